"""TensorRT-LLM's command line, as its main branch reads it. Pure.

Most is in the file that --config names, which nobody here can read.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..spec import Engine
from .commandline import UNKNOWN, Words, program
from .flags import Unreadable
from .reading import Reading

KIND = Engine.TENSORRT_LLM
HTTP_PORT = 8000
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


def _ranks(reading: Reading) -> None:
    flags = reading.flags
    attention = flags.tree("--set").get("enable_attention_dp")
    if attention:
        reading.ranks = flags.number("--tp-size", "--tensor-parallel-size") or 1
    elif attention is not None or not flags.opaque:
        reading.ranks = 1
    elif reading.pool.ranks == 1:
        raise Unreadable("ranks")


def _events(reading: Reading) -> None:
    cache = reading.flags.tree("--set").get("kv_cache_config")
    config = cache.get("kv_events_config") if isinstance(cache, Mapping) else None
    enabled = isinstance(config, Mapping) and bool(config.get("enable_kv_cache_events"))
    publishes = enabled and (config or {}).get("publisher") in ("zmq", None)
    # It binds at whatever address it is given.
    reading.read_events(config, lambda endpoint: True, publishes=publishes)
