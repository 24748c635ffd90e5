"""Turns what TensorRT-LLM answers to POST /kv_cache_events into events, entry by entry.

Pure. An entry is a JSON object with a number that rises by one in each rank; whoever pulls hands each over as if it had
been published under that number. Entries tell neither the size of a block nor the adapter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from servingfleet_protos.v1.common_pb2 import TIER_GPU, TIER_HOST

from . import wire
from .events import Batch, Cleared, Doubt, Dropped, Event, Group, Removed, Shape, Stored
from .schema import gone
from .trtllm import as_list, hashes_of, shape_of
from .wire import BadValue

__all__ = ["EVENT_ID", "Reader", "message_of", "place_of"]

EVENT_ID = "event_id"
_LEVELS = {0: TIER_GPU, 1: TIER_HOST}
_GRAVE = frozenset({"field_missing", "field_type", "hash_range", "hash_type", "hash_width"})
_ENTRY = frozenset(
    {
        *(EVENT_ID, "data", "window_size", "attention_dp_rank"),
        *("layer_group_id", "hash_algo"),
    }
)
_DATA: Mapping[str, frozenset[str]] = {
    "created": frozenset({"num_blocks_per_cache_level"}),
    "stored": frozenset({"parent_hash", "blocks"}),
    "removed": frozenset({"block_hashes"}),
    "updated": frozenset({"block_hash", "cache_level", "priority"}),
}
_BLOCK = frozenset(
    {"type", "block_hash", "tokens", "cache_level", "priority", "mm_keys", "cache_salt"}
)
MAX_PARTIAL = 65_536
"""Blocks that were stored before they were full, by hash: their removals mean nothing to us."""


def place_of(entry: object) -> tuple[int, int] | None:
    """Rank and number of an entry. None: it can't be read."""
    if not isinstance(entry, Mapping) or not wire.is_integer(entry.get(EVENT_ID), 0, 2**63):
        return None
    rank = entry.get("attention_dp_rank")
    if rank is None:
        return 0, entry[EVENT_ID]
    return (rank, entry[EVENT_ID]) if wire.is_integer(rank, 0, 2**16) else None


def message_of(entry: object) -> tuple[int, tuple[bytes, bytes, bytes]] | None:
    """Rank of an entry, and the frames under which it is read: as if it had been published. None: it can't be read."""
    place = place_of(entry)
    if place is None:
        return None
    rank, number = place
    payload = json.dumps(entry, separators=(",", ":")).encode()
    return rank, (b"", number.to_bytes(8, "big"), payload)


class Reader:
    """Entries of one rank, in order."""

    def __init__(self, unit_tokens: int) -> None:
        """`unit_tokens`: the engine's tokens_per_block."""
        self._unit = unit_tokens
        self._window = 0
        self._algorithm: object = None
        self._partial: dict[bytes, None] = {}

    def decode(self, payload: bytes) -> Batch:
        """One entry as JSON. Never raises: trouble is among the batch's events."""
        try:
            entry = json.loads(payload)
        # Python's reader gives up on depth, and on numbers of thousands of digits.
        except (ValueError, RecursionError) as error:
            return Batch((Dropped("malformed_json", f"entry: {error}"[:200], Doubt.STALE),))
        rank, _ = place_of(entry) or (None, 0)
        return Batch(tuple(self.read(entry)), rank=rank, length=3)

    def read(self, entry: object) -> Sequence[Event]:
        """One entry, as JSON gave it."""
        try:
            return self._read(entry)
        except BadValue as error:
            grave = error.reason in _GRAVE
            # It may have been a removal.
            doubt = Doubt.QUARANTINED if grave else Doubt.STALE
            return [Dropped(error.reason, f"entry: {error}", doubt)]

    def _read(self, entry: object) -> Sequence[Event]:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("data"), Mapping):
            raise BadValue("field_missing", "no data")
        data, kind = entry["data"], entry["data"].get("type")
        if kind not in _DATA:
            named = f"type {kind!a:.40}; known: {', '.join(_DATA)}"
            doubt = Doubt.QUARANTINED if gone(kind) else Doubt.STALE
            return [Dropped("unknown_event", named, doubt)]
        missing = (_DATA[kind] - {"priority"}) - data.keys()
        if missing:
            raise BadValue("field_missing", f"{kind}: no {', '.join(sorted(missing))}")
        unknown = sorted({*(entry.keys() - _ENTRY), *(data.keys() - _DATA[kind] - {"type"})})
        shape = Shape(kind, "json", unknown_fields=tuple(f"{key!a:.40}" for key in unknown[:8]))
        self._check_algorithm(entry)
        if kind == "created":
            self._partial.clear()
            return [Cleared(shape)]
        if not self._main(entry.get("window_size")):
            return []
        read = {"stored": self._stored, "removed": self._removed, "updated": self._updated}
        return read[kind](data, shape)

    def _check_algorithm(self, entry: Mapping[str, Any]) -> None:
        algorithm = entry.get("hash_algo")
        if self._algorithm not in (None, algorithm):
            raise BadValue(
                "hash_type", f"hash_algo {algorithm!a:.40}; so far {self._algorithm!a:.40}"
            )
        self._algorithm = algorithm

    def _main(self, window: object) -> bool:
        """Of several window sizes only the largest shows whole prompts."""
        if window is not None and type(window) is not int:
            raise BadValue("field_type", f"window_size is {type(window).__name__}; expected int")
        size = window or 0
        self._window = max(self._window, size)
        return size == self._window

    def _stored(self, data: Mapping[str, Any], shape: Shape) -> Sequence[Event]:
        events: list[Event] = []
        parent_value = data["parent_hash"]
        parent = None if parent_value is None else wire.pack_hash(parent_value, "parent_hash")
        for block in as_list("blocks", data["blocks"]):
            if type(block) is not dict:
                raise BadValue("field_type", "blocks holds something that is no object")
            missing = {"block_hash", "tokens", "cache_level"} - block.keys()
            if missing:
                raise BadValue("field_missing", f"a block without {', '.join(sorted(missing))}")
            unknown = tuple(f"{key!a:.40}" for key in sorted(block.keys() - _BLOCK)[:8])
            key = hashes_of([block["block_hash"]], "block_hash")[0]
            rows = as_list("tokens", block["tokens"])
            if any(type(row) is not dict or "token_id" not in row for row in rows):
                raise BadValue("field_type", "tokens holds something without a token_id")
            tokens = wire.pack_tokens([row["token_id"] for row in rows])
            tier = _level(block["cache_level"])
            if len(rows) > self._unit:
                text = (
                    f"tokens has {len(rows)}; expected {self._unit}, the engine's tokens_per_block"
                )
                raise BadValue("token_count", text)
            if len(rows) < self._unit:
                # Not full yet: it is stored again, under another hash, when it is.
                self._partial[key] = None
                while len(self._partial) > MAX_PARTIAL:
                    del self._partial[next(iter(self._partial))]
                return events
            extra = any(row.get("token_extra_id") for row in rows) or bool(block.get("mm_keys"))
            salt = wire.text("cache_salt", block.get("cache_salt"))
            written = shape_of(shape, 8, [block["block_hash"], parent_value])
            written = Shape(
                *(written.tag, written.form, 8, written.low, written.high),
                unknown_fields=(*shape.unknown_fields, *unknown),
                tells_adapters=False,
                tells_salts="cache_salt" in block,
                pairs=False,
            )
            events.append(
                Stored(
                    *(written, tier, Group(), key, 8, parent, tokens, self._unit, "", salt),
                    opaque=extra,
                    doubtful=True,
                )
            )
            parent = key
        return events

    def _removed(self, data: Mapping[str, Any], shape: Shape) -> Sequence[Event]:
        hashes, width = hashes_of(data["block_hashes"], "block_hashes")
        keys = (hashes[at : at + 8] for at in range(0, len(hashes), 8))
        held = b"".join(key for key in keys if not self._forget(key))
        shape = shape_of(shape, width, data["block_hashes"])
        # Its level is not told: it is gone from each.
        tiers = (TIER_GPU, TIER_HOST) if held else ()
        return [Removed(shape, tier, Group(), held, width, tier_told=False) for tier in tiers]

    def _updated(self, data: Mapping[str, Any], shape: Shape) -> Sequence[Event]:
        key = hashes_of([data["block_hash"]], "block_hash")[0]
        levels = data["cache_level"]
        if levels is None or key in self._partial:
            return []  # only its priority changed
        if type(levels) is not dict or not {"old_value", "new_value"} <= levels.keys():
            raise BadValue(
                "field_type", "cache_level is neither null nor an old_value and a new_value"
            )
        new, old = _level(levels["new_value"]), _level(levels["old_value"])
        shape = shape_of(shape, 8, [data["block_hash"]])
        # There before gone: in between nobody must think that it is lost.
        return [
            Stored(shape, new, Group(), key, 8, None, b"", 0, doubtful=True),
            Removed(shape, old, Group(), key, 8),
        ]

    def _forget(self, key: bytes) -> bool:
        """Whether the block was one that is not full; it is gone."""
        known = key in self._partial
        self._partial.pop(key, None)
        return known


def _level(value: object) -> int:
    """The tier of a cache level."""
    tier = _LEVELS.get(value) if type(value) is int else None
    if tier is None:
        raise BadValue("unknown_medium", f"cache_level {value!a:.40}; known: 0, 1")
    return tier
