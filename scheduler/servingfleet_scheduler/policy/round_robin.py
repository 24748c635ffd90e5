"""Each target in turn."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .candidate import Estimate


class RoundRobin:
    """Orders by the last dispatch, longest ago first; targets never used come first, by name."""

    name = "round-robin"
    from_memory = False

    def order(self, estimates: Sequence[Estimate], rng: random.Random) -> list[Estimate]:
        ordered = sorted(
            estimates,
            key=lambda each: (
                each.candidate.last_dispatch,
                each.candidate.replica,
                each.candidate.rank,
            ),
        )
        return [
            each._replace(propensity=0.0 if place else 1.0) for place, each in enumerate(ordered)
        ]
