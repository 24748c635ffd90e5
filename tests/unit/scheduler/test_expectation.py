from __future__ import annotations

import pytest

from servingfleet_protos.v1 import common_pb2, fleet_pb2, routing_pb2, stream_pb2
from servingfleet_scheduler.correction import NONE
from servingfleet_scheduler.eviction import PRIOR, Tail
from servingfleet_scheduler.metrics import Metrics
from servingfleet_scheduler.policy.candidate import Candidate

from .helpers import FakeRelay, finished, hashes, hello, make_scheduler, profile, route_request

PROMPT = 1024
LONG = 200_000
"""Tokens of a prompt that keeps an engine busy for many seconds."""


def drop(relay: FakeRelay, packed: bytes) -> None:
    relay.send(delta=stream_pb2.Delta(op=stream_pb2.Delta.OP_DROP, hashes=packed))


def turning_over(relay: FakeRelay, turnover_s: float) -> None:
    """Its engine evicts what was not used for so long."""
    for number in range(20):
        relay.hold(hashes(64, first=1_000_000 + 1000 * number))
    relay.now += turnover_s
    for number in range(20):
        drop(relay, hashes(64, first=1_000_000 + 1000 * number))


def seen_with(relay: FakeRelay, count: int) -> Candidate:
    """The only target, as a route of so many tokens would see it now."""
    scheduler = relay.scheduler
    considered = scheduler._considering.consider(route_request(count), relay.now, scheduler._rng)
    (option,) = considered.options.values()
    return option.candidate


def seen(relay: FakeRelay) -> Candidate:
    """The only target, as a route of PROMPT would see it now."""
    return seen_with(relay, PROMPT)


def busy(relay: FakeRelay) -> None:
    busy_with(relay, 5_000_000)


def busy_with(relay: FakeRelay, first: int) -> None:
    relay.scheduler.route(route_request(LONG, first=first), relay.now)


def fresh(*, learn: bool = True) -> FakeRelay:
    relay = FakeRelay(make_scheduler(learn=learn)).hello()
    relay.snapshot()
    return relay


def test_what_will_be_evicted_while_it_waits_is_expected_less() -> None:
    relay = fresh()
    turning_over(relay, 100.0)
    relay.hold(hashes(PROMPT))
    held = seen(relay)
    assert held.reuse.expected == held.reuse.predicted == PROMPT - 16
    relay.now += 90.0
    busy(relay)
    late = seen(relay)
    assert late.queue_s > 10.0
    assert 0.5 < late.gone <= 1.0
    assert late.reuse.expected == pytest.approx((1 - late.gone) * late.reuse.predicted)
    assert late.reuse[:4] == held.reuse[:4]  # what is held does not depend on it
    answer = relay.scheduler.explain(route_request(PROMPT), relay.now).candidates[0]
    assert answer.prediction.expected == late.reuse.expected


def test_what_was_dispatched_is_used_again() -> None:
    relay = fresh()
    turning_over(relay, 100.0)
    relay.hold(hashes(PROMPT))
    relay.now += 90.0
    relay.scheduler.route(route_request(PROMPT), relay.now)
    busy(relay)
    tail = seen(relay).tail
    assert tail is not None
    assert tail.idle_s == pytest.approx(0.0)
    assert seen(relay).gone < 0.5


def test_the_first_blocks_of_a_prompt_may_outlive_its_last() -> None:
    relay = fresh()
    turning_over(relay, 100.0)
    # Nothing says that the second hold goes on where the first ends, so that they lie apart.
    relay.hold(hashes(PROMPT)[: 32 * 8])
    relay.hold(hashes(2 * PROMPT)[32 * 8 :])
    relay.now += 90.0
    relay.scheduler.route(route_request(64 * 8), relay.now)
    busy(relay)
    late = seen_with(relay, 2 * PROMPT)
    reuse, gone = late.reuse, late.gone
    assert gone > 0.9
    # 512 tokens are as good as there, of the other 1520 hardly any.
    assert reuse.expected == pytest.approx(512 + (1 - gone) * (reuse.predicted - 512))


def test_nobody_knows_how_long_a_snapshots_blocks_were_idle() -> None:
    relay = FakeRelay(make_scheduler()).hello()
    relay.snapshot(hashes(PROMPT))
    turning_over(relay, 100.0)
    relay.now += 90.0
    busy(relay)
    assert seen(relay).tail is None
    assert seen(relay).reuse.expected == seen(relay).reuse.predicted


def test_a_cache_not_seen_to_evict_is_judged_by_what_fills_it() -> None:
    lanes = profile()
    lanes.lanes[0].capacity_tokens = 100 * PROMPT
    relay = FakeRelay(make_scheduler()).hello(profile=lanes)
    relay.snapshot()
    for number in range(120):
        relay.hold(hashes(PROMPT, first=10_000 * number))
        relay.now += 1.0
    tail = seen(relay).tail
    assert tail is not None
    assert tail.turnover_s == pytest.approx(100.0, rel=0.1)


def test_a_restarted_engine_has_evicted_nothing() -> None:
    relay = fresh()
    turning_over(relay, 100.0)
    relay.send(rank_state=stream_pb2.RankState(state=hello().ranks[0].state, incarnation=2))
    relay.snapshot()
    relay.hold(hashes(PROMPT))
    relay.now += 90.0
    busy(relay)
    assert seen(relay).tail is None


def report(relay: FakeRelay, cached: int, count: int) -> None:
    for number in range(count):
        request = route_request(PROMPT, request_id=f"{cached} {number} {relay.now}")
        response = relay.scheduler.route(request, relay.now)
        relay.scheduler.report(
            finished(response.decision_id, prompt=PROMPT, cached=cached), relay.now
        )


@pytest.mark.parametrize("learn", [True, False])
def test_predictions_that_turn_out_wrong_are_expected_less_if_learning_is_on(learn: bool) -> None:
    relay = fresh(learn=learn)
    relay.hold(hashes(PROMPT))
    report(relay, PROMPT // 2, 50)
    reuse = seen(relay).reuse
    assert reuse.predicted == PROMPT - 16
    if learn:
        # (50 * 512 + 8192) / (50 * 1008 + 8192)
        assert reuse.expected == pytest.approx(reuse.predicted * 33_792 / 58_592)
    else:
        assert reuse.expected == reuse.predicted


def test_right_predictions_stay_as_they_are() -> None:
    relay = fresh()
    relay.hold(hashes(PROMPT))
    report(relay, PROMPT - 16, 50)
    assert seen(relay).reuse.expected == PROMPT - 16


def test_the_ledger_shows_what_expected_was_worth() -> None:
    relay = fresh()
    relay.hold(hashes(PROMPT))
    report(relay, PROMPT // 2, 50)
    (answer,) = relay.scheduler.get_reuse(fleet_pb2.GetReuseRequest(), relay.now).reports
    figures = {each.name: each for each in answer.figures}
    figure = figures["expected_over_actual"]
    assert figure.denominator == answer.sums.actual == 50 * PROMPT // 2
    assert figure.numerator == answer.sums.expected < answer.sums.predicted
    assert figure.low < figure.value < figure.high


def test_an_outcome_says_whether_the_chance_of_eviction_was_true() -> None:
    relay = fresh()
    turning_over(relay, 100.0)
    relay.hold(hashes(PROMPT))
    relay.now += 60.0
    response = relay.scheduler.route(route_request(PROMPT), relay.now)
    relay.scheduler.report(finished(response.decision_id, prompt=PROMPT, cached=0), relay.now)
    row = relay.scheduler.expectations.evictions.reliability["", 1]
    assert (sum(row.pairs), sum(row.gone)) == (1, 1)
    text = Metrics(relay.scheduler, lambda: relay.now).text().decode()
    labels = 'chance="0.0-0.1",pool="",tier="gpu"'
    assert f"servingfleet_scheduler_eviction_gone_total{{{labels}}} 1.0" in text
    assert "servingfleet_scheduler_expected_tokens_total" in text


def test_an_orphan_counts_with_what_was_expected_of_it() -> None:
    relay = fresh()
    relay.hold(hashes(PROMPT))
    report(relay, PROMPT // 2, 50)
    expected = round(seen(relay).reuse.expected)
    response = relay.scheduler.route(route_request(PROMPT), relay.now)
    other = make_scheduler(instance_id="scheduler-2")
    joined = other.report(
        finished(response.decision_id, prompt=PROMPT, cached=PROMPT // 2), relay.now
    )
    assert joined.disposition == routing_pb2.ReportResponse.DISPOSITION_ORPHAN_JOIN
    (row,) = other.ledger.totals.values()
    assert row.sums.expected == expected


def test_who_waits_behind_a_prompt_finds_what_it_reuses_fresh() -> None:
    relay = fresh()
    turning_over(relay, 100.0)
    relay.hold(hashes(PROMPT))
    relay.now += 60.0
    busy(relay)
    # The long prompt is computed first; then this one uses what it needs again.
    relay.scheduler.route(route_request(PROMPT), relay.now)
    for number in range(10):
        busy_with(relay, 6_000_000 + number * LONG)
    behind = seen(relay)
    assert behind.queue_s > 100.0
    assert behind.tail is not None
    assert -behind.queue_s < behind.tail.idle_s < -10.0
    assert behind.gone == pytest.approx(
        1 - PRIOR.alive(0.0, behind.queue_s + behind.tail.idle_s, 100.0)
    )


def test_what_is_only_credited_may_be_gone_again_when_its_sibling_is_served() -> None:
    relay = fresh()
    turning_over(relay, 30.0)
    relay.scheduler.route(route_request(PROMPT), relay.now)
    at_once = seen(relay)
    assert at_once.reuse.lower == 0
    assert at_once.reuse.expected == at_once.reuse.predicted == PROMPT - 16
    for number in range(10):
        busy_with(relay, 6_000_000 + number * LONG)
    late = seen(relay)
    assert late.reuse.predicted == PROMPT - 16
    assert late.gone > 0.9


def test_a_loss_that_was_foreseen_says_nothing_against_predictions() -> None:
    relay = fresh()
    scheduler = relay.scheduler
    relay.hold(hashes(PROMPT))
    replica, reuse = scheduler.fleet.get("r1"), seen(relay).reuse
    assert replica is not None
    for gone in (0.9, 0.0):
        tail = Tail(1, 90.0, 20.0, 100.0, gone)
        for _ in range(50):
            scheduler.expectations.learn(replica, 0, reuse, tail, 0, relay.now)
        factors = scheduler.expectations.corrections.factors(("r1", 0), relay.now)
        assert (factors == NONE) == (gone > 0.5)


def test_what_leaves_a_faster_tier_is_not_taken_to_be_gone() -> None:
    lanes = profile()
    lanes.lanes[0].capacity_tokens = 100 * PROMPT
    lanes.lanes.add().CopyFrom(lanes.lanes[0])
    lanes.lanes[1].lane, lanes.lanes[1].tier = 1, common_pb2.TIER_HOST
    relay = FakeRelay(make_scheduler()).hello(profile=lanes)
    relay.snapshot()
    for number in range(130):
        relay.hold(hashes(PROMPT, first=10_000 * number))
        relay.now += 1.0
    assert seen(relay).tail is None
    for number in range(130):
        relay.hold(hashes(PROMPT, first=10_000 * number), lane=1)
        relay.now += 1.0
    tail = seen(relay).tail
    assert tail is not None
    assert tail.tier == 2
    assert tail.turnover_s == pytest.approx(100.0, rel=0.1)


def test_what_a_peer_dispatched_is_used_too() -> None:
    relay = fresh()
    turning_over(relay, 100.0)
    relay.hold(hashes(PROMPT))
    relay.now += 90.0
    relay.send(
        credit_opened=stream_pb2.CreditOpened(
            decision_id="of a peer",
            origin="scheduler-2",
            hashes=hashes(PROMPT),
            prompt_tokens=PROMPT,
            predicted=PROMPT - 16,
            expires_s=60.0,
        )
    )
    tail = seen(relay).tail
    assert tail is not None
    assert tail.idle_s == 0.0
