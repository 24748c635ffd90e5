"""The least expected seconds to first token; near ties are broken by chance."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence

from .candidate import Estimate

TIE_SHARE = 0.01
"""Estimates within 1% of the best are equal as far as the plain defaults can tell."""
TIE_S = 0.001


class Cost:
    """Orders by seconds. Chance among near ties spreads a burst of unknown prompts over idle replicas."""

    name = "cost"

    def order(self, estimates: Sequence[Estimate], rng: random.Random) -> list[Estimate]:
        ordered = sorted(
            estimates, key=lambda each: (each.seconds, each.candidate.replica, each.candidate.rank)
        )
        if not ordered:
            return []
        limit = ordered[0].seconds + max(TIE_S, TIE_SHARE * ordered[0].seconds)
        ties = bisect_right(ordered, limit, key=lambda each: each.seconds)
        if ties > 1:
            chosen = ordered.pop(rng.randrange(ties))
            ordered.insert(0, chosen)
        return ordered
