"""The engine's metrics page, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .settings import Settings
from .steps import Scheduling

_GAUGES: tuple[tuple[str, str, Callable[[Scheduling], float]], ...] = (
    ("vllm:num_requests_running", "Requests in the running batch.", lambda s: s.running_count),
    ("vllm:num_requests_waiting", "Requests that wait.", lambda s: s.waiting_count),
    ("vllm:kv_cache_usage_perc", "Share of the blocks in use, 0 to 1.", lambda s: s.usage),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Scheduling], float]], ...] = (
    (
        "vllm:prefix_cache_queries",
        "Tokens looked up in the GPU cache.",
        lambda s: s.counters.prefix_queries,
    ),
    (
        "vllm:prefix_cache_hits",
        "Tokens found in the GPU cache.",
        lambda s: s.counters.prefix_hits,
    ),
    (
        "vllm:external_prefix_cache_queries",
        "Tokens looked up in the host tier.",
        lambda s: s.counters.host_queries,
    ),
    (
        "vllm:external_prefix_cache_hits",
        "Tokens found in the host tier.",
        lambda s: s.counters.host_hits,
    ),
    ("vllm:num_preemptions", "Requests preempted.", lambda s: s.counters.preemptions),
    ("vllm:prompt_tokens", "Prompt tokens taken in.", lambda s: s.counters.prompt_tokens),
    ("vllm:generation_tokens", "Tokens generated.", lambda s: s.counters.generated_tokens),
)


def page(settings: Settings, schedulers: Sequence[Scheduling], started: float) -> bytes:
    """The page now. `started`: seconds since the epoch; a restart shows by it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Now(settings, schedulers, started))
    return generate_latest(registry)


class _Now(Collector):
    def __init__(
        self, settings: Settings, schedulers: Sequence[Scheduling], started: float
    ) -> None:
        self._settings = settings
        self._schedulers = schedulers
        self._started = started

    def collect(self) -> Iterable[Metric]:
        names = ("engine", "model_name")
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=names)
            for labels, scheduler in self._labelled():
                gauge.add_metric(labels, read(scheduler))
            yield gauge
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=names)
            for labels, scheduler in self._labelled():
                counter.add_metric(labels, read(scheduler))
            yield counter
        yield self._cache_config()
        yield GaugeMetricFamily(
            "process_start_time_seconds", "When the engine started.", value=self._started
        )

    def _labelled(self) -> Iterator[tuple[tuple[str, str], Scheduling]]:
        for rank, scheduler in enumerate(self._schedulers):
            yield (str(rank), self._settings.model), scheduler

    def _cache_config(self) -> Metric:
        limits = self._settings.limits
        facts = {
            "block_size": str(limits.block_size),
            "num_gpu_blocks": str(limits.blocks),
            "num_cpu_blocks": str(limits.host_chunks * limits.host_chunk_blocks),
            "enable_prefix_caching": "True",
            "cache_dtype": "auto",
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Sizes of the cache.", labels=("engine", *facts)
        )
        for rank in range(self._settings.ranks):
            info.add_metric((str(rank), *facts.values()), 1)
        return info
