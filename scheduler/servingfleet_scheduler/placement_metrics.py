"""Who takes no requests, and where sessions went, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .service import Scheduler


def placement(scheduler: Scheduler, prefix: str) -> Iterator[Metric]:
    """Labels are models and fixed words."""
    draining: Counter[str] = Counter()
    broken: Counter[str] = Counter()
    for replica in scheduler.fleet:
        draining[replica.model] += bool(replica.draining_by)
        broken[replica.model] += sum(
            rank.breaker is not None and rank.breaker.level > 0 for rank in replica.ranks.values()
        )
    for name, text, counts in (
        ("replicas_draining", "Replicas that somebody drains.", draining),
        ("ranks_broken", "Ranks on which requests fail: their breaker is not closed.", broken),
    ):
        family = GaugeMetricFamily(prefix + name, text, labels=["model"])
        for model, count in counts.items():
            family.add_metric([model], count)
        yield family
    yield CounterMetricFamily(
        f"{prefix}last_resorts",
        "Decisions for a target on which requests fail, there being no other.",
        value=scheduler.last_resorts,
    )
    yield GaugeMetricFamily(
        f"{prefix}sessions", "Sessions whose last target is known.", value=len(scheduler.pins)
    )
    pinned = CounterMetricFamily(
        f"{prefix}pinned_routes",
        "Decisions that were to stay where their session was.",
        labels=["result"],
    )
    for result, count in scheduler.pinning.items():
        pinned.add_metric([result], count)
    yield pinned
