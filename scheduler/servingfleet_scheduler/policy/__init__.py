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


def make_policy(name: str, explore_share: float = EXPLORE_SHARE) -> Policy:
    """`explore_share`: of decisions that explore, where the policy does. Raises ValueError for an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown; known: {', '.join(POLICIES)}")
    policy = POLICIES[name]
    if policy in (Cost, Approximate):
        return policy(explore_share)
    return policy()
