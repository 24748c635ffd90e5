"""Which targets a request may get: labels, draining, breakers, adapters, fallbacks, pins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from servingfleet_protos.v1 import common_pb2, fleet_pb2, routing_pb2, stream_pb2
from servingfleet_scheduler.breaker import BreakerSettings
from servingfleet_scheduler.errors import (
    InvalidRequest,
    NoReplicas,
    ReplicaUnknown,
    SessionRefused,
)
from servingfleet_scheduler.service import Scheduler

from .helpers import LIVE, FakeRelay, finished, make_scheduler, profile, route_request

Target = common_pb2.Target
Stage = routing_pb2.ReportRequest.Stage
EXACT = BreakerSettings(failures=2, open_s=5.0, jitter=0.0)


def relays(scheduler: Scheduler, labels: Mapping[str, Mapping[str, str]]) -> dict[str, FakeRelay]:
    return {
        name: FakeRelay(scheduler, name).hello(labels=dict(said)) for name, said in labels.items()
    }


def drain(scheduler: Scheduler, replica: str, by: str = "cli", *, undo: bool = False) -> list[str]:
    asked = fleet_pb2.SetDrainingRequest(replica=replica, draining=not undo, by=by)
    return list(scheduler.set_draining(asked).draining_by)


def chosen(scheduler: Scheduler, now: float = 0.0, **fields: Any) -> str:
    return scheduler.route(route_request(**fields), now).target.replica


def refused(scheduler: Scheduler, now: float = 0.0, **fields: Any) -> dict[str, str]:
    answer = scheduler.explain(route_request(**fields), now)
    return {each.target.replica: each.refused for each in answer.candidates if each.refused}


def fail(scheduler: Scheduler, replica: str, now: float, times: int = 2) -> None:
    for _ in range(times):
        decided = scheduler.route(route_request(only=[Target(replica=replica)]), now)
        scheduler.report(finished(decided.decision_id, stage=Stage.STAGE_FAILED), now + 0.1)


# Labels


def test_only_replicas_with_all_labels_are_chosen() -> None:
    scheduler = make_scheduler()
    said = {"pool": "h100", "zone": "a"}
    relays(scheduler, {"r1": said, "r2": {**said, "zone": "b"}, "r3": {"zone": "a"}})
    wanted = {"pool": "h100", "zone": "a"}
    assert {chosen(scheduler, labels=wanted) for _ in range(6)} == {"r1"}
    assert refused(scheduler, labels=wanted) == {
        "r2": "its label 'zone' is 'b', not 'a'",
        "r3": "its label 'pool' is absent, not 'h100'",
    }


def test_labels_that_nobody_has_leave_no_replica_and_say_which() -> None:
    scheduler = make_scheduler()
    relays(scheduler, {"r1": {"pool": "h100"}, "r2": {}})
    with pytest.raises(NoReplicas, match=r"1 its label 'pool' is 'h100', not 'a10', 1 its label"):
        chosen(scheduler, labels={"pool": "a10"})


def test_a_configured_replica_has_no_labels() -> None:
    with pytest.raises(NoReplicas):
        chosen(make_scheduler(static=["r1"]), labels={"pool": ""})


@pytest.mark.parametrize(
    "labels", [{str(n): "" for n in range(17)}, {"": "a"}, {"k" * 513: ""}, {"k": "v" * 513}]
)
def test_labels_have_bounds(labels: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="labels"):
        chosen(make_scheduler(static=["r1"]), labels=labels)


# Draining


def test_a_draining_replica_gets_nothing_new_until_it_is_taken_back() -> None:
    scheduler = make_scheduler(static=["r1", "r2"])
    drain(scheduler, "r1")
    assert {chosen(scheduler) for _ in range(6)} == {"r2"}
    assert refused(scheduler) == {"r1": "draining: cli"}
    drain(scheduler, "r1", undo=True)
    assert chosen(scheduler) == "r1"


def test_it_drains_until_everybody_who_drained_it_has_taken_that_back() -> None:
    scheduler = make_scheduler(static=["r1", "r2"])
    drain(scheduler, "r1", "operator")
    assert drain(scheduler, "r1", "cli") == ["cli", "operator"]
    assert drain(scheduler, "r1", "cli", undo=True) == ["operator"]
    assert chosen(scheduler) == "r2"
    assert drain(scheduler, "r1", "operator", undo=True) == []


def test_draining_all_leaves_no_replica_and_says_so() -> None:
    scheduler = make_scheduler(static=["r1"])
    drain(scheduler, "r1")
    with pytest.raises(NoReplicas, match="1 draining: cli"):
        chosen(scheduler)


def test_draining_outlives_a_relays_connection_and_its_restart() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    drain(scheduler, "r1")
    relay.session.close(1.0)
    relay.reconnect()
    relay.hello(stream_id="another life of the relay")
    [replica] = scheduler.list_replicas(fleet_pb2.ListReplicasRequest(), 1.0).replicas
    assert list(replica.draining_by) == ["cli"]


def test_draining_of_a_configured_replica_outlives_its_relay() -> None:
    scheduler = make_scheduler(static=["r1"], replica_ttl_s=10.0)
    relay = FakeRelay(scheduler).hello()
    drain(scheduler, "r1")
    relay.session.close(1.0)
    scheduler.tick(20.0)
    [replica] = scheduler.list_replicas(fleet_pb2.ListReplicasRequest(), 20.0).replicas
    assert list(replica.draining_by) == ["cli"]


def test_what_runs_on_a_draining_replica_is_counted() -> None:
    scheduler = make_scheduler(static=["r1"])
    scheduler.route(route_request(), 0.0)
    asked = fleet_pb2.SetDrainingRequest(replica="r1", draining=True, by="cli")
    assert scheduler.set_draining(asked).dispatched_requests == 1


def test_draining_a_replica_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ReplicaUnknown):
        drain(make_scheduler(static=["r1"]), "r2")


def test_who_drains_is_named_and_bounded() -> None:
    scheduler = make_scheduler(static=["r1"])
    for by in ("", "x" * 65):
        with pytest.raises(InvalidRequest, match="by"):
            drain(scheduler, "r1", by)
    for number in range(8):
        drain(scheduler, "r1", str(number))
    drain(scheduler, "r1", "0")
    with pytest.raises(InvalidRequest, match="more than 8"):
        drain(scheduler, "r1", "8")


# Breakers


def test_a_replica_on_which_requests_fail_is_left_alone_for_a_time() -> None:
    scheduler = make_scheduler(static=["r1", "r2"], breaker=EXACT)
    fail(scheduler, "r1", 0.0)
    assert {chosen(scheduler, 1.0) for _ in range(6)} == {"r2"}
    assert refused(scheduler, 1.1) == {"r1": "requests fail there: none for 4.0 s"}
    [r1, _] = scheduler.list_replicas(fleet_pb2.ListReplicasRequest(), 1.1).replicas
    assert r1.ranks[0].broken_s == pytest.approx(4.0)


def test_one_probe_goes_there_after_that_time() -> None:
    scheduler = make_scheduler(static=["r1", "r2"], breaker=EXACT, policy="round-robin")
    fail(scheduler, "r1", 0.0)
    first = [scheduler.route(route_request(), 6.0) for _ in range(6)]
    [probe] = [each for each in first if each.target.replica == "r1"]
    scheduler.report(finished(probe.decision_id, stage=Stage.STAGE_FIRST_TOKEN), 7.0)
    assert {chosen(scheduler, 7.0) for _ in range(6)} == {"r1", "r2"}


def test_where_all_fail_the_least_bad_is_used_and_that_is_said() -> None:
    scheduler = make_scheduler(static=["r1", "r2"], breaker=EXACT)
    fail(scheduler, "r1", 0.0)
    fail(scheduler, "r1", 6.0, times=1)  # its probe: it opened twice
    fail(scheduler, "r2", 6.0)
    answer = scheduler.route(route_request(), 7.0)
    assert (answer.target.replica, answer.last_resort) == ("r2", True)
    assert scheduler.last_resorts == 1
    assert set(refused(scheduler, 7.0)) == {"r1"}


def test_an_abort_is_no_failure() -> None:
    scheduler = make_scheduler(static=["r1", "r2"], breaker=EXACT)
    for _ in range(20):
        decided = scheduler.route(route_request(only=[Target(replica="r1")]), 0.0)
        scheduler.report(finished(decided.decision_id, stage=Stage.STAGE_ABORTED), 0.1)
    assert refused(scheduler, 1.0) == {}


def test_a_failure_reported_twice_counts_once() -> None:
    scheduler = make_scheduler(static=["r1", "r2"], breaker=EXACT)
    decided = scheduler.route(route_request(only=[Target(replica="r1")]), 0.0)
    for _ in range(2):
        scheduler.report(finished(decided.decision_id, stage=Stage.STAGE_FAILED), 0.1)
    assert refused(scheduler, 1.0) == {}


def test_failures_before_it_ran_elsewhere_speak_against_where_it_failed() -> None:
    scheduler = make_scheduler(static=["r1", "r2"], breaker=EXACT)
    for _ in range(2):
        decided = scheduler.route(route_request(only=[Target(replica="r1")]), 0.0)
        there: dict[str, Any] = {
            "ran_on": Target(replica="r2"),
            "failed_on": [Target(replica="r1")],
        }
        said = finished(decided.decision_id, stage=Stage.STAGE_STARTED, **there)
        scheduler.report(said, 0.1)
        scheduler.report(said, 0.1)
        scheduler.report(finished(decided.decision_id, **there), 0.2)
    assert set(refused(scheduler, 1.0)) == {"r1"}


def test_a_report_speaks_only_against_targets_that_it_was_given() -> None:
    scheduler = make_scheduler(static=["r1", "r2", "r3"], breaker=EXACT)
    others = [Target(replica="r2"), Target(replica="r3")]
    for number in range(2):
        request = route_request(only=[Target(replica="r1")], first=number)
        decided = scheduler.route(request, 0.0)
        said = finished(decided.decision_id, failed_on=others)
        scheduler.report(said, 0.1)
    assert refused(scheduler, 1.0) == {}
    for number in range(2):
        request = route_request(only=others, max_fallbacks=1, first=100 + number)
        decided = scheduler.route(request, 1.0)
        assert len(decided.fallbacks) == 1
        said = finished(decided.decision_id, stage=Stage.STAGE_FAILED, failed_on=others)
        scheduler.report(said, 1.1)
    assert set(refused(scheduler, 2.0)) == {"r2", "r3"}


def test_a_report_can_not_name_more_failures_than_there_are_fallbacks() -> None:
    scheduler = make_scheduler(static=["r1"])
    decided = scheduler.route(route_request(), 0.0)
    with pytest.raises(InvalidRequest, match="failed_on"):
        scheduler.report(
            finished(decided.decision_id, failed_on=[Target(rank=n) for n in range(17)]), 0.1
        )


def test_a_new_life_of_the_engine_closes_it_and_a_new_connection_does_not() -> None:
    scheduler = make_scheduler(breaker=EXACT)
    relay = FakeRelay(scheduler).hello()
    FakeRelay(scheduler, "r2").hello()
    fail(scheduler, "r1", 0.0)
    relay.session.close(1.0)
    relay.reconnect()
    relay.hello(stream_id="another life of the relay")
    assert set(refused(scheduler, 1.0)) == {"r1"}
    relay.send(rank_state=stream_pb2.RankState(rank=0, incarnation=1, state=LIVE))
    assert refused(scheduler, 1.0) == {}


# Adapters


def lora(request: routing_pb2.RouteRequest) -> routing_pb2.RouteRequest:
    request.prompt.adapter = "lora"
    return request


def tell_adapters(relay: FakeRelay, *adapters: str, known: bool = True) -> None:
    relay.tell(load=stream_pb2.EngineLoad(rank=0, adapters=adapters, adapters_known=known))


def test_who_is_known_not_to_have_the_adapter_is_refused_while_another_has_it() -> None:
    scheduler = make_scheduler()
    known = relays(scheduler, {"r1": {}, "r2": {}, "r3": {}})
    tell_adapters(known["r1"], "other")
    tell_adapters(known["r2"], "lora", "other")
    tell_adapters(known["r3"], known=False)
    answer = scheduler.explain(lora(route_request()), 0.0)
    assert {each.target.replica: each.refused for each in answer.candidates} == {
        "r1": "adapter 'lora' is not loaded there, but elsewhere",
        "r2": "",
        "r3": "",
    }
    assert refused(scheduler) == {}


def test_where_nobody_has_the_adapter_all_may_load_it() -> None:
    scheduler = make_scheduler()
    known = relays(scheduler, {"r1": {}, "r2": {}})
    tell_adapters(known["r1"])
    tell_adapters(known["r2"], "other")
    answer = scheduler.explain(lora(route_request()), 0.0)
    assert not any(each.refused for each in answer.candidates)


def test_who_has_the_adapter_and_drains_does_not_keep_others_from_loading_it() -> None:
    scheduler = make_scheduler()
    known = relays(scheduler, {"r1": {}, "r2": {}})
    tell_adapters(known["r1"], "lora")
    tell_adapters(known["r2"])
    drain(scheduler, "r1")
    assert scheduler.route(lora(route_request()), 0.0).target.replica == "r2"


def test_what_was_said_of_adapters_long_ago_is_not_known_any_more() -> None:
    scheduler = make_scheduler()
    known = relays(scheduler, {"r1": {}, "r2": {}})
    tell_adapters(known["r1"], "lora")
    tell_adapters(known["r2"])
    answer = scheduler.explain(lora(route_request()), 11.0)
    assert not any(each.refused for each in answer.candidates)


@pytest.mark.parametrize("adapters", [["a" * 513], [str(n) for n in range(1025)]])
def test_a_list_of_adapters_beyond_all_measure_is_dropped(adapters: list[str]) -> None:
    scheduler = make_scheduler()
    tell_adapters(FakeRelay(scheduler).hello(), *adapters)
    assert scheduler.streams.drops["bad_adapters"] == 1


# Ranks


def test_a_decision_says_what_makes_the_engine_use_that_rank() -> None:
    scheduler = make_scheduler()
    said = profile()
    said.rank_fields.extend(["routed_dp_rank"])
    FakeRelay(scheduler).hello(ranks=(0, 1), profile=said)
    answer = scheduler.route(route_request(only=[Target(rank=1)], max_fallbacks=1), 0.0)
    assert dict(answer.headers) == {"X-data-parallel-rank": "1"}
    assert dict(answer.body) == {"routed_dp_rank": "1"}
    answer = scheduler.route(route_request(max_fallbacks=1), 0.0)
    assert answer.fallbacks[0].body["routed_dp_rank"] == str(1 - answer.target.rank)


def test_an_engine_of_one_rank_is_told_nothing() -> None:
    scheduler = make_scheduler()
    said = profile()
    said.rank_fields.extend(["routed_dp_rank"])
    FakeRelay(scheduler).hello(profile=said)
    answer = scheduler.route(route_request(), 0.0)
    assert (dict(answer.headers), dict(answer.body)) == ({}, {})


@pytest.mark.parametrize("fields", [[""], ["f" * 65], ["a", "b", "c", "d", "e"]])
def test_rank_fields_have_bounds(fields: list[str]) -> None:
    scheduler = make_scheduler()
    said = profile()
    said.rank_fields.extend(fields)
    with pytest.raises(SessionRefused):
        FakeRelay(scheduler).hello(profile=said)


def test_fallbacks_name_each_other_replica_before_a_second_rank_of_one() -> None:
    scheduler = make_scheduler(static=["r1", "r2", "r3"], ranks=2)
    answer = scheduler.route(route_request(max_fallbacks=16), 0.0)
    named = [answer.target.replica, *(each.target.replica for each in answer.fallbacks)]
    assert len(named) == 6
    assert set(named[:3]) == {"r1", "r2", "r3"}


# Pins


def test_a_pinned_session_stays_where_it_went_last() -> None:
    scheduler = make_scheduler(static=["r1", "r2", "r3"])
    first = scheduler.route(route_request(session_id="s", only=[Target(replica="r2")]), 0.0)
    assert not first.pinned
    for number in range(6):
        answer = scheduler.route(
            route_request(first=1000 * number, session_id="s", pin_session=True), 1.0
        )
        assert (answer.target.replica, answer.pinned, answer.propensity) == ("r2", True, 1.0)
    assert {chosen(scheduler, 1.0, session_id="s") for _ in range(4)} == {"r1", "r3"}, "not asked"
    assert scheduler.pinning == {"kept": 6}


def test_a_session_moves_where_its_target_is_not_allowed_and_then_stays_there() -> None:
    scheduler = make_scheduler(static=["r1", "r2"])
    scheduler.route(route_request(session_id="s", only=[Target(replica="r1")]), 0.0)
    drain(scheduler, "r1")
    moved = scheduler.route(route_request(session_id="s", pin_session=True), 1.0)
    assert (moved.target.replica, moved.pinned) == ("r2", False)
    drain(scheduler, "r1", undo=True)
    for _ in range(4):
        stays = scheduler.route(route_request(session_id="s", pin_session=True), 2.0)
        assert (stays.target.replica, stays.pinned) == ("r2", True)
    assert scheduler.pinning == {"moved": 1, "kept": 4}


def test_a_deadline_counts_more_than_a_pin() -> None:
    scheduler = make_scheduler(static=["r1", "r2"])
    busy = Target(replica="r1")
    for number in range(20):
        scheduler.route(route_request(20_000, first=number * 50_000, only=[busy]), 0.0)
    scheduler.route(route_request(session_id="s", only=[busy]), 0.0)
    stays = scheduler.route(route_request(session_id="s", pin_session=True), 0.0)
    assert (stays.target.replica, stays.pinned) == ("r1", True)
    request = route_request(session_id="s", pin_session=True, deadline_s=1.0, first=7)
    shown = scheduler.explain(request, 0.0).candidates[0]
    assert (shown.target.replica, shown.chosen, shown.propensity) == ("r2", True, 1.0)
    moved = scheduler.route(request, 0.0)
    assert (moved.target.replica, moved.pinned, moved.propensity) == ("r2", False, 1.0)


def test_a_session_is_where_its_request_ran_in_the_end() -> None:
    scheduler = make_scheduler(static=["r1", "r2"])
    first = scheduler.route(route_request(session_id="s", only=[Target(replica="r1")]), 0.0)
    scheduler.report(finished(first.decision_id, ran_on=Target(replica="r2")), 1.0)
    assert chosen(scheduler, 2.0, session_id="s", pin_session=True) == "r2"


def test_the_other_schedulers_learn_of_it_through_the_relays() -> None:
    one, other = make_scheduler(), make_scheduler(instance_id="scheduler-2")
    mine = [FakeRelay(one, name).hello() for name in ("r1", "r2")]
    theirs = [FakeRelay(other, name).hello() for name in ("r1", "r2")]
    one.route(route_request(session_id="s", only=[Target(replica="r2")]), 0.0)
    [credit] = mine[1].take("credit_opened")
    assert credit.session != 0
    theirs[1].send(credit_opened=credit)
    answer = other.route(route_request(first=9000, session_id="s", pin_session=True), 1.0)
    assert (answer.target.replica, answer.pinned) == ("r2", True)


def test_to_stay_needs_a_session() -> None:
    with pytest.raises(InvalidRequest, match="pin_session"):
        chosen(make_scheduler(static=["r1"]), pin_session=True)


def test_explaining_shows_the_pin_and_moves_nothing() -> None:
    scheduler = make_scheduler(static=["r1", "r2"])
    scheduler.route(route_request(session_id="s", only=[Target(replica="r1")]), 0.0)
    for _ in range(3):
        answer = scheduler.explain(route_request(session_id="s", pin_session=True), 1.0)
        assert answer.candidates[0].target.replica == "r1"
        assert answer.candidates[0].chosen


# The same request again


def test_labels_that_the_decision_does_not_fit_make_a_new_one() -> None:
    scheduler = make_scheduler()
    relays(scheduler, {"r1": {"zone": "a"}, "r2": {"zone": "b"}})
    first = scheduler.route(route_request(request_id="q", labels={"zone": "a"}), 0.0)
    again = scheduler.route(route_request(request_id="q", labels={"zone": "a"}), 0.0)
    other = scheduler.route(route_request(request_id="q", labels={"zone": "b"}), 0.0)
    assert first.decision_id == again.decision_id != other.decision_id
    assert other.target.replica == "r2"
