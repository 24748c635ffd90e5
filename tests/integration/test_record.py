"""`servingfleet record`: a live engine becomes a recording that is verified as the shared ones are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from servingfleet_sim.driving import Driver, Step, read_steps
from servingfleet_sim.processes import Process
from servingfleet_sim.recordings import RecordingError, read
from servingfleet_sim.wire import free_ports
from tests.integration.fleet import Fleet
from tests.integration.test_command import run

FREE_PORTS = ("--port", "0", "--events-port", "0", "--replay-port", "0")
SHARED = list(range(100, 196))


class Engine:
    """An emulated engine and how the command is told of it."""

    def __init__(self, ports: Mapping[str, Any]) -> None:
        self.http = f"http://127.0.0.1:{ports['http_port']}"
        self.events = f"tcp://127.0.0.1:{ports['events_port']}"
        self.replay = f"tcp://127.0.0.1:{ports['replay_port']}"

    async def record(self, into: Path, *options: str) -> tuple[int, str, str]:
        asked = ["record", self.events, "--engine-http", self.http, "-o", str(into), *options]
        return await run(*asked)

    async def post(self, path: str, **body: object) -> None:
        async with httpx.AsyncClient(base_url=self.http) as http:
            (await http.post(path, json=body)).raise_for_status()


async def engine(fleet: Fleet, *options: str) -> Engine:
    process: Process = await fleet.process(
        "servingfleet_sim.emulator", *FREE_PORTS, "--gpu", "instant", *options
    )
    return Engine(await process.event("listening"))


def prompts(at: Path, *rows: Mapping[str, Any]) -> Path:
    at.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return at


def asked(prompt: Sequence[int] | str, **more: object) -> dict[str, Any]:
    return {"request": {"prompt": prompt, "max_tokens": 2, **more}}


async def judged(folder: Path) -> dict[str, Any]:
    """The verdict of `verify`, which must find nothing wrong."""
    status, out, err = await run("verify", str(folder), "-o", "json")
    assert status == 0, out + err
    (result,) = json.loads(out)
    return dict(result)


async def test_a_recording_of_a_live_engine_verifies_request_by_request(
    fleet: Fleet, tmp_path: Path
) -> None:
    live = await engine(fleet, "--adapter", "french", "--ranks", "2")
    text = " ".join(f"t{token}" for token in SHARED)
    plan = prompts(
        tmp_path / "plan.jsonl",
        {**asked(SHARED), "label": "cold"},
        {**asked([*SHARED, 7]), "label": "warm"},
        asked(text),
        asked(SHARED, cache_salt="s"),
        asked(SHARED, lora="french"),
        {**asked(SHARED), "headers": {"X-data-parallel-rank": "1"}},
        {"control": "/reset_prefix_cache"},
        asked(list(range(300, 340))),
        asked([*SHARED, 8]),
    )
    folder = tmp_path / "recorded"
    options = ["--ranks", "2", "--replay", live.replay, "--prompts", str(plan)]
    status, out, err = await live.record(folder, *options)
    assert status == 0, out + err
    assert "8 requests, 0 refused" in out
    recording = read(folder)
    assert recording.adapter == "vllm"
    assert recording.engine["vllm"] == "0.33.0"
    # Each on a rank of its own choice but for the one that names it: only what is certain is counted here.
    assert recording.requests[0].cached_tokens == 0
    assert [request.adapter for request in recording.requests].count("french") == 1
    assert recording.requests[2].prompts == (tuple(SHARED),)
    assert [control.is_reset for control in recording.controls] == [True]
    result = await judged(folder)
    assert (result["requests"], result["wrong"]) == (8, 0)
    status, out, _ = await run("check-stream", str(folder))
    assert status == 0, out


async def test_what_came_before_the_recorder_and_what_was_lost_is_fetched(
    fleet: Fleet, tmp_path: Path
) -> None:
    live = await engine(fleet)
    await live.post("/v1/completions", prompt=SHARED, max_tokens=1)
    # The next batch reaches nobody: only a replay has it.
    await live.post("/faults", drop_batches=1)
    plan = prompts(tmp_path / "plan", asked(SHARED), asked([*SHARED, 1] * 2), asked(SHARED * 2))
    folder = tmp_path / "recorded"
    status, out, err = await live.record(folder, "--replay", live.replay, "--prompts", str(plan))
    assert status == 0, out + err
    recording = read(folder)
    sequence = [message.seq for message in recording.messages]
    assert sequence == list(range(len(sequence)))
    assert recording.requests[0].cached_tokens == 80
    assert (await judged(folder))["exact"] == 3


async def test_a_recording_can_be_asked_again(fleet: Fleet, tmp_path: Path) -> None:
    plan = prompts(tmp_path / "plan", asked(SHARED), asked([*SHARED, 1]), asked(SHARED))
    first, second = tmp_path / "first", tmp_path / "second"
    status, *said = await (await engine(fleet)).record(first, "--prompts", str(plan))
    assert status == 0, said
    newer = await engine(fleet, "--engine-version", "0.20.0", "--model", "other")
    status, *said = await newer.record(second, "--prompts", str(first / "requests.jsonl"))
    assert status == 0, said
    reported = [[request.cached_tokens for request in read(at).requests] for at in (first, second)]
    assert reported == [[0, 96, 80]] * 2
    assert (await judged(second))["exact"] == 3


async def test_who_can_not_be_recorded_is_named(fleet: Fleet, tmp_path: Path) -> None:
    nobody = f"tcp://127.0.0.1:{free_ports(1)}"
    asked_of = ["record", nobody, "--engine", "vllm", "--connect-s", "0.2", "-o"]
    status, _, err = await run(*asked_of, str(tmp_path / "a"))
    assert status == 3
    assert nobody in err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    status, _, err = await run(*asked_of, str(tmp_path / "full"))
    assert status == 2
    assert "not empty" in err
    live = await engine(fleet)
    status, _, err = await live.record(tmp_path / "b", "--engine", "sglang")
    assert status == 3
    assert "is vllm; expected sglang" in err
    status, out, _ = await live.record(tmp_path / "c", "--seconds", "0.1")
    assert status == 1
    assert "nothing was published" in out


async def test_an_engine_that_tells_no_reuse_leaves_nothing_to_verify() -> None:
    usages: list[dict[str, Any]] = [{"prompt_tokens": 3}, {"prompt_tokens": 3}]

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"usage": usages.pop(0)})

    async def settled() -> None: ...

    async with httpx.AsyncClient(
        base_url="http://engine", transport=httpx.MockTransport(answer)
    ) as http:
        driver = Driver(http, "m", lambda: 0.0)
        await driver.play([Step(request={"prompt": [1, 2, 3]})], settled)
        assert not driver.reports_reuse
        assert "cached_tokens" not in driver.finished()[0]
        usages[0]["prompt_tokens_details"] = {"cached_tokens": 2}
        await driver.play([Step(request={"prompt": [1, 2, 3]})], settled)
        assert [row["cached_tokens"] for row in driver.finished()] == [0, 2]


@pytest.mark.parametrize("line", ['{"control": "engine gone"}', '{"request": {}}', "[]", "{"])
def test_a_line_that_can_not_be_asked_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "plan"
    path.write_text(f'{{"request": {{"prompt": [1]}}}}\n{line}\n')
    with pytest.raises(RecordingError, match="plan:2: "):
        read_steps(path)


@pytest.mark.parametrize(
    ("page", "options"),
    [(1, ()), (16, ()), (32, ()), (16, ("--pairs",)), (16, ("--host-blocks", "80"))],
)
async def test_an_emulated_sglang_is_recorded_and_predicted_as_documented(
    fleet: Fleet, tmp_path: Path, page: int, options: Sequence[str]
) -> None:
    sizes = ("--block-size", str(page), "--blocks", str(640 // page + 1))
    live = await engine(fleet, "--engine", "sglang", *sizes, *options)
    others = [list(range(1000 * n, 1000 * n + 200)) for n in range(1, 5)]
    plan = prompts(
        tmp_path / "plan",
        *(asked([*SHARED, *more]) for more in ([], [1], [2], [])),
        asked(SHARED, cache_salt="s"),
        asked([*SHARED, 1], cache_salt="s"),
        *(asked(prompt) for prompt in [*others, *others[::-1]]),
        {"control": "/flush_cache"},
        asked([*SHARED, 1]),
        asked([*SHARED, *SHARED]),
    )
    folder = tmp_path / "recorded"
    status, out, err = await live.record(folder, "--replay", live.replay, "--prompts", str(plan))
    assert status == 0, out + err
    recording = read(folder)
    assert recording.engine["sglang"] == "0.5.23"
    assert sum(request.cached_tokens for request in recording.requests) > 400
    assert [control.is_reset for control in recording.controls] == [True]
    result = await judged(folder)
    # Of pages smaller than a block, only whole blocks are known.
    assert result["exact"] >= result["requests"] - (9 if page < 16 else 0)


async def test_what_a_tensorrt_llm_keeps_is_pulled_and_verified(
    fleet: Fleet, tmp_path: Path
) -> None:
    live = await engine(fleet, "--engine", "trtllm", "--block-size", "32", "--blocks", "21")
    others = [list(range(1000 * n, 1000 * n + 200)) for n in range(1, 5)]
    plan = prompts(
        tmp_path / "plan",
        *(asked([*SHARED, *more]) for more in ([], [1], [2], [])),
        *(asked(prompt) for prompt in [*others, *others[::-1]]),
        asked([*SHARED, 1]),
    )
    folder = tmp_path / "recorded"
    source = ["record", live.http, "-o", str(folder), "--prompts", str(plan), "--quiet-s", "0.05"]
    for missing, options in (
        ("takes them away", []),
        ("--engine-block-tokens", ["--take-events"]),
        ("no replay", ["--take-events", "--engine-block-tokens", "32", "--replay", live.replay]),
    ):
        status, _, err = await run(*source, *options)
        assert status == 2
        assert missing in err
    status, out, err = await run(*source, "--take-events", "--engine-block-tokens", "32")
    assert status == 0, out + err
    recording = read(folder)
    assert (recording.adapter, recording.pulled_unit_tokens) == ("trtllm", 32)
    assert sum(request.cached_tokens for request in recording.requests) > 300
    assert (await judged(folder))["exact"] == 13
    status, _, err = await run("demo", str(folder))
    assert status == 2
    assert "servingfleet verify" in err
    status, out, _ = await run("check-stream", str(folder))
    assert status == 1
    assert "but as an upper bound" in out
    options = ["--take-events", "--engine-block-tokens", "32", "--canary", live.http, "-o", "json"]
    status, out, err = await run("check-stream", live.http, *options)
    report = json.loads(out)
    assert (status, report["verdict"], report["canary"]) == (1, "degraded", [])


async def test_an_engine_that_connects_is_recorded_in_its_relays_place(
    fleet: Fleet, tmp_path: Path
) -> None:
    live = await engine(fleet, "--events-connect")
    plan = prompts(tmp_path / "plan", asked(SHARED), asked([*SHARED, 1]))
    folder = tmp_path / "recorded"
    options = ["--replay", live.replay, "--prompts", str(plan)]
    status, *said = await live.record(folder, *options, "--bind")
    assert status == 0, said
    assert (await judged(folder))["exact"] == 2
    status, *said = await run("check-stream", live.events, "--bind", "--replay", live.replay)
    assert status == 0, said
    status, _, err = await live.record(tmp_path / "b", *options, "--connect-s", "0.2")
    assert status == 3
    assert "--bind" in err
