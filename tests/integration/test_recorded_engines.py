"""Recorded engines on real sockets, real relay processes, a real scheduler process."""

from __future__ import annotations

import pytest

from servingfleet_protos.v1 import common_pb2, fleet_pb2
from servingfleet_sim.recordings import read
from servingfleet_sim.verify import Verdict
from tests.contract.test_recordings import RECORDINGS, recording
from tests.integration.fleet import Fleet
from tests.recordings import recordings_dir

RACES = {"f3-mistral-all-swa"}
"""Nothing but window groups: what the engine keeps is placed by the prompt that was dispatched, which reaches the relay by
another road than the engine's event and may come after it. Until then it counts in `upper` only; `verify`, where nothing
races, is exact."""


@pytest.mark.parametrize("name", RECORDINGS)
async def test_processes_predict_what_the_engine_reported(name: str, fleet: Fleet) -> None:
    played = recording(name)
    scheduler = await fleet.scheduler()
    player = await fleet.player(played, scheduler)
    verdicts = [verdict async for verdict in player.play()]
    assert len(verdicts) == len(played.requests)
    misses = [v for v in verdicts if v.wrong and not (name in RACES and v.in_bounds)]
    assert [describe(v) for v in misses] == []


async def test_the_report_counts_every_outcome_once(fleet: Fleet) -> None:
    recording = read(recordings_dir() / "a-shared-prefix")
    scheduler = await fleet.scheduler()
    player = await fleet.player(recording, scheduler)
    verdicts = [verdict async for verdict in player.play()]
    report = await scheduler.fleet.GetReuse(fleet_pb2.GetReuseRequest())
    (model,) = report.reports
    single = [v for v in verdicts if len(v.request.prompts) == 1]
    assert model.sums.pairs == len(single)
    assert model.sums.prompt == sum(v.request.prompt_tokens for v in single)
    assert model.sums.actual == sum(v.request.cached_tokens for v in single)
    assert model.sums.predicted == sum(v.predicted for v in single)
    assert dict(model.set_aside) == {"shared_usage": 3}


async def test_one_dead_scheduler_does_not_disturb_the_other(fleet: Fleet) -> None:
    recording = read(recordings_dir() / "a2-text-chat")
    first, second = await fleet.scheduler(), await fleet.scheduler()
    engine = await fleet.engine(recording)
    await fleet.relay(engine, "r", "m", first.target, second.target)
    for scheduler in (first, second):
        await scheduler.until(lambda seen: connected(seen, "r"), "the relay")
    await first.process.stop()
    for message in recording.messages:
        await engine.publish(message)
    last = recording.messages[-1].seq
    await second.until(lambda seen: engine_seq(seen, "r") == last, f"engine sequence {last}")


async def test_a_scheduler_that_starts_later_learns_all_by_snapshot(fleet: Fleet) -> None:
    recording = read(recordings_dir() / "a2-text-chat")
    first = await fleet.scheduler()
    engine = await fleet.engine(recording)
    await fleet.relay(engine, "r", "m", first.target)
    await first.until(lambda seen: connected(seen, "r"), "the relay")
    for message in recording.messages:
        await engine.publish(message)
    last = recording.messages[-1].seq
    before = await first.until(lambda seen: engine_seq(seen, "r") == last, f"sequence {last}")
    await first.process.stop()
    again = await fleet.scheduler(listen=first.target)
    after = await again.until(lambda seen: engine_seq(seen, "r") == last, f"sequence {last}")
    after = await again.until(lambda seen: bool(held(seen, "r")), "the snapshot")
    assert held(after, "r") == held(before, "r")


async def test_a_relay_that_dies_leaves_no_credit_behind(fleet: Fleet) -> None:
    recording = read(recordings_dir() / "a2-text-chat")
    scheduler = await fleet.scheduler()
    engine = await fleet.engine(recording)
    relay = await fleet.relay(engine, "r", "m", scheduler.target)
    await scheduler.until(lambda seen: connected(seen, "r"), "the relay")
    await relay.stop()
    seen = await scheduler.until(
        lambda seen: "r" in seen and not seen["r"].connected, "the relay's end"
    )
    assert {rank.state for rank in seen["r"].ranks} == {common_pb2.STREAM_STATE_UNPROVEN}


def describe(v: Verdict) -> tuple[object, ...]:
    """What a failing test shows of a miss."""
    return (
        v.request.number,
        v.request.label,
        v.lower,
        v.predicted,
        v.upper,
        v.request.cached_tokens,
    )


def connected(seen: dict[str, fleet_pb2.Replica], replica: str) -> bool:
    return replica in seen and seen[replica].connected and bool(seen[replica].ranks)


def engine_seq(seen: dict[str, fleet_pb2.Replica], replica: str) -> int | None:
    ranks = seen[replica].ranks if replica in seen else ()
    return next((rank.engine_seq for rank in ranks if rank.HasField("engine_seq")), None)


def held(seen: dict[str, fleet_pb2.Replica], replica: str) -> int:
    ranks = seen[replica].ranks if replica in seen else ()
    return sum(lane.blocks for rank in ranks for lane in rank.lanes)
