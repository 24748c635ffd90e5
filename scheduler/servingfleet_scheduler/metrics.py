"""Prometheus metrics. What the scheduler counts is read when scraped; labels are bounded: models, tiers, fixed words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from servingfleet_core.figures import figures
from servingfleet_protos.v1 import common_pb2, routing_pb2

from .eviction import BINS
from .gate import Gate
from .ledger import by_model
from .placement_metrics import placement
from .policy.speeds import TIER_NAMES
from .service import Scheduler
from .speed_metrics import learned

PREFIX = "servingfleet_scheduler_"
_MAX_RELAY_COUNTERS = 512


class Metrics:
    """The registry of one process."""

    def __init__(
        self, scheduler: Scheduler, clock: Callable[[], float], gate: Gate | None = None
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Collector(scheduler, clock, gate))
        self._route = Histogram(
            f"{PREFIX}route_duration_seconds",
            "Time that Route took inside the scheduler.",
            buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5),
            registry=self.registry,
        )
        self._reports = PrometheusCounter(
            f"{PREFIX}reports",
            "Reports answered, by what became of them.",
            ["disposition"],
            registry=self.registry,
        )
        self._passed_on = PrometheusCounter(
            f"{PREFIX}reports_passed_on",
            "Reports of other schedulers' decisions, by what came of passing them on.",
            ["result"],
            registry=self.registry,
        )

    @contextmanager
    def route(self) -> Iterator[None]:
        """Times one Route."""
        with self._route.time():
            yield

    def reported(self, disposition: routing_pb2.ReportResponse.Disposition.ValueType) -> None:
        """Counts one answered Report."""
        name = routing_pb2.ReportResponse.Disposition.Name(disposition)
        self._reports.labels(name.removeprefix("DISPOSITION_").lower()).inc()

    def passed_on(self, result: str) -> None:
        """Counts one report sent on to the scheduler that decided: answered, refused, gone or silent."""
        self._passed_on.labels(result).inc()

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)


class _Collector(Collector):
    def __init__(self, scheduler: Scheduler, clock: Callable[[], float], gate: Gate | None) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._gate = gate

    def collect(self) -> Iterable[Metric]:
        yield from self._ledger()
        yield from self._figures()
        yield from self._evictions()
        yield from self._streams()
        yield from self._tables()
        yield from learned(self._scheduler.learner, PREFIX)
        yield from placement(self._scheduler, PREFIX)
        yield from self._relays()
        if self._gate is not None:
            yield from self._access(self._gate)

    def _ledger(self) -> Iterator[Metric]:
        sums = {
            "decisions": "Requests routed.",
            "rejected": "Requests turned away early.",
            "pairs": "Decisions joined with an outcome.",
            "interval_hits": "Pairs whose reported reuse lay between lower and upper.",
            "prompt": "Prompt tokens of joined pairs.",
            "best": "Longest reuse predicted on any replica, tokens of joined pairs.",
            "predicted": "Tokens predicted to be reused, of joined pairs.",
            "expected": "Tokens that the cost counted on, of joined pairs.",
            "actual": "Tokens reported reused, of joined pairs.",
            "agreed": "Tokens predicted and reported reused.",
            "erroneous": "Tokens predicted but not reported reused.",
        }
        names = {
            "rejected": "rejections",
            "prompt": "prompt_tokens",
            "best": "best_tokens",
            "predicted": "predicted_tokens",
            "expected": "expected_tokens",
            "actual": "actual_tokens",
            "agreed": "agreed_tokens",
            "erroneous": "erroneous_credit_tokens",
        }
        totals = self._scheduler.ledger.totals
        for name, text in sums.items():
            family = CounterMetricFamily(PREFIX + names.get(name, name), text, labels=["model"])
            for model, row in totals.items():
                family.add_metric([model], getattr(row.sums, name))
            yield family
        aside = CounterMetricFamily(
            f"{PREFIX}set_aside", "Outcomes in no figure, by reason.", labels=["model", "reason"]
        )
        for model, row in totals.items():
            for reason, count in row.set_aside.items():
                aside.add_metric([model, reason], count)
        yield aside
        routes = CounterMetricFamily(
            f"{PREFIX}routes", "Routes answered, by what they rest on.", labels=["model", "basis"]
        )
        for (model, basis), count in self._scheduler.routes.items():
            word = routing_pb2.Basis.Name(basis).removeprefix("BASIS_").lower()
            routes.add_metric([model, word], count)
        yield routes
        yield _counts("route_refusals", "Routes refused.", self._scheduler.refusals)
        turned_away = CounterMetricFamily(
            f"{PREFIX}class_rejections",
            "Requests turned away early, by class (least priority; empty: only a deadline) and reason.",
            labels=["model", "class", "reason"],
        )
        for labels, count in self._scheduler.admission.rejections.items():
            turned_away.add_metric(labels, count)
        yield turned_away

    def _figures(self) -> Iterator[Metric]:
        rows, _ = self._scheduler.ledger.rows(self._clock())
        family = GaugeMetricFamily(
            f"{PREFIX}reuse_figure_ratio",
            "Figures of docs/measures.md over the window; absent below the least number of pairs.",
            labels=["model", "figure", "bound"],
        )
        for model, row in by_model(rows).items():
            for figure in figures(row.sums, self._scheduler.settings.min_pairs):
                if figure.value is None or figure.low is None or figure.high is None:
                    continue
                family.add_metric([model, figure.name, "value"], figure.value)
                family.add_metric([model, figure.name, "low"], figure.low)
                family.add_metric([model, figure.name, "high"], figure.high)
        yield family

    def _evictions(self) -> Iterator[Metric]:
        families = {
            "pairs": "Outcomes, by the chance of eviction that their decision was told.",
            "gone": "Those of them whose last predicted block was gone.",
            "told": "Sum of the chances: as many should be gone.",
        }
        labels = ["pool", "tier", "chance"]
        rows = self._scheduler.expectations.evictions.reliability.items()
        for name, text in families.items():
            family = CounterMetricFamily(f"{PREFIX}eviction_{name}", text, labels=labels)
            for (pool, tier), row in rows:
                for number, count in enumerate(getattr(row, name)):
                    if row.pairs[number]:
                        chance = f"{number / BINS:.1f}-{(number + 1) / BINS:.1f}"
                        family.add_metric([pool, TIER_NAMES[tier - 1], chance], count)
            yield family

    def _streams(self) -> Iterator[Metric]:
        streams = self._scheduler.streams
        yield _gauge("relay_streams", "Relay streams open.", streams.open)
        yield _counts("relay_drops", "Relay messages that changed nothing.", streams.drops)
        yield _counts("relay_refusals", "Relay streams ended.", streams.refusals)
        yield _gauge("snapshots_running", "Snapshot slots in use.", streams.slots.in_use)
        yield _gauge("snapshots_waiting", "Relays waiting for a slot.", streams.slots.waiting)
        yield CounterMetricFamily(
            f"{PREFIX}snapshot_timeouts", "Slots taken back.", value=streams.slots.timeouts
        )
        states: Counter[tuple[str, str]] = Counter()
        for replica in self._scheduler.fleet:
            for rank in replica.ranks.values():
                word = common_pb2.StreamState.Name(replica.state(rank))
                states[replica.model, word.removeprefix("STREAM_STATE_").lower()] += 1
        family = GaugeMetricFamily(
            f"{PREFIX}ranks", "Known ranks, by stream state.", labels=["model", "state"]
        )
        for labels, count in states.items():
            family.add_metric(labels, count)
        yield family
        warm = self._scheduler.fleet.warm()
        if warm is not None:
            yield _gauge("warm_ratio", "Share of ranks whose snapshot is complete.", warm)

    def _tables(self) -> Iterator[Metric]:
        scheduler = self._scheduler
        yield _gauge("credits", "Credits open.", len(scheduler.credits))
        yield CounterMetricFamily(
            f"{PREFIX}credits_refused",
            "Credits not opened, a limit being reached.",
            value=scheduler.credits.refused,
        )
        disagreement = scheduler.disagreement
        for name, text, value in (
            ("samples", "Peers' predictions compared with the own.", disagreement.samples),
            ("prompt_tokens", "Prompt tokens of those.", disagreement.prompt),
            (
                "difference_tokens",
                "Tokens by which the two predictions of a prompt differ, added up.",
                disagreement.difference,
            ),
        ):
            yield CounterMetricFamily(f"{PREFIX}peer_prediction_{name}", text, value=value)
        yield _gauge("decisions_open", "Decisions without outcome.", len(scheduler.decisions))
        yield CounterMetricFamily(
            f"{PREFIX}decisions_forgotten",
            "Open decisions dropped, there being too many.",
            value=scheduler.decisions.forgotten,
        )
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            "entries": GaugeMetricFamily(
                f"{PREFIX}index_entries", "(holder, block) pairs known.", labels=["model"]
            ),
            "memory_bytes": GaugeMetricFamily(
                f"{PREFIX}index_memory_bytes", "Memory of the index.", labels=["model"]
            ),
            "evicted": CounterMetricFamily(
                f"{PREFIX}index_evicted", "Pairs dropped, the index being full.", labels=["model"]
            ),
        }
        for model in scheduler.fleet.models:
            index = scheduler.fleet.index(model)
            counts = index.counts() if index is not None else {}
            for name, family in families.items():
                family.add_metric([model], counts.get(name, 0))
        yield from families.values()

    def _access(self, gate: Gate) -> Iterator[Metric]:
        yield _counts("access_refusals", "Callers turned away.", gate.refusals)
        family = CounterMetricFamily(
            f"{PREFIX}access_reviews",
            "Questions to the API server: whose a token is, whether a right is granted.",
            labels=["kind", "answer"],
        )
        for labels, count in gate.reviews.items():
            family.add_metric(labels, count)
        yield family

    def _relays(self) -> Iterator[Metric]:
        totals: Counter[tuple[str, str]] = Counter()
        for replica in self._scheduler.fleet:
            for name, value in replica.relay_totals.items():
                if (replica.engine, name) in totals or len(totals) < _MAX_RELAY_COUNTERS:
                    totals[replica.engine, name] += value
        # A gauge: the sum falls when a relay leaves.
        family = GaugeMetricFamily(
            f"{PREFIX}relay_totals",
            "Totals of the relays known now, added up.",
            labels=["engine", "name"],
        )
        for labels, value in totals.items():
            family.add_metric(labels, value)
        yield family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counts(name: str, text: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=["reason"])
    for reason, count in counts.items():
        family.add_metric([reason], count)
    return family
