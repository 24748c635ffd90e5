"""Makes a fleet's children be as wanted, adopts nothing that the operator did not make, and takes away what is no longer
wanted.

An object is sent only when it differs from what was sent last, or when somebody changed it since: an idle fleet costs no
write, and a pod that starts costs none either.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import names
from .cluster import Cluster
from .errors import Conflict, ForeignObject, Invalid, OperatorError
from .kinds import Kind, kind_of
from .metrics import Metrics
from .settings import OperatorSettings
from .spec import Fleet
from .store import Body, Key, Store, fleet_label, keep_child, key_of

log = logging.getLogger(__name__)


class Leftover(OperatorError):
    """A child of an earlier fleet of that name, which garbage collection is about to remove: try again soon."""


class AnotherOperator(OperatorError):
    """Another release of the operator looks after the fleet: this one keeps off."""


@dataclass(frozen=True, slots=True)
class _Sent:
    digest: bytes
    uid: str
    state: str
    """Changes when somebody changed more than its status."""


class Children:
    """Applies and removes the children of fleets."""

    def __init__(
        self, cluster: Cluster, store: Store, settings: OperatorSettings, metrics: Metrics
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._operator = names.label_value(settings.instance)
        self._metrics = metrics
        self._sent: dict[str, dict[tuple[Kind, Key], _Sent]] = {}
        """By the fleet's uid."""

    async def find(self, fleet: Fleet, kind: Kind, name: str) -> Body | None:
        """The fleet's own object of that name, with all its content; None if there is none. Raises as `apply` does."""
        present = await self._cluster.find(kind, name, fleet.namespace)
        if present is not None:
            self._claim(kind, present, fleet)
        return present

    async def apply(self, child: Mapping[str, Any], fleet: Fleet, *, trust: bool) -> None:
        """Makes the child be as wanted.

        trust: a child of a kind that is not watched is taken to be still as it was sent; otherwise the API server is asked.
        Raises ForeignObject, Leftover, AnotherOperator and ClusterError.
        """
        kind, key = kind_of(child), key_of(child)
        digest = hashlib.sha256(json.dumps(child, sort_keys=True).encode()).digest()
        known = self._sent.setdefault(fleet.uid, {})
        sent = known.get((kind, key))
        table = self._store.children.get(kind)
        if table is None and trust and sent is not None and sent.digest == digest:
            return
        present = table.get(key) if table is not None else None
        fetched = present is None or not names.is_owned(present, fleet.uid)
        if fetched:
            # Who made it is written in what the store does not keep.
            present = await self._cluster.find(kind, key.name, key.namespace)
        if present is not None:
            uid = present["metadata"]["uid"]
            if sent == _Sent(digest, uid, _state(present)):
                return
            if fetched or sent is None or sent.uid != uid:
                self._claim(kind, present, fleet)
        applied = await self._send(child, kind, present)
        version = applied["metadata"]["resourceVersion"]
        known[kind, key] = _Sent(digest, applied["metadata"]["uid"], _state(keep_child(applied)))
        if table is not None:
            table.put(keep_child(applied))
        outcome = "unchanged"
        if present is None:
            outcome = "created"
        elif version != present["metadata"]["resourceVersion"]:
            outcome = "changed"
        self._metrics.applies.labels(kind.name, outcome).inc()
        if outcome != "unchanged":
            self._log("applied", kind, child, outcome=outcome)

    async def _send(self, child: Mapping[str, Any], kind: Kind, present: Body | None) -> Body:
        if present is None:
            # Without force: should somebody else have made one in this very moment, it is not ours to change.
            try:
                return (await self._cluster.apply(child, force=False)).body
            except Conflict as error:
                raise ForeignObject(str(error)) from error
        # With its uid, so that one that took its place meanwhile is not changed.
        metadata = {**child["metadata"], "uid": present["metadata"]["uid"]}
        try:
            return (await self._cluster.apply({**child, "metadata": metadata})).body
        except Invalid as error:
            raise Invalid(
                f"{error}; if it is a field that can't change, delete the {kind.name} and it will be made anew: "
                f"kubectl -n {metadata['namespace']} delete {kind.plural} {metadata['name']}",
                code=error.code,
            ) from error

    def _claim(self, kind: Kind, present: Body, fleet: Fleet) -> None:
        """Raises unless the object was made for this fleet by this operator."""
        metadata = present["metadata"]
        what = f"{kind.name} {metadata['name']} in namespace {fleet.namespace}"
        owners: Sequence[Mapping[str, Any]] = metadata.get("ownerReferences") or ()
        labels = metadata.get("labels") or {}
        if not names.is_owned(present, fleet.uid):
            if any(
                owner.get("kind") == names.KIND and owner.get("name") == fleet.name
                for owner in owners
            ):
                raise Leftover(
                    f"{what} belongs to an earlier fleet {fleet.name}, and will be removed"
                )
            made_here = any(
                entry.get("manager") == names.CHILDREN_MANAGER and entry.get("operation") == "Apply"
                for entry in metadata.get("managedFields") or ()
            )
            if owners or not made_here or labels.get(names.FLEET_LABEL, fleet.name) != fleet.name:
                raise ForeignObject(
                    f"{what} is there already, and the operator did not make it: "
                    "rename or delete it, or name the fleet otherwise"
                )
        operator = labels.get(names.OPERATOR_LABEL, self._operator)
        if operator != self._operator:
            raise AnotherOperator(
                f"{what} is looked after by the operator {operator}, this one is {self._operator}: "
                f"limit one of them (Helm value watchNamespaces), or remove its label "
                f"{names.OPERATOR_LABEL} if that operator is gone"
            )

    async def prune(self, wanted: Sequence[Mapping[str, Any]], fleet: Fleet) -> None:
        """Removes what was made for the fleet and is not wanted any more. Raises ClusterError."""
        keep = {(kind_of(child), child["metadata"]["name"]) for child in wanted}
        key = Key(fleet.namespace, fleet.name)
        for kind, body in list(self._store.children_of(key)):
            name = body["metadata"]["name"]
            if (kind, name) not in keep and self._ours(body, fleet):
                await self._remove(kind, body, fleet)

    async def prune_unwatched(self, kind: Kind, name: str, fleet: Fleet) -> None:
        """Removes that object if it was made for the fleet. Raises ClusterError."""
        body = await self._cluster.find(kind, name, fleet.namespace)
        if body is not None and self._ours(body, fleet):
            await self._remove(kind, body, fleet)

    def _ours(self, body: Body, fleet: Fleet) -> bool:
        labels = body["metadata"].get("labels") or {}
        return (
            names.is_owned(body, fleet.uid) and labels.get(names.OPERATOR_LABEL) == self._operator
        )

    async def _remove(self, kind: Kind, body: Body, fleet: Fleet) -> None:
        metadata = body["metadata"]
        if "deletionTimestamp" in metadata:
            return
        await self._cluster.delete(kind, metadata["name"], fleet.namespace, metadata["uid"])
        self._sent.get(fleet.uid, {}).pop((kind, key_of(body)), None)
        self._log("removed", kind, body)

    def _log(self, event: str, kind: Kind, body: Body, **extra: str) -> None:
        metadata = body["metadata"]
        log.info(
            event,
            extra={
                "fleet": fleet_label(body),
                "namespace": metadata["namespace"],
                "kind": kind.name,
                "object": metadata["name"],
                **extra,
            },
        )

    def distrust(self, fleet: Fleet) -> None:
        """All of the fleet's children are sent again when next wanted, whatever the watches say."""
        self._sent.pop(fleet.uid, None)

    def keep_only(self, uids: Container[str]) -> None:
        """Forgets what was sent for other fleets than these."""
        self._sent = {uid: sent for uid, sent in self._sent.items() if uid in uids}


def _state(body: Body) -> str:
    metadata = body["metadata"]
    if "generation" not in metadata:
        return str(metadata["resourceVersion"])
    said = (metadata["generation"], metadata.get("labels"), metadata.get("ownerReferences"))
    return json.dumps(said, sort_keys=True)
