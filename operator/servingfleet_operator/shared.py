"""The objects that all fleets share: the webhook configuration, the schedulers' right to ask about tokens, the webhook's
certificate. Each is made to say what the list of fleets says, so that a fleet deleted while nobody watched leaves nothing.

The chart makes the objects and this fills them in: nothing here is ever created, but for Secrets in the operator's own
namespace.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import names
from .admission import entry
from .certificates import Certificates
from .cluster import Cluster
from .errors import ClusterError
from .kinds import CLUSTER_ROLE_BINDING, SERVICE_ACCOUNT, WEBHOOKS, Kind
from .metrics import Metrics
from .pki import Plan
from .reconcile import Reconciler, Shared
from .settings import OperatorSettings
from .store import Body, Key, Store

log = logging.getLogger(__name__)

EVERY_S = 60.0
"""These objects are not watched: a change of somebody else's stands so long at most."""


class SharedObjects:
    """Keeps them true."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        store: Store,
        settings: OperatorSettings,
        certificates: Certificates,
        reconciler: Reconciler,
        metrics: Metrics,
        on_certificate: Callable[[Plan], None],
    ) -> None:
        """on_certificate: told of the webhook's certificate, each time."""
        self._cluster = cluster
        self._store = store
        self._settings = settings
        self._certificates = certificates
        self._reconciler = reconciler
        self._metrics = metrics
        self._on_certificate = on_certificate
        self._missing: set[str] = set()

    async def reconcile(self) -> float:
        """Brings them up to date. Returns the seconds until they are looked at again. Raises OperatorError."""
        self._reconciler.forget_gone()
        known = {
            Key(each.fleet.namespace, each.fleet.name): each for each in self._reconciler.shared()
        }
        fleets = sorted(self._store.fleets)
        failures: list[ClusterError] = []
        # What one of them is refused is no reason to leave the others.
        for part in (self._fill_binding, self._fill_webhooks, self._prune):
            try:
                await part(fleets, known)
            except ClusterError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return EVERY_S

    async def _fill_binding(self, fleets: Sequence[Key], known: Mapping[Key, Shared]) -> None:
        await self._fill(
            CLUSTER_ROLE_BINDING,
            f"{self._settings.fullname}-scheduler",
            lambda _: {"subjects": _subjects(fleets, known)},
        )

    async def _fill_webhooks(self, fleets: Sequence[Key], known: Mapping[Key, Shared]) -> None:
        # The certificate first: an entry must not name an authority that nobody serves by.
        plan = await self._certificates.webhook()
        self._on_certificate(plan)
        await self._fill(
            WEBHOOKS,
            f"{self._settings.fullname}-inject",
            lambda present: {"webhooks": self._entries(present, fleets, known, plan)},
        )

    async def _prune(self, fleets: Sequence[Key], _: Mapping[Key, Shared]) -> None:
        await self._certificates.prune(fleets)

    def _entries(
        self, present: Body, fleets: Iterable[Key], known: Mapping[Key, Shared], plan: Plan
    ) -> list[dict[str, Any]]:
        standing = {webhook["name"]: webhook for webhook in present.get("webhooks") or ()}
        entries = []
        for key in fleets:
            shared = known.get(key)
            name = names.webhook(key.name, key.namespace)
            if shared is not None:
                if shared.injects:
                    entries.append(entry(shared.fleet, self._settings, plan.certificates.ca_bundle))
            elif name in standing:
                # Not looked at yet, or its spec can't be read: what was right before stays.
                entries.append(standing[name])
        return entries

    async def _fill(
        self, kind: Kind, name: str, content: Callable[[Body], Mapping[str, Any]]
    ) -> None:
        present = await self._cluster.find(kind, name)
        if present is None:
            if name not in self._missing:
                self._missing.add(name)
                log.error(
                    "object missing",
                    extra={
                        "kind": kind.name,
                        "object": name,
                        "remedy": "helm upgrade makes it again",
                    },
                )
            return
        self._missing.discard(name)
        wanted = content(present)
        if not any(wanted.values()) and not any(present.get(key) for key in wanted):
            # An empty list that is applied over none makes a new version each time.
            return
        applied = await self._cluster.apply(
            {
                "apiVersion": kind.api_version,
                "kind": kind.name,
                "metadata": {"name": name, "uid": present["metadata"]["uid"]},
                **wanted,
            }
        )
        version = present["metadata"]["resourceVersion"]
        changed = applied.body["metadata"]["resourceVersion"] != version
        self._metrics.applies.labels(kind.name, "changed" if changed else "unchanged").inc()
        if changed:
            log.info("applied", extra={"kind": kind.name, "object": name, "outcome": "changed"})


def _subjects(fleets: Sequence[Key], known: Mapping[Key, Shared]) -> list[dict[str, str]]:
    """The accounts of the schedulers that ask the API server who a caller is."""
    return [
        {
            "kind": SERVICE_ACCOUNT.name,
            "name": names.scheduler(key.name),
            "namespace": key.namespace,
        }
        for key in fleets
        if key not in known or known[key].fleet.secured
    ]
