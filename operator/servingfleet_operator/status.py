"""`.status` of a fleet from what was observed, and whether it is worth a write. Pure; the time is an argument.

Every write is an event for everyone who watches: conditions are written at once when they change, everything else at
most every `FIGURES_EVERY_S`, and what has not changed not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from . import measured, names
from .conditions import CONDITIONS, Verdict, View
from .observed import Observed, Trouble
from .replicas import Replica, counted, indexed_blocks

MOST_REPLICAS = 64
"""As in the CRD, which refuses a longer list and with it the whole status."""
FIGURES_EVERY_S = 15.0

_MOST_MESSAGE = 1024
_MOST_REASON = 512


def status(previous: Mapping[str, Any], observed: Observed, now: datetime) -> dict[str, Any]:
    """The whole status, as server-side apply wants it. `previous`: the one that stands in the object."""
    view = View.of(observed)
    fleet = observed.fleet
    made: dict[str, Any] = {
        "conditions": [
            _condition(previous, kind, condition(view), fleet.generation, now)
            for kind, condition in CONDITIONS.items()
        ],
        "observedAt": _time(now),
        "observedGeneration": fleet.generation,
        "replicas": [_replica(each) for each in view.replicas[:MOST_REPLICAS]],
        "scheduler": {
            "endpoint": names.endpoint(fleet.name, fleet.namespace),
            "ready": f"{view.rollout.ready}/{view.rollout.wanted}",
        },
        "summary": _summary(view),
    }
    omitted = len(view.replicas) - MOST_REPLICAS
    if omitted > 0:
        made["replicasOmitted"] = omitted
    if view.measured is not None:
        made["reuse"] = measured.reuse(view.measured)
    return made


def refused(
    previous: Mapping[str, Any], trouble: Trouble, generation: int, now: datetime
) -> dict[str, Any]:
    """The status of a fleet whose spec can't be read: as it was, but not reconciled."""
    kept = [each for each in _conditions(previous).values() if each["type"] != "Reconciled"]
    verdict = Verdict("False", trouble.reason, f"{trouble.message}.")
    return {
        **previous,
        "conditions": [*kept, _condition(previous, "Reconciled", verdict, generation, now)],
        "observedAt": _time(now),
        "observedGeneration": generation,
    }


def write_in(previous: Mapping[str, Any], made: Mapping[str, Any], now: datetime) -> float | None:
    """Seconds until `made` should be written over `previous`; 0: at once, None: there is nothing new in it."""
    if _essence(previous) == _essence(made):
        return None
    if _urgent(previous) != _urgent(made):
        return 0.0
    try:
        written = datetime.fromisoformat(previous["observedAt"])
        age_s = (now - written).total_seconds()
    except (KeyError, TypeError, ValueError):
        return 0.0
    # A clock that was set back must not hold the figures up.
    return FIGURES_EVERY_S - age_s if 0 <= age_s < FIGURES_EVERY_S else 0.0


def _essence(said: Mapping[str, Any]) -> dict[str, Any]:
    """All but when it was written. What is absent and what is empty are one: an API server may drop the latter."""
    return {key: value for key, value in said.items() if key != "observedAt" and value != []}


def _urgent(said: Mapping[str, Any]) -> object:
    return (
        said.get("observedGeneration"),
        {
            kind: (each.get("status"), each.get("reason"), each.get("observedGeneration"))
            for kind, each in _conditions(said).items()
        },
    )


def _conditions(said: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = said.get("conditions") or ()
    return {each["type"]: each for each in found if "type" in each}


def _condition(
    previous: Mapping[str, Any], kind: str, verdict: Verdict, generation: int, now: datetime
) -> dict[str, Any]:
    before = _conditions(previous).get(kind, {})
    same = before.get("status") == verdict.status and "lastTransitionTime" in before
    return {
        "type": kind,
        "status": verdict.status,
        "reason": verdict.reason,
        "message": _clipped(verdict.message, _MOST_MESSAGE),
        "lastTransitionTime": before["lastTransitionTime"] if same else _time(now),
        "observedGeneration": generation,
    }


def _replica(replica: Replica) -> dict[str, Any]:
    said = {
        "name": replica.pod.name,
        "node": replica.pod.node,
        "pool": replica.pod.pool,
        "state": str(replica.state),
        "stateReason": _clipped(replica.reason, _MOST_REASON),
        "storedBlocks": replica.blocks,
    }
    return {key: value for key, value in said.items() if value != ""}


def _summary(view: View) -> dict[str, Any]:
    count = counted(view.replicas)
    return {
        "coverage": measured.in_brief(view.measured, "index_coverage"),
        "erroneous": measured.in_brief(view.measured, "erroneous_credit"),
        "indexBlocks": indexed_blocks(view.replicas),
        "live": f"{count['live']}/{count['all']}",
        "reused": measured.in_brief(view.measured, "reused_fraction"),
    }


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _time(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
