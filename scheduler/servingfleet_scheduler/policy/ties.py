"""Chance among equals, and with what probability it chose."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .candidate import Estimate


def shared_first(
    estimates: Sequence[Estimate], keys: Sequence[float], rng: random.Random
) -> list[Estimate]:
    """Ascending by key; equals in an order that is as likely as any other."""
    places = sorted(
        range(len(estimates)),
        key=lambda at: (estimates[at].candidate.replica, estimates[at].candidate.rank),
    )
    rng.shuffle(places)
    places.sort(key=lambda at: keys[at])
    equals = sum(1 for key in keys if key == keys[places[0]]) if places else 0
    return [
        estimates[at]._replace(propensity=1.0 / equals if place < equals else 0.0)
        for place, at in enumerate(places)
    ]
