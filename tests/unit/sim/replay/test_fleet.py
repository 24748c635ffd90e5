"""Tests of `servingfleet_sim.replay.fleet`."""

from __future__ import annotations

import msgspec
import pytest

from servingfleet_scheduler.policy.speeds import DEFAULTS
from servingfleet_sim.emulator.speed import GPUS
from servingfleet_sim.replay.fleet import (
    BadFleet,
    EventsSpec,
    FailureSpec,
    FleetSpec,
    PoolSpec,
    TierSpec,
    read_fleet,
)
from tests.recordings import ROOT

FLEET = """
pools:
  - name: fast
    replicas: 2
    gpu: h100
    factor: 2
    tiers: [{tier: host, tokens: 1000000, bandwidth_bytes_per_s: 20e9, latency_s: 0.001}]
  - name: slow
    engine: sglang
    ranks: 2
    gpu: a100
    told: {prefill_tokens_per_s: 99000}
schedulers: 2
events: {lag_s: 2, loss: 0.01}
failures: [{at: 10, replica: slow-0, for: 5}]
"""


def test_a_fleet_is_what_its_file_says() -> None:
    fleet = read_fleet(FLEET)
    assert list(fleet.replicas()) == ["fast-0", "fast-1", "slow-0"]
    fast, slow = fleet.pools
    assert fast.truth == GPUS["h100"].scaled(2.0)
    assert fast.tiers[0].bandwidth_bytes_per_s == 20e9
    assert (slow.engine, slow.ranks, slow.gpu_tokens) == ("sglang", 2, 400_000)
    assert (fleet.events.lag_s, fleet.failures[0].for_s) == (2.0, 5.0)


def test_schedulers_are_told_the_truth_where_nothing_else_is_said() -> None:
    told = read_fleet(FLEET).told()
    truth = GPUS["h100"].scaled(2.0)
    fast = told["fast"]
    assert (fast.step_s, fast.token_s, fast.attention_s) == (
        truth.step_s,
        truth.token_s,
        truth.pair_s,
    )
    assert fast.host.token_s == pytest.approx(131072 / 20e9)
    assert fast.host.fixed_s == 0.001


def test_what_the_schedulers_are_told_may_be_wrong() -> None:
    slow = read_fleet(FLEET).told()["slow"]
    assert slow.token_s == pytest.approx(1 / 99000)
    assert slow.step_s == DEFAULTS.step_s


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pools: []", "length >= 1"),
        ("pools: [{name: a}]", "needs either `gpu` or `speed`"),
        ("pools: [{name: a, gpu: z9}]", "gpu 'z9'; known: b200"),
        ("pools: [{name: a, gpu: h100}, {name: a, gpu: h100}]", "pool 'a' is there twice"),
        ("pools: [{name: a, gpu: h100, replica: 2}]", "unknown field `replica`"),
        ("pools: [{name: a, gpu: h100, replicas: 0}]", "replicas"),
        ("pools: [{name: a, gpu: h100, replicas: 5000}]", "5000 ranks; at most 4096"),
        (
            "pools: [{name: a, gpu: h100, tiers: [{tier: disk, tokens: 1}, {tier: host, tokens: 1}]}]",
            "expected host, then disk",
        ),
        (
            "pools: [{name: a, gpu: h100}]\nfailures: [{at: 1, replica: b, for: 1}]",
            "failure of 'b', which is no replica; there are a-0",
        ),
        ("pools: [{name: a, gpu: h100, told: {speed: 1}}]", "pool 'a', told: .*speed"),
        ("pools: {", "fleet file"),
    ],
)
def test_a_file_that_describes_no_fleet_is_told_where(text: str, said: str) -> None:
    with pytest.raises(BadFleet, match=said):
        read_fleet(text)


def test_the_documentation_names_every_key() -> None:
    text = (ROOT / "docs" / "replay.md").read_text()
    table = text[text.index("## The fleet file") :]
    for struct in (PoolSpec, TierSpec, EventsSpec, FailureSpec, FleetSpec):
        for field in msgspec.structs.fields(struct):
            assert f"{field.encode_name}" in table, field
    for gpu in GPUS.keys() - {"instant"}:
        assert f"`{gpu}`" in table


def test_the_example_is_a_fleet() -> None:
    read_fleet((ROOT / "examples" / "replay" / "fleet.yaml").read_bytes())
