"""What an engine's HTTP server says of itself: its metrics, its identity, its load. Text and JSON in, figures out.

Pure. Nothing is guessed: what an answer does not prove is not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from servingfleet_protos.v1.stream_pb2 import EngineLoad

_RUNNING = frozenset(
    {"vllm:num_requests_running", "sglang:num_running_reqs", "trtllm_num_requests_running"}
)
_WAITING = frozenset(
    {"vllm:num_requests_waiting", "sglang:num_queue_reqs", "trtllm_num_requests_waiting"}
)
_USAGE = frozenset(
    {
        *("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        *("sglang:token_usage", "trtllm_kv_cache_utilization"),
    }
)
_CACHE = "vllm:cache_config_info"
_BLOCKS = "trtllm_kv_cache_max_blocks"
_UNIT = "trtllm_kv_cache_tokens_per_block"
_TOKENS = "sglang:max_total_num_tokens"
_HYBRID = frozenset({"sglang:swa_token_usage", "sglang:mamba_usage"})
_FINISHED = frozenset(
    {
        *("vllm:request_success_total", "sglang:num_requests_total"),
        "trtllm_request_success_total",
    }
)
_COMPUTED = {
    # Queries are all prompt tokens; hits those of the GPU, and of what a connector brought.
    "vllm:prefix_cache_queries_total": 1,
    "vllm:prefix_cache_hits_total": -1,
    "vllm:external_prefix_cache_hits_total": -1,
    "sglang:prompt_tokens_total": 1,
    "sglang:cached_tokens_total": -1,
    "trtllm_prompt_tokens_total": 1,
    "trtllm_prompt_cached_tokens_total": -1,
}
_RANK = ("engine", "dp_rank")
"""Labels that name the data-parallel rank: vLLM's and SGLang's."""
_STARTED = "process_start_time_seconds"
_ENGINES = {"vllm:": "vllm", "sglang:": "sglang", "trtllm_": "trtllm"}
_TRTLLM_OWNER = "tensorrt_llm"


class ScrapeFailed(Exception):
    """The engine's answer could not be had or read: try again later."""


@dataclass(frozen=True)
class Progress:
    """Totals of one rank since its engine's start."""

    finished: int
    """Requests."""
    computed: int
    """Prompt tokens that were not reused."""


@dataclass(frozen=True)
class Metrics:
    """What one scrape told."""

    loads: dict[int, EngineLoad] = field(default_factory=dict)
    """By rank."""
    progress: dict[int, Progress] = field(default_factory=dict)
    """By rank, where the engine counts both."""
    started: float | None = None
    """When the process started, seconds since 1970."""
    gpu_blocks: int | None = None
    gpu_tokens: int | None = None
    block_tokens: int | None = None
    """The size that the engine was configured with: its events may have others."""
    hybrid: bool = False
    """Window or recurrent layers are in use (only SGLang says so)."""
    engine: str | None = None
    """The engine whose names the samples have."""


@dataclass(frozen=True)
class Identity:
    """What the engine says that it is."""

    engine: str
    version: str
    event_block_tokens: int = 0
    """Tokens of a block in its events, as it says. 0: it doesn't."""


class _Reading:
    """Samples, one after the other."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self.loads: dict[int, EngineLoad] = {}
        self.engines: set[str] = set()
        self.started: float | None = None
        self.sizes: dict[str, int] = {}
        self.hybrid = False
        self._finished: dict[int, float] = {}
        self._computed: dict[int, float] = {}

    def sample(self, name: str, labels: dict[str, str], value: float) -> None:
        """One sample."""
        for prefix, engine in _ENGINES.items():
            if name.startswith(prefix):
                self.engines.add(engine)
        if name == _STARTED and math.isfinite(value):
            self.started = value
        elif name == _CACHE:
            for label, size in (("num_gpu_blocks", "gpu_blocks"), ("block_size", "block_tokens")):
                if labels.get(label, "").isdecimal():
                    self.sizes[size] = int(labels[label])
        elif name == _UNIT and 0 < value < 2**20:
            self.sizes["block_tokens"] = int(value)
        elif name in (_TOKENS, _BLOCKS) and 0 < value < 2**63:
            self.sizes["gpu_tokens" if name == _TOKENS else "gpu_blocks"] = int(value)
        elif name in _HYBRID:
            self.hybrid = self.hybrid or value > 0
        elif name in _FINISHED or name in _COMPUTED:
            self._count(name, labels, value)
        elif name in _RUNNING or name in _WAITING or name in _USAGE:
            self._load(name, labels, value)

    def progress(self) -> dict[int, Progress]:
        """Of ranks that count requests and tokens."""
        return {
            rank: Progress(int(self._finished[rank]), int(max(0.0, computed)))
            for rank, computed in self._computed.items()
            if rank in self._finished
        }

    def _rank(self, labels: dict[str, str]) -> int | None:
        label = next((labels[name] for name in _RANK if labels.get(name)), "")
        if not label and len(self._ranks) > 1:
            return None  # one figure for several ranks
        rank = int(label) if label.isdecimal() else self._ranks[0]
        return rank if rank in self._ranks else None

    def _count(self, name: str, labels: dict[str, str], value: float) -> None:
        rank = self._rank(labels)
        if rank is None or not math.isfinite(value) or not 0 <= value < 2**63:
            return
        counted, sign = (
            (self._finished, 1) if name in _FINISHED else (self._computed, _COMPUTED[name])
        )
        counted[rank] = counted.get(rank, 0.0) + sign * value

    def _load(self, name: str, labels: dict[str, str], value: float) -> None:
        rank = self._rank(labels)
        if rank is None or not math.isfinite(value) or not 0 <= value < 2**32:
            return
        load = self.loads.setdefault(rank, EngineLoad(rank=rank))
        if name in _RUNNING:
            load.running_requests = int(value)
        elif name in _WAITING:
            load.waiting_requests = int(value)
        else:
            load.kv_usage = min(value, 1.0)


def parse_metrics(text: str, ranks: tuple[int, ...]) -> Metrics:
    """Reads an engine's metrics; samples of other ranks are left out. Raises ScrapeFailed."""
    reading = _Reading(ranks)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                reading.sample(sample.name, sample.labels, sample.value)
    except (ValueError, KeyError, IndexError) as error:
        raise ScrapeFailed(f"metrics are not in Prometheus' text format: {error}"[:200]) from error
    engine = reading.engines.pop() if len(reading.engines) == 1 else None
    return Metrics(
        reading.loads,
        reading.progress(),
        reading.started,
        reading.sizes.get("gpu_blocks"),
        reading.sizes.get("gpu_tokens"),
        reading.sizes.get("block_tokens"),
        reading.hybrid,
        engine,
    )


def identity_of(
    server_info: Any, version: Any, metrics: Metrics | None, models: Any = None
) -> Identity | None:
    """Which engine gave these answers; None for an answer that was none, and for none of those we know.

    Several engines answer /version alike: that it is vLLM is told by its metrics' names, that it is TensorRT-LLM by the
    owner of its models.
    """
    if isinstance(server_info, dict) and "internal_states" in server_info:
        told = server_info.get("version")
        events = server_info.get("kv_events")
        size = events.get("block_size") if isinstance(events, dict) else 0
        unit = size if type(size) is int and 0 < size < 2**20 else 0
        return Identity("sglang", told[:128], unit) if isinstance(told, str) else None
    told = version.get("version") if isinstance(version, dict) else None
    if not isinstance(told, str):
        return None
    if metrics is not None and metrics.engine == "vllm":
        return Identity("vllm", told[:128])
    owners = {row.get("owned_by") for row in _rows(models, "data")}
    return Identity("trtllm", told[:128]) if owners == {_TRTLLM_OWNER} else None


def model_of(models: Any) -> str | None:
    """The base model's name in the answer of /v1/models; adapters name a parent."""
    for row in _rows(models, "data"):
        if not row.get("parent") and isinstance(row.get("id"), str):
            return str(row["id"]) or None
    return None


MAX_ADAPTERS = 1024
MAX_ADAPTER_BYTES = 512


def adapters_of(models: Any, engine: str) -> tuple[str, ...] | None:
    """LoRA adapters that the engine has loaded, by the names that requests use, in its answer of /v1/models.

    None: it does not say, or there are too many to tell. vLLM lists those that are loaded, each with its parent; so does
    SGLang with --enable-lora. Where it lists none it may be of a release that never does.
    """
    rows = list(_rows(models, "data"))
    names = [row["id"] for row in rows if row.get("parent") and isinstance(row.get("id"), str)]
    if not rows or len(names) > MAX_ADAPTERS or not (names or engine == "vllm"):
        return None
    # Half a surrogate pair is no text: no request can name such an adapter, and no message can tell of it.
    told = {name for name in names if name.encode(errors="ignore").decode() == name}
    if any(len(name.encode()) > MAX_ADAPTER_BYTES for name in told):
        return None
    return tuple(sorted(told))


def loads_of(answer: Any, ranks: tuple[int, ...]) -> dict[int, EngineLoad]:
    """SGLang's answer of /v1/loads, by rank: what waits is told in tokens, too."""
    loads: dict[int, EngineLoad] = {}
    for row in _rows(answer, "loads"):
        rank = row.get("dp_rank") or 0
        if rank not in ranks:
            continue
        load = loads.setdefault(rank, EngineLoad(rank=rank))
        for name, known in (
            ("running_requests", "num_running_reqs"),
            ("waiting_requests", "num_waiting_reqs"),
            ("waiting_tokens", "num_waiting_uncached_tokens"),
        ):
            if _is_count(row.get(known)):
                setattr(load, name, row[known])
        usage = row.get("token_usage")
        if isinstance(usage, int | float) and 0 <= usage < math.inf:
            load.kv_usage = min(float(usage), 1.0)
    return loads


STATISTICS_AGE_S = 2.0
"""TensorRT-LLM answers when there has been no iteration for so long."""


def statistics_of(answer: Any, ranks: tuple[int, ...]) -> Metrics:
    """TensorRT-LLM's statistics of iterations, oldest first: load and sizes as the last one tells them.

    One figure for several ranks is of none. Raises ScrapeFailed for what is no list of them; an empty one tells nothing.
    """
    if not isinstance(answer, list) or not all(isinstance(each, dict) for each in answer):
        raise ScrapeFailed("statistics of iterations are no list of objects")
    last = answer[-1] if answer else {}
    cache = last.get("kvCacheStats")
    cache = cache if isinstance(cache, dict) else {}
    loads = {}
    if len(ranks) == 1 and last:
        load = loads[ranks[0]] = EngineLoad(rank=ranks[0], age_s=STATISTICS_AGE_S)
        for name, known in (
            ("running_requests", "numActiveRequests"),
            ("waiting_requests", "numQueuedRequests"),
        ):
            if _is_count(last.get(known)):
                setattr(load, name, last[known])
        used, most = cache.get("usedNumBlocks"), cache.get("maxNumBlocks")
        if _is_count(used) and _is_count(most) and most:
            load.kv_usage = min(used / most, 1.0)
    sizes = (cache.get("maxNumBlocks"), cache.get("tokensPerBlock"))
    blocks, unit = (size if _is_count(size) and size else None for size in sizes)
    return Metrics(loads, {}, None, blocks, None, unit, engine="trtllm")


def cached_tokens(answer: Any) -> int | None:
    """Prompt tokens that an engine says it reused, in the answer to a completion. None: it doesn't say."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    value = details.get("cached_tokens") if isinstance(details, dict) else None
    return value if type(value) is int and value >= 0 else None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**32


def _rows(answer: Any, name: str) -> Iterator[dict[str, Any]]:
    rows = answer.get(name) if isinstance(answer, dict) else None
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict):
            yield row
