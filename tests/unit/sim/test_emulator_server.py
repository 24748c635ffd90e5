"""An emulated engine on real sockets: what a client, a relay and an auditor see of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import zmq
import zmq.asyncio
from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from servingfleet_sim.emulator.engine import Engine
from servingfleet_sim.emulator.events import generation
from servingfleet_sim.emulator.server import Server
from servingfleet_sim.emulator.settings import Settings
from servingfleet_sim.emulator.speed import GPUS, INSTANT
from servingfleet_sim.emulator.steps import Limits
from servingfleet_sim.processes import running
from servingfleet_sim.wire import END

PATIENCE_S = 10.0
SETTINGS = Settings(
    limits=Limits(blocks=64, block_size=4),
    speed=INSTANT,
    ranks=2,
    events_port=0,
    replay_port=0,
    vocabulary=1000,
)
PROMPT = list(range(10, 22))
FREE_PORTS = ("--port", "0", "--events-port", "0", "--replay-port", "0")


@dataclass
class Running:
    """An engine, a client of it, and a subscriber to rank 0."""

    engine: Engine
    http: TestClient[Any, Any]
    context: zmq.asyncio.Context
    events: zmq.asyncio.Socket

    async def complete(self, **fields: Any) -> dict[str, Any]:
        headers = {"X-data-parallel-rank": "0"}
        body = {"prompt": PROMPT, "max_tokens": 1, **fields}
        async with self.http.post("/v1/completions", json=body, headers=headers) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return answer

    async def message(self) -> tuple[int, list[Any]]:
        """The next batch: its sequence number and its events."""
        topic, seq, payload = await asyncio.wait_for(self.events.recv_multipart(), PATIENCE_S)
        assert topic == b"kv-events"
        return int.from_bytes(seq, "big"), msgpack.unpackb(payload)[1]

    async def replay(self, start: int) -> list[list[bytes]]:
        """What the replay socket of rank 0 answers, up to its end marker."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{self.engine.endpoints.replay_port}")
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        answers: list[list[bytes]] = []
        while not answers or answers[-1][-2] != END:
            answers.append(await asyncio.wait_for(dealer.recv_multipart(), PATIENCE_S))
        return answers


@contextlib.asynccontextmanager
async def started(settings: Settings = SETTINGS) -> AsyncIterator[Running]:
    engine = Engine(settings, b"seed")
    opened = asyncio.Event()
    task = asyncio.create_task(engine.run(opened))
    await asyncio.wait_for(opened.wait(), PATIENCE_S)
    context = zmq.asyncio.Context()
    events = context.socket(zmq.SUB)
    monitor = events.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    events.subscribe(b"")
    events.connect(f"tcp://127.0.0.1:{engine.endpoints.events_port}")
    server = TestServer(Server(engine).app())
    try:
        await asyncio.wait_for(monitor.recv_multipart(), PATIENCE_S)
        async with TestClient(server) as http:
            engine_running = Running(engine, http, context, events)
            await subscribed(engine_running)
            yield engine_running
    finally:
        events.disable_monitor()
        context.destroy(linger=0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def subscribed(engine: Running) -> None:
    """Waits until the subscription has reached the publisher: its test messages arrive."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await engine.engine._sockets.send(0, 0, (b"test", b"", b""), keep=False)
            if await engine.events.poll(20):
                break
        while await engine.events.poll(50):
            await engine.events.recv_multipart()


def counter(page: str, name: str, rank: str) -> float:
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == name and sample.labels.get("engine", rank) == rank:
                return float(sample.value)
    raise AssertionError(f"{name} of rank {rank} is not on the page")


async def test_what_is_published_can_be_replayed_and_reused() -> None:
    async with started() as engine:
        first = await engine.complete()
        again = await engine.complete()
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        seq, (stored,) = await engine.message()
        assert (seq, stored["type"], stored["token_ids"]) == (0, "BlockStored", PROMPT)
        assert (await engine.message())[0] == 1
        answers = await engine.replay(1)
        assert [answer[:-1] for answer in answers] == [
            [b"", b"kv-events", (1).to_bytes(8, "big")],
            [b"", b"", END],
        ]


async def test_replays_of_older_releases_lack_the_topic() -> None:
    old = replace(SETTINGS, engine_version="0.22.0", form=generation("0.22.0"))
    async with started(old) as engine:
        await engine.complete()
        _, (stored,) = await engine.message()
        assert stored[0] == "BlockStored"
        assert len(stored) == 12
        assert [len(answer) for answer in await engine.replay(0)] == [3, 3]


async def test_the_replay_ring_forgets_the_oldest() -> None:
    async with started(replace(SETTINGS, buffer_steps=2)) as engine:
        for start in range(4):
            await engine.complete(prompt=[start] * 8)
        seqs = [int.from_bytes(answer[-2], "big") for answer in await engine.replay(0)]
        assert seqs == [2, 3, int.from_bytes(END, "big")]


async def test_a_dropped_batch_leaves_a_gap_that_replay_closes_or_not() -> None:
    async with started() as engine:
        for replayable in (True, False):
            fault = {"drop_batches": 1, "drop_from_replay": not replayable}
            async with engine.http.post("/faults", json=fault) as response:
                assert response.status == 200
            await engine.complete(prompt=[int(replayable)] * 8)
        await engine.complete()
        assert (await engine.message())[0] == 2
        assert [answer[-2][-1] for answer in await engine.replay(0)] == [0, 2, 255]


async def test_a_stream_is_the_whole_answer_in_parts() -> None:
    async with started() as engine:
        body = {"messages": [{"role": "user", "content": "hello t7"}], "max_tokens": 3}
        async with engine.http.post("/v1/chat/completions", json=body) as response:
            whole = await response.json()
        wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with engine.http.post("/v1/chat/completions", json=wanted) as response:
            lines = [line.decode().removeprefix("data: ") for line in await lines_of(response)]
        assert lines[-1] == "[DONE]"
        *parts, last = map(json.loads, lines[:-1])
        text = "".join(part["choices"][0]["delta"]["content"] for part in parts)
        assert text == whole["choices"][0]["message"]["content"]
        *before, end = [part["choices"][0]["finish_reason"] for part in parts]
        assert (set(before) <= {None}, end) == (True, "length")
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 3


async def idle(http: ClientSession) -> bool:
    """Whether nothing runs on rank 0 any more."""
    async with http.get("/metrics") as response:
        return counter(await response.text(), "vllm:num_requests_running", "0") == 0


async def lines_of(response: Any) -> list[bytes]:
    return [line for line in (await response.read()).split(b"\n\n") if line]


async def test_several_prompts_are_answered_in_order_with_one_usage() -> None:
    async with started() as engine:
        await engine.complete()
        answer = await engine.complete(prompt=[[1, 2], PROMPT], max_tokens=2, return_token_ids=True)
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[1, 2], PROMPT]
        assert answer["usage"]["prompt_tokens"] == 14
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


async def test_ranks_share_no_cache_and_count_by_themselves() -> None:
    async with started() as engine:
        await engine.complete()
        headers = {"X-data-parallel-rank": "1"}
        body = {"prompt": PROMPT, "max_tokens": 1}
        async with engine.http.post("/v1/completions", json=body, headers=headers) as response:
            other = await response.json()
        assert other["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        await engine.complete()
        async with engine.http.get("/metrics") as response:
            page = await response.text()
        assert counter(page, "vllm:prefix_cache_hits_total", "0") == 8
        assert counter(page, "vllm:prefix_cache_hits_total", "1") == 0
        assert counter(page, "vllm:num_requests_running", "1") == 0
        assert counter(page, "vllm:kv_cache_usage_perc", "0") == 0
        assert counter(page, "vllm:cache_config_info", "1") == 1
        assert counter(page, "process_start_time_seconds", "") == engine.engine.started


async def test_a_reset_empties_every_rank() -> None:
    async with started() as engine:
        await engine.complete()
        async with engine.http.post("/reset_prefix_cache") as response:
            assert await response.json() == {"success": True}
        again = await engine.complete()
        assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        await engine.message()
        seq, events = await engine.message()
        assert (seq, [event["type"] for event in events]) == (
            1,
            ["AllBlocksCleared", "BlockStored"],
        )


async def test_what_cannot_be_served_is_refused_with_a_reason() -> None:
    async with started() as engine:
        for body, status in (
            ({"prompt": [1] * 300}, 400),
            ({"prompt": []}, 400),
            ({"prompt": [1], "model": "other"}, 404),
        ):
            async with engine.http.post("/v1/completions", json=body) as response:
                answer = await response.json()
                assert (response.status, answer["error"]["code"]) == (status, status)
                assert answer["error"]["message"]
        async with engine.http.post("/v1/completions", data=b"{") as response:
            assert response.status == 400


async def test_the_tokenizer_of_the_engine_can_be_asked() -> None:
    async with started() as engine:
        async with engine.http.post("/tokenize", json={"prompt": "t5 word"}) as response:
            answer = await response.json()
        assert answer["count"] == 2
        assert answer["tokens"][0] == 5
        async with engine.http.post("/detokenize", json={"tokens": [5, 6]}) as response:
            assert await response.json() == {"prompt": "t5 t6"}


async def test_the_truth_recounts_every_request_and_event(tmp_path: Path) -> None:
    path = tmp_path / "truth.jsonl"
    async with started(replace(SETTINGS, log=path, log_tokens=True)) as engine:
        await engine.complete()
        await engine.complete()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = [row["what"] for row in rows]
    assert kinds == ["started", *["scheduled", "stored", "finished"] * 2]
    assert [row["cached_tokens"] for row in rows if row["what"] == "finished"] == [0, 8]
    first, again = (row for row in rows if row["what"] == "stored")
    assert first["tokens"] == PROMPT
    assert again["hashes"] == first["hashes"][-1:]
    assert again["parent"] == first["hashes"][1]


async def test_a_full_disk_costs_the_account_and_not_the_engine() -> None:
    async with started(replace(SETTINGS, log=Path("/dev/full"))) as engine:
        assert (await engine.complete())["usage"]["completion_tokens"] == 1
        # Started, scheduled, stored, finished: each was tried, none could be written.
        assert engine.engine.truth.lost == 4


async def test_a_client_that_leaves_ends_its_request(tmp_path: Path) -> None:
    truth = tmp_path / "truth.jsonl"
    arguments = [*FREE_PORTS, "--gpu", "l40s", "--log", str(truth)]
    async with running("servingfleet_sim.emulator", arguments, tmp_path / "log") as process:
        port = (await process.event("listening"))["http_port"]
        body = {"prompt": [1], "max_tokens": 10_000, "stream": True}
        async with ClientSession(f"http://127.0.0.1:{port}") as http:
            response = await http.post("/v1/completions", json=body)
            assert await asyncio.wait_for(response.content.readline(), PATIENCE_S)
            response.close()
            while not await idle(http):
                assert process.child.returncode is None
        assert json.loads(truth.read_text().splitlines()[-1])["outcome"] == "aborted"
        assert await asyncio.wait_for(process.stop(), PATIENCE_S) == 0


async def test_a_stop_does_not_wait_for_requests(tmp_path: Path) -> None:
    arguments = [*FREE_PORTS, "--gpu", "l40s", "--speed", "0.1"]
    async with running("servingfleet_sim.emulator", arguments, tmp_path / "log") as process:
        port = (await process.event("listening"))["http_port"]
        body = {"prompt": [1], "max_tokens": 10_000, "stream": True}
        async with ClientSession(f"http://127.0.0.1:{port}") as http:
            response = await http.post("/v1/completions", json=body)
            assert await asyncio.wait_for(response.content.readline(), PATIENCE_S)
            assert await asyncio.wait_for(process.stop(), 3) == 0
            response.close()
        assert [line["event"] for line in process.lines()] == ["listening"]


async def test_a_taken_port_is_said(tmp_path: Path) -> None:
    async with started() as engine:
        taken = engine.engine.endpoints.events_port
        arguments = ["--port", "0", "--events-port", str(taken), "--replay-port", "0"]
        async with running("servingfleet_sim.emulator", arguments, tmp_path / "log") as process:
            assert await asyncio.wait_for(process.child.wait(), PATIENCE_S) == 1
            assert process.lines()[-1]["event"] == "not started"
            assert "Address already in use" in process.lines()[-1]["reason"]


async def test_a_prompt_takes_the_time_that_its_gpu_needs() -> None:
    slow = replace(SETTINGS, limits=Limits(blocks=600, block_size=16), speed=GPUS["l40s"])
    async with started(slow) as engine:
        clock = asyncio.get_running_loop().time
        times = []
        for _ in range(2):
            begun = clock()
            await engine.complete(prompt=[7] * 4001)
            times.append(clock() - begun)
        cold, warm = times
        assert cold > 4001 * slow.speed.token_s
        assert warm < cold / 2
