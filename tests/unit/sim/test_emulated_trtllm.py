"""An emulated TensorRT-LLM: what it keeps for who pulls, and that this is enough to predict what it reuses."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from servingfleet_relay.answers import parse_metrics
from servingfleet_sim.emulator.engine import Engine
from servingfleet_sim.emulator.pull import PullBuffer
from servingfleet_sim.emulator.radix_scheduler import TRTLLM
from servingfleet_sim.emulator.settings import Settings
from servingfleet_sim.emulator.speed import INSTANT
from servingfleet_sim.emulator.steps import Limits
from servingfleet_sim.emulator.trtllm_events import TrtllmForm
from servingfleet_sim.emulator.trtllm_server import TrtllmServer
from tests.unit.sim.test_emulated_sglang import PATIENCE_S, Rank

LIMITS = Limits(blocks=33, block_size=4, max_step_tokens=64)
PROMPT = list(range(10, 30))


class Reader:
    """Who pulls: knows what is held by tokens, from the entries alone."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.numbers: list[int] = []
        self.places: dict[tuple[int | None, tuple[int, ...]], int] = {}
        self.held: set[int] = set()

    def read(self, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            self.numbers.append(entry["event_id"])
            data = entry["data"]
            match data["type"]:
                case "stored":
                    parent = data["parent_hash"]
                    for block in data["blocks"]:
                        tokens = tuple(token["token_id"] for token in block["tokens"])
                        name = block["block_hash"]
                        assert name not in self.held, "one copy of each block"
                        self.held.add(name)
                        self.places[parent, tokens] = parent = name
                case "removed":
                    assert self.held.issuperset(data["block_hashes"])
                    self.held.difference_update(data["block_hashes"])
                case kind:
                    assert kind == "created"
                    self.held.clear()

    def reusable(self, prompt: list[int]) -> int:
        """Tokens: whole blocks, never the last token."""
        parent = None
        for at in range(0, (len(prompt) - 1) // self.page * self.page, self.page):
            parent = self.places.get((parent, tuple(prompt[at : at + self.page])))
            if parent not in self.held:
                return at
        return (len(prompt) - 1) // self.page * self.page


def test_what_is_pulled_predicts_every_reuse_under_eviction() -> None:
    rng = random.Random(1)
    rank = Rank(replace(LIMITS, blocks=24, max_step_tokens=16), TRTLLM)
    buffer, reader, form = PullBuffer(1, 10_000), Reader(4), TrtllmForm(23, 92)
    roots = [[rng.randrange(1000) for _ in range(24)] for _ in range(4)]
    reused = 0
    for _ in range(200):
        prompt = rng.choice(roots)[: rng.randint(1, 24)]
        prompt += [rng.randrange(1000) for _ in range(rng.randint(0, 6))]
        rank.run()
        entries = [
            entry for batch in rank.batches for entry in json.loads(form.encode(batch, 0.0, 0))
        ]
        rank.batches.clear()
        asyncio.run(buffer.send(0, 0, (json.dumps(entries).encode(),)))
        reader.read(buffer.drain())
        predicted = reader.reusable(prompt)
        sequence = rank.ask(tuple(prompt), rng.randint(1, 9))
        rank.run()
        assert sequence.cached_tokens == predicted
        reused += predicted
    assert reused > 500
    assert reader.numbers == list(range(len(reader.numbers)))


def test_a_prompt_in_parts_is_told_with_its_last_and_an_answer_with_its_last_part_of_a_block() -> (
    None
):
    rank = Rank(replace(LIMITS, max_step_tokens=8), TRTLLM)
    rank.ask(tuple(PROMPT), tokens=7)
    for _ in range(2):
        rank.step()
    assert rank.pages() == ["Cleared 0"]
    rank.run()
    # 26 tokens are computed: five blocks with the prompt, one and a half with the answer.
    assert rank.pages() == ["Cleared 0", "Stored 5", "Stored 2"]


async def test_what_overflows_leaves_a_hole_in_the_numbers() -> None:
    buffer = PullBuffer(2, 3)
    for rank in (0, 1, 0, 0):
        await buffer.send(rank, 0, (json.dumps([{"rank": rank}]).encode(),))
    await buffer.send(1, 0, (json.dumps([{"rank": 1}]).encode(),), live=False)
    assert [(e["rank"], e["event_id"]) for e in buffer.drain()] == [(1, 0), (0, 1), (0, 2)]
    assert buffer.drain() == []
    await buffer.send(1, 0, (json.dumps([{"rank": 1}]).encode(),))
    assert buffer.drain() == [{"event_id": 2, "rank": 1}]


async def test_the_server_answers_each_event_once() -> None:
    form = TrtllmForm(32, 128, names_ranks=True)
    settings = Settings(LIMITS, INSTANT, 2, engine="trtllm", form=form, vocabulary=1000)
    engine = Engine(settings, b"")
    opened = asyncio.Event()
    running = asyncio.create_task(engine.run(opened))
    await asyncio.wait_for(opened.wait(), PATIENCE_S)
    try:
        async with TestClient(TestServer(TrtllmServer(engine).app())) as http:

            async def post(path: str, **body: Any) -> Any:
                headers = {"X-data-parallel-rank": "1"}
                async with http.post(path, json=body, headers=headers) as response:
                    return await response.json()

            first = await post("/v1/completions", prompt=PROMPT, max_tokens=1)
            again = await post("/v1/completions", prompt=PROMPT, max_tokens=1)
            assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
            assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
            entries = await post("/kv_cache_events")
            seen = [(e["attention_dp_rank"], e["data"]["type"]) for e in entries]
            assert sorted(seen) == [(0, "created"), (1, "created"), (1, "stored")]
            assert await post("/kv_cache_events") == []
            async with http.get("/metrics") as response:
                (stats,) = await response.json()
            assert stats["kvCacheStats"]["maxNumBlocks"] == 64
            async with http.get("/prometheus/metrics") as response:
                found = parse_metrics(await response.text(), (0,))
            assert (found.engine, found.gpu_blocks) == ("trtllm", 64)
            load = found.loads[0]
            assert (load.running_requests, load.waiting_requests) == (0, 0)
            assert load.HasField("kv_usage")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
