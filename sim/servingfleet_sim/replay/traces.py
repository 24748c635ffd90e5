"""Request traces: what a trace file says, as requests to be replayed.

Two formats, told apart by their first row; a name that ends in .gz is compressed, "-" is standard input:
- Mooncake (FAST'25): one request a row, `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}`.
  An id stands for 512 tokens and all before them; the last one for what is left, which no cache keeps.
- agentic, run-length coded: one conversation a row, `{"id": name, "r": [[s, input, output, api_s, "1-615,620"], ...]}`.
  An id stands for 64 tokens of this conversation and all before them; `api_s` is how long the answer took then.
  Conversations begin one by one at random; pauses within one are kept, up to `longest_pause_s`.

A row may be of any length below 64 MiB. Nothing of what was said is in a trace.
"""

from __future__ import annotations

import gzip
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Annotated, NamedTuple, TypeVar, cast

import msgspec

MAX_ROW_BYTES = 64 * 1024 * 1024
MAX_REQUESTS = 5_000_000
MAX_BLOCK_ID = 50_000_000
HASH_BYTES = 8
MOONCAKE_BLOCK = 512
AGENTIC_BLOCK = 64

_Row = TypeVar("_Row")
_Whole = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class BadTrace(ValueError):
    """The file holds no trace: says which line, what was seen and what was expected."""


class Names:
    """Canonical hashes of the blocks of one space of ids, packed: `hashes[8 * id]` on is that of block `id`.

    Made up, but always the same for the same space: a replay needs hashes that are equal where the blocks are.
    """

    def __init__(self, space: str) -> None:
        self._space = space
        self.blocks = 0
        self._packed = b""

    def reach(self, block: int) -> None:
        """Blocks up to this one will be asked for."""
        self.blocks = max(self.blocks, block + 1)

    @property
    def packed(self) -> bytes:
        if len(self._packed) < self.blocks * HASH_BYTES:
            # Longer ones begin like shorter ones: `randbytes` draws words in order of their place.
            self._packed = random.Random(self._space).randbytes(self.blocks * HASH_BYTES)
        return self._packed


class Blocks(NamedTuple):
    """A prompt's full blocks, as runs of consecutive ids: [first, end)."""

    names: Names
    runs: tuple[tuple[int, int], ...]

    def packed(self) -> bytes:
        """Their canonical hashes, packed. Made anew by each call: long traces would not fit otherwise."""
        names = self.names.packed
        return b"".join(names[HASH_BYTES * a : HASH_BYTES * b] for a, b in self.runs)

    def __len__(self) -> int:
        return sum(end - first for first, end in self.runs)


@dataclass(frozen=True, slots=True)
class Request:
    """One request to come. Times are seconds, counts tokens."""

    at: float
    """When it is sent, since the trace began. In a closed loop only the first of a session goes by it."""
    prompt_tokens: int
    output_tokens: int
    """At least 1."""
    blocks: Blocks
    session: str = ""
    """Empty: a request of its own."""
    priority: int = 0
    target_s: float = math.nan
    """Time to first token asked for; nan: none."""
    think_s: float = 0.0
    """In a closed loop: from the end of the session's request before to this one."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of `at`."""

    block_tokens: int
    """Tokens of one block."""
    requests: list[Request] = field(default_factory=list)


class _Mooncake(msgspec.Struct):
    timestamp: _Seconds
    input_length: _Whole
    output_length: _Whole
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_ID)]]


_Turn = tuple[_Seconds, _Whole, _Whole, _Seconds, str]


class _Conversation(msgspec.Struct):
    id: str
    r: list[_Turn]


def read_trace(
    path: str, *, seed: int = 0, start_every_s: float = 5.0, longest_pause_s: float = 300.0
) -> Trace:
    """Of a path, or "-". `start_every_s`: mean time between two conversations' beginnings, where the trace has none in
    common. Raises BadTrace, OSError."""
    name = "standard input" if path == "-" else Path(path).name
    with _opened(path) as lines:
        rows = _rows(lines, name)
        first = next(rows, None)
        if first is None:
            raise BadTrace(f"{name}: no rows; expected one JSON object a line")
        both = itertools.chain([first], rows)
        try:
            known = msgspec.json.decode(first[1], type=dict[str, msgspec.Raw]).keys()
        except msgspec.DecodeError as error:
            raise BadTrace(f"{name}, line {first[0]}: {error}") from None
        if "hash_ids" in known:
            return _mooncake(both, name)
        if "r" in known:
            return _agentic(both, name, random.Random(seed), start_every_s, longest_pause_s)
    raise BadTrace(
        f"{name}, line {first[0]}: has {', '.join(sorted(known)[:8])}; expected hash_ids (Mooncake) "
        "or r (agentic, run-length coded)"
    )


def shaped(
    requests: Sequence[Request],
    *,
    rate: float = 1.0,
    first: int | None = None,
    seconds: float | None = None,
) -> list[Request]:
    """The first so many requests, those of the first so many seconds, at `rate` times the trace's arrival rate."""
    kept: Iterable[Request] = requests if first is None else requests[:first]
    if seconds is not None:
        kept = (each for each in kept if each.at <= seconds)
    return [replace(each, at=each.at / rate) for each in kept]


def _opened(path: str) -> IO[bytes]:
    if path == "-":
        return sys.stdin.buffer
    if path.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    return open(path, "rb")


def _rows(lines: IO[bytes], name: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        while line := lines.readline(MAX_ROW_BYTES + 1):
            number += 1
            if len(line) > MAX_ROW_BYTES:
                raise BadTrace(f"{name}, line {number}: longer than {MAX_ROW_BYTES} bytes")
            if line.strip():
                yield number, line
    except (EOFError, gzip.BadGzipFile) as error:
        raise BadTrace(f"{name}, after line {number}: not gzip to its end: {error}") from None


def _read(
    rows: Iterable[tuple[int, bytes]], name: str, row: type[_Row], take: Callable[[_Row], None]
) -> None:
    decoder = msgspec.json.Decoder(row)
    for number, line in rows:
        try:
            take(decoder.decode(line))
        except (msgspec.DecodeError, BadTrace) as error:
            raise BadTrace(f"{name}, line {number}: {error}") from None


def _mooncake(rows: Iterable[tuple[int, bytes]], name: str) -> Trace:
    names = Names("mooncake")
    requests: list[Request] = []

    def take(row: _Mooncake) -> None:
        if not row.input_length:
            return  # nothing to route
        full = row.input_length // MOONCAKE_BLOCK
        if len(row.hash_ids) < full:
            raise BadTrace(
                f"{row.input_length} tokens and {len(row.hash_ids)} hash_ids; expected {full} or more"
            )
        requests.append(
            Request(
                row.timestamp / 1000,
                row.input_length,
                max(1, row.output_length),
                Blocks(names, _runs(row.hash_ids[:full])),
            )
        )
        _bounded(requests)

    _read(rows, name, _Mooncake, take)
    return _trace(MOONCAKE_BLOCK, requests)


def _agentic(
    rows: Iterable[tuple[int, bytes]],
    name: str,
    rng: random.Random,
    start_every_s: float,
    longest_pause_s: float,
) -> Trace:
    requests: list[Request] = []
    start = 0.0

    def take(row: _Conversation) -> None:
        nonlocal start
        names = Names(f"agentic {row.id}")
        at, began, took = start, row.r[0][0] if row.r else 0.0, 0.0
        for turn, (second, prompt, output, took_then, runs) in enumerate(row.r):
            if second < began:
                raise BadTrace(f"turn {turn} begins at {second} s, before the one before it")
            pause = min(max(0.0, second - began - took), longest_pause_s)
            at += min(second - began, took + pause)
            began, took = second, took_then
            if not prompt:
                continue
            blocks = Blocks(names, tuple(_spans(runs)))
            if len(blocks) * AGENTIC_BLOCK > prompt:
                raise BadTrace(f"turn {turn}: {len(blocks)} blocks, but {prompt} tokens")
            requests.append(
                Request(at, prompt, max(1, output), blocks, session=row.id, think_s=pause)
            )
            _bounded(requests)
        start += rng.expovariate(1 / start_every_s)

    _read(rows, name, _Conversation, take)
    return _trace(AGENTIC_BLOCK, requests)


def _trace(block_tokens: int, requests: list[Request]) -> Trace:
    for each in requests:
        for _, end in each.blocks.runs:
            each.blocks.names.reach(end - 1)
    requests.sort(key=lambda each: each.at)
    return Trace(block_tokens, requests)


def _bounded(requests: list[Request]) -> None:
    if len(requests) > MAX_REQUESTS:
        raise BadTrace(f"more than {MAX_REQUESTS} requests")


def _runs(ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Consecutive ids as [first, end)."""
    runs: list[tuple[int, int]] = []
    for each in ids:
        if runs and runs[-1][1] == each:
            runs[-1] = (runs[-1][0], each + 1)
        else:
            runs.append((each, each + 1))
    return tuple(runs)


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """ "1-3,5" as [1, 4), [5, 6)."""
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        try:
            begin = int(first)
            end = int(last) if dash else begin
        except ValueError:
            raise BadTrace(f"run {part!r}; expected a number, or two with a dash") from None
        if not 0 <= begin <= end <= MAX_BLOCK_ID:
            raise BadTrace(f"run {part!r}; expected ascending ids up to {MAX_BLOCK_ID}")
        yield begin, end + 1
