from __future__ import annotations

import random

import pytest

from servingfleet_operator.engines.facts import Finding
from servingfleet_operator.observed import Relay
from servingfleet_operator.replicas import Replica, State, counted, indexed_blocks, replicas
from servingfleet_protos.v1 import common_pb2, fleet_pb2

from .observing import LIVE, observed, pod, report, stream

EVENTS_OFF = Finding(
    "EventsOff", "container engine publishes no events: add --kv-events-config '{}'"
)
NO_REPLAY = Finding("NoReplay", "has no replay_endpoint", severe=False)


def one(target: object, *reports: object, **changes: object) -> Replica:
    (found,) = replicas(observed(pods=[target], reports=list(reports), **changes))
    return found


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (common_pb2.STREAM_STATE_LIVE, State.LIVE),
        (common_pb2.STREAM_STATE_HISTORY_LOST, State.HISTORY_LOST),
        (common_pb2.STREAM_STATE_UNPROVEN, State.UNPROVEN),
        (common_pb2.STREAM_STATE_RESYNCING, State.RESYNCING),
        (common_pb2.STREAM_STATE_QUARANTINED, State.QUARANTINED),
        (common_pb2.STREAM_STATE_UNSPECIFIED, State.NO_STREAM),
    ],
)
def test_a_replica_is_in_the_state_of_its_stream(
    said: common_pb2.StreamState.ValueType, state: State
) -> None:
    found = one(pod(), report([stream(pod(), (said, "what was seen"))]))
    assert (found.state, found.reason) == (state, "" if state == State.LIVE else "what was seen")


def test_every_state_that_the_protocol_has_is_known() -> None:
    for number in common_pb2.StreamState.values():
        found = one(pod(), report([stream(pod(), number)]))
        assert found.state != State.UNPROVEN or number == common_pb2.STREAM_STATE_UNPROVEN


def test_the_worst_rank_decides_and_is_named() -> None:
    lost = (common_pb2.STREAM_STATE_UNPROVEN, "gap: expected 41, got 44")
    found = one(pod(), report([stream(pod(), LIVE, lost, LIVE)]))
    assert (found.state, found.reason) == (State.UNPROVEN, "rank 1: gap: expected 41, got 44")


def test_the_worst_scheduler_decides_since_each_routes_by_its_own_view() -> None:
    found = one(pod(), report([stream(pod())]), report([], name="demo-scheduler-b"))
    assert found.state == State.NO_STREAM
    assert found.reason == "its relay has not reached scheduler demo-scheduler-b"


def test_a_scheduler_that_has_just_started_is_no_trouble_while_another_is_reached() -> None:
    young = report([], name="demo-scheduler-b", window_s=5.0)
    assert one(pod(), report([stream(pod())]), young).state == State.LIVE
    assert one(pod(), young).state == State.NO_STREAM
    lost = (common_pb2.STREAM_STATE_UNPROVEN, "gap")
    heard = report([stream(pod(), lost)], name="demo-scheduler-b", window_s=5.0)
    assert one(pod(), report([stream(pod())]), heard).state == State.UNPROVEN


def test_a_pod_is_known_by_its_uid_not_by_its_name() -> None:
    """A StatefulSet's new pod has the old one's name."""
    found = one(pod(uid="new"), report([stream("old")]))
    assert found.state == State.NO_STREAM


def test_a_replica_whose_pod_is_gone_is_not_listed() -> None:
    found = replicas(observed(pods=[], reports=[report([stream("uid-0")])]))
    assert found == []


def test_without_schedulers_nothing_is_known_of_streams() -> None:
    assert one(pod()).state == State.UNKNOWN
    (found,) = replicas(observed(reports=None))
    assert found.state == State.UNKNOWN


@pytest.mark.parametrize(
    "relay", [Relay.NOT_INJECTED, Relay.OPTED_OUT, Relay.INJECTION_OFF, Relay.NOT_INJECTABLE]
)
def test_a_pod_without_relay_says_why(relay: Relay) -> None:
    found = one(pod(relay=relay, relay_reason="it predates the fleet"), report())
    assert (found.state, found.reason) == (State(relay), "it predates the fleet")


def test_an_outdated_relay_is_as_good_as_its_stream() -> None:
    found = one(
        pod(relay=Relay.OUTDATED, relay_reason="its relay was told other ports"),
        report([stream(pod())]),
    )
    assert (found.state, found.reason) == (State.LIVE, "its relay was told other ports")


def test_a_command_line_without_events_explains_a_missing_stream() -> None:
    found = one(pod(findings=[NO_REPLAY, EVENTS_OFF]), report())
    assert (found.state, found.reason) == (State.MISCONFIGURED, EVENTS_OFF.message)


def test_a_stream_proves_more_than_a_command_line() -> None:
    found = one(pod(findings=[EVENTS_OFF]), report([stream(pod())]))
    assert found.state == State.LIVE


def test_an_engine_that_starts_is_not_blamed_for_its_stream() -> None:
    assert one(pod(ready=False), report()).state == State.STARTING
    down = stream(pod(), (common_pb2.STREAM_STATE_UNPROVEN, "socket down"))
    assert one(pod(ready=False), report([down])).state == State.STARTING


def test_a_further_pod_of_an_engine_is_not_counted() -> None:
    found = replicas(
        observed(pods=[pod(), pod(1, serving=False)], reports=[report([stream(pod())])])
    )
    assert [each.state for each in found] == [State.FOLLOWER, State.LIVE]
    assert counted(found) == {"all": 1, "live": 1}


def test_blocks_are_those_of_one_index_with_all_ranks() -> None:
    first = report([stream(pod(), LIVE, LIVE, blocks=10)])
    behind = report([stream(pod(), LIVE, LIVE, blocks=8)], name="demo-scheduler-b")
    found = replicas(observed(pods=[pod(), pod(1)], reports=[first, behind]))
    assert {each.pod.name: each.blocks for each in found} == {"vllm-0": 20, "vllm-1": 0}
    assert indexed_blocks(found) == 20


def test_the_worst_come_first_then_by_name_in_whatever_order_they_were_seen() -> None:
    pods = [pod(number) for number in range(4)]
    said = fleet_pb2.ListReplicasResponse(
        replicas=[
            stream(pods[0]),
            stream(pods[1], common_pb2.STREAM_STATE_RESYNCING),
            stream(pods[2], common_pb2.STREAM_STATE_QUARANTINED),
            stream(pods[3], common_pb2.STREAM_STATE_QUARANTINED),
        ]
    )
    for seed in range(5):
        shuffled = random.Random(seed).sample(pods, k=4)
        found = replicas(observed(pods=shuffled, reports=[report(said.replicas)]))
        assert [each.pod.name for each in found] == ["vllm-2", "vllm-3", "vllm-1", "vllm-0"]


def test_who_drained_a_replica_is_told_with_its_state() -> None:
    engine = pod()
    drained, other = stream(engine), stream(engine)
    drained.draining_by.append("cli")
    [found] = replicas(observed(pods=[engine], reports=[report([drained]), report([other])]))
    assert (found.state, found.reason) == (
        State.LIVE,
        "gets no new requests: drained by cli",
    )
