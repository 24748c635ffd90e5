"""What the watches said last: fleets, their children, the pods and NetworkPolicies of their namespaces. Pure.

Only what is read later is kept of each object, so that ten thousand pods cost a few tens of MiB. A list puts right what
a watch missed; whichever of the two is newer wins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from . import names
from .kinds import WATCHED_CHILDREN, Kind
from .spec import BadSpec, Fleet, parse

Body = Mapping[str, Any]

GRAVES = 4096
"""Deletions remembered per table: a list that began before one may end after it."""


class Key(NamedTuple):
    """A fleet, or any namespaced object."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def key_of(body: Body) -> Key:
    """Which object it is."""
    metadata = body["metadata"]
    return Key(metadata.get("namespace", ""), metadata["name"])


class Table:
    """The objects of one kind, by namespace and name."""

    def __init__(self, changed: Callable[[Body | None, Body | None], bool]) -> None:
        """changed: whether the step from the one (None: nothing) to the other matters to anybody."""
        self._changed = changed
        self._namespaces: dict[str, dict[str, Body]] = {}
        self._graves: OrderedDict[Key, int] = OrderedDict()

    def get(self, key: Key) -> Body | None:
        """The object, or None."""
        return self._namespaces.get(key.namespace, {}).get(key.name)

    def of(self, namespace: str) -> Iterable[Body]:
        """All objects of a namespace."""
        return self._namespaces.get(namespace, {}).values()

    def __iter__(self) -> Iterator[Key]:
        """Every object there is, by its key."""
        for namespace, objects in self._namespaces.items():
            for name in objects:
                yield Key(namespace, name)

    def __len__(self) -> int:
        return sum(len(objects) for objects in self._namespaces.values())

    def put(self, body: Body) -> bool:
        """Keeps the object unless a newer state of it is known. Returns whether that changes anything."""
        key = key_of(body)
        before = self.get(key)
        known = max(_version(before), self._graves.get(key, -1))
        if _version(body) <= known:
            return False
        self._namespaces.setdefault(key.namespace, {})[key.name] = body
        return self._changed(before, body)

    def remove(self, body: Body) -> bool:
        """The object is gone, in the state that `body` gives. Returns whether that changes anything."""
        key = key_of(body)
        before = self.get(key)
        if before is not None and _version(before) > _version(body):
            return False  # made again since
        self._bury(key, _version(body))
        return before is not None

    def replace(
        self, namespace: str, bodies: Iterable[Body], resource_version: str
    ) -> list[tuple[Body | None, Body | None]]:
        """All objects of a namespace ("": of all) as a list of that moment gave them. Returns what changed, (old, new)."""
        moment = int(resource_version) if resource_version.isdecimal() else -1
        listed: set[Key] = set()
        steps: list[tuple[Body | None, Body | None]] = []
        for body in bodies:
            listed.add(key_of(body))
            before = self.get(key_of(body))
            if self.put(body):
                steps.append((before, body))
        for key in [*self]:
            known = self.get(key)
            if key in listed or namespace not in ("", key.namespace) or _version(known) > moment:
                continue
            self._bury(key, moment)
            steps.append((known, None))
        return steps

    def drop(self, namespace: str) -> None:
        """Nobody watches that namespace any more."""
        self._namespaces.pop(namespace, None)
        for key in [key for key in self._graves if key.namespace == namespace]:
            del self._graves[key]

    def _bury(self, key: Key, version: int) -> None:
        objects = self._namespaces.get(key.namespace, {})
        objects.pop(key.name, None)
        if not objects:
            self._namespaces.pop(key.namespace, None)
        self._graves[key] = version
        self._graves.move_to_end(key)
        while len(self._graves) > GRAVES:
            self._graves.popitem(last=False)


class Store:
    """Everything that is watched."""

    def __init__(self) -> None:
        self.fleets = Table(_fleet_changed)
        self.children = {kind: Table(_any_change) for kind in WATCHED_CHILDREN}
        self.pods = Table(_content_changed)
        self.policies = Table(_content_changed)
        self._parsed: dict[Key, tuple[str, Fleet | BadSpec]] = {}

    def fleet(self, key: Key) -> Fleet | None:
        """The fleet's spec, typed; None if there is no such fleet or it is being deleted. Raises BadSpec."""
        body = self.fleets.get(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._parsed.pop(key, None)
            return None
        version = f"{body['metadata'].get('uid')}/{body['metadata'].get('generation')}"
        known = self._parsed.get(key)
        if known is None or known[0] != version:
            try:
                known = (version, parse(body))
            except BadSpec as error:
                known = (version, error)
            self._parsed[key] = known
            if len(self._parsed) > len(self.fleets):
                self._parsed = {
                    each: kept for each, kept in self._parsed.items() if self.fleets.get(each)
                }
        if isinstance(known[1], BadSpec):
            raise known[1]
        return known[1]

    def readable_fleets(self, namespace: str | None = None) -> list[Fleet]:
        """Every fleet (None: of all namespaces) whose spec can be read, in order of name."""
        fleets = []
        for key in sorted(self.fleets):
            if namespace not in (None, key.namespace):
                continue
            try:
                fleet = self.fleet(key)
            except BadSpec:
                continue
            if fleet is not None:
                fleets.append(fleet)
        return fleets

    def children_of(self, key: Key) -> Iterator[tuple[Kind, Body]]:
        """Watched children that carry the fleet's label."""
        for kind, table in self.children.items():
            for body in table.of(key.namespace):
                if fleet_label(body) == key.name:
                    yield kind, body

    def scheduler_pods(self, key: Key) -> list[Body]:
        """The pods of the fleet's scheduler."""
        wanted = names.scheduler_selector(key.name).items()
        return [
            pod
            for pod in self.pods.of(key.namespace)
            if wanted <= (pod["metadata"].get("labels") or {}).items()
        ]


def fleet_label(body: Body) -> str | None:
    """The fleet that the object says it belongs to."""
    labels = body["metadata"].get("labels") or {}
    return labels.get(names.FLEET_LABEL)


def _version(body: Body | None) -> int:
    """Numbers that grow within one kind: so they are everywhere, and so KEP-5504 makes them official."""
    if body is None:
        return -1
    version = str(body["metadata"].get("resourceVersion", ""))
    return int(version) if version.isdecimal() else 0


def _any_change(before: Body | None, after: Body | None) -> bool:
    return True


def _fleet_changed(before: Body | None, after: Body | None) -> bool:
    # Our own status writes come back as events: only what others can change counts.
    def essence(body: Body | None) -> tuple[object, ...]:
        metadata = (body or {}).get("metadata", {})
        return (
            metadata.get("uid"),
            metadata.get("generation"),
            metadata.get("deletionTimestamp"),
        )

    return essence(before) != essence(after)


def _content_changed(before: Body | None, after: Body | None) -> bool:
    def content(body: Body | None) -> Body:
        body = body or {}
        metadata = {**body.get("metadata", {}), "resourceVersion": ""}
        return {**body, "metadata": metadata}

    return content(before) != content(after)


def keep_fleet(body: Body) -> Body:
    """A fleet without its managedFields, which are longer than the rest."""
    return {**body, "metadata": _metadata(body)}


def keep_child(body: Body) -> Body:
    """Which object it is, whose, and how it does. What it should be like is known without it."""
    kept: dict[str, Any] = {"metadata": _metadata(body)}
    if "status" in body:
        kept["status"] = body["status"]
    if "replicas" in (body.get("spec") or {}):
        kept["spec"] = {"replicas": body["spec"]["replicas"]}
    return kept


def keep_policy(body: Body) -> Body:
    """A NetworkPolicy."""
    return {"metadata": _metadata(body), "spec": body.get("spec") or {}}


def keep_pod(body: Body) -> Body:
    """What is read of a pod: its engines' command lines, whether it has a relay, where it runs and how."""
    spec = body.get("spec") or {}
    status = body.get("status") or {}
    return {
        "metadata": _metadata(body),
        "spec": {
            **_only(spec, _POD_SPEC),
            "volumes": [
                {"name": volume["name"]}
                for volume in spec.get("volumes") or ()
                if volume.get("name") == names.IDENTITY_VOLUME
            ],
            **{
                group: [_only(container, _CONTAINER) for container in spec[group]]
                for group in ("containers", "initContainers")
                if spec.get(group)
            },
        },
        "status": {
            **_only(status, ("phase", "podIP", "podIPs")),
            "conditions": [
                _only(condition, ("type", "status", "reason"))
                for condition in status.get("conditions") or ()
            ],
            **{
                group: [_only(container, _CONTAINER_STATUS) for container in status[group]]
                for group in ("containerStatuses", "initContainerStatuses")
                if status.get(group)
            },
        },
    }


_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "labels",
    "ownerReferences",
)
_POD_SPEC = ("nodeName", "nodeSelector", "os", "hostNetwork", "dnsPolicy")
_CONTAINER = ("name", "image", "command", "args", "env", "envFrom", "ports", "restartPolicy")
_CONTAINER_STATUS = ("name", "image", "imageID", "ready", "restartCount", "started", "state")


def _metadata(body: Body) -> dict[str, Any]:
    metadata = body["metadata"]
    kept = _only(metadata, _METADATA)
    annotations = {
        key: value
        for key, value in (metadata.get("annotations") or {}).items()
        if key.startswith(f"{names.GROUP}/")
    }
    if annotations:
        kept["annotations"] = annotations
    return kept


def _only(body: Body, keys: Iterable[str]) -> dict[str, Any]:
    return {key: body[key] for key in keys if key in body}
