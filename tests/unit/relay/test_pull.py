"""Pulling an engine's events over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_relay.load import EngineHttp, ScrapeFailed
from servingfleet_relay.pipeline import Pipeline
from servingfleet_relay.pull import Puller, entries_of
from servingfleet_relay.settings import PipelineSettings, RelaySettings
from tests.unit.relay.batches import tokens
from tests.unit.relay.entries import block, created, stored

DEADLINE_S = 10.0
ANSWERS_AFTER_S = 0.2
"""The engine waits for more before it answers: 2 s, and some releases twice."""
SETTINGS = RelaySettings(
    sockets=(), schedulers=(), pull_interval_s=0.01, scrape_deadline_s=ANSWERS_AFTER_S / 4
)


class Engine:
    """Answers each entry once, or refuses."""

    def __init__(self) -> None:
        self.entries: list[object] = []
        self.refuses = False
        self.breaks_off = False
        self.answers_after_s = 0.0
        self.asked = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        assert request.method == "POST"
        self.asked.set()
        if self.refuses:
            raise web.HTTPServiceUnavailable
        taken, self.entries = self.entries, []
        await asyncio.sleep(self.answers_after_s)
        if self.breaks_off:
            return web.Response(text=json.dumps(taken)[:-1])
        return web.json_response(taken)


@asynccontextmanager
async def pulling(engine: Engine) -> AsyncIterator[Pipeline]:
    app = web.Application()
    app.router.add_route("*", "/kv_cache_events", engine.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    http = EngineHttp(f"http://127.0.0.1:{runner.addresses[0][1]}", SETTINGS)
    settings = PipelineSettings(
        "r", "m", (0,), "s", engine="trtllm", pull=True, engine_block_tokens=32
    )
    pipeline = Pipeline(settings, 0.0)
    task = asyncio.create_task(Puller(http, SETTINGS, pipeline).run())
    try:
        yield pipeline
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await http.close()
        await runner.cleanup()


async def reached(pipeline: Pipeline, state: str, stored: int = 0) -> None:
    """In this state, with so many stores read."""
    changed = asyncio.Event()
    pipeline.on_output = changed.set
    async with asyncio.timeout(DEADLINE_S):
        while (
            pipeline.status().ranks[0].state != state
            or pipeline.counters().get("events_stored", 0) < stored
        ):
            await changed.wait()
            changed.clear()


async def test_entries_are_read_once_and_held() -> None:
    engine = Engine()
    engine.entries = [created(), stored(1, block(7, tokens(2)))]
    async with pulling(engine) as pipeline:
        await reached(pipeline, "history_lost")
        assert pipeline.counters()["events_stored"] == 1
        assert pipeline.counters()["batches"] == 2


async def test_an_engine_that_waits_for_more_entries_is_waited_for() -> None:
    engine = Engine()
    engine.answers_after_s = ANSWERS_AFTER_S
    engine.entries = [created(), stored(1, block(7, tokens(2)))]
    async with pulling(engine) as pipeline:
        await reached(pipeline, "history_lost")
        assert pipeline.counters()["events_stored"] == 1


async def test_an_engine_that_does_not_answer_is_not_believed_until_its_numbers_go_on() -> None:
    engine = Engine()
    engine.entries = [created()]
    async with pulling(engine) as pipeline:
        await reached(pipeline, "history_lost")
        engine.refuses = True
        await reached(pipeline, "unproven")
        engine.entries = [stored(1, block(7, tokens(2)))]
        engine.refuses = False
        await reached(pipeline, "history_lost")
        assert pipeline.status().ranks[0].incarnation == 1


async def test_an_answer_that_is_no_list_is_none() -> None:
    engine = Engine()
    async with pulling(engine) as pipeline:
        engine.entries = {}  # type: ignore[assignment]
        async with asyncio.timeout(DEADLINE_S):
            await engine.asked.wait()
        assert pipeline.counters().get("batches", 0) == 0


async def test_what_comes_before_an_answer_breaks_off_is_not_lost() -> None:
    engine = Engine()
    engine.breaks_off = True
    engine.entries = [created(), stored(1, block(7, tokens(2)))]
    async with pulling(engine) as pipeline:
        await reached(pipeline, "unproven", stored=1)
        engine.breaks_off = False
        engine.entries = [stored(2, block(8, tokens(2)))]
        await reached(pipeline, "history_lost", stored=2)
        assert pipeline.counters()["gaps"] == 0


_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.lists(_JSON, max_size=5), st.sampled_from([None, 1]), st.booleans())
def test_entries_are_those_of_the_list(entries: list[Any], indent: int | None, plain: bool) -> None:
    text = json.dumps(entries, indent=indent, ensure_ascii=plain)
    assert list(entries_of(f" {text}\n")) == entries


@pytest.mark.parametrize("answer", ["", "{}", "[", "[1", "[1,]", "[1 2]", "[nul]", "[" * 100_000])
def test_what_is_no_list_is_refused(answer: str) -> None:
    with pytest.raises(ScrapeFailed):
        list(entries_of(answer))
