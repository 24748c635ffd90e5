"""What a reconcile may have seen, made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from servingfleet_core.figures import Sums
from servingfleet_core.reports import reuse_report
from servingfleet_operator.observed import Observed, Pod, SchedulerReport
from servingfleet_protos.v1 import common_pb2, fleet_pb2

from .pods import fleet

LIVE = common_pb2.STREAM_STATE_LIVE
MODEL = "org/model"


def pod(number: int = 0, **changes: Any) -> Pod:
    """A ready engine pod with its relay."""
    fields = {
        "name": f"vllm-{number}",
        "uid": f"uid-{number}",
        "pool": "main",
        "node": "gpu-1",
        "ready": True,
    }
    return Pod(**{**fields, **changes})


def stream(
    target: Pod | str,
    *states: common_pb2.StreamState.ValueType | tuple[common_pb2.StreamState.ValueType, str],
    blocks: int = 0,
) -> fleet_pb2.Replica:
    """What a scheduler says of a pod: a state, or a state with its reason, for each rank."""
    said = [state if isinstance(state, tuple) else (state, "") for state in states or (LIVE,)]
    return fleet_pb2.Replica(
        replica=target if isinstance(target, str) else target.uid,
        model=MODEL,
        connected=True,
        ranks=[
            fleet_pb2.Rank(
                rank=number,
                state=state,
                reason=reason,
                lanes=[fleet_pb2.LaneHolding(tier=common_pb2.TIER_GPU, blocks=blocks)],
            )
            for number, (state, reason) in enumerate(said)
        ],
    )


def sums(pairs: int, *, decisions: int | None = None, joined: int | None = None) -> Sums:
    """Pairs of 1000 prompt tokens: 500 to 699 reused, ten fewer predicted; one in ten reuses less than predicted."""
    made = Sums()
    for number in range(pairs):
        actual = 500 + number % 200
        predicted = actual + 20 if number % 10 == 0 else actual - 10
        made.add_pair(
            prompt=1000,
            best=predicted,
            predicted=predicted,
            lower=0,
            upper=1000,
            expected=predicted,
            actual=actual,
        )
    made.decisions = pairs if decisions is None else decisions
    made.joined = pairs if joined is None else joined
    return made


def report(
    replicas: Iterable[fleet_pb2.Replica] = (),
    *,
    name: str = "demo-scheduler-a",
    total: Sums | None = None,
    set_aside: Mapping[str, int] | None = None,
    unknown: Mapping[str, int] | None = None,
    window_s: float = 3600.0,
    min_pairs: int = 20,
) -> SchedulerReport:
    """One scheduler's answer. `unknown`: set aside without a model."""
    reports = [reuse_report(MODEL, "", total or Sums(), set_aside or {}, min_pairs)]
    if unknown:
        reports.append(reuse_report("", "", Sums(), unknown, min_pairs))
    return SchedulerReport(
        name,
        fleet_pb2.ListReplicasResponse(replicas=replicas, instance_id=name),
        fleet_pb2.GetReuseResponse(
            reports=reports, window_s=window_s, instance_id=name, min_pairs=min_pairs
        ),
    )


def deployment(ready: int = 2, **changes: Any) -> dict[str, Any]:
    """The scheduler's Deployment with so many of two pods ready."""
    return {
        "metadata": {"name": "demo-scheduler", "generation": 4},
        "status": {
            "observedGeneration": 4,
            "replicas": 2,
            "updatedReplicas": 2,
            "readyReplicas": ready,
            "conditions": [{"type": "Available", "status": "True" if ready == 2 else "False"}],
            **changes,
        },
    }


def observed(**changes: Any) -> Observed:
    """A fleet with one engine, of which all is well."""
    engine = pod()
    fields = {
        "fleet": fleet(),
        "deployment": deployment(),
        "pods": [engine],
        "reports": [report([stream(engine, blocks=100)], total=sums(100))],
    }
    return Observed(**{**fields, **changes})
