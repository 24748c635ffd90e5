from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from servingfleet_protos.v1 import common_pb2, routing_pb2, stream_pb2
from servingfleet_scheduler.errors import SessionRefused
from servingfleet_scheduler.policy.estimate import prefill_seconds
from servingfleet_scheduler.policy.speeds import DEFAULTS
from servingfleet_scheduler.service import Scheduler

from .helpers import (
    LIVE,
    MODEL,
    FakeRelay,
    finished,
    hashes,
    make_scheduler,
    route_request,
    tokens,
)
from .test_sessions import predicted, rank_of

STAGES = [value for value in routing_pb2.ReportRequest.Stage.values() if value]


def opened(**fields: object) -> stream_pb2.CreditOpened:
    """A peer's credit for a prompt of 64 tokens."""
    said = {
        "decision_id": "peer's",
        "hashes": hashes(64),
        "prompt_tokens": 65,
        "origin": "scheduler-2",
        "expires_s": 30.0,
    }
    return stream_pb2.CreditOpened(**said | fields)  # type: ignore[arg-type]


def test_siblings_of_a_dispatched_prompt_are_credited_at_once() -> None:
    scheduler = make_scheduler(static=["r1"])
    scheduler.route(route_request(65), 0.0)
    assert predicted(scheduler) == 64


def siblings(scheduler: Scheduler, number: int, prefix: int, suffix: int) -> Counter[str]:
    """Prompts that begin alike, all at once: how many went where."""
    chosen: Counter[str] = Counter()
    for each in range(number):
        prompt = routing_pb2.Prompt(
            tokens_le32=tokens(prefix) + tokens(suffix, first=10**6 * (each + 1))
        )
        response = scheduler.route(routing_pb2.RouteRequest(model=MODEL, prompt=prompt), 0.0)
        chosen[response.target.replica] += 1
    return chosen


def beside_a_busy_one(**fields: Any) -> Scheduler:
    """r1 is idle; before r2 is, a prompt of 8,000 tokens could be computed three times."""
    scheduler = make_scheduler(**fields)
    for name in ("r1", "r2"):
        FakeRelay(scheduler, name).hello().snapshot()
    busy = routing_pb2.Prompt(tokens_le32=tokens(32_000, first=10**8))
    request = routing_pb2.RouteRequest(model=MODEL, prompt=busy)
    request.only.add(replica="r2")
    scheduler.route(request, 0.0)
    return scheduler


def test_sixteen_siblings_of_one_tick_go_together_when_that_is_faster() -> None:
    assert siblings(beside_a_busy_one(), 16, 8000, 100) == {"r1": 16}
    # Without credits each is thought to compute the whole prefix again.
    assert siblings(beside_a_busy_one(credit=False), 16, 8000, 100)["r2"] > 0


def test_sixteen_siblings_of_one_tick_spread_when_that_is_faster() -> None:
    scheduler = make_scheduler()
    for name in ("r1", "r2"):
        FakeRelay(scheduler, name).hello().snapshot()
    # What they have in common is little against what each has for itself.
    chosen = siblings(scheduler, 16, 320, 4000)
    assert min(chosen["r1"], chosen["r2"]) >= 7


def test_a_hot_prefix_spreads_once_queueing_costs_more_than_recomputing() -> None:
    scheduler = make_scheduler()
    holder = FakeRelay(scheduler, "r1").hello()
    holder.snapshot(hashes(8000))
    FakeRelay(scheduler, "r2").hello().snapshot()
    targets = []
    for each in range(12):
        prompt = routing_pb2.Prompt(
            tokens_le32=tokens(8000) + tokens(2000, first=10**6 * (each + 1))
        )
        request = routing_pb2.RouteRequest(model=MODEL, prompt=prompt)
        queue = {
            candidate.target.replica: candidate.terms[0].seconds
            for candidate in scheduler.explain(request, 0.0).candidates
        }
        target = scheduler.route(request, 0.0).target.replica
        if "r2" not in targets:
            recompute = prefill_seconds(DEFAULTS, 10_000, 0) - prefill_seconds(DEFAULTS, 2000, 8000)
            assert (target == "r2") == (queue["r1"] > queue["r2"] + recompute)
        targets.append(target)
    assert targets[:3] == ["r1"] * 3
    assert min(targets.count("r1"), targets.count("r2")) >= 3


def test_a_credit_is_told_to_the_replicas_relay() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    response = scheduler.route(route_request(65), 0.0)
    (credit,) = relay.take("credit_opened")
    assert credit == stream_pb2.CreditOpened(
        decision_id=response.decision_id,
        rank=0,
        hashes=hashes(64),
        prompt_tokens=65,
        origin="scheduler-1",
        expires_s=60.0,
        work_s=prefill_seconds(DEFAULTS, 65, 0),
        predicted=0,
    )


def test_the_end_of_a_credit_is_told_too() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    response = scheduler.route(route_request(65), 0.0)
    scheduler.report(finished(response.decision_id, prompt=65), 1.0)
    assert [each.decision_id for each in relay.take("credit_ended")] == [response.decision_id]


def whole(scheduler: Scheduler, replica: str = "r1", engine_seq: int = 7) -> FakeRelay:
    """A relay whose rank is known, up to one of the engine's batches."""
    relay = FakeRelay(scheduler, replica=replica).hello()
    relay.snapshot()
    state = stream_pb2.RankState(rank=0, incarnation=1, state=LIVE, engine_seq=engine_seq)
    relay.send(rank_state=state)
    return relay


def told(predicted: int, reported: int, **fields: Any) -> stream_pb2.Outcome:
    """What the relay of `whole` hears a second after the prediction."""
    said = {"rank": 0, "incarnation": 1, "engine_seq": 7, "age_s": 1.0, **fields}
    return stream_pb2.Outcome(predicted=predicted, reported=reported, **said)


def test_what_became_of_a_prompt_is_told_to_the_relay_of_where_it_ran() -> None:
    scheduler = make_scheduler()
    relay, other = whole(scheduler), whole(scheduler, "r2")
    response = scheduler.route(route_request(65), 0.0)
    ran, idle = (relay, other) if response.target.replica == "r1" else (other, relay)
    # What comes meanwhile is of no account: the prediction did not rest on it.
    later = stream_pb2.RankState(rank=0, incarnation=1, state=LIVE, engine_seq=8)
    ran.send(rank_state=later)
    scheduler.report(finished(response.decision_id, prompt=65, cached=48), 1.0)
    assert ran.take("outcome") == [told(0, 48)]
    assert idle.take("outcome") == []
    failed = scheduler.route(route_request(65, first=900), 2.0)
    stage = routing_pb2.ReportRequest.STAGE_FAILED
    scheduler.report(finished(failed.decision_id, prompt=65, stage=stage), 3.0)
    assert ran.take("outcome") == []


def test_a_prediction_within_its_bounds_is_told_as_right() -> None:
    scheduler = make_scheduler()
    relay = whole(scheduler)
    lost = common_pb2.STREAM_STATE_HISTORY_LOST
    relay.send(rank_state=stream_pb2.RankState(rank=0, incarnation=1, state=lost, engine_seq=7))
    response = scheduler.route(route_request(65), 0.0)
    assert response.prediction.upper > 48
    scheduler.report(finished(response.decision_id, prompt=65, cached=48), 1.0)
    assert relay.take("outcome") == [told(48, 48)]


def test_what_rests_on_credits_says_nothing_against_the_stream() -> None:
    scheduler = make_scheduler()
    relay = whole(scheduler)
    relay.hold(hashes(32))
    scheduler.route(route_request(65), 0.0)
    sibling = scheduler.route(route_request(65), 0.0)
    assert sibling.prediction.predicted == 64
    scheduler.report(finished(sibling.decision_id, prompt=65, cached=32), 1.0)
    assert relay.take("outcome") == [told(32, 32)]
    again = scheduler.route(route_request(65), 0.0)
    scheduler.report(finished(again.decision_id, prompt=65, cached=16), 1.0)
    assert relay.take("outcome") == [told(32, 16)], "what was surely held was not there"


@pytest.mark.parametrize("trouble", ["cold", "cut", "doubted"])
def test_what_rests_on_a_stream_that_is_not_whole_is_not_told(trouble: str) -> None:
    scheduler = make_scheduler()
    relay = whole(scheduler)
    match trouble:
        case "cold":
            relay.send(snapshot_begin=stream_pb2.SnapshotBegin(rank=0, incarnation=1))
        case "cut":
            relay.session.close(0.0)
        case "doubted":
            relay.hold(hashes(32), lane=9)
    response = scheduler.route(route_request(65), 0.0)
    if trouble == "cut":
        relay.reconnect()
        relay.hello(resume_instance=scheduler.instance_id, resume_from=1)
    scheduler.report(finished(response.decision_id, prompt=65, cached=48), 1.0)
    assert relay.take("outcome") == []


def test_a_credit_told_after_its_outcome_was_reported_here_is_none() -> None:
    scheduler, peer = make_scheduler(), make_scheduler(instance_id="scheduler-2")
    relay = FakeRelay(scheduler).hello()
    FakeRelay(peer).hello()
    decision_id = peer.route(route_request(65), 0.0).decision_id
    scheduler.report(finished(decision_id, prompt=65), 1.0)
    relay.send(credit_opened=opened(decision_id=decision_id))
    relay.send(credit_ended=stream_pb2.CreditEnded(decision_id=decision_id, origin="scheduler-2"))
    assert predicted(scheduler) == 0
    assert scheduler.streams.drops == {}


def test_the_own_echo_is_ignored() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    scheduler.route(route_request(65), 0.0)
    relay.send(credit_opened=relay.take("credit_opened")[0])
    assert rank_of(scheduler).credits == 1


def test_a_peers_credit_counts_and_ends_with_its_echo() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    relay.send(credit_opened=opened())
    assert predicted(scheduler) == 64
    relay.send(credit_ended=stream_pb2.CreditEnded(decision_id="peer's", origin="scheduler-2"))
    assert predicted(scheduler) == 0


def test_a_peers_credit_expires() -> None:
    scheduler = make_scheduler()
    FakeRelay(scheduler).hello().send(credit_opened=opened())
    scheduler.tick(29.9)
    assert predicted(scheduler) == 64
    scheduler.tick(30.0)
    assert predicted(scheduler) == 0


def test_a_relay_can_not_end_another_replicas_credit() -> None:
    scheduler = make_scheduler()
    FakeRelay(scheduler, "r1").hello().send(credit_opened=opened())
    liar = FakeRelay(scheduler, "r2").hello()
    liar.send(credit_ended=stream_pb2.CreditEnded(decision_id="peer's", origin="scheduler-2"))
    assert predicted(scheduler) == 64
    assert scheduler.streams.drops == {"unknown_credit": 1}


def test_a_relay_can_not_end_this_schedulers_own_credit() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    response = scheduler.route(route_request(65), 0.0)
    relay.send(
        credit_ended=stream_pb2.CreditEnded(decision_id=response.decision_id, origin="scheduler-2")
    )
    assert predicted(scheduler) == 64


def test_credits_that_can_not_be_are_dropped() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    for bad in (
        opened(decision_id=""),
        opened(decision_id="d" * 1025),
        opened(origin=""),
        opened(hashes=bytes(9)),
        opened(prompt_tokens=63),
        opened(expires_s=0.0),
        opened(expires_s=float("nan")),
        opened(expires_s=1e9),
    ):
        relay.send(credit_opened=bad)
    assert scheduler.streams.drops == {"bad_credit": 8}


def test_a_hold_takes_the_place_of_a_credit() -> None:
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler).hello()
    response = scheduler.route(route_request(65), 0.0)
    relay.hold(hashes(64))
    scheduler.report(finished(response.decision_id, prompt=65), 1.0)
    assert predicted(scheduler) == 64


def test_no_more_credits_than_the_limit() -> None:
    scheduler = make_scheduler(static=["r1"], max_credits=2)
    for first in (0, 1000, 2000):
        scheduler.route(route_request(65, first=first), 0.0)
    assert (len(scheduler.credits), scheduler.credits.refused) == (2, 1)


def test_no_more_credited_blocks_than_the_limit() -> None:
    scheduler = make_scheduler(static=["r1"], max_credit_blocks=7)
    for first in (0, 1000):
        scheduler.route(route_request(65, first=first), 0.0)
    assert (len(scheduler.credits), scheduler.credits.refused) == (1, 1)


def served() -> tuple[Scheduler, FakeRelay]:
    """A prompt of four whole blocks was answered at 1 s, and the engine's events are not there yet."""
    scheduler = make_scheduler()
    relay = FakeRelay(scheduler, "r1").hello()
    relay.snapshot()
    decision_id = scheduler.route(route_request(65), 0.0).decision_id
    scheduler.report(finished(decision_id, prompt=65), 1.0)
    return scheduler, relay


def test_what_a_served_prompt_left_is_counted_until_the_relay_has_told_what_is_there() -> None:
    scheduler, relay = served()
    assert predicted(scheduler) == 64
    [ended] = relay.take("credit_ended")
    relay.send(credit_ended=ended)
    assert predicted(scheduler) == 0
    assert len(scheduler.credits) == 0


def test_a_relay_that_tells_nothing_keeps_no_credit_of_what_was_served() -> None:
    scheduler, _ = served()
    scheduler.tick(1.0 + 0.9 * scheduler.settings.credit_served_s)
    assert predicted(scheduler) == 64
    scheduler.tick(1.0 + scheduler.settings.credit_served_s)
    assert predicted(scheduler) == 0
    assert len(scheduler.credits) == 0


def test_a_failed_request_is_credited_no_more() -> None:
    scheduler = make_scheduler(static=["r1"])
    response = scheduler.route(route_request(65), 0.0)
    scheduler.report(
        routing_pb2.ReportRequest(
            decision_id=response.decision_id, stage=routing_pb2.ReportRequest.STAGE_FAILED
        ),
        1.0,
    )
    assert predicted(scheduler) == 0


def test_a_request_that_runs_elsewhere_is_credited_no_more() -> None:
    scheduler = make_scheduler(static=["r1", "r2"])
    response = scheduler.route(route_request(65), 0.0)
    report = routing_pb2.ReportRequest(
        decision_id=response.decision_id, stage=routing_pb2.ReportRequest.STAGE_STARTED
    )
    report.ran_on.replica = "r1" if response.target.replica == "r2" else "r2"
    scheduler.report(report, 1.0)
    assert len(scheduler.credits) == 0


class CreditMachine(RuleBasedStateMachine):
    """Whatever happens to relays and requests, every credit ends."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.scheduler = make_scheduler(
            static=["r3"], credit_ttl_s=10.0, decision_ttl_s=40.0, takeover_silence_s=0.0
        )
        self.relays: dict[str, FakeRelay] = {}
        self.ids: list[str] = []
        self.peers = 0
        self.incarnation = 0

    def _speaking(self) -> Iterator[FakeRelay]:
        for relay in self.relays.values():
            relay.now = self.now
            if relay.session.refused is None:
                yield relay

    @rule(replica=st.sampled_from(["r1", "r2", "r3"]), life=st.integers(0, 99))
    def connect(self, replica: str, life: int) -> None:
        relay = FakeRelay(self.scheduler, replica, now=self.now)
        try:
            relay.hello(stream_id=f"life {life}")
        except SessionRefused:
            relay.session.close(self.now)
        else:
            self.relays[replica] = relay

    @rule(replica=st.sampled_from(["r1", "r2", "r3"]))
    def disconnect(self, replica: str) -> None:
        if replica in self.relays:
            self.relays.pop(replica).session.close(self.now)

    @rule(first=st.integers(0, 3))
    def route(self, first: int) -> None:
        response = self.scheduler.route(route_request(65, first=first * 1000), self.now)
        self.ids.append(response.decision_id)

    @rule(data=st.data(), stage=st.sampled_from(STAGES))
    def report(self, data: st.DataObject, stage: routing_pb2.ReportRequest.Stage.ValueType) -> None:
        if self.ids:
            decision_id = data.draw(st.sampled_from(self.ids))
            self.scheduler.report(finished(decision_id, prompt=65, stage=stage), self.now)

    @rule()
    def restart_engines(self) -> None:
        self.incarnation += 1
        for relay in self._speaking():
            relay.send(rank_state=stream_pb2.RankState(incarnation=self.incarnation, state=LIVE))

    @rule()
    def hear_of_a_peers_dispatch(self) -> None:
        for relay in self._speaking():
            self.peers += 1
            relay.send(credit_opened=opened(decision_id=f"peer {self.peers}", expires_s=5.0))

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.scheduler.tick(self.now)

    @invariant()
    def the_index_holds_no_credit_that_the_table_does_not_know(self) -> None:
        counted = sum(
            index.credits(replica.number, rank)
            for replica in self.scheduler.fleet
            for rank in replica.ranks
            if (index := self.scheduler.fleet.index(replica.model)) is not None
        )
        assert counted <= len(self.scheduler.credits)

    def teardown(self) -> None:
        self.scheduler.tick(self.now + 10.0)
        assert len(self.scheduler.credits) == 0
        self.the_index_holds_no_credit_that_the_table_does_not_know()
        self.scheduler.tick(self.now + 41.0)
        assert len(self.scheduler.decisions) == 0
        assert not any(
            rank.dispatches for replica in self.scheduler.fleet for rank in replica.ranks.values()
        )


CreditMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestEveryCreditEnds = CreditMachine.TestCase
