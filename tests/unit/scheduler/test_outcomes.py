from __future__ import annotations

from typing import Any

import pytest

from servingfleet_core.reports import added
from servingfleet_protos.v1 import common_pb2, fleet_pb2, routing_pb2
from servingfleet_scheduler.errors import InvalidRequest
from servingfleet_scheduler.service import Scheduler

from .helpers import MODEL, FakeRelay, finished, hashes, make_scheduler, route_request

Response = routing_pb2.ReportResponse
Stage = routing_pb2.ReportRequest


def warm_scheduler(**settings: Any) -> Scheduler:
    """Two replicas, of which r1 holds 64 tokens of every prompt that begins at 0."""
    scheduler = make_scheduler(**settings)
    FakeRelay(scheduler, "r1").hello().snapshot(hashes(64))
    FakeRelay(scheduler, "r2").hello().snapshot()
    return scheduler


def decide(scheduler: Scheduler, now: float = 0.0, replica: str = "r1") -> str:
    request = route_request(80)
    request.only.add(replica=replica)
    return scheduler.route(request, now).decision_id


def report(
    scheduler: Scheduler, decision_id: str, now: float = 1.0, **fields: Any
) -> routing_pb2.ReportResponse:
    return scheduler.report(finished(decision_id, **{"prompt": 80, "cached": 64, **fields}), now)


def model_report(scheduler: Scheduler, now: float = 2.0) -> fleet_pb2.ReuseReport:
    request = fleet_pb2.GetReuseRequest(model=MODEL)
    (found,) = scheduler.get_reuse(request, now).reports
    return found


def set_aside(scheduler: Scheduler, model: str = MODEL, now: float = 2.0) -> dict[str, int]:
    for found in scheduler.get_reuse(fleet_pb2.GetReuseRequest(), now).reports:
        if found.model == model:
            return dict(found.set_aside)
    return {}


def test_a_finished_request_is_joined() -> None:
    scheduler = warm_scheduler()
    response = report(scheduler, decide(scheduler))
    assert response.disposition == Response.DISPOSITION_JOINED
    sums = model_report(scheduler).sums
    assert (sums.pairs, sums.prompt, sums.predicted, sums.actual) == (1, 80, 64, 64)
    assert (sums.agreed, sums.erroneous, sums.interval_hits, sums.best) == (64, 0, 1, 64)


def test_reuse_that_was_not_there_is_erroneous_credit() -> None:
    scheduler = warm_scheduler()
    report(scheduler, decide(scheduler), cached=16)
    sums = model_report(scheduler).sums
    assert (sums.agreed, sums.erroneous, sums.interval_hits) == (16, 48, 0)


def test_the_ceiling_is_the_best_of_all_targets_not_of_the_chosen() -> None:
    scheduler = warm_scheduler()
    report(scheduler, decide(scheduler, replica="r2"), cached=0)
    sums = model_report(scheduler).sums
    assert (sums.predicted, sums.best) == (0, 64)


def test_an_outcome_reported_twice_counts_once() -> None:
    scheduler = warm_scheduler()
    decision = decide(scheduler)
    report(scheduler, decision)
    assert report(scheduler, decision).disposition == Response.DISPOSITION_DUPLICATE
    assert model_report(scheduler).sums.pairs == 1
    assert set_aside(scheduler) == {"duplicate": 1}


def test_an_outcome_in_time_is_still_joined() -> None:
    scheduler = warm_scheduler(decision_ttl_s=100.0)
    decision = decide(scheduler)
    scheduler.tick(99.0)
    assert report(scheduler, decision, 100.0).disposition == Response.DISPOSITION_JOINED


def test_a_late_outcome_counts_in_no_figure() -> None:
    scheduler = warm_scheduler(decision_ttl_s=100.0)
    decision = decide(scheduler)
    scheduler.tick(100.5)
    assert report(scheduler, decision, 101.0).disposition == Response.DISPOSITION_LATE
    assert model_report(scheduler, 101.0).sums.pairs == 0
    assert set_aside(scheduler, now=101.0) == {"expired": 1, "late": 1}


def test_a_decision_without_outcome_stays_in_the_join_rate() -> None:
    scheduler = warm_scheduler(decision_ttl_s=100.0, min_pairs=1)
    report(scheduler, decide(scheduler))
    decide(scheduler)
    scheduler.tick(101.0)
    (rate,) = [each for each in model_report(scheduler, 101.0).figures if each.name == "join_rate"]
    assert (rate.numerator, rate.denominator, rate.value) == (1, 2, 0.5)


def test_an_id_that_is_none_is_refused_by_its_field() -> None:
    scheduler = warm_scheduler()
    with pytest.raises(InvalidRequest) as refused:
        report(scheduler, "not an id")
    assert refused.value.field == "decision_id"
    assert set_aside(scheduler, model="") == {"bad_token": 1}


def test_an_id_of_another_key_is_set_aside() -> None:
    other = warm_scheduler(key=b"key of another fleet")
    scheduler = warm_scheduler()
    response = report(scheduler, decide(other))
    assert response.disposition == Response.DISPOSITION_SET_ASIDE
    assert set_aside(scheduler, model="") == {"unknown_decision": 1}


def test_a_decision_of_a_peer_is_joined_from_its_id_once() -> None:
    gone = warm_scheduler(instance_id="gone")
    scheduler = warm_scheduler()
    decision = decide(gone)
    assert report(scheduler, decision).disposition == Response.DISPOSITION_ORPHAN_JOIN
    assert report(scheduler, decision).disposition == Response.DISPOSITION_DUPLICATE
    sums = model_report(scheduler).sums
    assert (sums.pairs, sums.predicted, sums.decisions) == (1, 64, 0)


def test_a_decision_names_where_its_owner_is_reached() -> None:
    owner = warm_scheduler(instance_id="owner", address="10.0.0.1:7070")
    peer = warm_scheduler(instance_id="peer", address="10.0.0.2:7070")
    decision = decide(owner)
    found = peer.of_peer(decision)
    assert found is not None
    assert found.owner_address == "10.0.0.1:7070"
    assert owner.of_peer(decision) is None
    report(owner, decision)
    assert owner.of_peer(decision) is None


@pytest.mark.parametrize(
    "decided",
    [
        {"key": b"key of another fleet", "address": "10.0.0.1:7070"},
        {"address": "10.0.0.2:7070"},  # this scheduler's own: the owner was here before
        {"address": ""},
    ],
)
def test_a_decision_whose_owner_can_not_be_reached_is_nobody_elses(decided: dict[str, Any]) -> None:
    peer = warm_scheduler(instance_id="peer", address="10.0.0.2:7070")
    assert peer.of_peer(decide(warm_scheduler(instance_id="owner", **decided))) is None
    assert peer.of_peer("not an id") is None


def test_a_report_holds_all_that_its_figures_are_made_of() -> None:
    schedulers = [warm_scheduler(instance_id=name, min_pairs=2) for name in ("a", "b")]
    for scheduler, cached in zip(schedulers, (64, 16), strict=True):
        report(scheduler, decide(scheduler), cached=cached)
    report(schedulers[0], decide(schedulers[1]), cached=32)
    request = fleet_pb2.GetReuseRequest(model=MODEL)
    answer = added(each.get_reuse(request, 2.0) for each in schedulers)
    (together,) = answer.reports
    assert answer.min_pairs == 2
    assert (together.sums.decisions, together.sums.joined, together.sums.pairs) == (3, 2, 3)
    assert together.sums.products["actual_prompt"] == 80 * (64 + 16 + 32)
    figures = {each.name: each for each in together.figures}
    assert figures["reused_fraction"].value == pytest.approx((64 + 16 + 32) / 240)
    assert figures["reused_fraction"].HasField("low")


def test_a_decision_forgotten_for_lack_of_room_is_joined_from_its_id() -> None:
    scheduler = warm_scheduler(max_decisions=1)
    first = decide(scheduler)
    decide(scheduler)
    assert report(scheduler, first).disposition == Response.DISPOSITION_ORPHAN_JOIN
    (rate,) = [each for each in model_report(scheduler).figures if each.name == "join_rate"]
    assert (rate.numerator, rate.denominator) == (1, 2)


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"cached": 81}, "cached_tokens", "cached_exceeds_prompt"),
        ({"prompt": 0, "cached": 0}, "prompt_tokens", "impossible_counts"),
        ({"ttft_s": -0.1}, "ttft_s", "impossible_counts"),
        ({"ttft_s": float("nan")}, "ttft_s", "impossible_counts"),
        (
            {"cached_by_tier": [routing_pb2.TierTokens(tier=common_pb2.TIER_GPU, tokens=81)]},
            "cached_by_tier",
            "impossible_counts",
        ),
        (
            {"cached_by_tier": [routing_pb2.TierTokens(tokens=1)]},
            "cached_by_tier",
            "impossible_counts",
        ),
    ],
)
def test_counts_that_can_not_be_are_refused_by_their_field(
    fields: dict[str, Any], field: str, reason: str
) -> None:
    scheduler = warm_scheduler()
    with pytest.raises(InvalidRequest) as refused:
        report(scheduler, decide(scheduler), **fields)
    assert refused.value.field == field
    assert set_aside(scheduler) == {reason: 1}


def test_a_corrected_report_is_joined_after_one_that_could_not_be() -> None:
    scheduler = warm_scheduler()
    decision = decide(scheduler)
    with pytest.raises(InvalidRequest):
        report(scheduler, decision, cached=81)
    assert report(scheduler, decision).disposition == Response.DISPOSITION_JOINED


@pytest.mark.parametrize(
    ("fields", "reason", "disposition"),
    [
        ({"prompts_in_usage": 2}, "shared_usage", Response.DISPOSITION_SET_ASIDE),
        ({"prompt": 79}, "prompt_mismatch", Response.DISPOSITION_SET_ASIDE),
    ],
)
def test_what_can_not_be_compared_is_set_aside(
    fields: dict[str, Any], reason: str, disposition: Response.Disposition.ValueType
) -> None:
    scheduler = warm_scheduler()
    response = report(scheduler, decide(scheduler), **fields)
    assert response.disposition == disposition
    assert reason in response.detail
    assert model_report(scheduler).sums.pairs == 0
    assert set_aside(scheduler) == {reason: 1}


def test_a_usage_of_several_prompts_may_count_more_cached_than_one_prompt_has() -> None:
    scheduler = warm_scheduler()
    response = report(scheduler, decide(scheduler), cached=200, prompts_in_usage=3)
    assert response.disposition == Response.DISPOSITION_SET_ASIDE


@pytest.mark.parametrize(
    ("stage", "reason"),
    [(Stage.STAGE_FAILED, "failed"), (Stage.STAGE_ABORTED, "aborted")],
)
def test_a_request_that_did_not_finish_is_noted(stage: Stage.Stage.ValueType, reason: str) -> None:
    scheduler = warm_scheduler()
    response = report(scheduler, decide(scheduler), stage=stage)
    assert response.disposition == Response.DISPOSITION_NOTED
    assert set_aside(scheduler) == {reason: 1}


def test_an_end_without_counts_is_noted() -> None:
    scheduler = warm_scheduler()
    response = scheduler.report(Stage(decision_id=decide(scheduler)), 1.0)
    assert response.disposition == Response.DISPOSITION_NOTED
    assert set_aside(scheduler) == {"missing_counts": 1}


def test_a_stage_before_the_end_leaves_the_decision_open() -> None:
    scheduler = warm_scheduler()
    decision = decide(scheduler)
    started = Stage(decision_id=decision, stage=Stage.STAGE_FIRST_TOKEN)
    assert scheduler.report(started, 0.5).disposition == Response.DISPOSITION_NOTED
    assert report(scheduler, decision).disposition == Response.DISPOSITION_JOINED


def test_a_first_token_empties_the_queue() -> None:
    scheduler = warm_scheduler()
    request = route_request(60_000, first=1_000_000)
    request.only.add(replica="r1")
    decision = scheduler.route(request, 0.0).decision_id
    scheduler.report(Stage(decision_id=decision, stage=Stage.STAGE_FIRST_TOKEN), 0.5)
    (queue,) = [
        each.terms[0].seconds
        for each in scheduler.explain(route_request(80), 0.5).candidates
        if each.target.replica == "r1"
    ]
    assert queue == 0.0


def test_an_unknown_stage_is_refused() -> None:
    scheduler = warm_scheduler()
    request = Stage(decision_id=decide(scheduler))
    request.stage = 99  # type: ignore[assignment]
    with pytest.raises(InvalidRequest) as refused:
        scheduler.report(request, 1.0)
    assert refused.value.field == "stage"


def test_a_request_that_ran_elsewhere_is_joined_with_that_targets_prediction() -> None:
    scheduler = warm_scheduler()
    request = route_request(80)
    decision = scheduler.route(request, 0.0)
    assert decision.target.replica == "r1"
    ran = finished(decision.decision_id, prompt=80, cached=0)
    ran.ran_on.replica = "r2"
    assert scheduler.report(ran, 1.0).disposition == Response.DISPOSITION_JOINED
    reports = scheduler.get_reuse(
        fleet_pb2.GetReuseRequest(model=MODEL, by_replica=True), 2.0
    ).reports
    by_replica = {each.replica: each for each in reports}
    assert (by_replica["r2"].sums.pairs, by_replica["r2"].sums.erroneous) == (1, 0)
    assert (by_replica["r2"].sums.decisions, by_replica["r1"].sums.decisions) == (1, 0)
    assert by_replica[""].set_aside == {"ran_elsewhere": 1}


def test_a_request_that_ran_where_nothing_was_predicted_is_set_aside() -> None:
    scheduler = warm_scheduler()
    ran = finished(decide(scheduler), prompt=80, cached=0)
    ran.ran_on.replica = "unheard of"
    assert scheduler.report(ran, 1.0).disposition == Response.DISPOSITION_SET_ASIDE
    assert model_report(scheduler).sums.pairs == 0
    assert set_aside(scheduler) == {"ran_elsewhere": 1}


def test_figures_of_few_pairs_are_unknown_and_of_enough_are_known() -> None:
    scheduler = warm_scheduler(min_pairs=3)
    for _ in range(2):
        report(scheduler, decide(scheduler))
    assert not any(each.HasField("value") for each in model_report(scheduler).figures)
    report(scheduler, decide(scheduler))
    values = {each.name: each.value for each in model_report(scheduler).figures}
    assert values == {
        "reused_fraction": 0.8,
        "index_coverage": 1.0,
        "erroneous_credit": 0.0,
        "erroneous_credit_per_prompt": 0.0,
        "fleet_ceiling": 0.8,
        "expected_over_actual": 1.0,
        "interval_hit": 1.0,
        "join_rate": 1.0,
    }
