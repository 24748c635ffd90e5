"""One link: numbering, acknowledgement, resending, snapshots, bounds."""

from __future__ import annotations

from collections.abc import Iterable

from servingfleet_protos.v1.stream_pb2 import (
    CreditEnded,
    Delta,
    EngineLoad,
    RankState,
    RelayCounters,
    RelayMessage,
    SnapshotBegin,
    SnapshotEnd,
    Welcome,
)
from servingfleet_relay.outbox import Body, Limits, Outbox, Phase, Snapshot

LIMITS = Limits(resend_messages=8, resend_bytes=100_000, waiting_messages=20, waiting_bytes=100_000)


def snapshot(rank: int) -> Snapshot:
    yield [RelayMessage(snapshot_begin=SnapshotBegin(rank=rank))]
    for number in range(3):
        yield [RelayMessage(delta=Delta(rank=rank, lane=63, parent=number))]
    yield [RelayMessage(snapshot_end=SnapshotEnd(rank=rank))]


def delta(parent: int) -> Body:
    return Body.of(RelayMessage(delta=Delta(parent=parent)))


def state(incarnation: int = 1, seq: int | None = None) -> RankState:
    return RankState(rank=0, incarnation=incarnation, engine_seq=seq)


def opened(limits: Limits = LIMITS, opening: Iterable[RelayMessage] = ()) -> Outbox:
    outbox = Outbox(limits, snapshot)
    assert outbox.greet({0: 1}, 0) == ("", 0)
    outbox.welcome(Welcome(instance_id="i"), list(opening))
    return outbox


def parents(messages: Iterable[RelayMessage]) -> list[int]:
    return [m.delta.parent for m in messages if m.HasField("delta") and m.delta.lane == 0]


def kinds(messages: Iterable[RelayMessage]) -> list[str | None]:
    return [m.WhichOneof("body") for m in messages]


def test_nothing_is_sent_before_the_welcome() -> None:
    outbox = Outbox(LIMITS, snapshot)
    outbox.greet({0: 1}, 0)
    outbox.put(delta(1))
    assert outbox.take(10) == []


def test_a_session_begins_with_its_opening_at_1() -> None:
    outbox = opened(opening=[RelayMessage(rank_state=state())])
    outbox.put(delta(7))
    taken = outbox.take(10)
    assert [(m.seq, m.WhichOneof("body")) for m in taken] == [(1, "rank_state"), (2, "delta")]


def test_the_window_holds_back_what_is_not_acknowledged() -> None:
    outbox = opened()
    for number in range(12):
        outbox.put(delta(number))
    assert parents(outbox.take(100)) == list(range(8))
    assert outbox.take(100) == []
    outbox.acknowledge(3)
    assert parents(outbox.take(100)) == [8, 9, 10]


def test_the_schedulers_window_binds_where_it_is_smaller() -> None:
    outbox = Outbox(LIMITS, snapshot)
    outbox.greet({0: 1}, 0)
    outbox.welcome(Welcome(instance_id="i", window=2), [])
    for number in range(4):
        outbox.put(delta(number))
    assert parents(outbox.take(100)) == [0, 1]


def test_a_resumed_session_repeats_what_was_not_acknowledged_and_goes_on() -> None:
    outbox = opened()
    for number in range(4):
        outbox.put(delta(number))
    outbox.take(3)
    outbox.acknowledge(1)
    outbox.close()
    outbox.put(delta(4))
    assert outbox.greet({0: 1}, 0) == ("i", 2)
    outbox.welcome(Welcome(instance_id="i", resumed=True, expected_seq=3), [])
    taken = outbox.take(100)
    assert [m.seq for m in taken] == [3, 4, 5]
    assert parents(taken) == [2, 3, 4]


def test_a_session_that_is_not_resumed_starts_anew() -> None:
    outbox = opened()
    outbox.put(delta(1))
    outbox.take(10)
    outbox.close()
    outbox.greet({0: 1}, 0)
    outbox.welcome(Welcome(instance_id="j"), [RelayMessage(rank_state=state())])
    assert [(m.seq, m.WhichOneof("body")) for m in outbox.take(10)] == [(1, "rank_state")]


def test_a_resumption_that_does_not_fit_breaks_the_link() -> None:
    for expected in (0, 99):
        outbox = opened()
        outbox.put(delta(1))
        outbox.take(1)
        outbox.acknowledge(1)
        outbox.close()
        outbox.greet({0: 1}, 0)
        outbox.welcome(Welcome(instance_id="i", resumed=True, expected_seq=expected), [])
        assert outbox.phase is Phase.BROKEN
        outbox.close()
        assert outbox.greet({0: 1}, 0) == ("", 0)


def test_a_second_welcome_breaks_the_link() -> None:
    outbox = opened()
    outbox.welcome(Welcome(instance_id="i"), [])
    assert outbox.phase is Phase.BROKEN


def test_a_restart_that_is_not_acknowledged_forbids_to_resume() -> None:
    outbox = opened()
    outbox.put(Body.of(RelayMessage(rank_state=state(incarnation=2))))
    outbox.take(10)
    outbox.close()
    assert outbox.greet({0: 2}, 0) == ("", 0)


def test_a_restart_that_is_acknowledged_does_not() -> None:
    outbox = opened()
    outbox.put(Body.of(RelayMessage(rank_state=state(incarnation=2))))
    outbox.take(10)
    outbox.acknowledge(1)
    outbox.close()
    assert outbox.greet({0: 2}, 0) == ("i", 2)


def test_who_falls_behind_loses_the_session_not_the_relays_memory() -> None:
    outbox = opened()
    for number in range(1000):
        outbox.put(delta(number))
    assert outbox.phase is Phase.BROKEN
    assert outbox.overflows == 1
    assert outbox.take(10) == []
    outbox.close()
    assert outbox.greet({0: 1}, 0) == ("", 0)


def test_who_stays_away_loses_the_session() -> None:
    outbox = opened()
    outbox.close()
    for number in range(1000):
        outbox.put(delta(number))
    assert outbox.phase is Phase.CLOSED
    assert outbox.greet({0: 1}, 0) == ("", 0)


def test_bytes_are_bounded_too() -> None:
    outbox = opened(Limits(8, 100_000, waiting_messages=1000, waiting_bytes=10_000))
    for _ in range(3):
        outbox.put(Body.of(RelayMessage(delta=Delta(hashes=bytes(4000)))))
    assert outbox.phase is Phase.BROKEN


def test_a_snapshot_goes_between_live_deltas() -> None:
    outbox = opened()
    outbox.grant([0])
    for number in range(6):
        outbox.put(delta(number))
    taken = []
    while part := outbox.take(4):
        taken += part
        outbox.acknowledge(part[-1].seq)
    assert [m.seq for m in taken] == list(range(1, 12))
    assert parents(taken) == list(range(6))
    assert kinds(taken).index("snapshot_begin") < kinds(taken).index("snapshot_end")
    assert kinds(taken).index("snapshot_end") > 6


def test_a_snapshot_is_granted_once_and_survives_a_resumption() -> None:
    outbox = opened()
    outbox.grant([0, 0])
    first = outbox.take(2)
    outbox.close()
    outbox.greet({0: 1}, 0)
    outbox.welcome(Welcome(instance_id="i", resumed=True, expected_seq=3), [])
    rest = outbox.take(100)
    assert kinds([*first, *rest]) == ["snapshot_begin", "delta", "delta", "delta", "snapshot_end"]


def test_progress_follows_every_delta_and_is_told_once() -> None:
    outbox = opened()
    for seq in range(3):
        outbox.put(delta(seq))
        outbox.progress(state(seq=seq))
    taken = outbox.take(100)
    assert kinds(taken) == ["delta", "delta", "delta", "rank_state"]
    assert taken[-1].rank_state.engine_seq == 2


def test_a_changed_state_takes_the_place_of_progress() -> None:
    outbox = opened()
    outbox.progress(state(seq=1))
    outbox.put(Body.of(RelayMessage(rank_state=state(seq=1))))
    assert kinds(outbox.take(100)) == ["rank_state"]


def test_load_and_totals_are_not_numbered_and_only_the_newest_is_sent() -> None:
    outbox = opened()
    for running in range(3):
        outbox.load(EngineLoad(rank=0, running_requests=running))
        outbox.counters(RelayCounters(totals={"batches": running}))
    load, counters = outbox.take(10)
    assert (load.seq, load.load.running_requests) == (0, 2)
    assert (counters.seq, counters.counters.totals["batches"]) == (0, 2)
    assert outbox.take(10) == []


def test_credits_are_numbered_among_the_deltas() -> None:
    outbox = opened()
    outbox.put(delta(1))
    outbox.put(Body.of(RelayMessage(credit_ended=CreditEnded(decision_id="d"))))
    outbox.put(delta(2))
    assert kinds(outbox.take(10)) == ["delta", "credit_ended", "delta"]
