"""The least expected seconds to first token, its own and those it costs others; near ties are broken by chance, and a few
decisions explore."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence

from .candidate import Estimate
from .others import others_seconds

TIE_SHARE = 0.01
"""Estimates within 1% of the best are equal as far as speeds can be known."""
TIE_S = 0.001
"""However small the best is: a millisecond is lost in the network."""
NEAR_SHARE = 0.10
"""What explores goes to one of those within 10% of the best: prompts differ from their estimate by as much."""
EXPLORE_SHARE = 0.01
"""Of decisions that explore: enough for a comparison with what was not chosen, and 0.1% of time at most."""
COLD_LABELS = 20
"""Outcomes after which a rank's speed is known within 10%."""
COLD_SD_SHARE = 0.5
"""Standard deviation of the work's seconds on a rank without any: unlike pools differ by a factor of two."""
COLD_BONUS = 0.5
"""Standard deviations that a cold rank is taken to be faster, so that it gets prompts to be known by."""


class Cost:
    """Orders by seconds: what this prompt waits, and what later ones will wait for it. Chance among near ties spreads a burst of unknown prompts over idle replicas."""

    name = "cost"
    from_memory = False

    def __init__(self, explore_share: float = EXPLORE_SHARE, *, price_others: bool = True) -> None:
        self._explore_share = explore_share
        self._price_others = price_others

    def order(self, estimates: Sequence[Estimate], rng: random.Random) -> list[Estimate]:
        if not estimates:
            return []
        prices = _prices(estimates, self._price_others)
        places = sorted(range(len(prices)), key=prices.__getitem__)
        best = prices[places[0]]
        ties = _within(places, prices, best + max(TIE_S, TIE_SHARE * best))
        near = max(ties, _within(places, prices, best + NEAR_SHARE * best))
        explore = self._explore_share if near > 1 else 0.0
        chosen = 0
        if near > 1:
            among = near if rng.random() < explore else ties
            chosen = rng.randrange(among) if among > 1 else 0
        ordered = [estimates[place] for place in places]
        for place in range(near):
            propensity = explore / near
            if place < ties:
                propensity += (1.0 - explore) / ties
            ordered[place] = ordered[place].likely(propensity)
        if chosen:
            ordered.insert(0, ordered.pop(chosen))
        return ordered


def _within(places: Sequence[int], prices: Sequence[float], limit: float) -> int:
    return bisect_right(places, limit, key=prices.__getitem__)


def _prices(estimates: Sequence[Estimate], price_others: bool) -> list[float]:
    """Seconds, with those that others wait for it, less what a cold rank is given so that it becomes known."""
    if price_others:
        prices = [
            each.seconds + others
            for each, others in zip(estimates, others_seconds(estimates), strict=True)
        ]
    else:
        prices = [each.seconds for each in estimates]
    # Where all are cold alike there is nothing to find out by preferring one.
    labels = [each.candidate.labels for each in estimates]
    known = min(max(labels), COLD_LABELS)
    if min(labels) < known:
        share = COLD_BONUS * COLD_SD_SHARE / COLD_LABELS
        for at, each in enumerate(estimates):
            prices[at] -= share * max(0, known - labels[at]) * each.work_s
    return prices
