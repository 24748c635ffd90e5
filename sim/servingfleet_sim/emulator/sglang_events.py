"""The bytes that SGLang's publisher makes of what its caches tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]

from .events import Cleared, Event, Removed, Stored, release


@dataclass(frozen=True, slots=True)
class SglangForm:
    """The event format of an SGLang release."""

    replay_topic: bool = True
    """Whether replayed messages hold the topic, as since 0.5.22."""
    names_adapters: bool = True
    """Whether stored pages name their adapter, as since 0.5.22."""

    def encode(self, events: Iterable[Event], time: float, rank: int) -> bytes:
        """One batch as the payload of a message. `time`: seconds since the epoch."""
        payload = msgpack.packb([time, [self._map(event) for event in events], rank])
        assert isinstance(payload, bytes)
        return payload

    def name(self, digest: bytes) -> int:
        """A page's hash as the events show it: its first 64 bits, signed."""
        return int.from_bytes(digest[:8], "big", signed=True)

    def _map(self, event: Event) -> dict[str, Any]:
        match event:
            case Stored():
                row: dict[str, Any] = {
                    "type": "BlockStored",
                    "block_hashes": [self.name(digest) for digest in event.hashes],
                    "parent_block_hash": None if event.parent is None else self.name(event.parent),
                    "token_ids": list(event.tokens),
                    "block_size": event.block_size,
                    "lora_id": None,
                    "medium": event.medium,
                }
                # Fields at their default are left out.
                if event.cache_salt is not None:
                    row["cache_salt"] = event.cache_salt
                if event.adapter is not None and self.names_adapters:
                    row["lora_name"] = event.adapter
                return row
            case Removed():
                hashes = [self.name(digest) for digest in event.hashes]
                return {"type": "BlockRemoved", "block_hashes": hashes, "medium": event.medium}
            case Cleared():
                return {"type": "AllBlocksCleared"}


def sglang_form(version: str) -> SglangForm:
    """The format of an SGLang release. Raises ValueError for what is no release, or older than 0.5.20."""
    wanted = release(version)
    if wanted < (0, 5, 20):
        raise ValueError(f"engine version {version}, expected 0.5.20 or later")
    return SglangForm(replay_topic=wanted >= (0, 5, 22), names_adapters=wanted >= (0, 5, 22))
