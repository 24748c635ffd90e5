"""Which batches a relay has applied, and so how much a scheduler has been told."""

from __future__ import annotations

from dataclasses import dataclass, field

from .engines import SimulatedEngine
from .violations import Violation


@dataclass
class Followed:
    """What a relay's life has applied, batch by batch, as records of the ranks' histories."""

    engine: SimulatedEngine
    began: dict[tuple[int, int], int] = field(default_factory=dict)
    """By rank and incarnation: the record of the process that was up when the incarnation began."""
    applied: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """By rank, incarnation and number: the batch's record."""
    _mixed: dict[tuple[int, int], int] = field(default_factory=dict)
    _last: dict[tuple[int, int], int] = field(default_factory=dict)
    """By rank and incarnation: the record applied last, if no loss was noted since."""

    def begins(self, rank: int, incarnation: int) -> None:
        """The relay counts from here on."""
        history = self.engine.ranks[rank].history
        if (rank, incarnation) not in self.began:
            start = history.start_of(self.engine.life) if history.records else -1
            self.began[rank, incarnation] = start

    def loses(self, rank: int) -> None:
        """The relay says that batches are missing for good: nothing from before counts."""
        for key in [key for key in self._last if key[0] == rank]:
            del self._last[key]
            self._mixed.pop(key, None)

    def applies(self, rank: int, incarnation: int, payload: bytes) -> None:
        """Raises Violation for a batch that does not follow the one before, unless a loss was noted."""
        history = self.engine.ranks[rank].history
        index = history.payloads[payload]
        record = history.records[index]
        before = self._last.get((rank, incarnation))
        if before is not None:
            previous = history.records[before]
            if previous.life != record.life:
                # A restart that nothing has shown yet: what is held may be of either process.
                mixed = min(before, self._mixed.get((rank, incarnation), before))
                self._mixed[rank, incarnation] = mixed
            elif record.seq != previous.seq + 1:
                raise Violation(
                    "batches applied in order",
                    f"{self.engine.ranks[rank].name}: batch {record.seq} after {previous.seq}, "
                    "and no loss was noted",
                )
        self._last[rank, incarnation] = index
        self.applied[rank, incarnation, record.seq] = index

    def position(self, rank: int, incarnation: int, seq: int | None) -> int:
        """The record up to which a scheduler has been told, by what it says itself."""
        began = self.began.get((rank, incarnation), -1)
        if seq is None:
            return began
        index = self.applied.get((rank, incarnation, seq), began)
        return min(index, self._mixed.get((rank, incarnation), index))
