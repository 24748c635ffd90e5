"""Why a prediction missed, from the engines' own accounts: block by block, against the times of decision and execution.

A prediction speaks of the moment of routing, the engine's answer of the moment of execution. What changed between, or
was still on its way to the scheduler, explains a miss; anything else is somebody's error, and called unexplained.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from .clients import End, Request
from .emulator.groups import FULL

UNDER_WAY_S = 1.0
"""An announcement may take this long from the engine to the scheduler's index; far more than it should."""


class Cause(StrEnum):
    """Why reuse differs from its prediction: the first block that differs decides."""

    EVICTED = "evicted_meanwhile"
    """It was there at routing, and gone when its turn came."""
    EVICTION_UNDER_WAY = "eviction_under_way"
    """It went shortly before routing: the scheduler could not know yet."""
    IN_FLIGHT = "in_flight"
    """It was credited to a request in flight, and that had not filled it yet."""
    STORED = "stored_meanwhile"
    """It came after routing."""
    STORE_UNDER_WAY = "store_under_way"
    """It came shortly before routing: the scheduler could not know yet."""
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True)
class Miss:
    """A prediction that was not met to the token."""

    request: Request
    cause: Cause
    block: int
    """Index of the first block that differs."""

    @property
    def tokens(self) -> int:
        """Tokens reused beyond the prediction; negative: fewer."""
        assert self.request.answer is not None
        assert self.request.cached_tokens is not None
        return self.request.cached_tokens - self.request.answer.prediction.predicted


@dataclass
class Account:
    """What one engine wrote about itself."""

    block_tokens: int = 0
    children: dict[tuple[Any, tuple[int, ...]], Any] = field(default_factory=dict)
    """A block's name by that of the block before it and its tokens."""
    history: dict[tuple[int, int, Any], list[tuple[float, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By rank, group of layers and name: times, and copies in all tiers after each."""
    groups: set[int] = field(default_factory=set)
    batches: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    scheduled: dict[str, float] = field(default_factory=dict)
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The engine's lines for requests that it answered to the end, by request id."""

    def names(self, prompt: Sequence[int]) -> Iterator[Any]:
        """The names of a prompt's full blocks, up to the first that this engine never stored."""
        name = None
        for end in range(self.block_tokens, len(prompt) + 1, self.block_tokens):
            name = self.children.get((name, tuple(prompt[end - self.block_tokens : end])))
            if name is None:
                return
            yield name

    def changes(self, rank: int, name: Any, *, gone: bool) -> Iterator[float]:
        """When a block came to a rank, or with `gone` when its last copy left it, for any group of layers."""
        for group in self.groups:
            before = 0
            for at, copies in self.history.get((rank, group, name), ()):
                if (not copies) if gone else (copies and not before):
                    yield at
                before = copies


def read_account(path: Path) -> Account:
    """Reads a `truth` file that was written with its tokens. Raises OSError; ValueError for what is none."""
    account = Account()
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            match row["what"]:
                case "started":
                    account.block_tokens = row["block_size"]
                case "scheduled":
                    account.scheduled[row["id"]] = row["t"]
                case "finished" if row["outcome"] == "finished":
                    account.finished[row["id"]] = row
                case "stored":
                    _stored(account, row)
                case "removed":
                    _removed(account, row)
    return account


def misses(requests: Sequence[Request], accounts: dict[str, Account]) -> Iterator[Miss]:
    """Every finished request whose reuse was not the predicted one, and why; `accounts` by replica."""
    for request in requests:
        if request.end is not End.FINISHED or request.answer is None:
            continue
        predicted, cached = request.answer.prediction.predicted, request.cached_tokens
        if cached is None or cached == predicted:
            continue
        account = accounts[request.answer.target.replica]
        block = min(predicted, cached) // account.block_tokens
        yield Miss(request, _cause(request, account, block), block)


def _cause(request: Request, account: Account, block: int) -> Cause:
    assert request.answer is not None
    assert request.cached_tokens is not None
    prediction, rank = request.answer.prediction, request.answer.target.rank
    scheduled = account.scheduled.get(request.name)
    if scheduled is None:
        return Cause.UNEXPLAINED
    # A step's changes happen as it is scheduled and are told when it ends.
    batches = account.batches[rank]
    place = bisect_left(batches, scheduled)
    told = batches[place] if place < len(batches) else scheduled
    names = list(account.names(request.prompt))
    gone = prediction.predicted > request.cached_tokens
    end = block + 1
    if len(account.groups) > 1:
        # A group that does not keep every block lets a prompt go on further along only: any of these may decide.
        end = max(prediction.predicted, request.cached_tokens) // account.block_tokens
    changes = (account.changes(rank, name, gone=gone) for name in names[block:end])
    for at in itertools.chain.from_iterable(changes):
        if request.asked <= at <= told:
            return Cause.EVICTED if gone else Cause.STORED
        if request.asked - UNDER_WAY_S <= at < request.asked:
            return Cause.EVICTION_UNDER_WAY if gone else Cause.STORE_UNDER_WAY
    if gone and block * account.block_tokens >= prediction.lower:
        return Cause.IN_FLIGHT
    return Cause.UNEXPLAINED


def _stored(account: Account, row: dict[str, Any]) -> None:
    size, parent, tokens = account.block_tokens, row["parent"], row.get("tokens") or ()
    # Of a group that keeps less than all, the tokens are those of more blocks than it names.
    placed = row.get("kind", FULL) == FULL
    account.groups.add(row.get("group", 0))
    for place, name in enumerate(row["hashes"]):
        part = tuple(tokens[place * size : (place + 1) * size])
        if part and placed:  # a placeholder names a block that was stored with its tokens before
            account.children[parent, part] = name
            parent = name
        _change(account, row, name, 1)


def _removed(account: Account, row: dict[str, Any]) -> None:
    for name in row["hashes"]:
        _change(account, row, name, -1)


def _change(account: Account, row: dict[str, Any], name: Any, copies: int) -> None:
    history = account.history[row["rank"], row.get("group", 0), name]
    history.append((row["t"], (history[-1][1] if history else 0) + copies))
    batches = account.batches[row["rank"]]
    if not batches or batches[-1] != row["t"]:
        batches.append(row["t"])
