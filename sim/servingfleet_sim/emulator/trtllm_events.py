"""The JSON that TensorRT-LLM makes of what its caches tell."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .events import Cleared, Event, Removed, Stored

PRIORITY = 35
"""Of a block that nobody gave another."""


@dataclass(frozen=True, slots=True)
class TrtllmForm:
    """Entries as `POST /kv_cache_events` answers them, but for their numbers."""

    blocks: int
    """Of the GPU; there is no other level."""
    window: int
    """Tokens of the largest attention window: of the whole sequence."""
    names_ranks: bool = False
    """There are several attention data-parallel ranks."""
    replay_topic: bool = False

    def encode(self, events: Iterable[Event], time: float, rank: int) -> bytes:
        """One step's entries. They hold no time."""
        entries = []
        for event in events:
            entry: dict[str, Any] = {"data": self._data(event), "window_size": self.window}
            if self.names_ranks:
                entry["attention_dp_rank"] = rank
            entries.append(entry)
        return json.dumps(entries).encode()

    def name(self, digest: bytes) -> int:
        """A block's hash as the entries show it: 64 bits, unsigned."""
        return int.from_bytes(digest[:8], "big")

    def _data(self, event: Event) -> dict[str, Any]:
        match event:
            case Stored():
                parent = None if event.parent is None else self.name(event.parent)
                return {
                    "type": "stored",
                    "parent_hash": parent,
                    "blocks": list(self._blocks(event)),
                }
            case Removed():
                return {"type": "removed", "block_hashes": [self.name(d) for d in event.hashes]}
            case Cleared():
                # It has no such event: a cache is only ever made anew.
                return {"type": "created", "num_blocks_per_cache_level": [self.blocks, 0]}

    def _blocks(self, event: Stored) -> Iterator[dict[str, Any]]:
        size = event.block_size
        for place, digest in enumerate(event.hashes):
            yield {
                "type": "stored_block",
                "block_hash": self.name(digest),
                "tokens": [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                    for token in event.tokens[place * size : (place + 1) * size]
                ],
                "cache_level": 0,
                "priority": PRIORITY,
                "mm_keys": [],
                "cache_salt": event.cache_salt,
            }
