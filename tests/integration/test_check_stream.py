"""`servingfleet check-stream`: what a stream is, which invariants hold, what would be indexed, and what not."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from servingfleet_relay.conformance.invariants import TABLE
from servingfleet_sim.recordings import read
from servingfleet_sim.wire import free_ports
from tests.integration.fleet import Fleet
from tests.integration.test_command import run
from tests.integration.test_record import engine
from tests.recordings import recordings_dir

SOUND = ("b-eviction", "f1-gemma3-swa-hybrid", "i2-cpu-offload-self-describing", "sx-eagle")


async def reported(source: str, *options: str) -> tuple[int, dict[str, Any]]:
    status, out, err = await run("check-stream", source, "-o", "json", *options)
    assert out, err
    return status, json.loads(out)


def results(report: dict[str, Any]) -> dict[str, str]:
    return {each["id"]: each["result"] for each in report["invariants"]}


def falsified(into: Path, change: Callable[[list[Any]], None]) -> str:
    """A sound recording of which one event is another."""
    source = recordings_dir() / "z-inproc-base"
    rows = [json.loads(line) for line in (source / "events.jsonl").read_text().splitlines()]
    batch = msgpack.unpackb(base64.b64decode(rows[1]["frames"][2]))
    change(batch)
    rows[1]["frames"][2] = base64.b64encode(msgpack.packb(batch)).decode()
    (into / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(into)


@pytest.mark.parametrize("name", SOUND)
async def test_a_recording_of_a_known_release_is_sound(name: str) -> None:
    status, report = await reported(str(recordings_dir() / name))
    assert (status, report["verdict"]) == (0, "sound")
    assert list(results(report)) == [row.id for row in TABLE]
    assert set(results(report).values()) <= {"holds", "warning", "not checked"}
    assert report["indexed"]
    assert report["not_indexed"] == []


async def test_the_report_says_what_the_stream_is() -> None:
    _, report = await reported(str(recordings_dir() / "m-bytes-hash-sha256cbor"))
    assert (report["engine"], report["version"]) == ("vllm", "0.32.0")
    (rank,) = report["ranks"]
    assert (rank["condition"], rank["fingerprint"]["hashes"]) == ("live", "32 bytes")
    status, out, _ = await run("check-stream", str(recordings_dir() / "b-eviction"))
    assert status == 0
    assert "gpu attention, group 0, unit 32" in out
    assert "SOUND" in out


async def test_keys_that_are_not_told_make_it_an_upper_bound() -> None:
    status, report = await reported(str(recordings_dir() / "s1-sglang-page16"))
    assert (status, report["engine"], report["verdict"]) == (1, "sglang", "degraded")
    assert results(report)["C19"] == "failed"
    assert any("upper bound" in each["what"] for each in report["not_indexed"])


@pytest.mark.parametrize(
    ("change", "invariant", "verdict"),
    [
        (lambda batch: batch[1][0].update(medium="TAPE"), "C22", "degraded"),
        (lambda batch: batch[1][0].update(type="BlockMoved"), "C3", "degraded"),
        (lambda batch: batch[1][0].pop("token_ids"), "C4", "unusable"),
        (lambda batch: batch[1][0].update(block_hashes=[bytes(32)]), "C5", "unusable"),
        (lambda batch: batch.append(0), "C2", "unusable"),
    ],
)
async def test_what_is_not_as_it_was_is_named_with_what_to_do(
    tmp_path: Path, change: Callable[[list[Any]], None], invariant: str, verdict: str
) -> None:
    status, report = await reported(falsified(tmp_path, change))
    assert status == 1
    assert results(report)[invariant] == "failed"
    assert report["verdict"] == verdict, report["not_indexed"]
    (failed,) = [each for each in report["invariants"] if each["id"] == invariant]
    assert failed["act"]
    assert failed["failures"][0]["detail"]
    assert report["not_indexed"]


async def test_a_live_engine_is_heard_and_its_history_fetched(fleet: Fleet) -> None:
    recording = read(recordings_dir() / "b-eviction")
    replayed = await fleet.engine(recording)
    for message in recording.messages[:5]:
        await replayed.publish(message)
    asked = ["--replay", replayed.replay, "--seconds", "30", "--messages", "6"]
    listening = asyncio.create_task(reported(replayed.events, *asked))
    for message in recording.messages[5:] * 40:
        # The subscriber takes what comes after it has joined: publish until it has its six.
        if listening.done():
            break
        await replayed.publish(message)
        await asyncio.sleep(0.02)
    _, report = await listening
    assert report["messages"] == 6
    assert report["ranks"][0]["fingerprint"]["hashes"] == "8 bytes unsigned"


async def test_silence_and_absence_are_told_apart(fleet: Fleet) -> None:
    silent = await engine(fleet)
    status, report = await reported(silent.events, "--seconds", "0.1")
    assert (status, report["verdict"]) == (1, "silent")
    assert set(results(report).values()) == {"not checked"}
    status, _, err = await run("check-stream", f"tcp://127.0.0.1:{free_ports(1)}")
    assert status == 3
    assert "nobody publishes there" in err


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--host-blocks", "100"),
        ("--engine", "sglang", "--block-size", "1"),
        ("--engine", "sglang", "--block-size", "64"),
        ("--engine", "sglang", "--pairs"),
    ],
)
async def test_a_canary_proves_a_live_engine(fleet: Fleet, options: tuple[str, ...]) -> None:
    live = await engine(fleet, *options)
    status, report = await reported(live.events, "--replay", live.replay, "--canary", live.http)
    assert report["canary"] == []
    assert results(report)["C35"] == "holds"
    assert (status, report["verdict"]) == (0, "sound"), report["not_indexed"]
    assert report["engine"] == ("sglang" if "sglang" in options else "vllm")
    assert report["version"]


async def test_a_canary_that_is_not_announced_makes_the_stream_unusable(fleet: Fleet) -> None:
    live = await engine(fleet)
    await live.post("/v1/completions", prompt=list(range(64)), max_tokens=1)
    await live.post("/faults", drop_batches=100, drop_from_replay=True)
    status, report = await reported(live.events, "--replay", live.replay, "--canary", live.http)
    assert status == 1
    assert "0 of 3 blocks announced" in report["canary"][0]
    assert results(report)["C35"] == "failed"
    assert report["verdict"] == "unusable"
