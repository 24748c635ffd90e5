from __future__ import annotations

from typing import Any

import pytest

from servingfleet_protos.v1 import common_pb2, fleet_pb2, routing_pb2, stream_pb2
from servingfleet_scheduler.clock import Clock
from servingfleet_scheduler.errors import NotAdmitted
from servingfleet_scheduler.labels import STARTING_LABELS
from servingfleet_scheduler.metrics import Metrics
from servingfleet_scheduler.service import Scheduler

from .helpers import FakeRelay, finished, hashes, make_scheduler, profile, route_request

FIRST_TOKEN = routing_pb2.ReportRequest.STAGE_FIRST_TOKEN
FAILED = routing_pb2.ReportRequest.STAGE_FAILED
PROMPT = 4096
SECONDS = 0.5
"""Of a prompt on the engine of these tests: the defaults say 0.26."""


def serve(
    scheduler: Scheduler,
    count: int,
    *,
    began: float = 0.0,
    seconds: float = SECONDS,
    stages: bool = True,
    only: str = "",
) -> float:
    """So many prompts, one after the other; returns when it was done. `stages`: first tokens are told as they come."""
    now = began
    for number in range(count):
        request = route_request(PROMPT, first=int(began * 1000 + number) * PROMPT)
        if only:
            request.only.add(replica=only)
        decision_id = scheduler.route(request, now).decision_id
        told: dict[str, Any] = {}
        if stages:
            report = routing_pb2.ReportRequest(decision_id=decision_id, stage=FIRST_TOKEN)
            scheduler.report(report, now + seconds)
        else:
            told = {"ttft_s": seconds}
        scheduler.report(finished(decision_id, prompt=PROMPT, **told), now + seconds + 0.1)
        now += seconds + 1.0
    return now


def rank(scheduler: Scheduler, replica: str = "r1") -> fleet_pb2.Rank:
    answer = scheduler.list_replicas(fleet_pb2.ListReplicasRequest(), 0.0)
    return next(each.ranks[0] for each in answer.replicas if each.replica == replica)


def estimated(scheduler: Scheduler, now: float) -> float:
    return scheduler.explain(route_request(PROMPT, first=10**9), now).candidates[0].estimated_ttft_s


@pytest.mark.parametrize("stages", [True, False])
def test_what_a_prompt_takes_is_learned_from_reports(stages: bool) -> None:
    scheduler = make_scheduler(static=["r1"])
    assert estimated(scheduler, 0.0) == pytest.approx(0.259, abs=0.01)
    assert rank(scheduler).prefill_tokens_per_s == 0.0
    now = serve(scheduler, 30, stages=stages)
    assert estimated(scheduler, now) == pytest.approx(SECONDS, rel=0.05)
    assert rank(scheduler).speed_labels == 30 - STARTING_LABELS
    assert 0 < rank(scheduler).prefill_tokens_per_s < 20_000 * 0.8


def test_nothing_is_learned_where_that_is_switched_off() -> None:
    scheduler = make_scheduler(static=["r1"], learn=False)
    before = estimated(scheduler, 0.0)
    now = serve(scheduler, 30)
    assert estimated(scheduler, now) == before
    assert rank(scheduler).speed_labels == 0


def test_replicas_of_one_pool_learn_together_and_others_do_not() -> None:
    scheduler = make_scheduler()
    for name, pool in (("r1", "a"), ("r2", "a"), ("r3", "b")):
        FakeRelay(scheduler, name).hello(labels={"pool": pool}).snapshot()
    now = serve(scheduler, 30, only="r1")
    seconds = {
        each.target.replica: each.estimated_ttft_s
        for each in scheduler.explain(route_request(PROMPT, first=10**9), now).candidates
    }
    assert seconds["r1"] == pytest.approx(SECONDS, rel=0.05)
    assert seconds["r2"] > 0.4
    assert seconds["r3"] == pytest.approx(0.259, abs=0.01)


def test_requests_that_failed_teach_nothing() -> None:
    scheduler = make_scheduler(static=["r1", "r2"])
    now = 0.0
    for number in range(20):
        decision = scheduler.route(route_request(PROMPT, first=number * PROMPT), now)
        report = routing_pb2.ReportRequest(decision_id=decision.decision_id, stage=FAILED)
        scheduler.report(report, now + 0.5)
        now += 100.0
    assert rank(scheduler).speed_labels == 0


def test_a_request_that_ran_elsewhere_teaches_nothing_there_nor_here() -> None:
    scheduler = make_scheduler(static=["r1", "r2"])
    for number in range(20):
        now = number * 10.0
        request = route_request(PROMPT, first=number * PROMPT)
        request.only.add(replica="r1")
        decision_id = scheduler.route(request, now).decision_id
        scheduler.report(
            finished(
                decision_id,
                prompt=PROMPT,
                ttft_s=SECONDS,
                ran_on=common_pb2.Target(replica="r2", rank=0),
            ),
            now + 1.0,
        )
    assert rank(scheduler, "r1").speed_labels == rank(scheduler, "r2").speed_labels == 0


def test_a_full_cache_with_a_queue_teaches_nothing() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.snapshot()
    load = stream_pb2.EngineLoad(waiting_requests=3, running_requests=9, kv_usage=0.99)
    relay.tell(load=load)
    serve(scheduler, 20)
    assert rank(scheduler).speed_labels == 0


def test_a_new_life_of_the_engine_keeps_what_is_known_and_skips_its_start() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.snapshot()
    now = serve(scheduler, 20)
    relay.send(rank_state=stream_pb2.RankState(state=common_pb2.STREAM_STATE_LIVE, incarnation=2))
    before = rank(scheduler).speed_labels
    now = serve(scheduler, STARTING_LABELS, began=now, seconds=30.0)
    assert rank(scheduler).speed_labels == before
    assert estimated(scheduler, now) == pytest.approx(SECONDS, rel=0.05)


def test_what_is_learned_outlives_the_relay_s_connection() -> None:
    scheduler = make_scheduler()
    FakeRelay(scheduler).hello().snapshot()
    serve(scheduler, 20)
    before = rank(scheduler).speed_labels
    relay = FakeRelay(scheduler, now=1000.0)
    scheduler.tick(1000.0)
    relay.hello(stream_id="another")
    assert rank(scheduler).speed_labels == before > 0


def test_another_build_of_the_engine_begins_with_the_priors() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.snapshot()
    now = serve(scheduler, 20)
    newer = profile()
    newer.engine_version = "0.40"
    relay.send(profile=newer)
    serve(scheduler, 1, began=now)
    assert rank(scheduler).speed_labels == 0


def test_the_propensity_of_a_decision_is_that_among_those_it_was_chosen_from() -> None:
    scheduler = make_scheduler(static=["r1", "r2", "r3"], explore_share=0.0)
    relay = FakeRelay(scheduler, "r3").hello()
    relay.tell(load=stream_pb2.EngineLoad(waiting_tokens=10**6))
    assert scheduler.route(route_request(), 0.0).propensity == pytest.approx(0.5)
    # One of the two has work now, the other is the only best.
    response = scheduler.route(route_request(first=10**6), 0.0)
    assert response.propensity == 1.0
    explained = scheduler.explain(route_request(first=10**7), 5.0).candidates
    assert sum(each.propensity for each in explained) == pytest.approx(1.0)


def test_the_approximate_policy_takes_for_cached_what_was_sent_there() -> None:
    scheduler = make_scheduler(policy="approximate", explore_share=0.0)
    for name in ("r1", "r2"):
        FakeRelay(scheduler, name).hello().snapshot(hashes(64) if name == "r2" else b"")
    # What events told is not looked at.
    request = route_request(65)
    assert all(not each.prediction.predicted for each in scheduler.explain(request, 0.0).candidates)
    first = scheduler.route(request, 0.0)
    explained = scheduler.explain(request, 9.0).candidates[0]
    assert explained.target == first.target
    prediction = explained.prediction
    assert (prediction.lower, prediction.predicted, prediction.upper) == (0, 64, 65)


def test_tiers_can_be_priced_like_gpu_memory_for_comparison() -> None:
    seconds = []
    for price_tiers in (True, False):
        scheduler = make_scheduler(price_tiers=price_tiers)
        on_host = profile()
        on_host.lanes[0].tier = common_pb2.TIER_HOST
        FakeRelay(scheduler).hello(profile=on_host).snapshot(hashes(4000))
        found = scheduler.explain(route_request(4096), 0.0).candidates[0]
        assert found.prediction.tiers[0].tier == common_pb2.TIER_HOST
        seconds.append({term.name: term.seconds for term in found.terms})
    priced, free = seconds
    assert priced["load_host"] > 0.01
    assert "load_host" not in free


def test_what_is_learned_is_exported_by_pool() -> None:
    scheduler = make_scheduler()
    FakeRelay(scheduler).hello(labels={"pool": "a"}).snapshot()
    serve(scheduler, 20)
    text = Metrics(scheduler, Clock()).text().decode()
    labels = 'engine="vllm",model="model-a",pool="a",version=""'
    assert f"servingfleet_scheduler_speed_labels_total{{{labels}}} 17.0" in text
    assert f"servingfleet_scheduler_speed_step_seconds{{{labels}}}" in text


def test_what_another_scheduler_sends_is_not_taken_for_slowness() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.snapshot()
    now = serve(scheduler, 20)
    for number in range(40):
        peer: dict[str, Any] = {"decision_id": f"peer-{number}", "origin": "scheduler-2"}
        request = route_request(PROMPT, first=(1000 + number) * PROMPT)
        relay.now = now
        opened = stream_pb2.CreditOpened(
            **peer, prompt_tokens=PROMPT, predicted=0, expires_s=60.0, work_s=SECONDS
        )
        relay.send(credit_opened=opened)
        decision_id = scheduler.route(request, now).decision_id
        relay.now = now + SECONDS
        relay.send(prefill_ended=stream_pb2.PrefillEnded(**peer))
        report = routing_pb2.ReportRequest(decision_id=decision_id, stage=FIRST_TOKEN)
        scheduler.report(report, now + 2 * SECONDS)
        scheduler.report(finished(decision_id, prompt=PROMPT), now + 2 * SECONDS + 0.1)
        relay.send(credit_ended=stream_pb2.CreditEnded(**peer))
        now += 10.0
    assert rank(scheduler).speed_labels == 20 - STARTING_LABELS + 40
    assert estimated(scheduler, now) == pytest.approx(SECONDS, rel=0.05)


@pytest.mark.parametrize("stage", [FIRST_TOKEN, routing_pb2.ReportRequest.STAGE_FINISHED])
def test_a_first_token_told_for_the_future_does_not_end_learning(
    stage: routing_pb2.ReportRequest.Stage.ValueType,
) -> None:
    scheduler = make_scheduler(static=["r1"])
    now = serve(scheduler, 10)
    decision_id = scheduler.route(route_request(PROMPT, first=10**8), now).decision_id
    # Milliseconds, for example.
    scheduler.report(finished(decision_id, prompt=PROMPT, stage=stage, ttft_s=500.0), now + SECONDS)
    scheduler.report(finished(decision_id, prompt=PROMPT), now + SECONDS + 0.1)
    now = serve(scheduler, 20, began=now + 2.0)
    assert rank(scheduler).speed_labels >= 30 - STARTING_LABELS
    assert estimated(scheduler, now) == pytest.approx(SECONDS, rel=0.05)


def test_a_deadline_below_what_is_assumed_of_an_engine_is_no_reason_to_refuse() -> None:
    scheduler = make_scheduler(static=["r1"])
    for number in range(10):
        now = float(number)
        request = route_request(
            64, first=number * 64, deadline_s=0.03
        )  # a step alone is assumed to take 40 ms
        decision_id = scheduler.route(request, now).decision_id
        report = routing_pb2.ReportRequest(decision_id=decision_id, stage=FIRST_TOKEN)
        scheduler.report(report, now + 0.2)
        scheduler.report(finished(decision_id), now + 0.3)
        if rank(scheduler).speed_labels:
            break
    with pytest.raises(NotAdmitted):
        scheduler.route(request, 20.0)
