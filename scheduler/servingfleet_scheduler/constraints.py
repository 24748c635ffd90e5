"""Which ranks may take a request: what the request asks for, who is draining, where requests fail, who has the adapter.

Pure. What the request asks for, and draining, always hold. A breaker and a missing adapter hold as long as somebody else can
take the request: they never leave it without a target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from servingfleet_protos.v1 import routing_pb2

from .replicas import Rank, Replica
from .requests import names

Place = tuple[Replica, Rank]
Key = tuple[str, int]
"""Replica and rank."""


def refusals(
    request: routing_pb2.RouteRequest, places: Sequence[Place], now: float, stale_s: float
) -> tuple[dict[Key, str], bool]:
    """Why places can't be chosen, for people; and whether requests keep failing on all that could be.

    Then those stay that opened least often: the choice among them is the policy's, and each new failure gives the others
    their turn. `stale_s`: what an engine said of its adapters so long ago is not known any more.
    """
    refused: dict[Key, str] = {}
    allowed = []
    picky = bool(request.only or request.exclude or request.labels)
    for place in places:
        replica, rank = place
        why = _asked(request, replica, rank) if picky else ""
        if not why and replica.draining_by:
            why = f"draining: {', '.join(sorted(replica.draining_by))}"
        if why:
            refused[replica.name, rank.number] = why
        else:
            allowed.append(place)
    broken = {
        (replica.name, rank.number): rank.breaker
        for replica, rank in allowed
        if rank.breaker is not None and rank.breaker.broken_s(now)
    }
    last_resort = bool(broken) and len(broken) == len(allowed)
    least = min(each.level for each in broken.values()) if last_resort else 0
    for key, breaker in broken.items():
        if not last_resort or breaker.level > least:
            refused[key] = f"requests fail there: none for {breaker.broken_s(now):.1f} s"
    if request.prompt.adapter:
        working = [place for place in allowed if (place[0].name, place[1].number) not in refused]
        refused |= _without_adapter(request.prompt.adapter, working, now - stale_s)
    return refused, last_resort


def still_allows(request: routing_pb2.RouteRequest, replica: Replica | None, key: Key) -> bool:
    """The request allows the target that it was given before, which is there. `replica`: None if it is not."""
    if (request.only and not names(request.only, *key)) or names(request.exclude, *key):
        return False
    return (
        replica is not None
        and key[1] in replica.ranks
        and not _other_label(request.labels, replica.labels)
    )


def _asked(request: routing_pb2.RouteRequest, replica: Replica, rank: Rank) -> str:
    if request.only and not names(request.only, replica.name, rank.number):
        return "not among `only`"
    if names(request.exclude, replica.name, rank.number):
        return "excluded by the request"
    return _other_label(request.labels, replica.labels)


def _other_label(wanted: Mapping[str, str], labels: Mapping[str, str]) -> str:
    """Which label of `wanted` the replica lacks; empty: none."""
    for key, value in sorted(wanted.items()):
        if labels.get(key) != value:
            has = repr(labels[key]) if key in labels else "absent"
            return f"its label {key!r} is {has}, not {value!r}"
    return ""


def _without_adapter(adapter: str, places: Sequence[Place], since: float) -> dict[Key, str]:
    """Those known not to have it, if another is known to have it: an engine may load it when it is asked."""
    known = {
        (replica.name, rank.number): adapter in rank.adapters.names
        for replica, rank in places
        if rank.adapters is not None and rank.adapters.read_at >= since
    }
    if not any(known.values()):
        return {}
    return {
        key: f"adapter {adapter!r} is not loaded there, but elsewhere"
        for key, has in known.items()
        if not has
    }
