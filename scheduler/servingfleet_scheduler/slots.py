"""Who may send a snapshot now: at most so many streams at once, first come, first served.

Pure. A slot is free again when every rank of its grant has ended, when its stream closes, when its stream has been
silent for too long, or when the grant has lasted too long; a stream that lost its slot so queues again at the end.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)


@dataclass(slots=True)
class _Held:
    ranks: set[int]
    granted: float
    heard: float


@dataclass(frozen=True, slots=True)
class Grant(Generic[Who]):
    """`who` is to send the snapshots of these ranks."""

    who: Who
    ranks: tuple[int, ...]


class SnapshotSlots(Generic[Who]):
    """The slots and the queue before them."""

    def __init__(self, slots: int, *, silence_s: float, limit_s: float) -> None:
        if slots < 1:
            raise ValueError(f"{slots} snapshot slots; at least one is needed")
        self.slots = slots
        self.timeouts = 0
        self._silence_s = silence_s
        self._limit_s = limit_s
        self._held: dict[Who, _Held] = {}
        self._queue: dict[Who, set[int]] = {}

    @property
    def in_use(self) -> int:
        return len(self._held)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def request(self, who: Who, ranks: Iterable[int], *, again: bool = False) -> None:
        """Queues these ranks. `again`: also those whose snapshot is under way, since it is worthless by now."""
        held = self._held.get(who)
        wanted = set(ranks) - (held.ranks if held and not again else set())
        if wanted:
            self._queue.setdefault(who, set()).update(wanted)

    def granted(self, who: Who, rank: int) -> bool:
        """`who` has the slot for this rank."""
        held = self._held.get(who)
        return held is not None and rank in held.ranks

    def done(self, who: Who, rank: int) -> None:
        """A snapshot of this rank has ended."""
        held = self._held.get(who)
        if held is not None and rank in held.ranks:
            held.ranks.discard(rank)
            if not held.ranks:
                del self._held[who]
        elif (queued := self._queue.get(who)) is not None:
            queued.discard(rank)
            if not queued:
                del self._queue[who]

    def heard(self, who: Who, now: float) -> None:
        """`who` has said something."""
        held = self._held.get(who)
        if held is not None:
            held.heard = now

    def release(self, who: Who) -> None:
        """The stream is gone."""
        self._held.pop(who, None)
        self._queue.pop(who, None)

    def grants(self, now: float) -> list[Grant[Who]]:
        """Takes slots from those that ran out of time, and gives free ones to the first in the queue."""
        for who, held in list(self._held.items()):
            if now - held.heard > self._silence_s or now - held.granted > self._limit_s:
                del self._held[who]
                self.timeouts += 1
                # Behind all others, so that a stuck stream can't keep a slot by asking again.
                ranks = self._queue.pop(who, set()) | held.ranks
                self._queue[who] = ranks
        given = []
        for who in list(self._queue):
            if len(self._held) >= self.slots:
                break
            if who in self._held:
                continue
            ranks = self._queue.pop(who)
            self._held[who] = _Held(set(ranks), granted=now, heard=now)
            given.append(Grant(who, tuple(sorted(ranks))))
        return given
