"""The relay's own metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from servingfleet_relay.metrics import RelayCollector
from servingfleet_relay.pipeline import Pipeline
from tests.unit.relay.batches import live, stored, tokens
from tests.unit.relay.test_pipeline import NOW, proven


def sample(relay: Pipeline, name: str, **labels: str) -> float | None:
    collector = RelayCollector()
    collector.status = relay.status()
    registry = CollectorRegistry()
    registry.register(collector)
    return registry.get_sample_value(f"servingfleet_relay_{name}", labels)


def fed(*events: object) -> Pipeline:
    relay = proven()
    for seq, event in enumerate(events):
        relay.live(0, live(seq, event), NOW)
    return relay


def test_failures_are_counted_by_invariant_and_by_reason() -> None:
    relay = fed(stored([1], tokens(1)), stored([2], [2**40] * 16))
    assert sample(relay, "invariant_failures_total", engine="vllm", invariant="C27") == 1
    assert sample(relay, "drops_total", engine="vllm", reason="token_range") == 1
    assert sample(relay, "events_total", engine="vllm", kind="events_stored") == 1
    assert sample(relay, "events_total", engine="vllm", kind="invariant_c27") is None


def test_a_tier_that_is_quarantined_has_a_condition_of_its_own() -> None:
    relay = fed(
        stored([1], tokens(1)),
        stored(["x"], [], block=0, medium="CPU"),
        stored([2], tokens(1), medium="HBM"),
    )
    conditions = {
        tier: [
            name
            for name in ("live", "degraded", "resyncing", "quarantined")
            if sample(relay, "condition", rank="0", tier=tier, condition=name)
        ]
        for tier in ("", "host", "unknown")
    }
    assert conditions == {"": ["degraded"], "host": ["quarantined"], "unknown": ["quarantined"]}
    assert sample(relay, "rank_state", rank="0", state="history_lost") == 1
