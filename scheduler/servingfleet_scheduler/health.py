"""Tells the ranks' breakers what becomes of requests. Pure."""

from __future__ import annotations

import random

from .breaker import Breaker, BreakerSettings
from .fleet import Fleet
from .replicas import Rank

Target = tuple[str, int]
"""Replica and rank."""


class Health:
    """Of all ranks that are known now; what is said of others is nobody's."""

    def __init__(self, fleet: Fleet, settings: BreakerSettings, rng: random.Random) -> None:
        self._fleet = fleet
        self._settings = settings
        self._rng = rng

    def answered(self, target: Target, sent_at: float, now: float) -> None:
        """The first token of a request that was sent there at `sent_at`."""
        breaker = self._breaker(target)
        if breaker is not None:
            breaker.answered(sent_at, now)

    def finished(self, target: Target, sent_at: float, now: float) -> None:
        """Its whole answer."""
        breaker = self._breaker(target)
        if breaker is not None:
            breaker.finished(sent_at, now)

    def failed(self, target: Target, sent_at: float, now: float) -> None:
        """The engine refused it, or broke off."""
        rank = self._rank(target)
        if rank is not None:
            if rank.breaker is None:
                rank.breaker = Breaker(self._settings)
            rank.breaker.failed(sent_at, now, self._rng)

    def aborted(self, target: Target, sent_at: float) -> None:
        """Its user went away, or it ran elsewhere in the end."""
        breaker = self._breaker(target)
        if breaker is not None:
            breaker.aborted(sent_at)

    def _breaker(self, target: Target) -> Breaker | None:
        rank = self._rank(target)
        return rank.breaker if rank is not None else None

    def _rank(self, target: Target) -> Rank | None:
        found = self._fleet.rank(*target)
        return found[1] if found is not None else None
