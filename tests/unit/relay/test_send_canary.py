"""The relay sends an engine a prompt of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from servingfleet_relay.load import EngineHttp, send_canary, watch_engine
from servingfleet_relay.pipeline import Pipeline
from servingfleet_relay.settings import PipelineSettings, RelaySettings
from tests.unit.relay.batches import END, live, stored

DEADLINE_S = 10.0
UNIT = 16
SETTINGS = RelaySettings(sockets=(), schedulers=(), scrape_interval_s=0.01)
METRICS = (
    'vllm:num_requests_running{engine="0"} 0\n'
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
)


class Engine:
    """Holds what it was asked, and announces it to the relay beside it."""

    def __init__(self, ranks: tuple[int, ...] = (0,)) -> None:
        self.pipeline = Pipeline(PipelineSettings("r", "m", ranks, "s"), 0.0)
        for rank in ranks:
            self.pipeline.socket_up(rank, 0.0)
            self.pipeline.take_replay_requests()
            self.pipeline.replayed(rank, END, 0.0)
        self.held: set[tuple[str, tuple[int, ...]]] = set()
        self.asked: list[tuple[str, int]] = []
        self.seq: dict[str, int] = {}
        self.changed: Callable[[dict[str, Any]], dict[str, Any]] = lambda event: event
        self.reports: Callable[[int], int] = lambda cached: cached
        self.status = 200
        self.scrapes = 0
        self.scraped_after_canary = asyncio.Event()

    async def complete(self, request: web.Request) -> web.Response:
        if self.status != 200:
            raise web.HTTPServiceUnavailable
        asked = await request.json()
        prompt = tuple(asked["prompt"])
        rank = request.headers.get("X-data-parallel-rank", "0")
        self.asked.append((rank, len(prompt)))
        cached = 3 * UNIT if (rank, prompt) in self.held else 0
        if not cached:
            self.held.add((rank, prompt))
            event = self.changed(stored([1, 2, 3], list(prompt[: 3 * UNIT])))
            seq = self.seq.get(rank, 0)
            self.seq[rank] = seq + 1
            self.pipeline.live(int(rank), live(seq, event, rank=int(rank)), 1.0)
        details = {"cached_tokens": self.reports(cached)}
        return web.json_response({"usage": {"prompt_tokens_details": details}})

    async def metrics(self, _: web.Request) -> web.Response:
        # Two scrapes more: another canary would have been sent by then.
        self.scrapes += bool(self.pipeline.counters().get("canaries"))
        if self.scrapes > 2:
            self.scraped_after_canary.set()
        return web.Response(text=METRICS)

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[EngineHttp]:
    app = web.Application()
    app.router.add_post("/v1/completions", engine.complete)
    app.router.add_get("/metrics", engine.metrics)
    app.router.add_get("/version", engine.version)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    http = EngineHttp(f"http://127.0.0.1:{runner.addresses[0][1]}", SETTINGS)
    try:
        yield http
    finally:
        await http.close()
        await runner.cleanup()


async def sent(engine: Engine) -> list[str]:
    """States of the ranks after a canary of blocks of 16."""
    engine.pipeline.engine_unit(UNIT, certain=False)
    async with serving(engine) as http:
        await send_canary(http, engine.pipeline, random.Random(1))
    return [rank.state for rank in engine.pipeline.status().ranks]


async def test_an_engine_that_does_as_expected_passes() -> None:
    engine = Engine()
    assert await sent(engine) == ["live"]
    assert engine.asked == [("0", 49), ("0", 49)]
    assert engine.pipeline.counters()["canaries"] == 1


async def test_every_rank_is_asked_by_its_number() -> None:
    engine = Engine(ranks=(0, 1))
    assert await sent(engine) == ["live", "live"]
    assert engine.asked == [("0", 49), ("0", 49), ("1", 49), ("1", 49)]


@pytest.mark.parametrize(
    "change",
    [
        lambda event: event | {"token_ids": event["token_ids"][::-1]},
        lambda event: event | {"parent_block_hash": 9},
    ],
)
async def test_events_that_are_not_its_prompts_stop_the_stream(
    change: Callable[[dict[str, Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servingfleet_relay.load.CANARY_EVENTS_S", 0.1)
    engine = Engine()
    engine.changed = change
    assert await sent(engine) == ["quarantined"]
    assert "0 of 3 blocks" in engine.pipeline.status().ranks[0].reason


async def test_reports_that_are_not_its_prompts_stop_the_stream() -> None:
    engine = Engine()
    engine.reports = lambda cached: cached // 2
    assert await sent(engine) == ["quarantined"]
    assert "reports 24 cached tokens; expected 48" in engine.pipeline.status().ranks[0].reason


async def test_an_engine_that_does_not_answer_is_not_held_to_it() -> None:
    engine = Engine()
    engine.status = 503
    assert await sent(engine) == ["live"]
    assert engine.pipeline.counters().get("canaries", 0) == 0


async def test_one_is_sent_to_each_life_of_an_engine_whose_block_is_known() -> None:
    engine = Engine()
    async with serving(engine) as http:
        task = asyncio.create_task(
            watch_engine(http, SETTINGS, engine.pipeline, lambda: None, rng=random.Random(1))
        )
        async with asyncio.timeout(DEADLINE_S):
            await engine.scraped_after_canary.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert engine.asked == [("0", 49), ("0", 49)]
    assert engine.pipeline.status().ranks[0].state == "live"
