"""The engines that the relay reads, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from . import sglang, trtllm, trtllm_pulled, vllm
from .events import Adapter, Batch, Doubt, Dropped, EngineProfile

AUTO = "auto"
"""Not an engine: the engine's own answers will tell."""


def _pulled(unit_tokens: int) -> Callable[[bytes], Batch]:
    return trtllm_pulled.Reader(unit_tokens).decode


ADAPTERS: Mapping[str, Adapter] = {
    adapter.profile.engine: adapter
    for adapter in (vllm.ADAPTER, sglang.ADAPTER, replace(trtllm.ADAPTER, pulled=_pulled))
}

REFUSED: Mapping[str, str] = {
    "lmcache": "LMCache's controller tells hashes of its own and neither tokens nor parents: nothing places them. "
    "Read it through the engine's own events (LMCache's enable_kv_events)",
    "mooncake": "Mooncake's store tells keys of its own, and leaves tokens and parents empty: nothing places them. "
    "Read it through the engine's own events (vLLM's Mooncake connector announces what it stores)",
    "dynamo": "Dynamo's consolidator names blocks by hashes of its own and merges tiers: read the engines themselves",
}
"""Feeds that exist and that can't be read, with what to do instead."""


def _unread(payload: bytes) -> Batch:
    return Batch((Dropped("engine_unknown", "no adapter is chosen yet", Doubt.QUARANTINED),))


UNKNOWN = Adapter(EngineProfile(engine=""), _unread)
"""Until the engine is known: reads nothing."""


def named(engine: str) -> Adapter:
    """The adapter of an engine. Raises ValueError for one that nobody wrote an adapter for."""
    if engine == AUTO:
        return UNKNOWN
    adapter = ADAPTERS.get(engine)
    if engine in REFUSED:
        raise ValueError(f"engine {engine!r}: {REFUSED[engine]}")
    if adapter is None:
        known = ", ".join((*ADAPTERS, AUTO))
        raise ValueError(f"engine {engine!r} is not known; known: {known}")
    return adapter
