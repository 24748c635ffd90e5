"""What an engine will do, read from its pod's command line: its events, its ports, and what it must be told. Pure.

What isn't written plainly is never guessed: then the pool says it, and a finding asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from ..spec import Engine, EventsFrom, Fleet, Pool
from . import sglang, trtllm, vllm
from .commandline import Words, commands
from .facts import EngineFacts, Finding
from .flags import Flags
from .reading import Reading

__all__ = ["EngineFacts", "Finding", "findings", "read"]

_READERS: Mapping[Engine, ModuleType] = {each.KIND: each for each in (vllm, sglang, trtllm)}


def read(pod: Mapping[str, Any], pool: Pool) -> EngineFacts:
    """What the pod's manifest tells; what it doesn't, as the pool says."""
    container, kind, words = _engine(pod, pool)
    reading = Reading(pod, pool, container, kind, Flags(words or ()))
    if words is not None:
        _READERS[kind].read(reading)
    elif pool.events_from == EventsFrom.AUTO:
        reading.found(
            "NotReadable",
            "its command line doesn't start an engine in plain words: set engine, ports, ranks and eventsFrom of "
            f"pool {pool.name}",
            severe=False,
        )
    reading.read_annotation()
    reading.check_network()
    return reading.facts()


def findings(facts: EngineFacts, fleet: Fleet) -> tuple[Finding, ...]:
    """The engine's own findings, and where it differs from what the fleet says."""
    found = list(facts.findings)
    if facts.model not in ("", fleet.model.name):
        found.append(
            Finding(
                "ModelDiffers",
                f"container {facts.container}: clients know its model as {facts.model!r}, and spec.model.name is "
                f"{fleet.model.name!r}: add --served-model-name {fleet.model.name}, or correct the fleet",
                severe=False,
            )
        )
    smaller, larger = sorted((facts.block_tokens or 1, fleet.block_tokens))
    if larger % smaller:
        found.append(
            Finding(
                "BlockSizeDiffers",
                f"container {facts.container}: its blocks have {facts.block_tokens} tokens, and spec.blockTokens is "
                f"{fleet.block_tokens}: one must be a multiple of the other",
            )
        )
    return tuple(found)


def _engine(pod: Mapping[str, Any], pool: Pool) -> tuple[Mapping[str, Any], Engine, Words | None]:
    """The engine's container, which engine it is, and its flags' words if they were found."""
    containers: Sequence[Mapping[str, Any]] = (pod.get("spec") or {}).get("containers") or ()
    if pool.container:
        containers = [each for each in containers if each.get("name") == pool.container]
    for container in containers:
        started = list(_started(container, pool.engine))
        if started:
            kind, words = started[0]
            # Of several engines in one container nothing says which publishes where.
            return container, kind, words if len(started) == 1 else None
    return (containers[0] if containers else {}), pool.engine, None


def _started(container: Mapping[str, Any], declared: Engine) -> Iterator[tuple[Engine, Words]]:
    lines = commands(container)
    for words in lines:
        for kind, reader in _READERS.items():
            after = reader.arguments(words)
            if after is not None:
                yield kind, after
                break
        else:
            kind = declared if declared != Engine.AUTO else _of_image(container)
            if kind != Engine.AUTO and len(lines) == 1 and not container.get("command"):
                # The image's own command comes before these words.
                yield kind, words


def _of_image(container: Mapping[str, Any]) -> Engine:
    image = str(container.get("image", "")).partition("@")[0]
    # Of the engines' images only vLLM's starts its server by itself.
    name = image.rpartition("/")[2].partition(":")[0]
    return Engine.VLLM if "vllm" in name else Engine.AUTO
