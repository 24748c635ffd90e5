"""What was dispatched and is not yet confirmed: blocks that will be there soon.

Pure. The index counts credits; this table knows when they end. Every credit ends: by its outcome, by its time, by a
new engine life, or with its replica, whichever comes first. One whose request was served stands until the word of that
comes back in the relay's stream, behind the events that tell what is there. Ending one that is gone already is no error.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .fleet import Fleet
from .replicas import Replica

HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Credit:
    """A credit on one rank."""

    decision_id: str
    replica: str
    model: str
    rank: int
    blocks: int
    expires: float
    origin: str
    """Instance id of the scheduler that dispatched; empty: this one."""


class Credits:
    """All open credits, this scheduler's own and its peers'."""

    def __init__(self, fleet: Fleet, *, max_credits: int, max_blocks: int) -> None:
        self._fleet = fleet
        self._max_credits = max_credits
        self._max_blocks = max_blocks
        self._open: dict[str, Credit] = {}
        self._blocks = 0
        self._ends: list[tuple[float, str]] = []
        self.refused = 0
        """Not opened, because a limit was reached."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Credit]:
        return iter(self._open.values())

    def get(self, decision_id: str) -> Credit | None:
        return self._open.get(decision_id)

    def open(
        self,
        decision_id: str,
        replica: Replica,
        rank: int,
        hashes: bytes,
        prompt_tokens: int,
        *,
        expires: float,
        due: float | None = None,
        origin: str = "",
    ) -> bool:
        """Credits the prompt's blocks until `expires`; its engine gets to them at `due`. False: refused by a limit, or
        open already."""
        blocks = len(hashes) // HASH_BYTES
        if decision_id in self._open or not blocks:
            return False
        if len(self._open) >= self._max_credits or self._blocks + blocks > self._max_blocks:
            self.refused += 1
            return False
        index = self._fleet.index(replica.model)
        if index is None or not index.open_credit(
            decision_id, replica.number, rank, hashes, prompt_tokens, due
        ):
            return False
        credit = Credit(decision_id, replica.name, replica.model, rank, blocks, expires, origin)
        self._open[decision_id] = credit
        self._blocks += blocks
        heapq.heappush(self._ends, (expires, decision_id))
        return True

    def end(self, decision_id: str) -> Credit | None:
        """Ends a credit; None if there is none."""
        credit = self._open.pop(decision_id, None)
        if credit is None:
            return None
        self._blocks -= credit.blocks
        index = self._fleet.index(credit.model)
        if index is not None:
            # False where a new engine life or the replica's end took it before.
            index.close_credit(decision_id)
        if len(self._ends) > 64 and len(self._ends) > 4 * len(self._open):
            self._ends = [(each.expires, each.decision_id) for each in self._open.values()]
            heapq.heapify(self._ends)
        return credit

    def served(self, decision_id: str, until: float) -> Credit | None:
        """Its request ran to the end: at `until` it ends at the latest. None if there is none."""
        credit = self._open.get(decision_id)
        if credit is not None and until < credit.expires:
            self._open[decision_id] = replace(credit, expires=until)
            heapq.heappush(self._ends, (until, decision_id))
        return credit

    def expire(self, now: float) -> int:
        """Ends those whose time has come; returns how many."""
        ended = 0
        while self._ends and self._ends[0][0] <= now:
            expires, decision_id = heapq.heappop(self._ends)
            credit = self._open.get(decision_id)
            if credit is not None and credit.expires == expires:
                self.end(decision_id)
                ended += 1
        return ended
