"""Which fleets a change of an object concerns. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from .injection import pool_of
from .kinds import NETWORK_POLICY, Kind
from .store import Body, Key, Store, fleet_label, key_of


def by_fleet(store: Store, before: Body | None, after: Body | None) -> set[Key]:
    """A fleet came, went or changed: the others of its namespace may select the same pods."""
    keys = {key_of(each) for each in _bodies(before, after)}
    namespaces = {key.namespace for key in keys}
    return keys | {key for key in store.fleets if key.namespace in namespaces}


def by_child(before: Body | None, after: Body | None) -> set[Key]:
    """A child changed, or the label that makes it one."""
    return {
        Key(each["metadata"]["namespace"], name)
        for each in _bodies(before, after)
        if (name := fleet_label(each))
    }


def around(store: Store, kind: Kind, before: Body | None, after: Body | None) -> set[Key]:
    """A pod or a NetworkPolicy of a namespace with fleets changed."""
    bodies = [*_bodies(before, after)]
    namespace = bodies[0]["metadata"]["namespace"]
    if kind is NETWORK_POLICY:
        return {key for key in store.fleets if key.namespace == namespace}
    return {
        Key(namespace, fleet.name)
        for fleet in store.readable_fleets(namespace)
        if any(
            pool_of(each, fleet) is not None or fleet_label(each) == fleet.name for each in bodies
        )
    }


def is_of_status(before: Body | None, after: Body | None) -> bool:
    """A child's controller wrote its status, and nobody changed more of it."""
    if before is None or after is None:
        return False

    def essence(body: Body) -> tuple[object, ...]:
        metadata = body["metadata"]
        # Without a generation every change may be one of content.
        version = metadata.get("generation", metadata["resourceVersion"])
        return (version, metadata.get("labels"), metadata.get("ownerReferences"))

    return essence(before) == essence(after)


def _bodies(before: Body | None, after: Body | None) -> Iterator[Body]:
    yield from (each for each in (before, after) if each is not None)
