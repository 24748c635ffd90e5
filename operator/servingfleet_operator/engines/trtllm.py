"""TensorRT-LLM's command line, as its main branch reads it. Pure.

Most is in the file that --config names, which nobody here can read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..spec import Engine
from .commandline import UNKNOWN, Words, program
from .flags import Unreadable
from .reading import Reading

KIND = Engine.TENSORRT_LLM
HTTP_PORT = 8000
TOKENS_PER_BLOCK = 32
"""Where nothing else is set."""
MOST_TOKENS_PER_BLOCK = 65_536
_OTHERS = ("disaggregated", "disaggregated_mpi_worker", "mm_embedding_serve", "grpc")


def arguments(words: Words) -> Words | None:
    """The words after what starts a server; None if these start none."""
    for index, word in enumerate(words):
        rest = words[index + 1 :]
        if program(word) == "trtllm-serve" and rest and rest[0] not in _OTHERS:
            return rest[1:] if rest[0] == "serve" else rest
    return None


def read(reading: Reading) -> None:
    """Corrects the reading by what the flags say."""
    flags = reading.flags
    reading.attempt("--host or --port", "ports.http", lambda: reading.read_http(HTTP_PORT))
    # What the file may hold is only what has no flag of its own.
    flags.opaque |= flags.has("--config", "--extra-llm-api-options")
    reading.attempt("the number of ranks", "ranks", lambda: _ranks(reading))
    reading.attempt(
        "kv_cache_config.kv_events_config",
        "eventsFrom, ports.events and ports.replay",
        lambda: _events(reading),
    )
    if UNKNOWN not in flags.positional:
        reading.model = flags.positional
    if not flags.opaque:
        _check(reading)


def _check(reading: Reading) -> None:
    try:
        told, cache = reading.flags.tree("--set"), _cache(reading)
    except Unreadable:
        return  # it has been said
    if cache.get("enable_block_reuse") is False:
        reading.found("PrefixCachingOff", "enable_block_reuse is false: nothing is reused")
    if not (told.get("return_perf_metrics") and told.get("enable_iter_perf_stats")):
        reading.found(
            "LoadNotReported",
            "add --set return_perf_metrics=true --set enable_iter_perf_stats=true: its load is not known",
            severe=False,
        )


def _ranks(reading: Reading) -> None:
    flags = reading.flags
    attention = flags.tree("--set").get("enable_attention_dp")
    if attention:
        reading.ranks = flags.number("--tp-size", "--tensor-parallel-size") or 1
    elif attention is not None or not flags.opaque:
        reading.ranks = 1
    elif reading.pool.ranks == 1:
        raise Unreadable("ranks")


def _cache(reading: Reading) -> Mapping[str, Any]:
    cache = reading.flags.tree("--set").get("kv_cache_config")
    return cache if isinstance(cache, Mapping) else {}


def _events(reading: Reading) -> None:
    cache = _cache(reading)
    config = cache.get("kv_events_config")
    enabled = isinstance(config, Mapping) and bool(config.get("enable_kv_cache_events"))
    publishes = enabled and (config or {}).get("publisher") in ("zmq", None)
    size, unit = cache.get("event_buffer_max_size"), cache.get("tokens_per_block")
    buffered = type(size) is int and size > 0
    opaque = reading.flags.opaque
    if type(unit) is int and 0 < unit <= MOST_TOKENS_PER_BLOCK:
        reading.block_tokens = unit
    elif unit is None and not opaque:
        reading.block_tokens = TOKENS_PER_BLOCK
    # Published events are there at once, and nobody can take them away.
    reading.pull = (buffered and (reading.pull or not publishes)) or (reading.pull and opaque)
    if not reading.pull:
        # It binds at whatever address it is given.
        reading.read_events(config, lambda endpoint: True, publishes=publishes)
