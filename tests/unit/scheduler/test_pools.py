from __future__ import annotations

import json
from typing import Any

import pytest

from servingfleet_protos.v1 import common_pb2
from servingfleet_scheduler.policy.speeds import DEFAULTS
from servingfleet_scheduler.pools import BadPools, read_pools
from servingfleet_scheduler.service import Scheduler

from .helpers import FakeRelay, hashes, make_scheduler, profile, route_request

SLOW = {"name": "slow", "prefill_tokens_per_s": 2000}


def written(*pools: dict[str, Any]) -> bytes:
    return json.dumps({"pools": pools}).encode()


def test_a_pool_that_says_nothing_has_the_defaults() -> None:
    assert read_pools(written({"name": "plain"})) == {"plain": DEFAULTS}


def test_a_pool_has_the_speeds_that_it_says() -> None:
    tiers = [{"tier": "host", "bandwidth_bytes_per_s": 2e10, "latency_s": 0.5}]
    (speeds,) = read_pools(written(SLOW | {"bytes_per_token": 100_000, "tiers": tiers})).values()
    assert speeds.token_s == pytest.approx(1 / 2000)
    assert speeds.host.fixed_s == 0.5
    assert speeds.host.token_s == pytest.approx(100_000 / 2e10)
    assert speeds.step_s == DEFAULTS.step_s


def test_larger_tokens_take_longer_from_every_tier() -> None:
    (speeds,) = read_pools(written({"name": "a", "bytes_per_token": 2 * 131_072})).values()
    assert speeds.disk.token_s == pytest.approx(2 * DEFAULTS.disk.token_s)
    assert speeds.token_s == DEFAULTS.token_s


def test_an_engine_that_is_slower_is_slower_in_attention_too() -> None:
    (speeds,) = read_pools(written(SLOW)).values()
    crossover = DEFAULTS.token_s / DEFAULTS.attention_s
    assert speeds.token_s / speeds.attention_s == pytest.approx(crossover)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b"{", "truncated"),
        (b"[]", "array"),
        (b"{}", "pools"),
        (written({}), r"pools\[0\]"),
        (written({"name": ""}), r"pools\[0\].name"),
        (written({"name": "a", "speed": 1}), "speed"),
        (written(SLOW | {"prefill_tokens_per_s": 0}), r"pools\[0\].prefill_tokens_per_s"),
        (written(SLOW | {"prefill_tokens_per_s": True}), r"pools\[0\].prefill_tokens_per_s"),
        (written(SLOW | {"bytes_per_token": "128Ki"}), r"pools\[0\].bytes_per_token"),
        (written(SLOW | {"step_tokens": 0}), r"pools\[0\].step_tokens"),
        (written(SLOW | {"tiers": [{"tier": "gpu"}]}), r"pools\[0\].tiers\[0\].tier"),
        (written(SLOW | {"tiers": [{"tier": "host"}] * 2}), r"pools\[0\].tiers: tier 'host'"),
        (written(SLOW, {"name": "b"}, SLOW), "pools: name 'slow' is there 2 times"),
    ],
)
def test_what_a_pools_file_may_not_say_is_told_by_its_place(text: bytes, where: str) -> None:
    with pytest.raises(BadPools, match=where):
        read_pools(text)


def explained(scheduler: Scheduler) -> dict[str, dict[str, float]]:
    """Terms of the cost of a prompt of 64 tokens, by replica."""
    candidates = scheduler.explain(route_request(64), 1.0).candidates
    return {
        each.target.replica: {term.name: term.seconds for term in each.terms} for each in candidates
    }


def test_explain_shows_the_speeds_of_the_pool_that_a_relay_names() -> None:
    scheduler = make_scheduler(static=("static",), pools=read_pools(written(SLOW)))
    for name, labels in (("r1", {"pool": "slow"}), ("r2", {"pool": "unknown"}), ("r3", {})):
        FakeRelay(scheduler, name).hello(labels=labels)
    prefill = {name: terms["prefill"] for name, terms in explained(scheduler).items()}
    assert prefill["r1"] - DEFAULTS.step_s == pytest.approx(10 * (prefill["r2"] - DEFAULTS.step_s))
    assert prefill["r2"] == prefill["r3"] == prefill["static"]


def test_a_pool_says_how_many_tokens_a_step_takes() -> None:
    (speeds,) = read_pools(written(SLOW | {"step_tokens": 2048})).values()
    assert (speeds.step_tokens, DEFAULTS.step_tokens) == (2048, 8192)


def test_a_tier_is_charged_at_the_speed_of_its_pool() -> None:
    tiers = [{"tier": "host", "latency_s": 0.02}]
    scheduler = make_scheduler(pools=read_pools(written(SLOW | {"tiers": tiers})))
    on_host = profile()
    on_host.lanes[0].tier = common_pb2.TIER_HOST
    relay = FakeRelay(scheduler, "r1").hello(labels={"pool": "slow"}, profile=on_host)
    relay.snapshot(hashes(64))
    assert 0.02 < explained(scheduler)["r1"]["load_host"] < 0.03


def test_the_queue_of_a_slow_pool_is_longer() -> None:
    scheduler = make_scheduler(pools=read_pools(written(SLOW)))
    for name, labels in (("r1", {"pool": "slow"}), ("r2", {})):
        FakeRelay(scheduler, name).hello(labels=labels)
        request = route_request(16_000)
        request.only.add(replica=name)
        scheduler.route(request, 1.0)
    terms = explained(scheduler)
    assert terms["r1"]["queue"] > 5 * terms["r2"]["queue"]
