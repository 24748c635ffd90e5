"""The only Kubernetes client: typed errors, deadlines, server-side apply, and no write unless this replica leads.

Plain HTTP on the event loop: a call that hangs blocks nobody, ends at its deadline, and can be cancelled. The official
client would add 19 MiB to every replica for what is used here (six verbs, no models). The watches are kopf's
(`informer`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlencode

import aiohttp
import kopf

from . import names
from .answers import checked
from .errors import Conflict, NotFound, NotLeading, Refused, Unreachable
from .kinds import SERVICE_ACCOUNT, Kind, kind_of

APPLY = "application/apply-patch+yaml"
JSON = "application/json"
STRATEGIC_MERGE = "application/strategic-merge-patch+json"

DEADLINE_S = 10.0
"""An API server that needs longer is as good as away; a frozen one must not hold a reconcile for ever."""
LIST_DEADLINE_S = 30.0
PAGE_ITEMS = 500
CONNECTIONS = 32
LOGIN_EVERY_S = 60.0
"""The kubelet renews a ServiceAccount's token long before it ends; the file is read again so often."""

Observe = Callable[[str, str, int, float], None]
"""Told of every request: verb, plural, HTTP status (0: none), seconds."""

Lacking = Callable[[str, str], None]
"""Told of every request that was refused for lack of a right: verb, plural."""


class Listing(NamedTuple):
    """What a list held, and the moment (resourceVersion) that it describes."""

    items: list[Mapping[str, Any]]
    resource_version: str


class Applied(NamedTuple):
    """The object as it is after an apply."""

    body: dict[str, Any]
    created: bool


class Cluster:
    """A connection to the API server, used as an async context manager."""

    def __init__(
        self,
        login: Callable[[], kopf.ConnectionInfo],
        *,
        may_write: Callable[[], bool],
        observe: Observe = lambda verb, plural, status, seconds: None,
        lacking: Lacking = lambda verb, plural: None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._login = login
        self._may_write = may_write
        self._observe = observe
        self._lacking = lacking
        self._deadline_s = deadline_s
        self._info: kopf.ConnectionInfo | None = None
        self._logged_in_at = 0.0
        self._session: aiohttp.ClientSession | None = None
        self.answered_at = time.monotonic()
        """Monotonic seconds of the API server's last answer, whatever it said."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, kind: Kind, name: str, namespace: str = "") -> dict[str, Any]:
        """One object. Raises ClusterError, NotFound among them."""
        return await self._request("get", kind, kind.path(namespace, name))

    async def find(self, kind: Kind, name: str, namespace: str = "") -> dict[str, Any] | None:
        """One object, or None if there is none."""
        try:
            return await self.get(kind, name, namespace)
        except NotFound:
            return None

    async def list(
        self,
        kind: Kind,
        namespace: str = "",
        *,
        labels: str = "",
        keep: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda body: body,
        limit: int = 0,
    ) -> Listing:
        """Every object that `labels` selects, page by page; of each only what `keep` returns stays in memory.

        limit: read no more than so many; 0: all.
        """
        items: list[Mapping[str, Any]] = []
        query = {"labelSelector": labels, "limit": str(limit or PAGE_ITEMS)}
        while True:
            page = await self._request(
                "list", kind, kind.path(namespace), query=query, deadline_s=LIST_DEADLINE_S
            )
            items.extend(keep(item) for item in page.get("items") or ())
            metadata = page.get("metadata") or {}
            query["continue"] = metadata.get("continue") or ""
            if not query["continue"] or limit:
                return Listing(items, metadata.get("resourceVersion", ""))

    async def apply(
        self,
        body: Mapping[str, Any],
        *,
        manager: str = names.CHILDREN_MANAGER,
        force: bool = True,
        subresource: str = "",
    ) -> Applied:
        """Makes the object be as `body` says, server-side; fields that `manager` no longer sends are removed.

        A `metadata.uid` in the body refuses any other object of that name. Without `force` a field that somebody else
        holds is a Conflict.
        """
        kind = kind_of(body)
        metadata = body["metadata"]
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        status, answer = await self._exchange(
            "apply",
            kind,
            kind.path(metadata.get("namespace", ""), metadata["name"], subresource),
            query=query,
            body=body,
            content_type=APPLY,
        )
        return Applied(answer, created=status == 201)

    async def patch(
        self, kind: Kind, name: str, namespace: str, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Changes what `body` holds by strategic merge, for objects that others own."""
        return await self._request(
            "patch",
            kind,
            kind.path(namespace, name),
            query={"fieldManager": names.CHILDREN_MANAGER},
            body=body,
            content_type=STRATEGIC_MERGE,
        )

    async def create(
        self, body: Mapping[str, Any], *, elected: bool = False, deadline_s: float | None = None
    ) -> dict[str, Any]:
        """Makes the object. `elected`: also while this replica does not lead."""
        kind = kind_of(body)
        return await self._request(
            "create",
            kind,
            kind.path(body["metadata"].get("namespace", "")),
            body=body,
            elected=elected,
            deadline_s=deadline_s,
        )

    async def replace(
        self, body: Mapping[str, Any], *, elected: bool = False, deadline_s: float | None = None
    ) -> dict[str, Any]:
        """Replaces the object if it still has the resourceVersion that `body` names, else raises Conflict."""
        kind = kind_of(body)
        metadata = body["metadata"]
        return await self._request(
            "update",
            kind,
            kind.path(metadata.get("namespace", ""), metadata["name"]),
            body=body,
            elected=elected,
            deadline_s=deadline_s,
        )

    async def delete(self, kind: Kind, name: str, namespace: str, uid: str) -> None:
        """Deletes that very object; one that is gone, or another of the same name, is left alone."""
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        try:
            await self._request("delete", kind, kind.path(namespace, name), body=options)
        except (NotFound, Conflict):
            return

    async def token(self, account: str, namespace: str, audience: str, seconds: int) -> str:
        """A token of the account, for that audience only."""
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [audience], "expirationSeconds": seconds},
        }
        path = SERVICE_ACCOUNT.path(namespace, account, "token")
        # Changes nothing in the cluster, so it needs no leader.
        answer = await self._request("create", SERVICE_ACCOUNT, path, body=body, elected=True)
        return str(answer["status"]["token"])

    async def whoami(self) -> str:
        """The user name that the API server knows us by."""
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        kind = Kind(body["apiVersion"], body["kind"], "selfsubjectreviews", namespaced=False)
        answer = await self._request("create", kind, kind.path(), body=body, elected=True)
        return str(answer["status"]["userInfo"]["username"])

    async def version(self) -> tuple[int, int]:
        """Kubernetes' version, major and minor; (0, 0) where it can't be read."""
        kind = Kind("version", "Version", "version", namespaced=False)
        answer = await self._request("discover", kind, "/version")
        # Some distributions write "29+".
        digits = [re.match(r"\d+", str(answer.get(part, ""))) for part in ("major", "minor")]
        major, minor = (int(found[0]) if found else 0 for found in digits)
        return major, minor

    async def serves(self, kind: Kind) -> bool:
        """The API server knows the kind now."""
        try:
            answer = await self._request("discover", kind, f"/apis/{kind.api_version}")
        except NotFound:
            return False
        return any(each.get("name") == kind.plural for each in answer.get("resources") or ())

    async def _request(self, verb: str, kind: Kind, path: str, **options: Any) -> dict[str, Any]:
        return (await self._exchange(verb, kind, path, **options))[1]

    async def _exchange(
        self,
        verb: str,
        kind: Kind,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = JSON,
        elected: bool = False,
        deadline_s: float | None = None,
    ) -> tuple[int, dict[str, Any]]:
        if body is not None and not elected and not self._may_write():
            raise NotLeading(f"{verb} {path}: this replica does not lead")
        target = (
            f"{path}?{urlencode({key: value for key, value in (query or {}).items() if value})}"
        )
        data = None if body is None else json.dumps(body).encode()
        status, answer = 0, b""
        headers: dict[str, str] = {}
        for fresh in (False, True):
            session = await self._connected(fresh)
            began = time.monotonic()
            status = 0
            try:
                async with session.request(
                    _METHODS[verb],
                    self._server + target.rstrip("?"),
                    data=data,
                    headers={"Content-Type": content_type, "Accept": JSON, **self._credentials},
                    timeout=aiohttp.ClientTimeout(total=deadline_s or self._deadline_s),
                ) as response:
                    answer = await response.read()
                    status, headers = response.status, dict(response.headers)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise Unreachable(
                    f"{verb} {path}: no answer from the API server at {self._server} "
                    f"({str(error) or type(error).__name__})"
                ) from error
            finally:
                self._observe(verb, kind.plural, status, time.monotonic() - began)
            self.answered_at = time.monotonic()
            if status != 401:
                break
            # The token ended before its file was read again.
        try:
            return status, checked(verb, path, kind, status, headers, answer)
        except Refused:
            self._lacking(verb, kind.plural)
            raise

    async def _connected(self, fresh: bool) -> aiohttp.ClientSession:
        now = time.monotonic()
        if self._info is None or fresh or now - self._logged_in_at > LOGIN_EVERY_S:
            try:
                info = self._login()
            except (kopf.LoginError, OSError) as error:
                raise Unreachable(f"no credentials for the API server: {error}") from error
            if self._info is None or _endpoint(info) != _endpoint(self._info):
                if self._session is not None:
                    await self._session.close()
                self._session = None
            self._info, self._logged_in_at = info, now
            self._server = info.server.rstrip("/")
            self._credentials = info.as_http_headers()
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=CONNECTIONS, ssl=self._info.as_ssl_context(), keepalive_timeout=30
                ),
                headers={"User-Agent": names.CHILDREN_MANAGER},
            )
        return self._session


_METHODS = {
    "get": "GET",
    "list": "GET",
    "discover": "GET",
    "create": "POST",
    "update": "PUT",
    "apply": "PATCH",
    "patch": "PATCH",
    "delete": "DELETE",
}


def _endpoint(info: kopf.ConnectionInfo) -> tuple[Any, ...]:
    """What a connection is made of; a new token alone needs no new one."""
    return (
        info.server,
        info.ca_path,
        info.ca_data,
        info.certificate_path,
        info.certificate_data,
        info.private_key_path,
        info.private_key_data,
        info.insecure,
    )
