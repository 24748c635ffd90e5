"""Turns vLLM's event batches, of every wire generation since 0.9.0, into events.

Pure: bytes in, events out. Gaps in the numbering are `sequence`'s business, what odd events say about the stream is
`conformance`'s. One event that can't be read never costs its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from servingfleet_protos.v1.common_pb2 import TIER_DISK, TIER_GPU, TIER_HOST

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
    Span,
    Stored,
    TierTraits,
)
from .schema import Schema
from .wire import BadValue

__all__ = [
    "ADAPTER",
    "PROFILE",
    "Batch",
    "Cleared",
    "Dropped",
    "Event",
    "Removed",
    "Stored",
    "decode",
]

PROFILE = EngineProfile(
    engine="vllm",
    tiers={
        # Equal blocks are not merged on the GPU: each copy is stored and removed by itself. A repeat from the root
        # may be a mere report of a hit (kv_cache_report_mode "full"): an upper bound, predicted by nobody.
        TIER_GPU: TierTraits(multiset=True, whole_prompt=False, upper_in_predicted=False),
        # Measured: after a reset of the GPU the host tier still hits, and such hits may report the whole prompt.
        TIER_HOST: TierTraits(multiset=False, whole_prompt=True, upper_in_predicted=True),
        TIER_DISK: TierTraits(
            multiset=False, whole_prompt=True, upper_in_predicted=False, append_only=True
        ),
    },
    # AllBlocksCleared names no medium and means the GPU only.
    cleared_tiers=frozenset({TIER_GPU}),
    attention_kinds=frozenset({None, "full_attention", "mla_attention"}),
    window_kinds=frozenset({"sliding_window", "sliding_window_mla"}),
    recurrent_kinds=frozenset({"mamba"}),
)

# "cpu" is what the Mooncake and LMCache connectors say.
MEDIA: Mapping[str, int] = {
    "GPU": TIER_GPU,
    "CPU": TIER_HOST,
    "cpu": TIER_HOST,
    "STORAGE": TIER_DISK,
}

_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED = ("block_hashes", "medium", "group_idx")


def decode(frames: Sequence[bytes]) -> Batch:
    """One live message, frames as received. Never raises: trouble is among the batch's events."""
    return schema.decode(frames, _SCHEMAS)


def decode_payload(payload: bytes) -> Batch:
    """One batch. Never raises: trouble is among the batch's events."""
    return schema.decode_payload(payload, _SCHEMAS)


def _stored(fields: Mapping[str, Any], shape: Shape) -> Sequence[Event]:
    hashes, width = wire.pack_hashes(fields["block_hashes"])
    parent_value = fields["parent_block_hash"]
    parent = None if parent_value is None else wire.pack_hash(parent_value)
    if parent is not None and width and len(parent) != width:
        raise BadValue("hash_type", "parent_block_hash and block_hashes are of different types")
    low, high = wire.signs([*fields["block_hashes"], parent_value])
    is_map = shape.form == "map"
    shape = replace(
        shape,
        hash_width=width or len(parent or b""),
        low=low,
        high=high,
        tells_adapters=is_map or "lora_name" in fields,
        tells_salts=is_map or "extra_keys" in fields,
    )
    tier = _tier(fields, shape)
    group = _group(fields)
    tokens = wire.pack_tokens(fields["token_ids"])
    unit = fields["block_size"]
    if not wire.is_integer(unit, 0, 2**20):
        raise BadValue("block_size", "block_size is no integer from 0 to 2^20")
    adapter = wire.text("lora_name", fields.get("lora_name"))
    # Since 0.33 a hash may cover the tokens after its block: whose hits no prefix tells.
    lookahead = fields.get("lookahead_token_ids")
    if lookahead is not None and (type(lookahead) is not list or any(lookahead)):
        shape = replace(shape, unknown_fields=("lookahead_token_ids",))
    if group.kind not in PROFILE.attention_kinds:
        # Masked blocks are left out of the hashes but not of the tokens: the full-attention group's events place them.
        span = _span(fields, parent, tokens, unit, len(hashes) // width if width else 0, adapter)
        return [
            Stored(
                *(shape, tier, group, hashes, width, None, b"", unit),
                adapter=adapter if span else "",
                span=span,
            )
        ]
    count = len(hashes) // width if width else 0
    # Connectors that say "cpu" announce no removals.
    doubtful = fields.get("medium") == "cpu"
    if tokens or unit:
        if count == 0:
            raise BadValue("no_hashes", f"{len(tokens) // 4} tokens without a hash")
        if tier == TIER_HOST and len(tokens) == 4 * (count * unit + 1):
            # LMCache slices one token too many, and announces before the copy is done.
            tokens, doubtful = tokens[:-4], True
        if len(tokens) != 4 * count * unit:
            raise BadValue("token_count", f"{len(tokens) // 4} tokens in {count} blocks of {unit}")
    elif count == 0:
        raise BadValue("no_hashes", "neither hashes nor tokens")
    else:
        # An offload names a block once for each chunk that holds it.
        named = wire.distinct(hashes, width)
        return [
            Stored(shape, tier, group, named, width, parent, b"", 0, adapter, doubtful=doubtful)
        ]
    salt, opaque_from = _extra_keys(fields, count, parent is None and bool(tokens), adapter)
    whole = Stored(
        shape, tier, group, hashes, width, parent, tokens, unit, adapter, salt, False, doubtful
    )
    return _split(whole, opaque_from, count)


def _span(
    fields: Mapping[str, Any],
    parent: bytes | None,
    tokens: bytes,
    unit: int,
    count: int,
    adapter: str,
) -> Span | None:
    """The range that a window or recurrent group's store speaks of; None where it can't be read."""
    if not unit or not tokens or len(tokens) % (4 * unit) or len(tokens) < 4 * unit * count:
        return None
    if count == 0 and fields.get("extra_keys") is None:
        return Span(parent, tokens)
    # A salt is told with the prompt's first block, which may be left out: salted prompts are never placed.
    _, opaque_from = _extra_keys(fields, count, False, adapter)
    return Span(parent, tokens) if opaque_from >= count else None


def _split(event: Stored, at: int, count: int) -> Sequence[Event]:
    """The event up to block `at`, and the rest as opaque."""
    if at >= count:
        return [event]
    bytes_at, tokens_at = at * event.width, at * event.unit_tokens * 4
    rest = replace(
        event,
        hashes=event.hashes[bytes_at:],
        parent=event.hashes[bytes_at - event.width : bytes_at] if at else event.parent,
        tokens=event.tokens[tokens_at:],
        opaque=True,
    )
    if at == 0:
        return [rest]
    return [replace(event, hashes=event.hashes[:bytes_at], tokens=event.tokens[:tokens_at]), rest]


def _extra_keys(
    fields: Mapping[str, Any], count: int, at_root: bool, adapter: str
) -> tuple[str, int]:
    """The cache salt, and the first block whose keys no router can compute (`count`: none).

    Each block has nil or an untagged list: the adapter's name in every block, media items, the salt in the prompt's
    first block only, digests of embeddings.
    """
    if not adapter and fields.get("lora_id") is not None:
        return "", 0  # releases before 0.14 number adapters, and clients name them
    per_block = fields.get("extra_keys")
    if per_block is None:
        return "", count
    if type(per_block) is not list:
        raise BadValue("field_type", f"extra_keys is {type(per_block).__name__}; expected an array")
    if len(per_block) != count:
        return "", 0
    salt = ""
    for index, keys in enumerate(per_block):
        rest = list(keys) if type(keys) is list else [] if keys is None else [keys]
        if adapter:
            if rest[:1] != [adapter]:
                return salt, index
            rest = rest[1:]
        if index == 0 and at_root and len(rest) == 1 and type(rest[0]) is str:
            salt = wire.text("cache salt", rest.pop())
        if rest:
            return salt, index
    return salt, count


def _removed(fields: Mapping[str, Any], shape: Shape) -> Sequence[Event]:
    hashes, width = wire.pack_hashes(fields["block_hashes"])
    low, high = wire.signs(fields["block_hashes"])
    shape = replace(shape, hash_width=width, low=low, high=high)
    try:
        tier = _tier(fields, shape)
    except BadValue as error:
        return [schema.removal_of_no_tier(error, shape)]
    return [Removed(shape, tier, _group(fields), hashes, width)]


def _tier(fields: Mapping[str, Any], shape: Shape) -> int:
    tier = schema.tier_of(fields, shape, MEDIA)
    if fields.get("locality") not in (None, "LOCAL"):
        raise BadValue("remote_medium", f"locality {fields['locality']!r:.40}; expected LOCAL")
    return tier


def _group(fields: Mapping[str, Any]) -> Group:
    index = fields.get("group_idx")
    if index is not None and not wire.is_integer(index, 0, 64):
        raise BadValue("field_type", "group_idx is neither nil nor an integer below 64")
    kind = wire.text("kv_cache_spec_kind", fields.get("kv_cache_spec_kind")) or None
    window = fields.get("kv_cache_spec_sliding_window")
    if window is not None and not wire.is_integer(window, 0, 2**31):
        raise BadValue("field_type", "kv_cache_spec_sliding_window is no small integer")
    return Group(index, kind, window or 0)


_SCHEMAS: Mapping[str, Schema] = {
    "BlockStored": Schema(
        fields=_STORED,
        lengths=frozenset({6, 7, 8, 9, 10, 12}),
        required=frozenset({"block_hashes", "parent_block_hash", "token_ids", "block_size"}),
        map_only=frozenset({"locality", "ownership", "session_id", "lookahead_token_ids"}),
        doubt=Doubt.INCOMPLETE,
        build=_stored,
    ),
    "BlockRemoved": Schema(
        fields=_REMOVED,
        lengths=frozenset({2, 3, 4}),
        required=frozenset({"block_hashes"}),
        map_only=frozenset({"locality", "ownership"}),
        doubt=Doubt.STALE,
        build=_removed,
    ),
    "AllBlocksCleared": schema.CLEARED,
}

ADAPTER = Adapter(PROFILE, decode_payload)
