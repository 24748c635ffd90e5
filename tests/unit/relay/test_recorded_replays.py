"""Replays as a real vLLM answered them."""

from __future__ import annotations

import base64
import json

import pytest

from servingfleet_relay.frames import END_OF_REPLAY, reply_frame
from servingfleet_relay.pipeline import Pipeline
from servingfleet_relay.settings import PipelineSettings
from tests.recordings import recordings_dir

NOW = 0.0
WHOLE = "d-replay/replay-from-0-dealer"
TAIL = "d-replay/replay-tail"
ROLLED = "d2-replay-rollover"


def frames_of(name: str) -> list[list[bytes]]:
    lines = (recordings_dir() / f"{name}.jsonl").read_text().splitlines()
    return [[base64.b64decode(frame) for frame in json.loads(line)["frames"]] for line in lines]


def joined(*, replay: bool = True) -> Pipeline:
    relay = Pipeline(PipelineSettings("r", "m", (0,), "s", replay=replay), NOW)
    relay.socket_up(0, NOW)
    return relay


def serve(relay: Pipeline, name: str, start: int) -> None:
    (request,) = relay.take_replay_requests()
    assert request.start_seq == start
    for frames in frames_of(name):
        relay.replayed(0, frames, NOW)


def state(relay: Pipeline) -> tuple[str, int | None]:
    (rank,) = relay.status().ranks
    return rank.state, rank.engine_seq


def drops(relay: Pipeline) -> dict[str, int]:
    return {k: n for k, n in relay.counters().items() if k.startswith(("drop_", "odd_"))}


def test_a_whole_replay_gives_a_live_rank() -> None:
    relay = joined()
    serve(relay, WHOLE, 0)
    assert state(relay) == ("live", 150)
    assert drops(relay) == {}
    assert relay.counters()["events_stored"] == 141


def test_the_replayed_history_holds_what_the_live_one_held() -> None:
    replayed = joined()
    serve(replayed, WHOLE, 0)
    live = joined(replay=False)
    for frames in frames_of(WHOLE)[:-1]:
        live.live(0, frames[1:], NOW)
    assert state(live) == state(replayed)
    for confidence in (1, 2):
        assert live.holdings(0, 0, confidence) == replayed.holdings(0, 0, confidence)


def test_a_reply_without_topic_reads_the_same() -> None:
    relay = joined()
    relay.take_replay_requests()
    for topic_less in ([frames[0], *frames[2:]] for frames in frames_of(WHOLE)):
        relay.replayed(0, topic_less, NOW)
    assert state(relay) == ("live", 150)


def test_a_short_gap_is_closed_by_the_recorded_tail() -> None:
    relay = joined()
    relay.take_replay_requests()
    batches = frames_of(WHOLE)[:-1]
    for frames in batches[:149]:
        relay.replayed(0, frames, NOW)
    relay.replayed(0, frames_of(TAIL)[-1], NOW)
    assert state(relay) == ("live", 148)
    relay.live(0, batches[150][1:], NOW)
    serve(relay, TAIL, 148)
    assert state(relay) == ("live", 150)


def test_a_restarted_engine_knows_nothing_beyond_its_end() -> None:
    relay = joined()
    serve(relay, WHOLE, 0)
    relay.socket_down(0, NOW)
    relay.socket_up(0, NOW)
    serve(relay, "d-replay/replay-beyond-end", 150)
    assert relay.counters()["engine_restarts"] == 1
    assert relay.holdings(0, 0, 1) == b""
    assert [request.start_seq for request in relay.take_replay_requests()] == [0]


@pytest.mark.parametrize("name", ["replay-from0", "replay-from5"])
def test_a_rolled_ring_loses_history(name: str) -> None:
    relay = joined()
    serve(relay, f"{ROLLED}/{name}", 0)
    assert state(relay) == ("history_lost", 29)


def test_a_ring_that_rolled_past_our_last_batch_clears_and_goes_on() -> None:
    relay = joined()
    relay.take_replay_requests()
    events = frames_of(f"{ROLLED}/events")
    for frames in events[:6]:
        relay.replayed(0, [b"", *frames], NOW)
    relay.replayed(0, frames_of(f"{ROLLED}/replay-beyond")[0], NOW)
    assert state(relay) == ("live", 5)
    relay.live(0, events[29], NOW)
    serve(relay, f"{ROLLED}/replay-from5", 5)
    assert state(relay) == ("history_lost", 29)
    assert relay.counters()["histories_lost"] == 1


def test_the_end_marker_is_recognised() -> None:
    assert reply_frame(frames_of(WHOLE)[-1]).seq == END_OF_REPLAY


def test_a_restart_with_the_same_prompts_is_a_new_life() -> None:
    relay = joined(replay=False)
    for frames in frames_of("j-restart/events"):
        relay.live(0, frames, NOW)
    (rank,) = relay.status().ranks
    assert (rank.incarnation, rank.state) == (2, "live")
    assert drops(relay) == {}
