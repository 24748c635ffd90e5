from __future__ import annotations

from typing import Any

import pytest
from google.rpc import code_pb2

from servingfleet_core import block_hashes, namespace_root
from servingfleet_protos.v1 import common_pb2, fleet_pb2, routing_pb2, stream_pb2
from servingfleet_scheduler.errors import (
    DeadlineUnreachable,
    InvalidRequest,
    ModelUnknown,
    NoReplicas,
    TargetUnknown,
    TargetUnreachable,
)
from servingfleet_scheduler.metrics import Metrics
from servingfleet_scheduler.service import Scheduler
from servingfleet_scheduler.settings import AdmissionSettings, AdmissionTarget

from .helpers import (
    LIVE,
    MODEL,
    FakeRelay,
    finished,
    hashes,
    make_scheduler,
    profile,
    route_request,
    tokens,
)


def reuse(scheduler: Scheduler, now: float = 1.0) -> fleet_pb2.ReuseReport:
    (report,) = scheduler.get_reuse(fleet_pb2.GetReuseRequest(model=MODEL), now).reports
    return report


# Routing


def test_routing_works_without_any_relay_and_says_so() -> None:
    response = make_scheduler(static=["r1", "r2"]).route(route_request(), 0.0)
    assert response.basis == routing_pb2.BASIS_NO_STREAMS
    assert response.target.replica in ("r1", "r2")
    assert response.endpoint == f"{response.target.replica}:8000"


def test_a_prompt_goes_to_the_replica_that_holds_its_prefix() -> None:
    scheduler = make_scheduler()
    for name in ("r1", "r2", "r3"):
        FakeRelay(scheduler, name).hello().snapshot(hashes(4096) if name == "r2" else b"")
    response = scheduler.route(route_request(4100), 0.0)
    assert (response.target.replica, response.prediction.predicted) == ("r2", 4096)
    assert response.basis == routing_pb2.BASIS_INDEX


def test_a_snapshot_not_yet_complete_makes_the_basis_partial() -> None:
    scheduler = make_scheduler()
    FakeRelay(scheduler, "r1").hello().snapshot()
    FakeRelay(scheduler, "r2").hello()
    assert scheduler.route(route_request(), 0.0).basis == routing_pb2.BASIS_INDEX_PARTIAL


def test_a_burst_of_unknown_prompts_spreads() -> None:
    scheduler = make_scheduler(static=[f"r{n}" for n in range(4)])
    used = {
        scheduler.route(route_request(2000, first=n * 10_000), 0.0).target.replica for n in range(4)
    }
    assert len(used) == 4


def test_siblings_stay_together_while_that_is_faster() -> None:
    scheduler = make_scheduler(static=["r1", "r2"])
    first = scheduler.route(route_request(60_000), 0.0)
    second = scheduler.route(route_request(60_000), 10.0)
    assert second.target == first.target


def test_a_pinned_request_goes_where_it_is_pinned() -> None:
    scheduler = make_scheduler(static=["r1", "r2"], ranks=2)
    request = route_request()
    request.only.add(replica="r2", rank=1)
    response = scheduler.route(request, 0.0)
    assert (response.target.replica, response.target.rank) == ("r2", 1)
    assert response.headers == {"X-data-parallel-rank": "1"}


def test_an_engine_of_one_rank_needs_no_header() -> None:
    assert not make_scheduler(static=["r1"]).route(route_request(), 0.0).headers


def test_fallbacks_are_the_next_best_and_no_more_than_asked_for() -> None:
    scheduler = make_scheduler(static=["r1", "r2", "r3", "r4"])
    response = scheduler.route(route_request(max_fallbacks=2), 0.0)
    named = [response.target.replica, *(each.target.replica for each in response.fallbacks)]
    assert len(named) == len(set(named)) == 3


def test_a_pair_form_engine_is_matched_by_pairs() -> None:
    scheduler = make_scheduler()
    pairs = profile()
    pairs.key_form = common_pb2.KEY_FORM_PAIR
    packed = block_hashes(namespace_root(MODEL, pairs=True), tokens(65), 16, pairs=True)
    FakeRelay(scheduler, "pairs").hello(profile=pairs).snapshot(packed)
    FakeRelay(scheduler, "plain").hello().snapshot()
    found = {
        each.target.replica: each.prediction.predicted
        for each in scheduler.explain(route_request(70), 0.0).candidates
    }
    assert found == {"pairs": 64, "plain": 0}


def test_an_adapter_that_the_engine_does_not_tell_apart_opens_the_upper_bound() -> None:
    scheduler = make_scheduler()
    blind = profile()
    blind.adapters_separated = False
    FakeRelay(scheduler).hello(profile=blind).snapshot(hashes(64))
    request = route_request(65)
    request.prompt.adapter = "lora"
    prediction = scheduler.route(request, 0.0).prediction
    assert (prediction.lower, prediction.predicted, prediction.upper) == (0, 0, 65)


def test_prompt_logprobs_reuse_nothing() -> None:
    scheduler = make_scheduler()
    FakeRelay(scheduler).hello().snapshot(hashes(64))
    request = route_request(65)
    request.prompt.prompt_logprobs = True
    prediction = scheduler.route(request, 0.0).prediction
    assert (prediction.predicted, prediction.upper) == (0, 0)


def test_a_loaded_engine_is_passed_over() -> None:
    scheduler = make_scheduler()
    busy = FakeRelay(scheduler, "busy").hello()
    FakeRelay(scheduler, "idle").hello()
    busy.tell(load=stream_pb2.EngineLoad(waiting_tokens=100_000))
    assert scheduler.route(route_request(), 0.0).target.replica == "idle"


def test_a_load_too_old_says_nothing() -> None:
    scheduler = make_scheduler(load_stale_s=10.0)
    FakeRelay(scheduler).hello().tell(load=stream_pb2.EngineLoad(waiting_tokens=2_000_000))
    (candidate,) = scheduler.explain(route_request(), 10.1).candidates
    assert candidate.terms[0].seconds == 0.0
    assert candidate.load_age_s == pytest.approx(10.1)


# Refusals


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": ""}, "model"),
        ({"model": "m" * 513}, "model"),
        ({"request_id": "r" * 257}, "request_id"),
        ({"session_id": "s" * 257}, "session_id"),
        ({"deadline_s": -1.0}, "deadline_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"max_fallbacks": 17}, "max_fallbacks"),
        ({"only": [common_pb2.Target(replica="r" * 254)]}, "only[0].replica"),
        ({"exclude": [common_pb2.Target()] * 4097}, "exclude"),
    ],
)
def test_a_malformed_request_is_refused_by_its_field(fields: dict[str, Any], field: str) -> None:
    request = routing_pb2.RouteRequest(**{"model": MODEL, **fields})
    request.prompt.tokens_le32 = tokens(64)
    with pytest.raises(InvalidRequest) as refused:
        make_scheduler(static=["r1"]).route(request, 0.0)
    assert refused.value.field == field


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(ModelUnknown) as refused:
        make_scheduler().route(route_request(), 0.0)
    assert (refused.value.code, refused.value.reason) == (code_pb2.NOT_FOUND, "MODEL_UNKNOWN")


def test_a_malformed_prompt_is_told_before_an_unknown_model() -> None:
    with pytest.raises(InvalidRequest):
        make_scheduler().route(routing_pb2.RouteRequest(model="unknown"), 0.0)


def test_targets_that_nobody_knows_are_not_found() -> None:
    request = route_request()
    request.only.add(replica="elsewhere")
    with pytest.raises(TargetUnknown):
        make_scheduler(static=["r1"]).route(request, 0.0)


def test_targets_that_are_all_excluded_are_unavailable_for_now() -> None:
    request = route_request()
    request.exclude.add(replica="r1")
    with pytest.raises(NoReplicas) as refused:
        make_scheduler(static=["r1"]).route(request, 0.0)
    assert refused.value.retry_s == 2.0


def test_a_deadline_out_of_reach_is_rejected_and_counted() -> None:
    scheduler = make_scheduler(static=["r1"])
    FakeRelay(scheduler).hello().tell(load=stream_pb2.EngineLoad(waiting_tokens=1_000_000))
    with pytest.raises(DeadlineUnreachable):
        scheduler.route(route_request(deadline_s=0.5), 0.0)
    assert reuse(scheduler).sums.rejected == 1
    assert reuse(scheduler).sums.decisions == 0
    assert len(scheduler.credits) == 0


def test_a_class_of_requests_is_turned_away_where_its_target_can_not_be_kept() -> None:
    targets = (AdmissionTarget(0, 5.0), AdmissionTarget(10, 0.5))
    scheduler = make_scheduler(static=["r1"], admission=AdmissionSettings(targets))
    FakeRelay(scheduler).hello().tell(load=stream_pb2.EngineLoad(waiting_tokens=20_000))
    assert scheduler.route(route_request(), 0.0)
    with pytest.raises(TargetUnreachable):
        scheduler.route(route_request(priority=10), 0.0)
    (candidate,) = scheduler.explain(route_request(priority=10), 0.0).candidates
    assert "beyond the class's target" in candidate.refused
    assert reuse(scheduler).sums.rejected == 1
    text = Metrics(scheduler, lambda: 0.0).text().decode()
    assert (
        'class_rejections_total{class="10",model="model-a",reason="TARGET_UNREACHABLE"} 1.0' in text
    )


def test_a_deadline_within_reach_is_met_whatever_the_policy_prefers() -> None:
    scheduler = make_scheduler(policy="round-robin")
    FakeRelay(scheduler, "a").hello().tell(load=stream_pb2.EngineLoad(waiting_tokens=100_000))
    FakeRelay(scheduler, "b").hello()
    assert scheduler.route(route_request(deadline_s=1.0), 0.0).target.replica == "b"


# Explain


def test_explain_shows_what_route_then_does() -> None:
    scheduler = make_scheduler(static=[f"r{n}" for n in range(8)])
    for n in range(20):
        request = route_request(500, first=1000 * n)
        explained = scheduler.explain(request, float(n))
        assert explained.candidates[0].chosen
        assert scheduler.route(request, float(n)).target == explained.candidates[0].target


def test_explain_opens_and_counts_nothing() -> None:
    scheduler = make_scheduler(static=["r1"])
    scheduler.explain(route_request(), 0.0)
    assert (len(scheduler.credits), len(scheduler.decisions)) == (0, 0)
    assert reuse(scheduler).sums.decisions == 0


def test_explain_lists_refused_targets_last_with_the_reason() -> None:
    scheduler = make_scheduler(static=["r1", "r2", "r3"])
    slow = stream_pb2.EngineLoad(waiting_tokens=10**6, waiting_requests=1000)
    FakeRelay(scheduler, "r3").hello().tell(load=slow)
    request = route_request(deadline_s=1.0)
    request.exclude.add(replica="r1")
    found = [
        (each.target.replica, each.chosen, each.refused)
        for each in scheduler.explain(request, 0.0).candidates
    ]
    assert found == [
        ("r2", True, ""),
        ("r3", False, "55.770 s, ±0.265 s, is beyond the deadline, 1.000 s"),
        ("r1", False, "excluded by the request"),
    ]


def test_the_terms_of_a_candidate_add_up() -> None:
    scheduler = make_scheduler(static=["r1"])
    scheduler.route(route_request(5000, first=7), 0.0)
    (candidate,) = scheduler.explain(route_request(), 0.0).candidates
    assert sum(each.seconds for each in candidate.terms) == pytest.approx(
        candidate.estimated_ttft_s
    )
    assert candidate.terms[0].seconds > 0


# The same request again


def test_the_same_request_gets_the_same_decision() -> None:
    scheduler = make_scheduler(static=["r1", "r2"])
    first = scheduler.route(route_request(request_id="q"), 0.0)
    assert scheduler.route(route_request(request_id="q"), 1.0) == first
    assert reuse(scheduler).sums.decisions == 1


def test_a_retry_that_excludes_the_target_gets_another_decision() -> None:
    scheduler = make_scheduler(static=["r1", "r2"])
    first = scheduler.route(route_request(request_id="q"), 0.0)
    again = route_request(request_id="q")
    again.exclude.add(replica=first.target.replica)
    assert scheduler.route(again, 1.0).target.replica != first.target.replica


def test_a_retry_whose_replica_is_gone_gets_another_decision() -> None:
    scheduler = make_scheduler(static=["r1"])
    relay = FakeRelay(scheduler, "gone").hello()
    relay.snapshot()
    only = route_request(request_id="q")
    only.only.add(replica="gone")
    scheduler.route(only, 0.0)
    relay.session.close(1.0)
    scheduler.tick(1.0 + scheduler.settings.replica_ttl_s + 1.0)
    assert scheduler.fleet.get("gone") is None
    again = scheduler.route(route_request(request_id="q"), 602.5)
    assert again.target.replica == "r1"


def test_a_request_whose_decision_has_ended_gets_a_new_one() -> None:
    scheduler = make_scheduler(static=["r1"])
    first = scheduler.route(route_request(request_id="q"), 0.0)
    scheduler.report(finished(first.decision_id), 1.0)
    assert scheduler.route(route_request(request_id="q"), 2.0).decision_id != first.decision_id


def test_every_call_without_a_request_id_is_a_new_decision() -> None:
    scheduler = make_scheduler(static=["r1"])
    ids = {scheduler.route(route_request(), 0.0).decision_id for _ in range(3)}
    assert len(ids) == 3


# The fleet


def test_warmth_is_the_share_of_ranks_with_a_complete_snapshot() -> None:
    scheduler = make_scheduler(static=["without a relay"])
    assert scheduler.ready().warm is None
    relay = FakeRelay(scheduler).hello(ranks=(0, 1))
    assert scheduler.ready().warm == 0.0
    relay.snapshot(rank=0)
    assert scheduler.ready().warm == 0.5


def test_the_fleet_lists_what_each_rank_holds() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello(ranks=(0, 1))
    relay.hold(hashes(64), rank=1)
    relay.send(
        rank_state=stream_pb2.RankState(rank=1, state=LIVE, engine_seq=41, reason="joined late")
    )
    (replica,) = scheduler.list_replicas(fleet_pb2.ListReplicasRequest(), 0.0).replicas
    rank = replica.ranks[1]
    assert (rank.engine_seq, rank.reason, replica.connected) == (41, "joined late", True)
    assert rank.lanes[0].blocks == 4


def test_only_the_model_asked_for_is_listed() -> None:
    scheduler = make_scheduler(static=["r1"])
    FakeRelay(scheduler, "other").hello(model="model-b")
    request = fleet_pb2.ListReplicasRequest(model="model-b")
    found = scheduler.list_replicas(request, 0.0).replicas
    assert [each.replica for each in found] == ["other"]


def test_a_window_that_is_no_length_of_time_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        make_scheduler().get_reuse(fleet_pb2.GetReuseRequest(window_s=float("nan")), 0.0)


def test_figures_by_replica_add_up_to_the_models() -> None:
    scheduler = make_scheduler(static=["r1", "r2"], policy="round-robin")
    for n in range(6):
        response = scheduler.route(route_request(64, first=100 * n), float(n))
        scheduler.report(finished(response.decision_id, cached=16), n + 0.5)
    request = fleet_pb2.GetReuseRequest(by_replica=True)
    total, *single = scheduler.get_reuse(request, 10.0).reports
    assert [each.replica for each in single] == ["r1", "r2"]
    assert total.sums.actual == sum(each.sums.actual for each in single) == 6 * 16


def test_what_was_promised_is_remembered_also_of_a_target_behind_many_that_are_too_late() -> None:
    scheduler = make_scheduler(static=[f"r{n:02}" for n in range(20)], policy="round-robin")
    for number in range(19):
        busy = [common_pb2.Target(replica=f"r{number:02}")]
        for prompt in range(2):
            scheduler.route(
                route_request(40_000, first=(2 * number + prompt) * 50_000, only=busy), 0.0
            )
    request = route_request(
        deadline_s=1.0, first=7, only=[common_pb2.Target(replica=f"r{n:02}") for n in range(20)]
    )
    scheduler.route(route_request(8, only=[common_pb2.Target(replica="r19")]), 0.0)
    decided = scheduler.route(request, 0.0)
    assert decided.target.replica == "r19"
    pending = scheduler.decisions.get(decided.decision_id)
    assert pending is not None
    assert ("r19", 0) in pending.promises
