"""Policies: one file each, behind the Protocol in `candidate`."""

from __future__ import annotations

from collections.abc import Callable

from .approximate import Approximate
from .candidate import Policy
from .cost import EXPLORE_SHARE, Cost
from .least_loaded import LeastLoaded
from .prefix_overlap import PrefixOverlap
from .round_robin import RoundRobin

POLICIES: dict[str, Callable[[], Policy]] = {
    policy.name: policy for policy in (Cost, LeastLoaded, RoundRobin, PrefixOverlap, Approximate)
}


def make_policy(
    name: str, explore_share: float = EXPLORE_SHARE, *, price_others: bool = True
) -> Policy:
    """What is for policies that estimate seconds is ignored by the others. Raises ValueError for an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown; known: {', '.join(POLICIES)}")
    for estimating in (Cost, Approximate):
        if name == estimating.name:
            return estimating(explore_share, price_others=price_others)
    return POLICIES[name]()
