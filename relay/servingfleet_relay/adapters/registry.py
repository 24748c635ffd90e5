"""The engines that the relay reads, by name."""

from __future__ import annotations

from collections.abc import Mapping

from . import sglang, trtllm, vllm
from .events import Adapter, Batch, Doubt, Dropped, EngineProfile

AUTO = "auto"
"""Not an engine: the engine's own answers will tell."""

ADAPTERS: Mapping[str, Adapter] = {
    adapter.profile.engine: adapter for adapter in (vllm.ADAPTER, sglang.ADAPTER, trtllm.ADAPTER)
}


def _unread(payload: bytes) -> Batch:
    return Batch((Dropped("engine_unknown", "no adapter is chosen yet", Doubt.QUARANTINED),))


UNKNOWN = Adapter(EngineProfile(engine=""), _unread)
"""Until the engine is known: reads nothing."""


def named(engine: str) -> Adapter:
    """The adapter of an engine. Raises ValueError for one that nobody wrote an adapter for."""
    if engine == AUTO:
        return UNKNOWN
    adapter = ADAPTERS.get(engine)
    if adapter is None:
        known = ", ".join((*ADAPTERS, AUTO))
        raise ValueError(f"engine {engine!r} is not known; known: {known}")
    return adapter
