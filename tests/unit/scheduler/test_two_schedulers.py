"""Schedulers that hear of each other's dispatches through the relays' streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from servingfleet_protos.v1 import routing_pb2, stream_pb2
from servingfleet_scheduler.metrics import Metrics
from servingfleet_scheduler.service import Scheduler

from .helpers import BLOCK, LIVE, FakeRelay, finished, hashes, make_scheduler, route_request

Stage = routing_pb2.ReportRequest
STAGES = [value for value in Stage.Stage.values() if value]
ECHOED = ("credit_opened", "prefill_ended", "credit_ended")


class Fleet:
    """Replicas whose relays tell every scheduler what one of them has told, in order."""

    def __init__(self, *replicas: str, names: tuple[str, ...] = ("one", "two"), **fields: object):
        self.now = 0.0
        self.fields = fields
        self.replicas = replicas
        self.schedulers: dict[str, Scheduler] = {}
        self.relays: dict[str, dict[str, FakeRelay]] = {}
        self.lives = 0
        for name in names:
            self.start(name)

    def start(self, name: str) -> None:
        """A scheduler begins, or begins anew: what it knew is gone."""
        self.lives += 1
        scheduler = make_scheduler(
            instance_id=f"{name}, life {self.lives}",
            address=f"{name}:7070",
            now=self.now,
            **self.fields,  # type: ignore[arg-type]
        )
        self.schedulers[name] = scheduler
        self.relays[name] = {}
        for replica in self.replicas:
            relay = FakeRelay(scheduler, replica, now=self.now).hello()
            relay.snapshot()
            self.relays[name][replica] = relay

    def echo(self) -> None:
        """The relays pass on what they were told."""
        for replica in self.replicas:
            told = []
            for relays in self.relays.values():
                relay = relays[replica]
                relay.received += relay.session.take()
                told += [each for each in relay.received if each.WhichOneof("body") in ECHOED]
                relay.received.clear()
            for message in told:
                body = message.WhichOneof("body")
                assert body is not None
                for relays in self.relays.values():
                    relays[replica].now = self.now
                    relays[replica].send(**{body: getattr(message, body)})

    def report(self, scheduler: str, decision_id: str, stage: int, prompt: int = 65) -> None:
        said = finished(decision_id, prompt=prompt, stage=stage)
        self.schedulers[scheduler].report(said, self.now)

    def overhear(self, scheduler: str, said: routing_pb2.ReportRequest) -> None:
        """A report of a peer's decision passes that scheduler; of its own, nothing passes."""
        here = self.schedulers[scheduler]
        decision = here.of_peer(said.decision_id)
        if decision is not None:
            here.overhear(said, decision, self.now)

    def queue_s(self, scheduler: str, replica: str = "r1") -> float:
        known = self.schedulers[scheduler].fleet.get(replica)
        assert known is not None
        return known.ranks[0].backlog.ahead(self.now, stale_s=10.0).seconds

    def route(self, scheduler: str, count: int = 65, first: int = 0) -> routing_pb2.RouteResponse:
        return self.schedulers[scheduler].route(route_request(count, first=first), self.now)


def test_a_peers_dispatch_is_work_ahead_here() -> None:
    fleet = Fleet("r1")
    fleet.route("one", 5000)
    assert fleet.queue_s("two") == 0.0
    fleet.echo()
    assert fleet.queue_s("two") == pytest.approx(fleet.queue_s("one")) != 0.0


def test_a_peers_dispatch_of_a_prompt_without_a_whole_block_is_work_too() -> None:
    fleet = Fleet("r1")
    fleet.route("one", BLOCK - 1)
    fleet.echo()
    assert fleet.queue_s("two") == pytest.approx(fleet.queue_s("one")) != 0.0
    assert len(fleet.schedulers["two"].credits) == 0


def test_the_own_echo_adds_no_work() -> None:
    fleet = Fleet("r1")
    fleet.route("one", 5000)
    before = fleet.queue_s("one")
    fleet.echo()
    assert fleet.queue_s("one") == before


@pytest.mark.parametrize("reporter", ["one", "two"])
def test_a_first_token_takes_the_work_away_wherever_it_is_reported(reporter: str) -> None:
    fleet = Fleet("r1")
    decision_id = fleet.route("one", 5000).decision_id
    fleet.echo()
    fleet.report(reporter, decision_id, Stage.STAGE_FIRST_TOKEN)
    fleet.echo()
    assert [fleet.queue_s(name) for name in ("one", "two")] == [0.0, 0.0]
    assert [len(each.credits) for each in fleet.schedulers.values()] == [1, 1]


@pytest.mark.parametrize("stage", [each for each in STAGES if each != Stage.STAGE_STARTED])
@pytest.mark.parametrize("count", [5000, BLOCK - 1])
def test_whoever_passes_a_report_on_counts_its_prompt_as_waiting_no_more(
    stage: int, count: int
) -> None:
    fleet = Fleet("r1")
    decision_id = fleet.route("one", count).decision_id
    fleet.echo()
    said = finished(decision_id, prompt=count, stage=stage)
    fleet.overhear("two", said)
    # One without a block is short enough to wait for its owner's word.
    assert (fleet.queue_s("two") == 0.0) == (count > BLOCK)
    assert len(fleet.schedulers["two"].credits) == (count > BLOCK)
    fleet.report("one", decision_id, stage, prompt=count)
    fleet.echo()
    assert fleet.queue_s("two") == 0.0
    over = stage != Stage.STAGE_FIRST_TOKEN
    assert len(fleet.schedulers["two"].credits) == (count > BLOCK and not over)
    assert not any(each.streams.drops for each in fleet.schedulers.values())


def test_a_report_that_something_runs_elsewhere_takes_its_work_away_at_once() -> None:
    fleet = Fleet("r1", "r2")
    decision = fleet.route("one", 5000)
    fleet.echo()
    said = Stage(decision_id=decision.decision_id, stage=Stage.STAGE_STARTED)
    fleet.overhear("two", said)
    assert fleet.queue_s("two", decision.target.replica) > 0.0
    said.ran_on.replica = "r2" if decision.target.replica == "r1" else "r1"
    fleet.overhear("two", said)
    assert fleet.queue_s("two", decision.target.replica) == 0.0


@pytest.mark.parametrize("stage", [Stage.STAGE_FAILED, Stage.STAGE_ABORTED, Stage.STAGE_FINISHED])
@pytest.mark.parametrize("reporter", ["one", "two"])
def test_an_end_takes_work_and_credit_away_wherever_it_is_reported(
    reporter: str, stage: int
) -> None:
    fleet = Fleet("r1")
    decision_id = fleet.route("one", 5000).decision_id
    fleet.echo()
    fleet.report(reporter, decision_id, stage, prompt=5000)
    fleet.echo()
    assert [fleet.queue_s(name) for name in ("one", "two")] == [0.0, 0.0]
    assert [len(each.credits) for each in fleet.schedulers.values()] == [0, 0]
    assert not any(each.streams.drops for each in fleet.schedulers.values())


def test_a_peer_hears_of_the_end_of_a_prompt_without_a_whole_block() -> None:
    fleet = Fleet("r1")
    decided = fleet.route("one", BLOCK - 1)
    fleet.echo()
    assert fleet.queue_s("two") > 0.0
    fleet.report("one", decided.decision_id, Stage.STAGE_FINISHED, BLOCK - 1)
    fleet.echo()
    assert fleet.queue_s("two") == 0.0


def test_a_new_engine_life_has_nothing_ahead() -> None:
    fleet = Fleet("r1")
    fleet.route("one", 5000)
    fleet.echo()
    for relays in fleet.relays.values():
        relays["r1"].send(rank_state=stream_pb2.RankState(incarnation=1, state=LIVE))
    assert [fleet.queue_s(name) for name in ("one", "two")] == [0.0, 0.0]


def test_a_relay_that_begins_anew_does_not_make_its_engine_idle() -> None:
    fleet = Fleet("r1")
    fleet.route("one", 5000)
    fleet.echo()
    for name, scheduler in fleet.schedulers.items():
        before = fleet.queue_s(name)
        fleet.relays[name]["r1"].session.close(0.0)
        FakeRelay(scheduler, "r1").hello(stream_id="another life")
        assert fleet.queue_s(name) == before > 0.2


def test_a_peers_dispatch_is_taken_to_be_as_old_as_an_own_echo() -> None:
    fleet = Fleet("r1")
    for first in range(20):
        fleet.route("two", first=1000 * first)
        fleet.now += 0.5
        fleet.echo()
    fleet.route("one", 5000)
    fleet.now += 0.5
    fleet.echo()
    # Half a second late: so much of it is computed already.
    assert fleet.queue_s("two") == pytest.approx(fleet.queue_s("one"), abs=0.02)


def test_without_credits_nothing_is_told_but_own_work_counts() -> None:
    fleet = Fleet("r1", credit=False)
    decision_id = fleet.route("one", 5000).decision_id
    fleet.report("one", decision_id, Stage.STAGE_STARTED)
    assert len(fleet.schedulers["one"].credits) == 0
    assert fleet.queue_s("one") > 0.2
    assert fleet.relays["one"]["r1"].session.take()[-1].WhichOneof("body") not in ECHOED


# Disagreement


def test_schedulers_that_know_the_same_agree() -> None:
    fleet = Fleet("r1")
    for relays in fleet.relays.values():
        relays["r1"].hold(hashes(640))
    for _ in range(16):
        fleet.report("one", fleet.route("one", 700).decision_id, Stage.STAGE_FAILED, prompt=700)
        fleet.echo()
    found = fleet.schedulers["two"].disagreement
    assert (found.difference, found.prompt, found.samples) == (0, 1400, 2)
    assert fleet.schedulers["one"].disagreement.samples == 0


def test_what_one_of_them_does_not_know_is_the_disagreement() -> None:
    fleet = Fleet("r1")
    fleet.relays["one"]["r1"].hold(hashes(640))
    for _ in range(8):
        fleet.report("one", fleet.route("one", 700).decision_id, Stage.STAGE_FAILED, prompt=700)
        fleet.echo()
    found = fleet.schedulers["two"].disagreement
    assert (found.difference, found.prompt, found.samples) == (640, 700, 1)
    text = Metrics(fleet.schedulers["two"], lambda: 0.0).text().decode()
    assert "servingfleet_scheduler_peer_prediction_difference_tokens_total 640.0" in text
    assert "servingfleet_scheduler_peer_prediction_prompt_tokens_total 700.0" in text


# Whatever happens


class Death(RuleBasedStateMachine):
    """Schedulers die, engines restart, relays come late: every credit ends, and all work ahead is done in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet("r1", "r2", credit_ttl_s=10.0, decision_ttl_s=40.0)
        self.ids: list[str] = []
        self.incarnation = 0

    @rule(scheduler=st.sampled_from(["one", "two"]), first=st.integers(0, 3), long=st.booleans())
    def route(self, scheduler: str, first: int, *, long: bool) -> None:
        count = 65 if long else 9
        self.ids.append(self.fleet.route(scheduler, count, 1000 * first).decision_id)

    @rule(
        data=st.data(),
        scheduler=st.sampled_from(["one", "two"]),
        stage=st.sampled_from(STAGES),
        elsewhere=st.booleans(),
    )
    def report(self, data: st.DataObject, scheduler: str, stage: int, *, elsewhere: bool) -> None:
        if not self.ids:
            return
        decision_id = data.draw(st.sampled_from(self.ids))
        said = Stage(decision_id=decision_id, stage=stage)  # type: ignore[arg-type]
        if elsewhere:
            said.ran_on.replica = "r2"
        for name in self.fleet.schedulers:
            self.fleet.overhear(name, said)
        self.fleet.schedulers[scheduler].report(said, self.fleet.now)

    @rule()
    def echo(self) -> None:
        self.fleet.echo()

    @rule(scheduler=st.sampled_from(["one", "two"]))
    def die_and_start_again(self, scheduler: str) -> None:
        self.fleet.start(scheduler)

    @rule(replica=st.sampled_from(["r1", "r2"]))
    def restart_an_engine(self, replica: str) -> None:
        self.incarnation += 1
        for relays in self.fleet.relays.values():
            state = stream_pb2.RankState(incarnation=self.incarnation, state=LIVE)
            relays[replica].send(rank_state=state)

    @rule(
        replica=st.sampled_from(["r1", "r2"]),
        waiting=st.none() | st.integers(0, 5),
        running=st.none() | st.integers(0, 5),
        age=st.floats(0, 5),
    )
    def tell_load(self, replica: str, waiting: int | None, running: int | None, age: float) -> None:
        load = stream_pb2.EngineLoad(waiting_requests=waiting, running_requests=running, age_s=age)
        for relays in self.fleet.relays.values():
            relays[replica].now = self.fleet.now
            relays[replica].tell(load=load)

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.fleet.now += seconds
        self.tick()

    def tick(self) -> None:
        for scheduler in self.fleet.schedulers.values():
            scheduler.tick(self.fleet.now)

    def counted(self) -> Iterator[tuple[Scheduler, int]]:
        for scheduler in self.fleet.schedulers.values():
            index = scheduler.fleet.index("model-a")
            assert index is not None
            yield (
                scheduler,
                sum(index.credits(each.number, 0) for each in scheduler.fleet),
            )

    @invariant()
    def no_credit_counts_that_is_not_open_or_twice(self) -> None:
        for scheduler, credits in self.counted():
            assert credits <= len(scheduler.credits)

    def teardown(self) -> None:
        self.fleet.echo()
        self.fleet.now += 10.0
        self.tick()
        for scheduler, credits in self.counted():
            assert (credits, len(scheduler.credits)) == (0, 0)
        self.fleet.now += 41.0
        self.tick()
        for scheduler in self.fleet.schedulers.values():
            assert len(scheduler.decisions) == 0
            for replica in scheduler.fleet:
                rank = replica.ranks[0]
                assert not rank.dispatches
                assert rank.backlog.ahead(self.fleet.now, stale_s=10.0).seconds == 0.0


Death.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestEveryCreditEndsWhoeverDies = Death.TestCase
