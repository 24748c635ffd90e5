from __future__ import annotations

from typing import Any

import pytest
from google.rpc import code_pb2

from servingfleet_protos.v1 import common_pb2, fleet_pb2, stream_pb2
from servingfleet_scheduler.errors import SessionRefused
from servingfleet_scheduler.service import Scheduler

from .helpers import BLOCK, LIVE, FakeRelay, hashes, hello, make_scheduler, profile, route_request

Delta = stream_pb2.Delta


def predicted(scheduler: Scheduler, count: int = 65, *, replica: str = "r1", rank: int = 0) -> int:
    """Tokens predicted for a prompt on one target, without routing it."""
    request = route_request(count)
    request.only.add(replica=replica, rank=rank)
    (candidate,) = [each for each in scheduler.explain(request, 0.0).candidates if not each.refused]
    return candidate.prediction.predicted


def rank_of(scheduler: Scheduler, replica: str = "r1", rank: int = 0) -> fleet_pb2.Rank:
    found = scheduler.list_replicas(fleet_pb2.ListReplicasRequest(), 0.0).replicas
    (one,) = [each for each in found if each.replica == replica]
    return one.ranks[rank]


def refused(relay: FakeRelay, **fields: Any) -> SessionRefused:
    with pytest.raises(SessionRefused) as error:
        relay.hello(**fields)
    return error.value


# Hello


def test_a_hello_is_welcomed_and_given_a_snapshot_slot() -> None:
    relay = FakeRelay(make_scheduler()).hello(ranks=(0, 1))
    (welcome,) = relay.take("welcome")
    assert (welcome.instance_id, welcome.resumed, welcome.expected_seq) == ("scheduler-1", False, 1)
    (grant,) = relay.take("grant_snapshot")
    assert list(grant.ranks) == [0, 1]


def test_a_relay_that_has_proven_its_pod_speaks_for_no_other() -> None:
    scheduler = make_scheduler()
    FakeRelay(scheduler, "r2").hello().snapshot(hashes(64))
    relay = FakeRelay(scheduler, "r2")
    relay.session = scheduler.open_session(0.0, only_replica="r1")
    refusal = refused(relay, stream_id="another")
    assert (refusal.code, refusal.reason) == (code_pb2.PERMISSION_DENIED, "OTHER_REPLICA")
    assert predicted(scheduler, replica="r2") == 64
    relay = FakeRelay(scheduler, "r1")
    relay.session = scheduler.open_session(0.0, only_replica="r1")
    assert relay.hello().take("welcome")


def test_a_renewed_proof_changes_nothing_here() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.tell(credential=stream_pb2.Credential(token="fresh"))
    assert not scheduler.streams.drops
    with pytest.raises(SessionRefused) as refusal:
        relay.send(credential=stream_pb2.Credential(token="numbered"))
    assert refusal.value.reason == "SEQ_UNEXPECTED"


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"protocol_version": 2}, code_pb2.FAILED_PRECONDITION, "PROTOCOL_VERSION"),
        ({"block_tokens": 32}, code_pb2.FAILED_PRECONDITION, "BLOCK_SIZE"),
        ({"hash_version": "sf0"}, code_pb2.FAILED_PRECONDITION, "HASH_VERSION"),
        ({"replica": ""}, code_pb2.INVALID_ARGUMENT, "HELLO_REPLICA"),
        ({"replica": "r" * 254}, code_pb2.INVALID_ARGUMENT, "HELLO_REPLICA"),
        ({"stream_id": ""}, code_pb2.INVALID_ARGUMENT, "HELLO_STREAM_ID"),
        ({"stream_id": "s" * 65}, code_pb2.INVALID_ARGUMENT, "HELLO_STREAM_ID"),
        ({"model": ""}, code_pb2.INVALID_ARGUMENT, "HELLO_MODEL"),
        ({"model": "m" * 513}, code_pb2.INVALID_ARGUMENT, "HELLO_MODEL"),
        ({"labels": {str(n): "" for n in range(65)}}, code_pb2.INVALID_ARGUMENT, "HELLO_LABELS"),
        ({"ranks": ()}, code_pb2.INVALID_ARGUMENT, "HELLO_RANKS"),
        ({"ranks": (0, 1, 1)}, code_pb2.INVALID_ARGUMENT, "HELLO_RANKS"),
        ({"ranks": range(1025)}, code_pb2.INVALID_ARGUMENT, "HELLO_RANKS"),
        ({"ranks": (70_000,)}, code_pb2.INVALID_ARGUMENT, "HELLO_RANKS"),
        ({"profile": profile(unit=24)}, code_pb2.INVALID_ARGUMENT, "PROFILE_UNIT"),
        ({"profile": profile(unit=0)}, code_pb2.INVALID_ARGUMENT, "PROFILE_UNIT"),
        (
            {"profile": stream_pb2.Profile(lanes=[stream_pb2.Lane(lane=64, unit_tokens=BLOCK)])},
            code_pb2.INVALID_ARGUMENT,
            "PROFILE_LANES",
        ),
        (
            {"profile": stream_pb2.Profile(lanes=[stream_pb2.Lane(lane=0, unit_tokens=BLOCK)])},
            code_pb2.INVALID_ARGUMENT,
            "PROFILE_LANES",
        ),
        (
            {"profile": stream_pb2.Profile(lanes=[*profile().lanes, *profile().lanes])},
            code_pb2.INVALID_ARGUMENT,
            "PROFILE_LANES",
        ),
        (
            {"profile": stream_pb2.Profile(tiers=[stream_pb2.TierRule()])},
            code_pb2.INVALID_ARGUMENT,
            "PROFILE_TIERS",
        ),
        (
            {
                "profile": stream_pb2.Profile(
                    tiers=[stream_pb2.TierRule(tier=common_pb2.TIER_HOST, overlap_share=1.5)]
                )
            },
            code_pb2.INVALID_ARGUMENT,
            "PROFILE_TIERS",
        ),
    ],
)
def test_a_hello_that_can_not_be_right_is_refused(
    fields: dict[str, Any], code: int, reason: str
) -> None:
    scheduler = make_scheduler()
    fields = {"replica": "r1", "ranks": (0,), **fields}
    with pytest.raises(SessionRefused) as error:
        scheduler.open_session(0.0).receive(stream_pb2.RelayMessage(hello=hello(**fields)), 0.0)
    assert (error.value.code, error.value.reason) == (code, reason)
    assert scheduler.streams.refusals == {reason: 1}
    assert not list(scheduler.fleet)


def test_a_refused_hello_leaves_the_replica_that_speaks_alone() -> None:
    scheduler = make_scheduler()
    FakeRelay(scheduler).hello().snapshot(hashes(64))
    refused(FakeRelay(scheduler), stream_id="other", profile=profile(unit=24))
    assert predicted(scheduler) == 64


def test_the_first_message_must_be_a_hello() -> None:
    with pytest.raises(SessionRefused, match="not hello"):
        FakeRelay(make_scheduler()).hold(hashes(64))


def test_a_stream_that_never_says_hello_is_ended() -> None:
    scheduler = make_scheduler()
    session = scheduler.open_session(0.0)
    scheduler.tick(10.1)
    assert session.refused is not None
    assert session.refused.reason == "HELLO_EXPECTED"


def test_a_stream_can_not_change_its_replica() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.replica = "r2"
    assert refused(relay).reason == "HELLO_REPEATED"
    assert [each.name for each in scheduler.fleet] == ["r1"]


def test_more_replicas_than_the_bound_are_refused() -> None:
    scheduler = make_scheduler(max_replicas=1)
    FakeRelay(scheduler, "r1").hello()
    error = refused(FakeRelay(scheduler, "r2"))
    assert (error.code, error.reason) == (code_pb2.RESOURCE_EXHAUSTED, "TOO_MANY_REPLICAS")


# Who speaks for a replica


def test_a_second_relay_with_the_same_identity_is_refused_while_the_first_speaks() -> None:
    scheduler = make_scheduler()
    FakeRelay(scheduler).hello().snapshot(hashes(64))
    liar = FakeRelay(scheduler, now=1.0)
    error = refused(liar, stream_id="liar")
    liar.session.close(1.0)
    assert (error.code, error.reason) == (code_pb2.ALREADY_EXISTS, "REPLICA_TAKEN")
    assert predicted(scheduler) == 64


def test_another_stream_takes_over_when_the_first_is_silent() -> None:
    scheduler = make_scheduler()
    first = FakeRelay(scheduler).hello()
    FakeRelay(scheduler, now=5.0).hello(stream_id="second")
    assert first.session.refused is not None
    assert first.session.refused.reason == "SUPERSEDED"


def test_another_stream_takes_over_at_once_when_the_first_is_closed() -> None:
    scheduler = make_scheduler()
    first = FakeRelay(scheduler).hello()
    first.session.close(1.0)
    FakeRelay(scheduler, now=1.0).hello(stream_id="second")
    assert rank_of(scheduler).state == LIVE


def test_a_superseded_stream_never_comes_back() -> None:
    scheduler = make_scheduler()
    first = FakeRelay(scheduler).hello()
    first.session.close(1.0)
    FakeRelay(scheduler, now=1.0).hello(stream_id="second").session.close(2.0)
    again = FakeRelay(scheduler, now=3.0)
    assert refused(again).reason == "SUPERSEDED"


def test_the_end_of_a_superseded_stream_does_not_touch_its_successor() -> None:
    scheduler = make_scheduler()
    first = FakeRelay(scheduler).hello()
    FakeRelay(scheduler, now=6.0).hello(stream_id="second").snapshot(hashes(64))
    first.session.close(7.0)
    assert rank_of(scheduler).state == LIVE
    assert predicted(scheduler) == 64


def test_another_stream_forgets_what_the_first_said() -> None:
    scheduler = make_scheduler()
    first = FakeRelay(scheduler).hello()
    first.snapshot(hashes(64))
    first.session.close(1.0)
    FakeRelay(scheduler, now=1.0).hello(stream_id="second")
    assert predicted(scheduler) == 0


# Order


def test_a_gap_in_the_numbers_ends_the_stream() -> None:
    relay = FakeRelay(make_scheduler()).hello()
    relay.seq = 1
    with pytest.raises(SessionRefused) as error:
        relay.hold(hashes(64))
    assert (error.value.code, error.value.reason) == (code_pb2.ABORTED, "OUT_OF_ORDER")
    assert error.value.metadata == {"expected": "1", "got": "2"}


def test_a_number_that_comes_twice_ends_the_stream() -> None:
    relay = FakeRelay(make_scheduler()).hello()
    relay.hold(hashes(64))
    relay.seq = 0
    with pytest.raises(SessionRefused, match="reconnect and resume"):
        relay.hold(hashes(64))


def test_a_message_that_needs_a_number_has_one() -> None:
    relay = FakeRelay(make_scheduler()).hello()
    relay.seq = -1
    with pytest.raises(SessionRefused, match="message 0 after 0"):
        relay.hold(hashes(64))


def test_load_has_no_number() -> None:
    relay = FakeRelay(make_scheduler()).hello()
    with pytest.raises(SessionRefused, match="expected 0"):
        relay.send(load=stream_pb2.EngineLoad())


def test_a_stream_resumes_where_it_broke_off() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.snapshot(hashes(64))
    relay.session.close(1.0)
    assert predicted(scheduler) == 0
    relay.reconnect()
    relay.hello(resume_instance="scheduler-1", resume_from=2)
    assert relay.take("welcome")[-1] == stream_pb2.Welcome(
        instance_id="scheduler-1", resumed=True, expected_seq=4, window=4096
    )
    assert predicted(scheduler) == 64
    assert relay.take("grant_snapshot")[1:] == []


def test_messages_resent_after_a_resume_change_nothing() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.snapshot(hashes(64))
    relay.session.close(1.0)
    relay.reconnect()
    relay.hello(resume_instance="scheduler-1", resume_from=1)
    relay.seq = 0
    relay.send(snapshot_begin=stream_pb2.SnapshotBegin())
    assert predicted(scheduler) == 64
    assert scheduler.streams.drops["resent"] == 1


def test_a_resume_across_a_gap_starts_anew() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.snapshot(hashes(64))
    relay.session.close(1.0)
    relay.reconnect()
    relay.hello(resume_instance="scheduler-1", resume_from=5)
    assert relay.take("welcome")[-1].resumed is False
    assert predicted(scheduler) == 0


def test_another_relay_life_can_not_resume() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.snapshot(hashes(64))
    relay.session.close(1.0)
    relay.reconnect()
    relay.hello(stream_id="another", resume_instance="scheduler-1", resume_from=4)
    assert relay.take("welcome")[-1].resumed is False
    assert predicted(scheduler) == 0


def test_a_resume_of_another_schedulers_session_starts_anew() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.session.close(1.0)
    relay.reconnect()
    relay.hello(resume_instance="scheduler-0", resume_from=1)
    assert relay.take("welcome")[-1].resumed is False


def test_the_same_relay_takes_over_its_own_half_open_stream_at_once() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.snapshot(hashes(64))
    old = relay.session
    relay.reconnect()
    relay.hello(resume_instance="scheduler-1", resume_from=4)
    assert old.refused is not None
    old.close(1.0)
    assert predicted(scheduler) == 64


def test_a_rank_not_complete_is_granted_again_after_a_resume() -> None:
    relay = FakeRelay(make_scheduler()).hello(ranks=(0, 1))
    relay.snapshot(hashes(64), rank=0)
    relay.session.close(1.0)
    relay.reconnect()
    relay.take("grant_snapshot")
    relay.hello(ranks=(0, 1), resume_instance="scheduler-1", resume_from=4)
    assert [list(grant.ranks) for grant in relay.take("grant_snapshot")] == [[1]]


def test_a_message_that_ends_the_stream_is_not_taken_for_applied() -> None:
    relay = FakeRelay(make_scheduler()).hello()
    with pytest.raises(SessionRefused):
        relay.send(profile=profile(unit=24))
    relay.session.close(1.0)
    relay.reconnect()
    relay.hello(resume_instance="scheduler-1", resume_from=1)
    assert relay.take("welcome")[-1].expected_seq == 1


# Acknowledgements


def test_every_so_many_messages_are_acknowledged() -> None:
    relay = FakeRelay(make_scheduler(ack_messages=3)).hello()
    acks = []
    for _ in range(7):
        relay.hold(hashes(16))
        acks += [ack.seq for ack in relay.take("ack")]
    assert acks == [3, 6]


def test_an_idle_stream_is_acknowledged_too() -> None:
    scheduler = make_scheduler(ack_idle_s=0.2)
    relay = FakeRelay(scheduler).hello()
    relay.hold(hashes(16))
    scheduler.tick(0.1)
    assert relay.take("ack") == []
    scheduler.tick(0.21)
    assert [ack.seq for ack in relay.take("ack")] == [1]
    scheduler.tick(1.0)
    assert relay.take("ack") == []


# What is said


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        (Delta(rank=7, op=Delta.OP_HOLD, hashes=hashes(16)), "unknown_rank"),
        (Delta(lane=9, op=Delta.OP_HOLD, hashes=hashes(16)), "unknown_lane"),
        (Delta(op=Delta.OP_HOLD, hashes=bytes(9)), "hashes_not_whole"),
        (Delta(op=Delta.OP_HOLD, hashes=bytes(8 * 65_537)), "too_many_hashes"),
        (Delta(op=Delta.OP_CLEAR, hashes=hashes(16)), "clear_with_hashes"),
        (Delta(hashes=hashes(16)), "unknown_op"),
    ],
)
def test_a_delta_that_can_not_be_right_is_dropped_and_counted(delta: Delta, reason: str) -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.snapshot(hashes(64))
    relay.send(delta=delta)
    assert scheduler.streams.drops == {reason: 1}
    assert predicted(scheduler) == 64


def test_a_dropped_delta_asks_for_the_rank_again() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.snapshot()
    relay.take("grant_snapshot")
    relay.hold(bytes(9))
    assert [each.rank for each in relay.take("resync")] == [0]
    assert [list(each.ranks) for each in relay.take("grant_snapshot")] == [[0]]
    assert scheduler.fleet.warm() == 0.0


def test_a_snapshot_after_a_dropped_delta_makes_the_rank_whole_again() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.hold(bytes(9))
    relay.snapshot(hashes(64))
    assert scheduler.fleet.warm() == 1.0


def test_a_snapshot_in_which_a_delta_was_dropped_is_not_complete() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.send(snapshot_begin=stream_pb2.SnapshotBegin())
    relay.hold(bytes(9))
    relay.send(snapshot_end=stream_pb2.SnapshotEnd())
    assert scheduler.fleet.warm() == 0.0


def test_a_relay_that_keeps_sending_nonsense_is_not_asked_again_each_time() -> None:
    scheduler = make_scheduler(resync_interval_s=10.0)
    relay = FakeRelay(scheduler).hello()
    for _ in range(5):
        relay.hold(bytes(9))
    assert len(relay.take("resync")) == 1
    scheduler.tick(10.0)
    assert len(relay.take("resync")) == 1


def test_an_older_incarnation_is_dropped() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello(ranks=(0,))
    relay.send(rank_state=stream_pb2.RankState(incarnation=3, state=LIVE))
    relay.hold(hashes(64))
    relay.send(rank_state=stream_pb2.RankState(incarnation=2, state=LIVE))
    relay.send(snapshot_begin=stream_pb2.SnapshotBegin(incarnation=2))
    assert scheduler.streams.drops == {"incarnation_back": 2}
    assert predicted(scheduler) == 64


def test_a_new_incarnation_forgets_holdings_and_credits() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.snapshot(hashes(64))
    scheduler.route(route_request(96), 0.0)
    relay.send(rank_state=stream_pb2.RankState(incarnation=1, state=LIVE))
    assert predicted(scheduler, 97) == 0
    assert rank_of(scheduler).credits == 0
    assert rank_of(scheduler).dispatched_requests == 0


@pytest.mark.parametrize(
    ("state", "tokens"),
    [
        (common_pb2.STREAM_STATE_LIVE, 64),
        (common_pb2.STREAM_STATE_HISTORY_LOST, 64),
        (common_pb2.STREAM_STATE_RESYNCING, 64),
        (common_pb2.STREAM_STATE_UNPROVEN, 0),
        (common_pb2.STREAM_STATE_QUARANTINED, 0),
    ],
)
def test_a_ranks_state_decides_what_its_holdings_are_worth(
    state: common_pb2.StreamState.ValueType, tokens: int
) -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.snapshot(hashes(64))
    relay.send(rank_state=stream_pb2.RankState(state=state, reason="because"))
    assert predicted(scheduler) == tokens


def test_a_state_that_no_relay_may_send_is_dropped() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.send(rank_state=stream_pb2.RankState())
    assert scheduler.streams.drops == {"unknown_state": 1}
    assert rank_of(scheduler).state == LIVE


def test_a_lane_can_not_change_its_meaning() -> None:
    relay = FakeRelay(make_scheduler()).hello()
    changed = profile()
    changed.lanes[0].tier = common_pb2.TIER_HOST
    with pytest.raises(SessionRefused) as error:
        relay.send(profile=changed)
    assert error.value.reason == "LANE_CHANGED"


def test_a_lane_that_a_profile_adds_may_be_used() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello(profile=stream_pb2.Profile())
    relay.send(profile=profile())
    relay.hold(hashes(64))
    assert predicted(scheduler) == 64


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (stream_pb2.EngineLoad(rank=5), "unknown_rank"),
        (stream_pb2.EngineLoad(age_s=-1.0), "bad_load"),
        (stream_pb2.EngineLoad(age_s=float("nan")), "bad_load"),
        (stream_pb2.EngineLoad(kv_usage=1.5), "bad_load"),
    ],
)
def test_a_load_that_can_not_be_is_dropped(load: stream_pb2.EngineLoad, reason: str) -> None:
    scheduler = make_scheduler()
    FakeRelay(scheduler).hello().tell(load=load)
    assert scheduler.streams.drops == {reason: 1}


def test_counters_with_names_out_of_bounds_are_dropped() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.tell(counters=stream_pb2.RelayCounters(totals={"Bad Name": 1}))
    relay.tell(counters=stream_pb2.RelayCounters(totals={f"n{n}": 1 for n in range(129)}))
    assert scheduler.streams.drops == {"bad_counters": 2}


def test_a_kind_of_message_that_is_not_known_is_passed_over() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.send()
    relay.hold(hashes(64))
    assert predicted(scheduler) == 64
    assert scheduler.streams.drops == {"unknown_body": 1}


# Snapshots and absence


def test_snapshots_wait_for_a_slot_while_deltas_flow() -> None:
    scheduler = make_scheduler(snapshot_slots=1)
    first = FakeRelay(scheduler, "r1").hello()
    second = FakeRelay(scheduler, "r2").hello()
    assert second.take("grant_snapshot") == []
    second.hold(hashes(64))
    assert predicted(scheduler, replica="r2") == 64
    first.snapshot()
    assert len(second.take("grant_snapshot")) == 1


def test_a_closed_stream_leaves_only_the_upper_bound() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.snapshot(hashes(64))
    relay.session.close(1.0)
    (candidate,) = scheduler.explain(route_request(65), 1.0).candidates
    prediction = candidate.prediction
    assert (prediction.lower, prediction.predicted, prediction.upper) == (0, 0, 64)
    assert rank_of(scheduler).reason == "relay away"


def test_a_replica_that_stays_away_is_forgotten() -> None:
    scheduler = make_scheduler(replica_ttl_s=600.0)
    relay = FakeRelay(scheduler).hello()
    relay.session.close(0.0)
    scheduler.tick(600.0)
    assert [each.name for each in scheduler.fleet] == ["r1"]
    scheduler.tick(600.1)
    assert list(scheduler.fleet) == []


def test_a_configured_replica_outlives_its_relay() -> None:
    scheduler = make_scheduler(static=["r1"])
    relay = FakeRelay(scheduler).hello(endpoint="")
    assert scheduler.route(route_request(), 0.0).endpoint == "r1:8000"
    relay.session.close(0.0)
    scheduler.tick(601.0)
    assert rank_of(scheduler).state == common_pb2.STREAM_STATE_UNSPECIFIED


def test_what_the_engine_is_may_be_told_later() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    later = profile()
    later.engine_version = "0.33.0"
    relay.send(profile=later)
    (told,) = scheduler.list_replicas(fleet_pb2.ListReplicasRequest(), 0.0).replicas
    assert (told.engine, told.engine_version) == ("vllm", "0.33.0")
