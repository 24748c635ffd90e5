"""Reads the engine's HTTP server: load, version, model, when its process started.

Edge. Whatever fails is counted and tried again: a replica without load figures is still routed to.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from servingfleet_protos.v1.stream_pb2 import EngineLoad

from .pipeline import Pipeline
from .settings import RelaySettings

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 1024 * 1024
"""A vLLM with many ranks and adapters writes some hundred KiB."""

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_CACHE = "vllm:cache_config_info"
_TOKENS = "sglang:max_total_num_tokens"
_HYBRID = ("sglang:swa_token_usage", "sglang:mamba_usage")
_RANK = ("engine", "dp_rank")
"""Labels that name the data-parallel rank: vLLM's and SGLang's."""
_STARTED = "process_start_time_seconds"


class ScrapeFailed(Exception):
    """The engine's answer could not be had or read: try again later."""


@dataclass(frozen=True)
class Metrics:
    """What one scrape told."""

    loads: dict[int, EngineLoad] = field(default_factory=dict)
    """By rank; `age_s` is 0."""
    started: float | None = None
    """When the process started, seconds since 1970."""
    gpu_blocks: int | None = None
    gpu_tokens: int | None = None
    hybrid: bool = False
    """Window or recurrent layers are in use (only SGLang says so)."""
    engine: str | None = None
    """The engine whose names the samples have."""


@dataclass(frozen=True)
class Identity:
    """What the engine says that it is."""

    engine: str
    version: str


def parse_metrics(text: str, ranks: tuple[int, ...]) -> Metrics:
    """Reads vLLM's or SGLang's /metrics; samples of other ranks are left out. Raises ScrapeFailed."""
    loads: dict[int, EngineLoad] = {}
    started: float | None = None
    gpu_blocks: int | None = None
    gpu_tokens: int | None = None
    hybrid = False
    engines = set()
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                prefix = sample.name.partition(":")[0]
                if prefix in ("vllm", "sglang"):
                    engines.add(prefix)
                if sample.name == _STARTED and math.isfinite(sample.value):
                    started = sample.value
                elif sample.name == _CACHE:
                    blocks = sample.labels.get("num_gpu_blocks", "")
                    gpu_blocks = int(blocks) if blocks.isdecimal() else gpu_blocks
                elif sample.name == _TOKENS and 0 < sample.value < 2**63:
                    gpu_tokens = int(sample.value)
                elif sample.name in _HYBRID:
                    hybrid = hybrid or sample.value > 0
                elif sample.name in (*_RUNNING, *_WAITING, *_USAGE):
                    _add(loads, sample.name, sample.labels, sample.value, ranks)
    except (ValueError, KeyError, IndexError) as error:
        raise ScrapeFailed(f"/metrics is not in Prometheus' text format: {error}"[:200]) from error
    engine = engines.pop() if len(engines) == 1 else None
    return Metrics(loads, started, gpu_blocks, gpu_tokens, hybrid, engine)


def identity_of(server_info: Any, version: Any, metrics: Metrics | None) -> Identity | None:
    """Which engine gave these answers; None for an answer that was none, and for none of those we know.

    Several engines answer /version alike: that it is vLLM is told by its metrics' names.
    """
    if isinstance(server_info, dict) and "internal_states" in server_info:
        told = server_info.get("version")
        return Identity("sglang", told[:128]) if isinstance(told, str) else None
    told = version.get("version") if isinstance(version, dict) else None
    if isinstance(told, str) and metrics is not None and metrics.engine == "vllm":
        return Identity("vllm", told[:128])
    return None


def _add(
    loads: dict[int, EngineLoad],
    name: str,
    labels: dict[str, str],
    value: float,
    ranks: tuple[int, ...],
) -> None:
    label = next((labels[name] for name in _RANK if labels.get(name)), "")
    rank = int(label) if label.isdecimal() else ranks[0]
    if rank not in ranks or not math.isfinite(value) or not 0 <= value < 2**32:
        return
    load = loads.setdefault(rank, EngineLoad(rank=rank))
    if name in _RUNNING:
        load.running_requests = int(value)
    elif name in _WAITING:
        load.waiting_requests = int(value)
    else:
        load.kv_usage = min(value, 1.0)


def model_of(models: Any) -> str | None:
    """The base model's name in the answer of /v1/models; adapters name a parent."""
    rows = models.get("data") if isinstance(models, dict) else None
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and not row.get("parent") and isinstance(row.get("id"), str):
            return str(row["id"]) or None
    return None


class EngineHttp:
    """The engine's HTTP server. Every method raises ScrapeFailed."""

    def __init__(self, base: str, settings: RelaySettings) -> None:
        self._client = httpx.AsyncClient(base_url=base, timeout=settings.scrape_deadline_s)
        self._deadline_s = settings.scrape_deadline_s

    async def close(self) -> None:
        """Closes its connections."""
        await self._client.aclose()

    async def metrics(self, ranks: tuple[int, ...]) -> Metrics:
        """Load and identity as /metrics tells them."""
        return parse_metrics((await self._get("/metrics")).decode(errors="replace"), ranks)

    async def identity(self, ranks: tuple[int, ...]) -> Identity:
        """Which engine it is, and which release."""
        info = await self._answer("/server_info") or await self._answer("/get_server_info")
        version = await self._answer("/version")
        try:
            metrics = await self.metrics(ranks)
        except ScrapeFailed:
            metrics = None
        identity = identity_of(info, version, metrics)
        if identity is None:
            raise ScrapeFailed(
                "its answers to /server_info, /version and /metrics are of no engine that we know"
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

    async def _json(self, path: str) -> Any:
        try:
            return httpx.Response(200, content=await self._get(path)).json()
        except ValueError as error:
            raise ScrapeFailed(f"{path} is no JSON: {error}"[:200]) from error

    async def _get(self, path: str) -> bytes:
        body = bytearray()
        try:
            async with (
                asyncio.timeout(self._deadline_s),
                self._client.stream("GET", path) as response,
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
) -> None:
    """Scrapes until it is cancelled. `failed` is called for every scrape that did not work."""
    started: float | None = None
    identified = False
    working = True
    while True:
        try:
            if not identified:
                await _identify(engine, pipeline, clock)
                identified = True
            metrics = await engine.metrics(pipeline.settings.ranks)
            if metrics.started is not None and metrics.started != started:
                started = metrics.started
                pipeline.engine_started(started - wall_clock() + clock(), clock())
                await _identify(engine, pipeline, clock)
            if metrics.gpu_blocks is not None or metrics.gpu_tokens is not None:
                pipeline.engine_capacity(
                    metrics.gpu_blocks or 0, gpu_tokens=metrics.gpu_tokens or 0
                )
            if metrics.hybrid:
                pipeline.engine_hybrid()
            for load in metrics.loads.values():
                pipeline.load(load)
            working = True
        except ScrapeFailed as error:
            failed()
            if working:
                log.warning("engine not scraped", extra={"error": str(error)})
            working = identified = False
        await asyncio.sleep(settings.scrape_interval_s)


async def _identify(engine: EngineHttp, pipeline: Pipeline, clock: Callable[[], float]) -> None:
    """Asks the engine what it is, and tells the pipeline. Raises ScrapeFailed."""
    try:
        identity = await engine.identity(pipeline.settings.ranks)
    except ScrapeFailed as error:
        pipeline.engine_unknown(str(error))
        raise
    pipeline.engine_found(identity.engine, identity.version, clock())
