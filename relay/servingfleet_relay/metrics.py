"""The relay's own Prometheus metrics: a snapshot of the pipeline, taken on the event loop, read by the server's thread."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .conformance.standing import Condition
from .pipeline import RankStatus, Status

STATES = ("live", "history_lost", "unproven", "resyncing", "quarantined")
# Sizes now; everything else that the pipeline counts only grows.
_MIRROR_SIZES = (
    "units_held",
    "units_placed",
    "orphans",
    "opaque_units",
    "ambiguous_copies",
    "memory_bytes",
)


class RelayCollector(Collector):
    """Turns the newest status into metrics."""

    def __init__(self) -> None:
        self.status: Status | None = None
        """Replaced as a whole, never changed."""
        self.scrapes_failed = 0

    def collect(self) -> Iterator[Metric]:
        status = self.status
        if status is None:
            return
        engine = status.engine
        drops = CounterMetricFamily(
            "servingfleet_relay_drops", "What was dropped, by reason.", labels=["engine", "reason"]
        )
        totals = CounterMetricFamily(
            "servingfleet_relay_events",
            "Batches, events and turns of the stream.",
            labels=["engine", "kind"],
        )
        failures = CounterMetricFamily(
            "servingfleet_relay_invariant_failures",
            "Times that something did not hold which must hold of a stream (docs/invariants.md).",
            labels=["engine", "invariant"],
        )
        for name, value in sorted(status.totals.items()):
            if name.startswith("drop_"):
                drops.add_metric([engine, name.removeprefix("drop_")], value)
            elif name.startswith("invariant_"):
                failures.add_metric([engine, name.removeprefix("invariant_").upper()], value)
            elif not name.startswith("mirror_"):
                totals.add_metric([engine, name], value)
        scrapes = CounterMetricFamily(
            "servingfleet_relay_scrapes_failed",
            "Scrapes of the engine that did not work.",
            labels=["engine"],
        )
        scrapes.add_metric([engine], self.scrapes_failed)
        state = GaugeMetricFamily(
            "servingfleet_relay_rank_state",
            "1 for the state that a rank is in.",
            labels=["rank", "state"],
        )
        condition = GaugeMetricFamily(
            "servingfleet_relay_condition",
            "1 for what a stream, or one of its tiers, is good for.",
            labels=["rank", "tier", "condition"],
        )
        applied = GaugeMetricFamily(
            "servingfleet_relay_engine_sequence", "Last batch applied.", labels=["rank"]
        )
        mirror = GaugeMetricFamily(
            "servingfleet_relay_mirror", "Sizes of a rank's mirror.", labels=["rank", "size"]
        )
        for rank in status.ranks:
            label = str(rank.rank)
            for name in STATES:
                state.add_metric([label, name], float(rank.state == name))
            for tier, good_for in _conditions(rank).items():
                for each in Condition:
                    condition.add_metric([label, tier, each], float(each is good_for))
            if rank.engine_seq is not None:
                applied.add_metric([label], rank.engine_seq)
            for name in _MIRROR_SIZES:
                mirror.add_metric([label, name], rank.mirror.get(name, 0))
        links = GaugeMetricFamily(
            "servingfleet_relay_links", "Schedulers, by the phase of their link.", labels=["phase"]
        )
        phases = list(status.links.values())
        for phase in ("closed", "greeted", "open", "broken"):
            links.add_metric([phase], phases.count(phase))
        yield from (drops, totals, failures, scrapes, state, condition, applied, mirror, links)


def _conditions(rank: RankStatus) -> dict[str, Condition]:
    """By tier; "" is the stream, and "unknown" all media that nobody knows."""
    conditions = {"": rank.condition}
    for name, (condition, _) in rank.tiers.items():
        conditions["unknown" if name.startswith("medium ") else name] = condition
    return conditions


def serve(collector: RelayCollector, host: str, port: int) -> int:
    """Serves /metrics from a thread of its own; returns the port. Raises OSError."""
    registry = CollectorRegistry()
    registry.register(collector)
    server, _ = start_http_server(port, addr=host, registry=registry)
    return int(server.server_port)
