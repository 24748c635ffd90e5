"""The fewest requests, whatever is cached: the usual control."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .candidate import Candidate, Estimate


class LeastLoaded:
    """Orders by requests there: what the engine reports or what was sent, whichever is more."""

    name = "least-loaded"

    def order(self, estimates: Sequence[Estimate], rng: random.Random) -> list[Estimate]:
        shuffled = sorted(estimates, key=lambda each: (each.candidate.replica, each.candidate.rank))
        rng.shuffle(shuffled)
        return sorted(shuffled, key=lambda each: _requests(each.candidate))


def _requests(candidate: Candidate) -> int:
    # The larger, not the sum: what was sent is in the engine's figures too, as soon as they are read.
    reported = candidate.running_requests + candidate.waiting_requests
    return max(reported, candidate.dispatched_requests)
