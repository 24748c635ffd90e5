"""Writes the fleets' statuses, and an Event for each condition that changed with one. What they say is `status`'s business."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any

from . import names, status
from .cluster import Cluster
from .events import Events, happenings
from .metrics import Metrics
from .observed import Observed, Trouble
from .reports import is_ready
from .store import Body, Key, Store, keep_fleet

log = logging.getLogger(__name__)


class Statuses:
    """The statuses of all fleets."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        events: Events,
        metrics: Metrics,
        today: Callable[[], datetime],
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._events = events
        self._metrics = metrics
        self._today = today

    async def write(self, observed: Observed) -> float | None:
        """Writes the status if it is worth it now. Returns the seconds until it will be; None: it is as it should be.

        Raises ClusterError and NotLeading.
        """
        fleet = observed.fleet
        resource = self._store.fleets.get(Key(fleet.namespace, fleet.name))
        if resource is None or resource["metadata"]["uid"] != fleet.uid:
            return None
        now = self._today()
        previous = resource.get("status") or {}
        if (
            observed.reports is None
            and previous.get("conditions")
            and any(map(is_ready, observed.scheduler_pods))
        ):
            # They are being asked. Until then what was said stands: a new leader must not make it all Unknown.
            return None
        # On a thread: a thousand pods take a while, and the webhook must not wait.
        made = await asyncio.to_thread(status.status, previous, observed, now)
        wait_s = status.write_in(previous, made, now)
        if wait_s is None or wait_s > 0:
            return wait_s
        await self._put(resource, made)
        return None

    async def refuse(self, resource: Body, trouble: Trouble) -> None:
        """Says of a fleet whose spec can't be read why. Raises as `write` does."""
        previous = resource.get("status") or {}
        now = self._today()
        made = status.refused(previous, trouble, resource["metadata"].get("generation", 0), now)
        if status.write_in(previous, made, now) is not None:
            await self._put(resource, made)

    async def _put(self, resource: Body, made: dict[str, Any]) -> None:
        metadata = resource["metadata"]
        applied = await self._cluster.apply(
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "metadata": {key: metadata[key] for key in ("name", "namespace", "uid")},
                "status": made,
            },
            manager=names.STATUS_MANAGER,
            subresource="status",
        )
        self._metrics.applies.labels(f"{names.KIND}/status", "changed").inc()
        if applied.body["metadata"].get("generation") == metadata.get("generation"):
            self._store.fleets.put(keep_fleet(applied.body))
        # Else somebody changed the spec meanwhile: the watch must find that new, and tell all whom it concerns.
        before = (resource.get("status") or {}).get("conditions") or ()
        for happening in happenings(before, made["conditions"]):
            log.info(
                "condition changed",
                extra={
                    "fleet": metadata["name"],
                    "namespace": metadata["namespace"],
                    "reason": happening.reason,
                    "said": happening.note,
                },
            )
            await self._events.post(resource, happening)
