"""Clocks that jump.

The processes measure time by a clock that does not jump; what they take from the wall clock is shifted under them with
libfaketime, where that is installed. What would happen if their own clock jumped is tried on the pure parts.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from servingfleet_protos.v1 import fleet_pb2
from servingfleet_relay.pipeline import Pipeline
from servingfleet_relay.settings import PipelineSettings
from servingfleet_scheduler.service import Scheduler
from servingfleet_scheduler.settings import SchedulerSettings
from servingfleet_sim.recordings import Control, Message, Recording, read
from servingfleet_sim.recordings import Request as Recorded
from servingfleet_sim.verify import End, Verdict, judge, outcome, rank_of, route_request, timeline
from tests.faults.conftest import Stopwatch
from tests.faults.rig import Rig
from tests.recordings import recordings_dir

HOUR_S = 3600.0
LINK = "the only one"
KEY = b"one key for all schedulers of a fleet"
END_OF_REPLAY = [b"", b"", b"\xff" * 8, b""]


@pytest.fixture
def wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that says by how many seconds the wall clock of processes started from here on is wrong."""
    faketime = shutil.which("faketime")
    if faketime is None:
        pytest.skip("faketime is not installed: nothing else shifts the clock of one process")
    shown = subprocess.run(
        [faketime, "-f", "+0", "printenv", "LD_PRELOAD"], capture_output=True, text=True, check=True
    )
    offset = tmp_path / "offset"
    shift(offset, 0.0)
    monkeypatch.setenv("LD_PRELOAD", shown.stdout.strip())
    monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(offset))
    monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
    return offset


async def test_a_wall_clock_that_jumps_under_every_process_changes_nothing(
    rig: Rig, wall_clock: Path, stopwatch: Stopwatch
) -> None:
    scheduler = await rig.fleet.scheduler()
    engine = await rig.engine("engine", scheduler)
    await rig.settled(scheduler)
    await rig.traffic(10, scheduler)
    for offset in (HOUR_S, -HOUR_S):
        before = engine.account.refresh().last
        shift(wall_clock, offset)
        with stopwatch.measure(f"wall clock {offset:+.0f} s off: live and exact"):
            await rig.traffic(1, scheduler)
            await rig.settled(scheduler)
        # The jump was real: the engine's account shows it.
        assert abs(engine.account.last - before) > HOUR_S / 2
        await rig.traffic(5, scheduler)
        await rig.recovered(scheduler)
    (rank,) = (await scheduler.replicas())["engine"].ranks
    assert rank.incarnation == 1
    await rig.ledger_is_the_recount(scheduler)
    rig.every_answer_is_reported_once()


def shift(wall_clock: Path, seconds: float) -> None:
    wall_clock.write_text(f"{seconds:+.0f}\n")


class Played:
    """A recording played to relay and scheduler in one process, under a clock that jumps."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.offset = 0.0
        """Seconds by which both are wrong."""
        start = next(timeline(recording))[0]
        settings = PipelineSettings(
            replica="r", model="m", ranks=tuple(range(recording.ranks)), stream_id="s"
        )
        self.relay = Pipeline(settings, start)
        self.scheduler = scheduler_at(start)
        self.session = self.scheduler.open_session(start)
        self.session.receive(self.relay.open_link(LINK, start), start)
        self.published: list[Message] = []
        for rank in settings.ranks:
            self.relay.socket_up(rank, start)
        self.open: dict[int, str] = {}
        self.verdicts: list[Verdict] = []
        self.now = start

    def play(self, jumps: dict[int, float]) -> None:
        """`jumps`: by how much more the clock is wrong before that request."""
        self._settle()
        for at, step in timeline(self.recording):
            if isinstance(step, Recorded):
                self.offset += jumps.get(step.number, 0.0)
            self.now = at + self.offset
            self.relay.tick(self.now)
            self.scheduler.tick(self.now)
            # What fell due is said before anything new: grants, acknowledgements.
            self._settle()
            match step:
                case Message():
                    self.published.append(step)
                    self.relay.live(step.rank, step.frames, self.now)
                case Recorded():
                    self._route(step)
                case End():
                    report = outcome(step.request, self.open.pop(step.request.number))
                    self.scheduler.report(report, self.now)
                case Control():
                    raise AssertionError("choose a recording without controls")
            self._settle()

    def sums(self) -> fleet_pb2.ReuseReport:
        (report,) = self.scheduler.get_reuse(fleet_pb2.GetReuseRequest(), self.now).reports
        return report

    def _route(self, request: Recorded) -> None:
        (prompt,) = request.prompts
        rank = rank_of(self.recording, request)
        answer = self.scheduler.route(route_request(request, prompt, "m", "r", rank), self.now)
        self.open[request.number] = answer.decision_id
        self.verdicts.append(judge(self.recording, request, rank, answer.prediction))

    def _settle(self) -> None:
        busy = True
        while busy:
            for ask in self.relay.take_replay_requests():
                for published in self.published:
                    if published.rank == ask.rank and (published.seq or 0) >= ask.start_seq:
                        self.relay.replayed(ask.rank, [b"", *published.frames], self.now)
                self.relay.replayed(ask.rank, END_OF_REPLAY, self.now)
            sent = self.relay.take(LINK, 1024)
            for message in sent:
                self.session.receive(message, self.now)
            answers = self.session.take()
            for answer in answers:
                self.relay.receive(LINK, answer, self.now)
            busy = bool(sent or answers)


@pytest.fixture
def recording() -> Recording:
    """Requests with one prompt each, one after the other, whose engine is alive throughout."""
    whole = read(recordings_dir() / "a-shared-prefix")
    requests = tuple(
        request
        for request, following in pairwise(sorted(whole.requests, key=lambda each: each.start))
        if len(request.prompts) == 1 and request.end < following.start
    )
    return replace(whole, requests=requests, controls=())


@pytest.mark.parametrize("jump", [HOUR_S, -HOUR_S], ids=["ahead", "back"])
def test_pure_parts_predict_the_same_under_a_clock_that_jumps(
    jump: float, recording: Recording
) -> None:
    numbers = [request.number for request in recording.requests]
    smooth, jumping = Played(recording), Played(recording)
    smooth.play({})
    jumping.play({numbers[len(numbers) // 2]: jump})
    assert [(v.predicted, v.request) for v in jumping.verdicts] == [
        (v.predicted, v.request) for v in smooth.verdicts
    ]
    assert not [v for v in jumping.verdicts if v.wrong]
    assert jumping.sums().set_aside == smooth.sums().set_aside == {}
    # Ahead, what came before the jump has left the window of an hour; the counters since the start have all.
    whole = jumping.scheduler.ledger.totals["m"].sums
    assert (whole.pairs, whole.prompt, whole.actual) == (
        len(recording.requests),
        sum(request.prompt_tokens for request in recording.requests),
        sum(request.cached_tokens for request in recording.requests),
    )


def test_a_clock_an_hour_ahead_of_a_decision_counts_its_outcome_as_late_or_expired(
    recording: Recording,
) -> None:
    played = Played(recording)
    played.play({})
    request = recording.requests[-1]
    wanted = route_request(request, request.prompts[0], "m", "r", 0)
    before = played.sums().sums.pairs
    forgotten = played.scheduler.route(wanted, played.now)
    late = played.scheduler.route(wanted, played.now)
    later = played.now + HOUR_S / 2
    played.scheduler.report(outcome(request, late.decision_id), later)
    played.scheduler.tick(later)
    played.scheduler.report(outcome(request, forgotten.decision_id), later)
    played.now = later
    report = played.sums()
    assert report.sums.pairs == before
    assert dict(report.set_aside) == {"late": 2, "expired": 1}
    (rank,) = (
        played.scheduler.list_replicas(fleet_pb2.ListReplicasRequest(), later).replicas[0].ranks
    )
    assert (rank.credits, rank.dispatched_requests) == (0, 0)


@pytest.mark.parametrize("ahead", [HOUR_S, -HOUR_S], ids=["ahead", "behind"])
def test_schedulers_whose_clocks_differ_by_an_hour_account_for_each_others_decisions(
    ahead: float, recording: Recording
) -> None:
    played = Played(recording)
    played.play({})
    other = scheduler_at(played.now + ahead)
    request = recording.requests[-1]
    wanted = route_request(request, request.prompts[0], "m", "r", 0)
    decision = played.scheduler.route(wanted, played.now).decision_id
    session = other.open_session(played.now + ahead)
    session.receive(played.relay.open_link("other", played.now), played.now + ahead)
    other.report(outcome(request, decision), played.now + ahead)
    totals = other.ledger.totals["m"]
    # A token from the past is too old; one from the future is as good as any.
    assert dict(totals.set_aside) == ({"late": 1} if ahead > 0 else {})
    assert totals.sums.pairs == (0 if ahead > 0 else 1)


def scheduler_at(now: float) -> Scheduler:
    return Scheduler(
        SchedulerSettings(), instance_id=f"at {now}", now=now, rng=random.Random(0), token_key=KEY
    )
