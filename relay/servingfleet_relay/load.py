"""Reads the engine's HTTP server: load, version, model, when its process started; and sends it a prompt of our own.

Edge. Whatever fails is counted and tried again: a replica without load figures is still routed to.
"""

from __future__ import annotations

import asyncio
import logging
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
    cached_tokens,
    identity_of,
    loads_of,
    model_of,
    parse_metrics,
)
from .conformance.canary import Canary, prompt_of
from .pipeline import Pipeline
from .settings import RelaySettings

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
METRICS_PATHS = ("/metrics", "/prometheus/metrics")
"""TensorRT-LLM's /metrics is no text, and reading it drains it."""
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

    async def close(self) -> None:
        """Closes its connections."""
        await self._client.aclose()

    async def metrics(self, ranks: tuple[int, ...], engine: str = "") -> Metrics:
        """Load and identity as its metrics tell them."""
        path = METRICS_PATHS[engine == "trtllm"]
        return parse_metrics((await self._get(path)).decode(errors="replace"), ranks)

    async def loads(self, ranks: tuple[int, ...]) -> list[EngineLoad]:
        """SGLang's load, by rank, also where it has no metrics."""
        return list(loads_of(await self._json("/v1/loads"), ranks).values())

    async def identity(self, ranks: tuple[int, ...]) -> Identity:
        """Which engine it is, and which release."""
        info = await self._answer("/server_info") or await self._answer("/get_server_info")
        version = await self._answer("/version")
        models = await self._answer("/v1/models")
        try:
            metrics = await self.metrics(ranks)
        except ScrapeFailed:
            metrics = None
        identity = identity_of(info, version, metrics, models)
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

    async def drain(self, path: str) -> Any:
        """What a POST without a body answers: reading takes it away."""
        return await self._json(path, "POST")

    async def _json(self, path: str, method: str = "GET", **request: Any) -> Any:
        try:
            return httpx.Response(200, content=await self._get(path, method, **request)).json()
        except ValueError as error:
            raise ScrapeFailed(f"{path} is no JSON: {error}"[:200]) from error

    async def _get(
        self, path: str, method: str = "GET", *, deadline_s: float = 0.0, **request: Any
    ) -> bytes:
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
                    if len(body) > MAX_BODY_BYTES:
                        raise ScrapeFailed(f"{path} is longer than {MAX_BODY_BYTES} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise ScrapeFailed(f"{path}: {type(error).__name__} {error}"[:200]) from error
        return bytes(body)


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
    ranks = pipeline.settings.ranks
    async with asyncio.TaskGroup() as tasks:
        while True:
            try:
                identity = identity or await _identify(engine, pipeline, clock)
                if identity.engine == "sglang":
                    for load in await _optional_loads(engine, ranks):
                        pipeline.load(load, clock())
                metrics = await engine.metrics(ranks, identity.engine)
                if metrics.started is not None and metrics.started != started:
                    started = metrics.started
                    pipeline.engine_started(started - wall_clock() + clock(), clock())
                    identity, proven = await _identify(engine, pipeline, clock), None
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
            canary = Canary(prompt_of(pipeline.unit_tokens, rng), pipeline.unit_tokens)
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
