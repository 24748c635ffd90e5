"""Turns TensorRT-LLM's events, published (ZeroMQ) or pulled (JSON), into events.

Pure. Written from the engine's source and constructed streams; never run against it: everything stored is an upper
bound. Neither adapters' names nor (published) salts are on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from servingfleet_protos.v1.common_pb2 import TIER_GPU, TIER_HOST

from . import schema, wire
from .events import (
    Adapter,
    Batch,
    Cleared,
    Doubt,
    Dropped,
    EngineProfile,
    Event,
    Group,
    Removed,
    Shape,
    Stored,
    TierTraits,
)
from .schema import Schema
from .wire import BadValue

__all__ = ["ADAPTER", "PROFILE", "PullReader", "Pulled", "decode_payload"]

PROFILE = EngineProfile(
    engine="trtllm",
    tiers={
        # One block for each place in the reuse tree.
        tier: TierTraits(multiset=False, whole_prompt=False, upper_in_predicted=True)
        for tier in (TIER_GPU, TIER_HOST)
    },
    cleared_tiers=frozenset({TIER_GPU, TIER_HOST}),
    attention_kinds=frozenset({None}),
    fixed_unit=True,
)

_LEVELS = {0: TIER_GPU, 1: TIER_HOST}
MAX_PARTIAL = 65_536
"""Blocks that were stored before they were full, by hash: their removals mean nothing to us."""


def decode_payload(payload: bytes) -> Batch:
    """One published batch. Never raises: trouble is among the batch's events."""
    return schema.decode_payload(payload, _SCHEMAS)


def _stored(fields: Mapping[str, Any], shape: Shape) -> Sequence[Event]:
    hashes, width = _hashes(fields["block_hashes"])
    if not hashes:
        raise BadValue("no_hashes", "a store without a hash")
    unit, raw = fields["block_size"], fields["token_ids"]
    if not wire.is_integer(unit, 1, 2**20):
        raise BadValue("block_size", "block_size is no integer from 1 to 2^20")
    if type(raw) is not list or len(raw) != len(hashes) // width * unit:
        raise BadValue("token_count", f"other than {len(hashes) // width} blocks of {unit} tokens")
    if fields.get("medium") != "GPU":
        raise BadValue("unknown_medium", f"medium {fields.get('medium')!r:.40}; known: GPU")
    # An image's tokens come as text; its keys begin where it does.
    foreign = [at // unit for at, token in enumerate(raw) if type(token) is str]
    foreign += [at for at, keys in enumerate(_list("mm_keys", fields.get("mm_keys"))) if keys]
    if fields.get("lora_id") is not None:
        foreign.append(0)  # clients name adapters
    tokens = wire.pack_tokens([0 if type(token) is str else token for token in raw])
    parent_value = fields["parent_block_hash"]
    parent = None if parent_value is None else _hashes([parent_value])[0]
    event = Stored(
        _shape(shape, width, [*fields["block_hashes"], parent_value]),
        TIER_GPU,
        Group(),
        hashes,
        width,
        parent,
        tokens,
        unit,
        doubtful=True,
    )
    return _split(event, min(foreign, default=len(hashes) // width))


def _shape(shape: Shape, width: int, values: Sequence[object]) -> Shape:
    # Hashes are unsigned: half of them look like small signed numbers, none is negative.
    low, high = wire.signs(values)
    return replace(
        shape,
        hash_width=width,
        low=low,
        high=high,
        tells_adapters=False,
        tells_salts=False,
        pairs=False,
    )


def _split(event: Stored, at: int) -> Sequence[Event]:
    """The event up to block `at`, and the rest as opaque."""
    bytes_at, tokens_at = at * event.width, at * event.unit_tokens * 4
    if bytes_at >= len(event.hashes):
        return [event]
    rest = replace(
        event,
        hashes=event.hashes[bytes_at:],
        parent=event.hashes[bytes_at - event.width : bytes_at] if at else event.parent,
        tokens=event.tokens[tokens_at:],
        opaque=True,
    )
    whole = replace(event, hashes=event.hashes[:bytes_at], tokens=event.tokens[:tokens_at])
    return [whole, rest] if at else [rest]


def _removed(fields: Mapping[str, Any], shape: Shape) -> Sequence[Event]:
    hashes, width = _hashes(fields["block_hashes"])
    if fields.get("medium") != "GPU":
        detail = f"BlockRemoved: medium {fields.get('medium')!r:.40}; known: GPU"
        doubt = Doubt.STALE if fields.get("medium") is None else Doubt.NONE
        return [Dropped("unknown_medium", detail, doubt)]
    low, high = wire.signs(fields["block_hashes"])
    shape = replace(shape, hash_width=width, low=low, high=high)
    return [Removed(shape, TIER_GPU, Group(), hashes, width)]


def _cleared(fields: Mapping[str, Any], shape: Shape) -> Sequence[Event]:
    return [Cleared(shape)]


def _hashes(values: object) -> tuple[bytes, int]:
    packed, width = wire.pack_hashes(values)
    if width == 32:
        raise BadValue("hash_type", "a block hash is no 64-bit integer")
    return packed, width


def _level(value: object) -> int:
    """The tier of a cache level."""
    tier = _LEVELS.get(value) if type(value) is int else None
    if tier is None:
        raise BadValue("unknown_level", f"cache level {value!r:.40}; known: 0, 1")
    return tier


def _list(name: str, value: object) -> list[Any]:
    if value is None:
        return []
    if type(value) is not list:
        raise BadValue("field_type", f"{name} is {type(value).__name__}; expected an array")
    return value


_GRAVE = frozenset({"hash_type", "hash_width", "hash_range", "no_hashes", "token_count"})
_SCHEMAS: Mapping[str, Schema] = {
    "BlockStored": Schema(
        fields=(),
        lengths=frozenset(),
        required=frozenset({"block_hashes", "parent_block_hash", "token_ids", "block_size"}),
        map_only=frozenset(
            {
                *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
                *("medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
                *("kv_cache_spec_sliding_window", "locality", "mm_keys"),
            }
        ),
        doubt=Doubt.INCOMPLETE,
        build=_stored,
        grave=_GRAVE | {"block_size"},
    ),
    "BlockRemoved": Schema(
        fields=(),
        lengths=frozenset(),
        required=frozenset({"block_hashes"}),
        map_only=frozenset({"block_hashes", "medium", "group_idx", "locality"}),
        doubt=Doubt.STALE,
        build=_removed,
        grave=_GRAVE,
    ),
    "AllBlocksCleared": Schema(
        fields=(),
        lengths=frozenset(),
        required=frozenset(),
        map_only=frozenset(),
        doubt=Doubt.STALE,
        build=_cleared,
    ),
}

ADAPTER = Adapter(PROFILE, decode_payload)


@dataclass(frozen=True, slots=True)
class Pulled:
    """One entry of a pulled answer."""

    event_id: int | None
    """Rises by one for each rank. None: unreadable."""
    rank: int
    created: bool
    """A new cache: nothing that was held is."""
    events: tuple[Event, ...]


class PullReader:
    """Reads what POST /kv_cache_events answers, entry by entry, of one server. Never raises."""

    def __init__(self, unit_tokens: int) -> None:
        """`unit_tokens`: the engine's tokens_per_block, which entries don't tell."""
        self._unit = unit_tokens
        self._window = 0
        self._partial: dict[bytes, None] = {}

    def read(self, raw: object) -> Pulled:
        """One entry, as JSON gave it."""
        event_id, rank = None, 0
        try:
            if not isinstance(raw, Mapping) or not isinstance(raw.get("data"), Mapping):
                raise BadValue("event_shape", "an entry without data")
            if not wire.is_integer(raw.get("event_id"), 0, 2**63):
                raise BadValue("event_shape", "event_id is no integer")
            event_id, told = raw["event_id"], raw.get("attention_dp_rank")
            rank = int(told) if told is not None and wire.is_integer(told, 0, 2**16) else 0
            data = raw["data"]
            if data.get("type") == "created":
                self._partial.clear()
                return Pulled(event_id, rank, True, ())
            if not self._main(raw.get("window_size")):
                return Pulled(event_id, rank, False, ())
            return Pulled(event_id, rank, False, tuple(self._events(data)))
        except BadValue as error:
            # It may have been a removal.
            dropped = Dropped(error.reason, f"pulled: {error}", Doubt.STALE)
            return Pulled(event_id, rank, False, (dropped,))

    def _main(self, window: object) -> bool:
        """Of several window sizes only the largest shows whole prompts."""
        size = window if type(window) is int else 0
        self._window = max(self._window, size)
        return size == self._window

    def _events(self, data: Mapping[str, Any]) -> Sequence[Event]:
        match data.get("type"):
            case "stored":
                return self._stored(data)
            case "removed":
                hashes, width = _hashes(data.get("block_hashes"))
                keys = (hashes[at : at + 8] for at in range(0, len(hashes), 8))
                held = [key for key in keys if not self._forget(key)]
                # Its level is not told: it is gone from each.
                shape = Shape("removed", "json", hash_width=width)
                return [
                    Removed(shape, tier, Group(), b"".join(held), width)
                    for tier in (TIER_GPU, TIER_HOST)
                    if held
                ]
            case "updated":
                return self._updated(data)
            case other:
                raise BadValue("unknown_event", f"type {other!r:.40}")

    def _stored(self, data: Mapping[str, Any]) -> Sequence[Event]:
        events: list[Event] = []
        parent_value = data.get("parent_hash")
        parent = None if parent_value is None else wire.pack_hash(parent_value)
        for block in _list("blocks", data.get("blocks")):
            if type(block) is not dict:
                raise BadValue("field_type", "a block is no object")
            key = wire.pack_hash(block.get("block_hash"))
            rows = _list("tokens", block.get("tokens"))
            if any(type(row) is not dict for row in rows):
                raise BadValue("field_type", "a token is no object")
            tokens = wire.pack_tokens([row.get("token_id") for row in rows])
            tier = _level(block.get("cache_level"))
            if len(rows) < self._unit:
                # Not full yet: it is stored again, under another hash, when it is.
                self._partial[key] = None
                while len(self._partial) > MAX_PARTIAL:
                    del self._partial[next(iter(self._partial))]
                return events
            extra = any(row.get("token_extra_id") for row in rows) or bool(block.get("mm_keys"))
            salt = wire.text("cache salt", block.get("cache_salt"))
            shape = _shape(Shape("stored", "json"), 8, [block["block_hash"], parent_value])
            events.append(
                Stored(
                    *(shape, tier, Group(), key, 8, parent, tokens, len(rows), "", salt),
                    opaque=extra,
                    doubtful=True,
                )
            )
            parent = key
        return events

    def _forget(self, key: bytes) -> bool:
        """Whether the block was one that is not full; it is gone."""
        known = key in self._partial
        self._partial.pop(key, None)
        return known

    def _updated(self, data: Mapping[str, Any]) -> Sequence[Event]:
        key, levels = wire.pack_hash(data.get("block_hash")), data.get("cache_level")
        if levels is None or key in self._partial:
            return []  # only its priority changed
        if type(levels) is not dict:
            raise BadValue("field_type", "cache_level is neither null nor a pair of levels")
        new, old = _level(levels.get("new")), _level(levels.get("old"))
        shape = Shape("updated", "json", hash_width=8)
        # There before gone: in between nobody must think that it is lost.
        return [
            Stored(shape, new, Group(), key, 8, None, b"", 0, doubtful=True),
            Removed(shape, old, Group(), key, 8),
        ]
