"""An API server in memory, as far as the operator asks: objects with uid, version and owner, applied whole."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from servingfleet_operator import names
from servingfleet_operator.cluster import Applied, Listing
from servingfleet_operator.errors import Conflict, Invalid, NotFound, NotLeading
from servingfleet_operator.kinds import Kind, kind_of

Object = dict[str, Any]
Calls = list[tuple[str, str, str]]


@dataclass
class FakeCluster:
    """Stands for `cluster.Cluster`."""

    objects: dict[tuple[str, str, str], Object] = field(default_factory=dict)
    """By kind, namespace and name."""
    calls: Calls = field(default_factory=list)
    """Verb, kind and name of every request."""
    fails: Callable[[str, str, str], Exception | None] = lambda verb, kind, name: None
    """Decides about each request."""
    leads: bool = True
    served: set[str] = field(default_factory=set)
    """Plurals of kinds beyond the usual."""
    user: str = "system:serviceaccount:system:operator"
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def _ask(self, verb: str, kind: str, name: str, *, write: bool = False) -> None:
        if write and not self.leads:
            raise NotLeading(f"{verb} {kind} {name}")
        self.calls.append((verb, kind, name))
        failure = self.fails(verb, kind, name)
        if failure is not None:
            raise failure

    def put(self, body: Object) -> Object:
        """The object as somebody else made or changed it."""
        key = (body["kind"], body["metadata"].get("namespace", ""), body["metadata"]["name"])
        body = copy.deepcopy(body)
        before = self.objects.get(key)
        metadata = body["metadata"]
        metadata.setdefault(
            "uid", before["metadata"]["uid"] if before else f"u{next(self.numbers)}"
        )
        metadata["resourceVersion"] = str(next(self.numbers))
        self.objects[key] = body
        return copy.deepcopy(body)

    async def find(self, kind: Kind, name: str, namespace: str = "") -> Object | None:
        self._ask("get", kind.name, name)
        return copy.deepcopy(self.objects.get((kind.name, namespace, name)))

    async def list(
        self,
        kind: Kind,
        namespace: str = "",
        *,
        labels: str = "",
        keep: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda body: body,
        limit: int = 0,
    ) -> Listing:
        self._ask("list", kind.name, "")
        wanted = [part.partition("=") for part in labels.split(",") if part]
        items = [
            keep(copy.deepcopy(body))
            for (name, where, _), body in self.objects.items()
            if name == kind.name
            and namespace in ("", where)
            and all(
                key in (found := body["metadata"].get("labels") or {})
                and (not value or found[key] == value)
                for key, _, value in wanted
            )
        ]
        return Listing(items, str(next(self.numbers)))

    async def apply(
        self,
        body: Mapping[str, Any],
        *,
        manager: str = names.CHILDREN_MANAGER,
        force: bool = True,
        subresource: str = "",
    ) -> Applied:
        kind, metadata = kind_of(body), body["metadata"]
        self._ask("apply", kind.name, metadata["name"], write=True)
        key = (kind.name, metadata.get("namespace", ""), metadata["name"])
        before = self.objects.get(key)
        if before is None and (subresource or "uid" in metadata):
            raise NotFound(f"{kind.name} {metadata['name']} is not there")
        if (
            before is not None
            and metadata.get("uid", before["metadata"]["uid"]) != (before["metadata"]["uid"])
        ):
            raise Conflict("uid mismatch")
        if before is not None and not force:
            raise Conflict("somebody else holds the fields")
        after = copy.deepcopy(before) if before is not None else {"metadata": {}}
        own = {key: value for key, value in metadata.items() if key != "uid"}
        after |= copy.deepcopy({key: value for key, value in body.items() if key != "metadata"})
        after["metadata"] |= copy.deepcopy(own)
        after["metadata"].setdefault("uid", f"u{next(self.numbers)}")
        after["metadata"]["managedFields"] = [{"manager": manager, "operation": "Apply"}]
        if after != before:
            after["metadata"]["resourceVersion"] = str(next(self.numbers))
        self.objects[key] = after
        return Applied(copy.deepcopy(after), created=before is None)

    async def create(self, body: Mapping[str, Any], **_: Any) -> Object:
        self._ask("create", body["kind"], body["metadata"]["name"], write=True)
        return self.put(dict(body))

    async def patch(self, kind: Kind, name: str, namespace: str, body: Mapping[str, Any]) -> Object:
        self._ask("patch", kind.name, name, write=True)
        found = self.objects.get((kind.name, namespace, name))
        if found is None:
            raise NotFound(f"{kind.name} {name} is not there")
        found |= copy.deepcopy(dict(body))
        return copy.deepcopy(found)

    async def delete(self, kind: Kind, name: str, namespace: str, uid: str) -> None:
        self._ask("delete", kind.name, name, write=True)
        found = self.objects.get((kind.name, namespace, name))
        if found is not None and found["metadata"]["uid"] == uid:
            del self.objects[kind.name, namespace, name]

    async def serves(self, kind: Kind) -> bool:
        self._ask("discover", kind.name, "")
        return kind.plural in self.served

    async def whoami(self) -> str:
        self._ask("whoami", "", "")
        return self.user

    async def token(self, account: str, namespace: str, audience: str, seconds: int) -> str:
        self._ask("token", account, audience)
        return f"token {len(self.calls)} for {audience}"

    def refuse(self, *, verb: str, kind: str, error: Exception) -> None:
        """Every request of that verb and kind fails from now on."""
        self.fails = lambda asked, of, _: error if (asked, of) == (verb, kind) else None

    def writes(self) -> Calls:
        """Requests that change something."""
        return [call for call in self.calls if call[0] in ("apply", "create", "patch", "delete")]


def immutable() -> Invalid:
    """As the API server refuses a change of what can't change."""
    return Invalid("spec.selector: field is immutable", code=422)
