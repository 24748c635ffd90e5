"""Batches of one rank: what is decided of each, those that wait, and those applied, as far as they are remembered.

Pure.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from dataclasses import dataclass

DIGESTS_BEYOND_BUFFER = 256


@dataclass(frozen=True, slots=True)
class Apply:
    """The next batch."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """Batches are missing for good: what was held is unknown now."""

    reason: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """Another engine process: what was held is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """A batch that changes nothing. `reason` is a bounded word for counters."""

    reason: str


Step = Apply | Lost | Restarted | Ignored


class Held:
    """Batches that wait for the end of a replay. Bounded: see `full`."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: deque[Apply] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def last(self) -> Apply | None:
        """The newest."""
        return self._batches[-1] if self._batches else None

    @property
    def full(self) -> bool:
        """There are more than may wait."""
        return len(self._batches) > self._max_batches or self._bytes > self._max_bytes

    def add(self, batch: Apply) -> None:
        """One more."""
        self._batches.append(batch)
        self._bytes += len(batch.payload)

    def take(self) -> deque[Apply]:
        """All of them, in the order in which they came; none waits any more."""
        taken, self._batches, self._bytes = self._batches, deque(), 0
        return taken

    def clear(self) -> None:
        """None waits any more."""
        self.take()


class Digests:
    """What the last batches applied were."""

    def __init__(self, max_held: int) -> None:
        """`max_held`: as many may wait, and each of them may be one that was applied."""
        self._most = max_held + DIGESTS_BEYOND_BUFFER
        self._digests: OrderedDict[int, bytes] = OrderedDict()

    def add(self, batch: Apply) -> None:
        """It is applied."""
        self._digests[batch.seq] = _digest(batch.payload)
        while len(self._digests) > self._most:
            self._digests.popitem(last=False)

    def match(self, batch: Apply) -> bool:
        """This very batch was applied, and not too long ago."""
        return self._digests.get(batch.seq) == _digest(batch.payload)

    def clear(self) -> None:
        """Nothing is applied of the life that begins."""
        self._digests.clear()


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=8).digest()
