"""The fewest requests, whatever is cached: the usual control."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .candidate import Candidate, Estimate
from .ties import shared_first


class LeastLoaded:
    """Orders by requests there: what the engine reports or what was sent, whichever is more."""

    name = "least-loaded"
    from_memory = False

    def order(self, estimates: Sequence[Estimate], rng: random.Random) -> list[Estimate]:
        return shared_first(estimates, [_requests(each.candidate) for each in estimates], rng)


def _requests(candidate: Candidate) -> int:
    # The larger, not the sum: what was sent is in the engine's figures too, as soon as they are read.
    reported = candidate.running_requests + candidate.waiting_requests
    return max(reported, candidate.dispatched_requests)
