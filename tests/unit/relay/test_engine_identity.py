"""The relay asks an engine over HTTP what it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from aiohttp import web

from servingfleet_protos.v1.stream_pb2 import EngineLoad
from servingfleet_relay.load import EngineHttp, Identity, ScrapeFailed, watch_engine
from servingfleet_relay.pipeline import Pipeline
from servingfleet_relay.settings import PipelineSettings, RelaySettings

DEADLINE_S = 10.0
SETTINGS = RelaySettings(sockets=(), schedulers=(), scrape_interval_s=0.01)
VLLM: dict[str, object] = {
    "/version": {"version": "0.32.0"},
    "/metrics": 'vllm:num_requests_running{engine="0"} 1\n',
}
SGLANG: dict[str, object] = {"/server_info": {"version": "0.5.23", "internal_states": []}}
OLDER_SGLANG: dict[str, object] = {"/get_server_info": {"version": "0.5.9", "internal_states": []}}
TRTLLM: dict[str, object] = {
    "/version": {"version": "1.2.1"},
    "/v1/models": {"data": [{"id": "m", "owned_by": "tensorrt_llm"}]},
    "/metrics": [{"numActiveRequests": 3, "kvCacheStats": {"maxNumBlocks": 9}}],
}
OTHER: dict[str, object] = {"/version": {"version": "1.2.1"}, "/metrics": "[]"}


@asynccontextmanager
async def serving(
    answers: dict[str, object], asked: list[str] | None = None
) -> AsyncIterator[EngineHttp]:
    """An engine that answers these paths, as they are when it is asked. Notes in `asked` what it was asked for."""
    paths = [] if asked is None else asked

    async def answer(request: web.Request) -> web.Response:
        paths.append(request.path)
        found = answers.get(request.path)
        if found is None:
            raise web.HTTPNotFound
        return web.Response(text=found) if isinstance(found, str) else web.json_response(found)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = EngineHttp(f"http://127.0.0.1:{runner.addresses[0][1]}", SETTINGS)
    try:
        yield engine
    finally:
        await engine.close()
        await runner.cleanup()


@asynccontextmanager
async def watching(engine: EngineHttp, pipeline: Pipeline) -> AsyncIterator[None]:
    task = asyncio.create_task(watch_engine(engine, SETTINGS, pipeline, lambda: None))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def reached(pipeline: Pipeline, condition: Callable[[], bool]) -> None:
    changed = asyncio.Event()
    pipeline.on_output = changed.set
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await changed.wait()
            changed.clear()


def automatic() -> Pipeline:
    return Pipeline(PipelineSettings("r", "m", (0,), "s", engine="auto"), 0.0)


@pytest.mark.parametrize(
    ("answers", "identity"),
    [
        (VLLM, Identity("vllm", "0.32.0")),
        (SGLANG, Identity("sglang", "0.5.23")),
        (OLDER_SGLANG, Identity("sglang", "0.5.9")),
        (TRTLLM, Identity("trtllm", "1.2.1")),
    ],
)
async def test_an_engine_is_known_by_its_answers(
    answers: dict[str, object], identity: Identity
) -> None:
    async with serving(answers) as engine:
        assert await engine.identity((0,)) == identity


async def test_an_engine_that_answers_like_no_other_is_not_guessed_at() -> None:
    async with serving(OTHER) as engine:
        with pytest.raises(ScrapeFailed, match="of no engine that we know"):
            await engine.identity((0,))


async def test_a_relay_waits_until_the_engine_says_what_it_is() -> None:
    pipeline, answers = automatic(), dict(OTHER)

    def reason() -> str:
        return pipeline.status().ranks[0].reason

    async with serving(answers) as engine, watching(engine, pipeline):
        await reached(pipeline, lambda: "of no engine that we know" in reason())
        assert (pipeline.status().engine, pipeline.status().ranks[0].state) == ("", "unproven")
        answers.clear()
        answers.update(SGLANG)
        # It has no metrics: that it is SGLang is known all the same.
        await reached(pipeline, lambda: pipeline.status().engine == "sglang")
        assert "engine unknown" not in reason()


async def test_tensorrt_llm_is_known_without_reading_its_statistics_away() -> None:
    asked: list[str] = []
    async with serving(TRTLLM, asked) as engine:
        await engine.identity((0,))
    assert "/metrics" not in asked


def trtllm(*, pull: bool) -> Pipeline:
    settings = PipelineSettings("r", "m", (0,), "s", engine="trtllm", pull=pull)
    return Pipeline(replace(settings, engine_block_tokens=32), 0.0)


async def test_a_relay_that_pulls_reads_the_statistics_where_there_are_no_metrics() -> None:
    pipeline = trtllm(pull=True)
    asked: list[str] = []
    async with serving(TRTLLM, asked) as engine, watching(engine, pipeline):
        await reached(pipeline, lambda: "/metrics" in asked)
        assert asked[-2:] == ["/prometheus/metrics", "/metrics"]


async def test_a_relay_that_does_not_pull_leaves_the_statistics_to_others() -> None:
    asked: list[str] = []
    async with serving(TRTLLM, asked) as engine:
        failed = asyncio.Event()
        task = asyncio.create_task(watch_engine(engine, SETTINGS, trtllm(pull=False), failed.set))
        async with asyncio.timeout(DEADLINE_S):
            await failed.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert "/prometheus/metrics" in asked
    assert "/metrics" not in asked


def listening(pipeline: Pipeline) -> list[EngineLoad]:
    """The loads that the pipeline is told, as they come."""
    told: list[EngineLoad] = []
    take = pipeline.load

    def tell(load: EngineLoad, now: float | None = None) -> None:
        take(load, now)
        told.append(load)
        pipeline.on_output()

    pipeline.load = tell  # type: ignore[method-assign]
    return told


async def test_what_adapters_the_engine_has_loaded_goes_out_with_its_load() -> None:
    rows = [{"id": "m"}, {"id": "sql", "parent": "m"}, {"id": "half \ud800", "parent": "m"}]
    async with serving({**VLLM, "/v1/models": {"data": rows}}) as engine:
        pipeline = automatic()
        told = listening(pipeline)
        async with watching(engine, pipeline):
            await reached(pipeline, lambda: bool(told))
    assert (list(told[0].adapters), told[0].adapters_known) == (["sql"], True)


async def test_sglangs_metrics_do_not_take_back_what_its_load_tells_of_waiting_tokens() -> None:
    answers = {
        **SGLANG,
        "/v1/loads": {"loads": [{"dp_rank": 0, "num_waiting_uncached_tokens": 900}]},
        "/metrics": "sglang:num_running_reqs 5\n",
        "/v1/models": {"data": [{"id": "m"}, {"id": "sql", "parent": "m"}]},
    }
    async with serving(answers) as engine:
        pipeline = automatic()
        told = listening(pipeline)
        async with watching(engine, pipeline):
            await reached(pipeline, lambda: len(told) > 1)
    assert (told[1].running_requests, told[1].waiting_tokens) == (5, 900)
    assert list(told[1].adapters) == ["sql"]
