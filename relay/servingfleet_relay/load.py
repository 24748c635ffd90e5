"""Reads the engine's HTTP server: load, version, model, when its process started; and sends it a prompt of our own.

Edge. Whatever fails is counted and tried again: a replica without load figures is still routed to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from servingfleet_protos.v1.stream_pb2 import EngineLoad

from .answers import (
    Identity,
    Metrics,
    ScrapeFailed,
    adapters_of,
    cached_tokens,
    identity_of,
    loads_of,
    model_of,
    parse_metrics,
    statistics_of,
)
from .pipeline import Pipeline
from .settings import PipelineSettings, RelaySettings

__all__ = [
    "EngineHttp",
    "Identity",
    "Metrics",
    "ScrapeFailed",
    "identity_of",
    "learn_model",
    "model_of",
    "parse_metrics",
    "send_canary",
    "watch_engine",
]

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 1024 * 1024
"""A vLLM with many ranks and adapters writes some hundred KiB."""
STATISTICS_PATH = "/metrics"
"""TensorRT-LLM's is no text but JSON of its iterations, and reading it drains it."""
METRICS_PATHS = (STATISTICS_PATH, "/prometheus/metrics")
ADAPTERS_S = 5.0
"""Between two looks at the adapters: loading one takes seconds."""
CANARY_S = 120.0
"""One prompt of three blocks, on an engine that may be full."""
CANARY_EVENTS_S = 10.0


class EngineHttp:
    """The engine's HTTP server. Every method raises ScrapeFailed."""

    def __init__(self, base: str, settings: RelaySettings) -> None:
        # No proxy: the engine is in the same pod, or at least as near.
        self._client = httpx.AsyncClient(
            base_url=base, timeout=settings.scrape_deadline_s, trust_env=False
        )
        self._deadline_s = settings.scrape_deadline_s
        self._settings = settings

    async def close(self) -> None:
        """Closes its connections."""
        await self._client.aclose()

    async def metrics(self, ranks: tuple[int, ...], engine: str = "") -> Metrics:
        """Load and identity as its metrics tell them."""
        path = METRICS_PATHS[engine == "trtllm"]
        return parse_metrics((await self._get(path)).decode(errors="replace"), ranks)

    async def statistics(self, ranks: tuple[int, ...]) -> Metrics:
        """TensorRT-LLM's load where it has no metrics as text. Takes the statistics away from whoever else reads them."""
        answer = await self._json(STATISTICS_PATH, deadline_s=self._settings.pull_deadline_s)
        return statistics_of(answer, ranks)

    async def loads(self, ranks: tuple[int, ...]) -> list[EngineLoad]:
        """SGLang's load, by rank, also where it has no metrics."""
        return list(loads_of(await self._json("/v1/loads"), ranks).values())

    async def identity(self, ranks: tuple[int, ...]) -> Identity:
        """Which engine it is, and which release."""
        info = await self._answer("/server_info") or await self._answer("/get_server_info")
        version = await self._answer("/version")
        models = await self._answer("/v1/models")
        identity = identity_of(info, version, None, models)
        if identity is None:
            # Last: TensorRT-LLM has been told by then, and reading its statistics takes them away.
            with contextlib.suppress(ScrapeFailed):
                identity = identity_of(info, version, await self.metrics(ranks), models)
        if identity is None:
            raise ScrapeFailed(
                "its answers to /server_info, /version, /v1/models and /metrics are of no engine that we know"
            )
        return identity

    async def _answer(self, path: str) -> Any:
        """None: it has no (usable) answer."""
        try:
            return await self._json(path)
        except ScrapeFailed:
            return None

    async def adapters(self, engine: str) -> tuple[str, ...] | None:
        """The LoRA adapters that it has loaded; None: it does not say."""
        return adapters_of(await self._answer("/v1/models"), engine)

    async def model(self) -> str:
        """The model that it serves."""
        name = model_of(await self._json("/v1/models"))
        if name is None:
            raise ScrapeFailed("/v1/models names no base model")
        return name

    async def complete(
        self, model: str, prompt: Sequence[int], rank: int | None = None
    ) -> int | None:
        """Asks for one token after a prompt of token ids. Returns what of it the engine says it reused. `rank`: the
        data-parallel rank to run on, None where there is one."""
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        asked = {"model": model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        path = "/v1/completions"
        answer = await self._json(path, "POST", json=asked, headers=headers, deadline_s=CANARY_S)
        return cached_tokens(answer)

    async def drain(self, path: str) -> str:
        """What a POST without a body answers: reading takes it away."""
        settings = self._settings
        answer = await self._get(
            path,
            "POST",
            deadline_s=settings.pull_deadline_s,
            max_bytes=settings.max_pull_bytes,
        )
        return answer.decode(errors="replace")

    async def _json(self, path: str, method: str = "GET", **request: Any) -> Any:
        try:
            answer = bytes(await self._get(path, method, **request))
            return httpx.Response(200, content=answer).json()
        except (ValueError, RecursionError) as error:
            raise ScrapeFailed(f"{path} is no JSON: {error}"[:200]) from error

    async def _get(
        self,
        path: str,
        method: str = "GET",
        *,
        deadline_s: float = 0.0,
        max_bytes: int = MAX_BODY_BYTES,
        **request: Any,
    ) -> bytearray:
        body = bytearray()
        deadline_s = deadline_s or self._deadline_s
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._client.stream(method, path, timeout=deadline_s, **request) as response,
            ):
                if response.status_code != 200:
                    raise ScrapeFailed(f"{path} answers {response.status_code}; expected 200")
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > max_bytes:
                        raise ScrapeFailed(f"{path} is longer than {max_bytes} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise ScrapeFailed(f"{path}: {type(error).__name__} {error}"[:200]) from error
        return body


async def learn_model(engine: EngineHttp, settings: RelaySettings) -> str:
    """Asks until the engine is up and names its model."""
    told = False
    while True:
        try:
            return await engine.model()
        except ScrapeFailed as error:
            if not told:
                log.info("waiting for the engine to name its model", extra={"error": str(error)})
                told = True
            await asyncio.sleep(settings.scrape_interval_s)


async def watch_engine(
    engine: EngineHttp,
    settings: RelaySettings,
    pipeline: Pipeline,
    failed: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    rng: random.Random | None = None,
) -> None:
    """Scrapes until it is cancelled. `failed` is called for every scrape that did not work. `rng`: where a canary is
    sent to each life of the engine, once its block is known."""
    started: float | None = None
    identity: Identity | None = None
    working = True
    canary: asyncio.Task[None] | None = None
    proven: Identity | None = None
    adapters_at = -math.inf
    ranks = pipeline.settings.ranks
    async with asyncio.TaskGroup() as tasks:
        while True:
            try:
                identity = identity or await _identify(engine, pipeline, clock)
                if clock() - adapters_at >= ADAPTERS_S:
                    adapters_at = clock()
                    pipeline.engine_adapters(await engine.adapters(identity.engine))
                told: list[EngineLoad] = []
                if identity.engine == "sglang":
                    told = await _optional_loads(engine, ranks)
                for load in told:
                    pipeline.load(load, clock())
                metrics = await _metrics(engine, identity, pipeline.settings)
                if metrics.started is not None and metrics.started != started:
                    started = metrics.started
                    pipeline.engine_started(started - wall_clock() + clock(), clock())
                    identity, proven = await _identify(engine, pipeline, clock), None
                # Metrics know nothing of waiting tokens: they add to what was told, and replace none of it.
                for load in told:
                    if load.rank in metrics.loads:
                        metrics.loads[load.rank].MergeFrom(load)
                _tell(pipeline, metrics, clock())
                idle = canary is None or canary.done()
                if rng is not None and idle and proven != identity and pipeline.unit_tokens:
                    proven = identity
                    canary = tasks.create_task(send_canary(engine, pipeline, rng), name="canary")
                working = True
            except ScrapeFailed as error:
                failed()
                if working:
                    log.warning("engine not scraped", extra={"error": str(error)})
                working, identity = False, None
            await asyncio.sleep(settings.scrape_interval_s)


def _tell(pipeline: Pipeline, metrics: Metrics, now: float) -> None:
    if metrics.gpu_blocks is not None or metrics.gpu_tokens is not None:
        pipeline.engine_capacity(metrics.gpu_blocks or 0, gpu_tokens=metrics.gpu_tokens or 0)
    if metrics.block_tokens is not None:
        pipeline.engine_unit(metrics.block_tokens, certain=False)
    if metrics.hybrid:
        pipeline.engine_hybrid()
    for load in metrics.loads.values():
        pipeline.load(load, now)
    for rank, progress in metrics.progress.items():
        pipeline.engine_progress(rank, progress.finished, progress.computed, now)


async def _metrics(engine: EngineHttp, identity: Identity, settings: PipelineSettings) -> Metrics:
    try:
        return await engine.metrics(settings.ranks, identity.engine)
    except ScrapeFailed:
        # A relay that pulls is the engine's one reader anyway. Without return_perf_metrics it has nothing else.
        if identity.engine != "trtllm" or not settings.pull:
            raise
        return await engine.statistics(settings.ranks)


async def _optional_loads(engine: EngineHttp, ranks: tuple[int, ...]) -> list[EngineLoad]:
    """Older releases have no such path; their metrics tell what they can."""
    try:
        return await engine.loads(ranks)
    except ScrapeFailed:
        return []


async def _identify(engine: EngineHttp, pipeline: Pipeline, clock: Callable[[], float]) -> Identity:
    """Asks the engine what it is, and tells the pipeline. Raises ScrapeFailed."""
    try:
        identity = await engine.identity(pipeline.settings.ranks)
    except ScrapeFailed as error:
        pipeline.engine_unknown(str(error))
        raise
    try:
        pipeline.engine_found(identity.engine, identity.version, clock())
    except ValueError as error:
        pipeline.engine_unknown(str(error))
        raise ScrapeFailed(str(error)) from error
    if identity.event_block_tokens:
        pipeline.engine_unit(identity.event_block_tokens, certain=True)
    return identity


async def send_canary(engine: EngineHttp, pipeline: Pipeline, rng: random.Random) -> None:
    """Sends each rank a prompt of our own, twice, and holds its events and reports to what must come of it."""
    settings = pipeline.settings
    for rank in settings.ranks:
        fields = {"replica": settings.replica, "rank": rank}
        try:
            canary = pipeline.new_canary(rng)
        except ValueError as error:
            log.warning("no canary", extra={**fields, "error": str(error)})
            return
        pipeline.canary(rank, canary)
        at = rank if len(settings.ranks) > 1 else None
        try:
            first = await engine.complete(settings.model, canary.prompt, at)
            second = await engine.complete(settings.model, canary.prompt, at)
        except ScrapeFailed as error:
            # That it does not answer says nothing of its events.
            pipeline.canary(rank, None)
            log.warning("no canary", extra={**fields, "error": str(error)})
            continue
        waited = 0.0
        while not canary.announced and waited < CANARY_EVENTS_S:
            await asyncio.sleep(0.1)
            waited += 0.1
        different = pipeline.canary_answered(rank, canary, first, second)
        if different:
            log.error("canary failed", extra={**fields, "different": list(different)})
        else:
            log.info("canary passed", extra=fields)
