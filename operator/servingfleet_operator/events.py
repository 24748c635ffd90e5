"""Events about fleets, for `kubectl describe`: one where a condition changed, and never a storm of them.

A condition that flaps makes one Event per reason, whose series counts: at most one write in `QUIET_S`.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from . import names
from .cluster import Cluster
from .conditions import BAD_WHEN_TRUE
from .errors import ClusterError
from .kinds import EVENT
from .metrics import Metrics

log = logging.getLogger(__name__)

QUIET_S = 300.0
"""Between two writes about the same fleet and reason."""
SERIES_S = 3000.0
"""After this an Event is made anew: the API server forgets each an hour after its last change."""
MAX_REMEMBERED = 4096
MAX_NOTE = 1024
"""The API server refuses longer notes."""


class Happening(NamedTuple):
    """Something worth telling about a fleet."""

    reason: str
    note: str
    good: bool


_NEWS_FROM_THE_START = frozenset({"Reconciled", "TransportSecured"})
"""Everything else is not well yet when a fleet is new, and gets well by waiting."""


def happenings(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> list[Happening]:
    """What changed from one list of conditions to the next: a status, or the reason why something is not well.

    What is well from the start, or can't be told, is no news.
    """
    known = {condition["type"]: condition for condition in before}
    found = []
    for condition in after:
        kind, old = condition["type"], known.get(condition["type"])
        good = (condition["status"] == "True") != (kind in BAD_WHEN_TRUE)
        if condition["status"] == "Unknown":
            continue
        if old is None:
            changed = not good and kind in _NEWS_FROM_THE_START
        elif old["status"] == "Unknown":
            changed = not good
        else:
            changed = old["status"] != condition["status"] or (
                not good and old["reason"] != condition["reason"]
            )
        if changed:
            found.append(Happening(condition["reason"], condition["message"], good))
    return found


@dataclass(slots=True)
class _Told:
    name: str
    made_at: float
    written_at: float
    count: int = 1


class Events:
    """Posts what happens to fleets."""

    def __init__(
        self,
        cluster: Cluster,
        metrics: Metrics,
        *,
        reporter: str,
        clock: Callable[[], float],
        today: Callable[[], datetime],
    ) -> None:
        """reporter: which replica speaks. clock: monotonic seconds."""
        self._cluster = cluster
        self._metrics = metrics
        self._reporter = reporter[:128]
        self._clock = clock
        self._today = today
        self._told: OrderedDict[tuple[str, str], _Told] = OrderedDict()

    async def post(self, fleet: Mapping[str, Any], happening: Happening) -> None:
        """Tells of it, unless the same was told just now. An Event that can't be written is counted, and that is all."""
        key = (fleet["metadata"]["uid"], happening.reason)
        now = self._clock()
        told = self._told.get(key)
        if told is not None and now - told.written_at < QUIET_S:
            told.count += 1
            self._metrics.events.labels("held_back").inc()
            return
        try:
            if told is not None and now - told.made_at < SERIES_S:
                await self._count(fleet, told)
                told.written_at = now
                outcome = "counted"
            else:
                name = await self._make(fleet, happening)
                self._told[key] = _Told(name, made_at=now, written_at=now)
                self._told.move_to_end(key)
                outcome = "posted"
        except ClusterError as error:
            self._told.pop(key, None)
            outcome = "refused"
            log.warning("event not posted", extra={"reason": happening.reason, "error": str(error)})
        self._metrics.events.labels(outcome).inc()
        while len(self._told) > MAX_REMEMBERED:
            self._told.popitem(last=False)

    async def _count(self, fleet: Mapping[str, Any], told: _Told) -> None:
        told.count += 1
        series = {"count": told.count, "lastObservedTime": self._stamp()}
        await self._cluster.patch(
            EVENT, told.name, fleet["metadata"]["namespace"], {"series": series}
        )

    async def _make(self, fleet: Mapping[str, Any], happening: Happening) -> str:
        metadata = fleet["metadata"]
        name = f"{metadata['name']}.{secrets.token_hex(8)}"
        await self._cluster.create(
            {
                "apiVersion": EVENT.api_version,
                "kind": EVENT.name,
                "metadata": {"name": name, "namespace": metadata["namespace"]},
                "eventTime": self._stamp(),
                "reportingController": f"{names.GROUP}/operator",
                "reportingInstance": self._reporter,
                "action": "Reconcile",
                "reason": happening.reason,
                "note": happening.note[:MAX_NOTE],
                "type": "Normal" if happening.good else "Warning",
                "regarding": {
                    "apiVersion": names.API_VERSION,
                    "kind": names.KIND,
                    "name": metadata["name"],
                    "namespace": metadata["namespace"],
                    "uid": metadata["uid"],
                },
            }
        )
        return name

    def _stamp(self) -> str:
        return self._today().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
