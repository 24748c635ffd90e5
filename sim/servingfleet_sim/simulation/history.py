"""What one rank's cache really held, and when: the truth that every claim is held to.

Pure, and independent of relay and scheduler: blocks are named by their tokens, and hashed here from whole prefixes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache

from servingfleet_core import block_hashes, namespace_root

MODEL = "simulated"

Tokens = tuple[int, ...]
Block = tuple[str, Tokens]
"""An engine block: the cache salt, and every token from the start of the prompt to the block's end."""


@dataclass(frozen=True, slots=True)
class Record:
    """A published batch, or the start of a process (`seq` is -1). `named` are the blocks that changed."""

    life: int
    seq: int
    named: frozenset[Block]
    after: frozenset[Block]


class History:
    """One rank over all lives of its engine."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.now: frozenset[Block] = frozenset()
        self.records: list[Record] = []
        self.payloads: dict[bytes, int] = {}
        """Record of each batch, by its bytes: they hold the time, so that no two are alike."""
        self.blurred: set[Block] = set()
        """Held and stored again from the root: a second copy, or only a report of a hit; nobody can tell."""

    @property
    def last(self) -> int:
        """Index of the newest record."""
        return len(self.records) - 1

    def started(self, life: int) -> None:
        """A new process holds nothing."""
        self.now = frozenset()
        self.blurred.clear()
        self.records.append(Record(life, -1, frozenset(), self.now))

    def published(self, life: int, seq: int, payload: bytes, named: Iterable[Block]) -> None:
        """A batch left the engine, wherever it went. It tells all that happened before."""
        self.payloads[payload] = len(self.records)
        self.records.append(Record(life, seq, frozenset(named), self.now))
        self.blurred &= self.now

    def start_of(self, life: int) -> int:
        """Index of the record of a process's start."""
        return next(i for i, each in enumerate(self.records) if each.life == life and each.seq < 0)

    def throughout(self, since: int) -> set[Block]:
        """Blocks held at every moment since a record, as far as anybody may have been told."""
        held = set(self.now)
        for record in self.records[since + 1 :]:
            held -= record.named
        return held & self.records[-1].after

    def ever(self, since: int) -> set[Block]:
        """Blocks held at some moment since a record."""
        held = set(self.now)
        for record in self.records[max(since, 0) :]:
            held |= record.named | record.after
        return held

    def silent(self) -> bool:
        """Whether the cache has changed and no batch has told so."""
        return bool(self.records) and self.records[-1].after != self.now


def reusable(held: AbstractSet[Block], salt: str, prompt: Tokens, block_tokens: int) -> int:
    """Tokens of a prompt that an engine with these blocks would reuse: all but the last token at most."""
    most = (len(prompt) - 1) // block_tokens
    for block in range(most):
        if (salt, prompt[: (block + 1) * block_tokens]) not in held:
            return block * block_tokens
    return most * block_tokens


def canonical(held: AbstractSet[Block], block_tokens: int, canonical_tokens: int) -> set[int]:
    """Canonical hashes of the canonical blocks that these engine blocks cover."""
    hashes = set()
    for salt, prefix in held:
        end = len(prefix)
        first = (end - block_tokens) // canonical_tokens
        for number in range(first, end // canonical_tokens):
            start, stop = number * canonical_tokens, (number + 1) * canonical_tokens
            units = range(start // block_tokens * block_tokens + block_tokens, end, block_tokens)
            if stop > end - block_tokens and all((salt, prefix[:e]) in held for e in units):
                hashes.add(_canonical_hash(salt, prefix[:stop], canonical_tokens))
    return hashes


@lru_cache(maxsize=100_000)
def _canonical_hash(salt: str, prefix: Tokens, canonical_tokens: int) -> int:
    packed = struct.pack(f"<{len(prefix)}I", *prefix)
    hashes = block_hashes(namespace_root(MODEL, cache_salt=salt), packed, canonical_tokens)
    return int.from_bytes(hashes[-8:], "little")
