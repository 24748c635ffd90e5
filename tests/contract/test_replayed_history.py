"""A relay that joins late and replays the history must know what one that listened all along knows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from servingfleet_relay.pipeline import Pipeline
from servingfleet_relay.settings import PipelineSettings
from servingfleet_sim.recordings import Message, read, read_messages
from tests.recordings import recordings_dir

LIVES = ("a-shared-prefix", "a2-text-chat", "c-reset", "b-eviction")
"""One life of one engine, in order; `d-replay` holds its whole history."""
END = 2**64 - 1


def relay(now: float) -> Pipeline:
    settings = PipelineSettings(replica="r", model="m", ranks=(0,), stream_id="s")
    pipeline = Pipeline(settings, now)
    pipeline.socket_up(0, now)
    assert [ask.start_seq for ask in pipeline.take_replay_requests()] == [0]
    return pipeline


def listened(messages: Iterable[Message]) -> Pipeline:
    """The relay was there from the start: its replay found an engine that had published nothing."""
    pipeline = relay(0.0)
    pipeline.replayed(0, [b"", b"", END.to_bytes(8, "big"), b""], 0.0)
    for message in messages:
        pipeline.live(0, message.frames, message.time)
    return pipeline


def replayed(path: Path) -> Pipeline:
    """The relay joined at the end and was told the history."""
    pipeline = relay(0.0)
    for reply in read_messages(path):
        pipeline.replayed(0, reply.frames, 0.0)
    return pipeline


def known(pipeline: Pipeline) -> tuple[object, ...]:
    (rank,) = pipeline.status().ranks
    return (rank.state, rank.engine_seq, pipeline.holdings(0, 0, 1), pipeline.holdings(0, 0, 2))


@pytest.mark.parametrize("name", ["replay-from-0-dealer", "replay-bad-empty"])
def test_the_replayed_history_gives_the_same_state_as_the_live_one(name: str) -> None:
    root = recordings_dir()
    live = listened(m for life in LIVES for m in read(root / life).messages)
    late = replayed(root / "d-replay" / f"{name}.jsonl")
    assert known(late) == known(live)
    assert known(live)[0] == "live"
    assert known(live)[2], "the engine held something at the end"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_replay_of_one_rank_gives_the_state_of_its_live_stream(rank: int) -> None:
    folder = recordings_dir() / "e-data-parallel"
    live = [m for m in read(folder).messages if m.rank == rank]
    replies = read_messages(folder / f"replay-rank{rank}.jsonl")
    settings = PipelineSettings(replica="r", model="m", ranks=(rank,), stream_id="s")
    pipelines = [Pipeline(settings, 0.0), Pipeline(settings, 0.0)]
    for pipeline in pipelines:
        pipeline.socket_up(rank, 0.0)
        pipeline.take_replay_requests()
    pipelines[0].replayed(rank, [b"", b"", END.to_bytes(8, "big"), b""], 0.0)
    for message in live:
        pipelines[0].live(rank, message.frames, message.time)
    for reply in replies:
        pipelines[1].replayed(rank, reply.frames, 0.0)
    assert pipelines[0].holdings(rank, 0, 1) == pipelines[1].holdings(rank, 0, 1) != b""
    assert [p.status().ranks[0].state for p in pipelines] == ["live", "live"]


@pytest.mark.parametrize(("name", "first"), [("replay-from0", 20), ("replay-from5", 20)])
def test_a_ring_that_rolled_leaves_the_history_lost(name: str, first: int) -> None:
    replies = read_messages(recordings_dir() / "d2-replay-rollover" / f"{name}.jsonl")
    assert replies[0].seq == first
    pipeline = relay(0.0)
    for reply in replies:
        pipeline.replayed(0, reply.frames, 0.0)
    (rank,) = pipeline.status().ranks
    assert (rank.state, rank.engine_seq) == ("history_lost", 29)
