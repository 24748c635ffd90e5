"""Turns TensorRT-LLM's published events (ZeroMQ) into events; `trtllm_pulled` reads those that are pulled.

Pure. Written from the engine's source and constructed streams; never run against it: everything stored is an upper
bound. Neither adapters' names nor salts are on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from servingfleet_protos.v1.common_pb2 import TIER_GPU, TIER_HOST

from . import claims, schema, wire
from .events import (
    Adapter,
    Batch,
    Doubt,
    EngineProfile,
    Event,
    Foreign,
    Group,
    Removed,
    Shape,
    Stored,
    TierTraits,
)
from .schema import GRAVE, Schema
from .wire import BadValue

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
    claims=claims.TRTLLM,
    never_run="read from the engine's source only: never more than an upper bound",
)

MEDIA: Mapping[str, int] = {"GPU": TIER_GPU}


def decode_payload(payload: bytes) -> Batch:
    """One published batch. Never raises: trouble is among the batch's events."""
    return schema.decode_payload(payload, _SCHEMAS)


def _stored(fields: Mapping[str, Any], shape: Shape) -> Sequence[Event]:
    hashes, width = hashes_of(fields["block_hashes"])
    if not hashes:
        raise BadValue("no_hashes", "block_hashes is empty")
    unit, raw = fields["block_size"], fields["token_ids"]
    if not wire.is_integer(unit, 1, 2**20):
        raise BadValue("block_size", "block_size is no integer from 1 to 2^20")
    if type(raw) is not list or len(raw) != len(hashes) // width * unit:
        raise BadValue(
            "token_count",
            f"token_ids: other than {len(hashes) // width} blocks of block_size {unit}",
        )
    tier = schema.tier_of(fields, shape, MEDIA, stored=True)
    if isinstance(tier, Foreign):
        return [tier]
    # An image's tokens come as text; its keys begin where it does.
    strange = [at // unit for at, token in enumerate(raw) if type(token) is str]
    strange += [at for at, keys in enumerate(as_list("mm_keys", fields.get("mm_keys"))) if keys]
    if fields.get("lora_id") is not None:
        strange.append(0)  # clients name adapters
    tokens = wire.pack_tokens([0 if type(token) is str else token for token in raw])
    parent_value = fields["parent_block_hash"]
    parent = None if parent_value is None else hashes_of([parent_value], "parent_block_hash")[0]
    event = Stored(
        shape_of(shape, width, [*fields["block_hashes"], parent_value]),
        TIER_GPU,
        Group(),
        hashes,
        width,
        parent,
        tokens,
        unit,
        doubtful=True,
    )
    return _split(event, min(strange, default=len(hashes) // width))


def shape_of(shape: Shape, width: int, values: Sequence[object]) -> Shape:
    """How it was written, with its hashes."""
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
    hashes, width = hashes_of(fields["block_hashes"])
    tier = schema.tier_of(fields, shape, MEDIA, stored=False)
    if isinstance(tier, Foreign):
        return [tier]
    low, high = wire.signs(fields["block_hashes"])
    shape = replace(shape, hash_width=width, low=low, high=high)
    return [Removed(shape, TIER_GPU, Group(), hashes, width)]


def hashes_of(values: object, name: str = "block_hashes") -> tuple[bytes, int]:
    """As `wire.pack_hashes`, of unsigned 64-bit integers only."""
    packed, width = wire.pack_hashes(values, name)
    if width == 32 or wire.signs(values if type(values) is list else [])[0]:
        raise BadValue("hash_type", f"{name} holds something that is no unsigned 64-bit integer")
    return packed, width


def as_list(name: str, value: object) -> list[Any]:
    """A list, empty for nil. Raises BadValue."""
    if value is None:
        return []
    if type(value) is not list:
        raise BadValue("field_type", f"{name} is {type(value).__name__}; expected an array")
    return value


_GRAVE = GRAVE | {"no_hashes", "token_count"}
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
    "AllBlocksCleared": replace(schema.CLEARED, lengths=frozenset()),
}

ADAPTER = Adapter(PROFILE, decode_payload)
