"""One prompt on its way through an engine: its tokens, their block hashes, the blocks that it holds."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum

FIRST_TOKEN = 4
"""Lower ids are the special tokens of the recorded engines' tokenizer."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asked of the engine for one prompt."""

    prompt: tuple[int, ...]
    max_tokens: int = 16
    cache_salt: str | None = None
    adapter: str | None = None
    adapter_number: int | None = None
    session: str | None = None
    report_reused: bool = False
    """Announce reused blocks again, as vLLM's `kv_cache_report_mode=full` does."""
    prompt_logprobs: bool = False
    """Every prompt token must be computed: nothing is reused."""
    outputs: tuple[int, ...] | None = None
    """Tokens to answer with; None: made up from the prompt."""
    vocabulary: int = 32_000


class Phase(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    LOADING = "loading"
    """Holds blocks that the host tier is filling."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Lane:
    """A sequence's blocks in one group of layers."""

    blocks: list[int] = field(default_factory=list)
    """In order of their place; the pool's null block where there is none any more."""
    state: int | None = None
    """Recurrent layers: place of the state that the step before went on from."""
    trimmed: int = 0
    """Recurrent layers: no place before this one has a block."""
    named: int = 0
    """How many of its blocks are in the cache under their hash, as far as their group keeps them."""
    offered: int = 0
    """How many of its chunks the host tier has loaded or was offered."""


@dataclass(eq=False, slots=True)
class Sequence:
    """Mutable state of one prompt. Owned by a `Scheduler`; others read it."""

    number: int
    asked: Asked
    tokens: list[int] = field(default_factory=list)
    """The prompt, then every sampled token."""
    hashes: list[bytes] = field(default_factory=list)
    """Of every full block of `tokens`."""
    lanes: list[Lane] = field(default_factory=list)
    """Its blocks, by group of layers; none while it waits."""
    junction: int = 0
    """Blocks of a beginning that others share, too, and that some group had not kept."""
    computed: int = 0
    """Tokens whose keys and values exist, or will at the end of the step."""
    phase: Phase = Phase.WAITING
    cached_tokens: int | None = None
    """Reused at the first scheduling, from both tiers: what the engine reports. None before."""
    host_tokens: int = 0
    preemptions: int = 0
    loaded_at: float = 0.0
    """When the host tier will have filled its blocks."""
    chunks: dict[tuple[int, bytes], int] = field(default_factory=dict)
    """What of it the host tier has loaded or was offered since it was last admitted, and in which place."""
    loads: list[tuple[int, bytes]] = field(default_factory=list)
    """What the host tier is loading for it."""
    _digest: bytes = b""

    def __post_init__(self) -> None:
        self.tokens = list(self.asked.prompt)
        self._digest = hashlib.blake2b(array("I", self.asked.prompt).tobytes()).digest()

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.asked.prompt)

    @property
    def output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def outputs(self) -> Tokens[int]:
        """The sampled tokens."""
        return self.tokens[self.prompt_tokens :]

    def next_token(self) -> int:
        """The token that the model samples next: the same for the same prompt and place, everywhere."""
        place = self.output_tokens
        given = self.asked.outputs
        if given is not None and place < len(given):
            return given[place]
        drawn = hashlib.blake2b(self._digest + place.to_bytes(8, "big"), digest_size=8).digest()
        span = max(1, self.asked.vocabulary - FIRST_TOKEN)
        return FIRST_TOKEN + int.from_bytes(drawn, "big") % span

    def boundaries(self, block_size: int) -> tuple[int, ...]:
        """Lengths in blocks from which other prompts may go on."""
        return (self.prompt_tokens - 1) // block_size, self.junction

    def extra_keys(self, block: int) -> tuple[str, ...] | None:
        """What enters the hash of a block beside its tokens: the adapter, and in the first the salt."""
        keys = [self.asked.adapter] if self.asked.adapter else []
        if block == 0 and self.asked.cache_salt:
            keys.append(self.asked.cache_salt)
        return tuple(keys) or None

    def hash_blocks(self, block_size: int, seed: bytes) -> None:
        """Hashes the blocks that have become full. `seed` stands before the first block."""
        for block in range(len(self.hashes), len(self.tokens) // block_size):
            parent = self.hashes[-1] if self.hashes else seed
            content = hashlib.sha256(parent)
            for key in self.extra_keys(block) or ():
                named = key.encode()
                content.update(len(named).to_bytes(4, "big") + named)
            content.update(b"\0")
            tokens = self.tokens[block * block_size : (block + 1) * block_size]
            content.update(array("I", tokens).tobytes())
            self.hashes.append(content.digest())
