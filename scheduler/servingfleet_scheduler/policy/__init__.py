"""Policies: one file each, behind the Protocol in `candidate`."""

from __future__ import annotations

from collections.abc import Callable

from .candidate import Policy
from .cost import Cost
from .least_loaded import LeastLoaded
from .round_robin import RoundRobin

POLICIES: dict[str, Callable[[], Policy]] = {
    policy.name: policy for policy in (Cost, LeastLoaded, RoundRobin)
}


def make_policy(name: str) -> Policy:
    """Raises ValueError for a name that is not in POLICIES."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise ValueError(f"policy {name!r} is unknown; known: {', '.join(POLICIES)}") from None
