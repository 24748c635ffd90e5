"""Which batches a relay has applied, and so how much a scheduler has been told."""

from __future__ import annotations

from collections import Counter
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
    _losses: Counter[int] = field(default_factory=Counter)
    _mixed: dict[tuple[int, int], int] = field(default_factory=dict)
    _last: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """By rank and incarnation: the record applied last, and how often history was lost before it."""

    def begins(self, rank: int, incarnation: int) -> None:
        """The relay counts from here on."""
        history = self.engine.ranks[rank].history
        if (rank, incarnation) not in self.began:
            start = history.start_of(self.engine.life) if history.records else -1
            self.began[rank, incarnation] = start

    def loses(self, rank: int) -> None:
        """The relay says that batches are missing for good."""
        self._losses[rank] += 1

    def applies(self, rank: int, incarnation: int, payload: bytes) -> None:
        """Raises Violation for a batch that does not follow the one before, unless a loss was noted."""
        lost = self._losses[rank]
        history = self.engine.ranks[rank].history
        index = history.payloads[payload]
        record = history.records[index]
        before = self._last.get((rank, incarnation))
        if before is not None:
            previous = history.records[before[0]]
            if previous.life != record.life:
                # A restart that nothing has shown yet: what is held may be of either process.
                mixed = min(before[0], self._mixed.get((rank, incarnation), before[0]))
                self._mixed[rank, incarnation] = mixed
            elif record.seq != previous.seq + 1 and lost == before[1]:
                raise Violation(
                    "batches applied in order",
                    f"{self.engine.ranks[rank].name}: batch {record.seq} after {previous.seq}, "
                    "and no loss was noted",
                )
        self._last[rank, incarnation] = (index, lost)
        self.applied[rank, incarnation, record.seq] = index

    def position(self, rank: int, incarnation: int, seq: int | None) -> int:
        """The record up to which a scheduler has been told, by what it says itself."""
        began = self.began.get((rank, incarnation), -1)
        if seq is None:
            return began
        index = self.applied.get((rank, incarnation, seq), began)
        return min(index, self._mixed.get((rank, incarnation), index))
