"""What was learned of engines' speeds, for Prometheus. Labels are pools, at most `learner.MAX_POOLS`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .learner import Learner
from .policy.speeds import TIER_NAMES

_LABELS = ["model", "pool", "engine", "version"]


def learned(learner: Learner, prefix: str) -> Iterator[Metric]:
    """Of each pool: coefficients of the estimate, and how many outcomes they rest on."""
    step = _gauge(prefix, "speed_step_seconds", "Of one step of the engine, without its tokens.")
    token = _gauge(prefix, "speed_token_seconds", "Per computed token.")
    attention = _gauge(
        prefix, "speed_attention_seconds", "Per pair of computed and attended token."
    )
    load = GaugeMetricFamily(
        f"{prefix}speed_load_token_seconds", "Per loaded token.", labels=[*_LABELS, "tier"]
    )
    noise = _gauge(
        prefix, "speed_noise_ratio", "Standard deviation of a prompt's seconds, as a share."
    )
    labels = CounterMetricFamily(
        f"{prefix}speed_labels", "Outcomes that speeds were learned from.", labels=_LABELS
    )
    drifts = CounterMetricFamily(
        f"{prefix}speed_drifts", "Times that engines were found to have changed.", labels=_LABELS
    )
    for key, pool in learner:
        speeds = pool.known
        step.add_metric(key, speeds.step_s)
        token.add_metric(key, speeds.token_s)
        attention.add_metric(key, speeds.attention_s)
        for name, tier in zip(
            TIER_NAMES[1:], (speeds.host, speeds.disk, speeds.shared), strict=True
        ):
            load.add_metric([*key, name], tier.token_s)
        noise.add_metric(key, speeds.noise_share)
        labels.add_metric(key, pool.labels)
        drifts.add_metric(key, pool.drifts)
    yield from (step, token, attention, load, noise, labels, drifts)


def _gauge(prefix: str, name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(prefix + name, text, labels=_LABELS)
