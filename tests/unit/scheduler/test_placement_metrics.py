"""What Prometheus sees of draining, breakers and sessions."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from servingfleet_protos.v1 import common_pb2, fleet_pb2, routing_pb2
from servingfleet_scheduler.breaker import BreakerSettings
from servingfleet_scheduler.placement_metrics import placement
from servingfleet_scheduler.service import Scheduler

from .helpers import MODEL, finished, make_scheduler, route_request


def read(scheduler: Scheduler, name: str, **labels: str) -> float | None:
    class All(Collector):
        def collect(self) -> list[Metric]:
            return list(placement(scheduler, ""))

    registry = CollectorRegistry()
    registry.register(All())
    return registry.get_sample_value(name, labels)


def test_who_takes_no_requests_is_counted_and_how_sessions_fared() -> None:
    scheduler = make_scheduler(static=["r1", "r2"], breaker=BreakerSettings(failures=1))
    scheduler.set_draining(fleet_pb2.SetDrainingRequest(replica="r1", draining=True, by="cli"))
    on_r2 = [common_pb2.Target(replica="r2")]
    failing = scheduler.route(route_request(only=on_r2, session_id="s"), 0.0)
    stage = routing_pb2.ReportRequest.STAGE_FAILED
    scheduler.report(finished(failing.decision_id, stage=stage), 0.1)
    for session in ("s", "new"):
        scheduler.route(route_request(session_id=session, pin_session=True), 0.2)
    assert read(scheduler, "replicas_draining", model=MODEL) == 1
    assert read(scheduler, "ranks_broken", model=MODEL) == 1
    assert read(scheduler, "last_resorts_total") == 2
    assert read(scheduler, "sessions") == 2
    assert read(scheduler, "pinned_routes_total", result="kept") == 1
    assert read(scheduler, "pinned_routes_total", result="new") == 1
