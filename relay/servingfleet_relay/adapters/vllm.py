"""Turns vLLM's event batches, of every wire generation since 0.9.0, into events.

Pure: bytes in, events out. Gaps in the numbering are `sequence`'s business, what odd events say about the stream is
`conformance`'s. One event that can't be read never costs its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from servingfleet_protos.v1.common_pb2 import TIER_DISK, TIER_GPU, TIER_HOST, TIER_SHARED
from servingfleet_protos.v1.stream_pb2 import TierRule

from . import claims, schema, wire
from .events import (
    Adapter,
    Batch,
    Cleared,
    Doubt,
    Dropped,
    EngineProfile,
    Event,
    Foreign,
    Group,
    Reach,
    Removed,
    Shape,
    Span,
    Stored,
    TierTraits,
)
from .proof import with_proof
from .schema import GRAVE, TEXT, Schema
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

# Connectors load a hit whole before the request's first step, whatever it costs, while others are computed; they begin
# when the scheduler reaches the request with budget left, so that only part of its waiting hides the load: half, until
# somebody measures it.
_LOADED = TierTraits(
    multiset=False,
    whole_prompt=True,
    upper_in_predicted=True,
    overlap=TierRule.OVERLAP_QUEUE,
    overlap_share=0.5,
    always_loads=True,
)

PROFILE = EngineProfile(
    engine="vllm",
    tiers={
        # Equal blocks are not merged on the GPU: each copy is stored and removed by itself. A repeat from the root
        # may be a mere report of a hit (kv_cache_report_mode "full"): an upper bound, predicted by nobody.
        TIER_GPU: TierTraits(multiset=True, whole_prompt=False, upper_in_predicted=False),
        # Measured: after a reset of the GPU the host tier still hits, and such hits may report the whole prompt.
        TIER_HOST: _LOADED,
        TIER_DISK: replace(_LOADED, upper_in_predicted=False, append_only=True),
        TIER_SHARED: replace(_LOADED, append_only=True),
    },
    mixed_steps=True,
    # AllBlocksCleared names no medium and means the GPU only.
    cleared_tiers=frozenset({TIER_GPU}),
    attention_kinds=frozenset({None, "full_attention", "mla_attention"}),
    window_kinds=frozenset({"sliding_window", "sliding_window_mla"}),
    recurrent_kinds=frozenset({"mamba"}),
    chunked_kinds=frozenset({"chunked_local_attention"}),
    recorded=(0, 32),
    report_flag="--enable-prompt-tokens-details",
    replayed=claims.VLLM_REPLAYED,
    claims=claims.VLLM,
    generations=(
        schema.arrays((0, 9), 6, 2, batch_length=2),
        schema.arrays((0, 9, 1), 6, 2),
        schema.arrays((0, 10, 2), 7, 3),
        schema.arrays((0, 14), 8, 3),
        schema.arrays((0, 17), 9, 3),
        schema.arrays((0, 20), 10, 4),
        schema.arrays((0, 22), 12, 4),
        schema.maps((0, 24)),
    ),
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
_CONSTANT = ("group_idx", "kv_cache_spec_kind")
"""A release sends these with every event of a tier, or with none; placeholders without tokens differ."""


def decode(frames: Sequence[bytes]) -> Batch:
    """One live message, frames as received. Never raises: trouble is among the batch's events."""
    return with_proof(schema.decode(frames, _SCHEMAS))


def decode_payload(payload: bytes) -> Batch:
    """One batch. Never raises: trouble is among the batch's events."""
    return with_proof(schema.decode_payload(payload, _SCHEMAS))


def _stored(fields: Mapping[str, Any], shape: Shape) -> Sequence[Event]:
    hashes, width = wire.pack_hashes(fields["block_hashes"])
    parent_value = fields["parent_block_hash"]
    parent = None if parent_value is None else wire.pack_hash(parent_value)
    low, high = _signs([*fields["block_hashes"], parent_value], shape)
    if parent is not None and width and len(parent) != width:
        raise BadValue("hash_type", "parent_block_hash and block_hashes are of different types")
    tier = _tier(fields, shape, stored=True)
    if isinstance(tier, Foreign):
        return [tier]
    is_map = shape.form == "map"
    shape = replace(
        shape,
        hash_width=width or len(parent or b""),
        low=low,
        high=high,
        tells_adapters=is_map or "lora_name" in fields,
        tells_salts=is_map or "extra_keys" in fields,
        told=schema.told(fields, _CONSTANT),
    )
    tokens = wire.pack_tokens(fields["token_ids"])
    if not tokens:
        shape = replace(shape, variant="placeholder")
    unit = fields["block_size"]
    if not wire.is_integer(unit, 0, 2**20):
        raise BadValue("block_size", f"block_size is {unit!r:.40}; expected 0 to 2^20")
    adapter = wire.text("lora_name", fields.get("lora_name"))
    # Since 0.33 a hash may cover the tokens after its block: whose hits no prefix tells.
    ahead = any(fields.get("lookahead_token_ids") or ())
    if ahead:
        shape = replace(shape, oddities=("lookahead",))
    event = Stored(
        *(shape, tier, _group(fields), hashes, width, parent, tokens, unit, adapter),
        # Connectors that say "cpu" announce no removals.
        doubtful=ahead or fields.get("medium") == "cpu",
        reach=_reach(fields, tier),
    )
    if tier == TIER_GPU:
        _check_gpu(fields, event)
    elif parent_value == 0:
        # LMCache's word for a prompt whose beginning it did not store.
        raise BadValue("parent_zero", "parent_block_hash is 0: the blocks before are not known")
    if event.group.kind not in PROFILE.attention_kinds:
        return [_masked(fields, event)]
    if not event.count:
        kind = "" if event.group.kind else ", and no kv_cache_spec_kind leaves blocks out"
        raise BadValue("no_hashes", f"block_hashes is empty, with {len(tokens) // 4} tokens{kind}")
    if not tokens and (tier != TIER_GPU or not unit):
        # An offload names a block once for each chunk that holds it.
        return [replace(event, hashes=wire.distinct(hashes, width))]
    return _described(fields, event)


def _masked(fields: Mapping[str, Any], event: Stored) -> Stored:
    """Of a window or recurrent group: blocks that no next request can use are left out of the hashes, not of the tokens."""
    tokens, unit, count = event.tokens, event.unit_tokens, event.count
    if tokens and unit and (len(tokens) % (4 * unit) or len(tokens) < 4 * unit * count):
        raise BadValue(
            "token_count",
            f"token_ids has {len(tokens) // 4}; expected whole blocks of block_size {unit}, {count} at least",
        )
    keys = _extra_keys(fields, count, False, event.adapter)
    # A salt is told with the prompt's first block, which may be left out: salted prompts are never placed.
    told = unit and tokens and keys.opaque_from >= count
    return replace(
        event,
        shape=replace(event.shape, oddities=(*event.shape.oddities, *keys.oddities)),
        # The full-attention group's events place them.
        parent=None,
        tokens=b"",
        adapter=event.adapter if told else "",
        span=Span(event.parent, tokens) if told else None,
    )


def _described(fields: Mapping[str, Any], event: Stored) -> Sequence[Event]:
    """Of full attention, with its tokens."""
    tokens, unit, count, doubtful = event.tokens, event.unit_tokens, event.count, event.doubtful
    oddities = event.shape.oddities
    whole = 4 * count * unit
    more = len(tokens) > whole > 0 and not len(tokens) % whole
    if event.tier == TIER_HOST and len(tokens) == whole + 4:
        # LMCache slices one token too many, and announces before the copy is done.
        tokens, doubtful = tokens[:-4], True
        oddities = (*oddities, "one_token_more")
    elif more and event.group.kind and event.parent is None:
        # With context parallelism a report of a hit (kv_cache_report_mode "full") counts blocks of all ranks in the
        # block size of one. Whether it is one, the lane's unit tells.
        unit, doubtful = len(tokens) // (4 * count), True
        oddities = (*oddities, "block_size_unscaled")
    if len(tokens) != 4 * count * unit:
        kind = "" if event.group.kind else ", or a kv_cache_spec_kind that leaves blocks out"
        raise BadValue(
            "token_count",
            f"token_ids has {len(tokens) // 4}; expected {count} blocks of block_size {unit}{kind}",
        )
    keys = _extra_keys(fields, count, event.parent is None, event.adapter)
    stored = replace(
        event,
        shape=replace(event.shape, oddities=(*oddities, *keys.oddities)),
        tokens=tokens,
        unit_tokens=unit,
        cache_salt=keys.salt,
        doubtful=doubtful,
        # Connectors that describe their blocks leave the salt out, and the media.
        keys_told=event.tier == TIER_GPU or fields.get("extra_keys") is not None,
    )
    return _split(stored, keys.opaque_from, count)


def _signs(values: Sequence[object], shape: Shape) -> tuple[bool, bool]:
    low, high = wire.signs(values)
    if low and shape.form != "array 6":
        # Only the hashes of the first releases were Python's own, and signed.
        raise BadValue("hash_range", "block_hashes or parent_block_hash holds a negative number")
    return low, high


def _check_gpu(fields: Mapping[str, Any], event: Stored) -> None:
    """What every release says of blocks on the GPU. Raises BadValue."""
    shape = event.shape
    if shape.tells_salts and event.count and fields.get("extra_keys") is None:
        raise BadValue(
            "field_missing", "no extra_keys, which tell a salted prompt from a plain one"
        )
    number = fields.get("lora_id")
    if number is not None and number < 0:
        raise BadValue("field_type", "lora_id is negative")
    if shape.tells_adapters and (number is None) != (not event.adapter):
        raise BadValue("field_type", "of lora_id and lora_name one is nil and the other is not")


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


@dataclass(frozen=True, slots=True)
class _Keys:
    salt: str
    opaque_from: int
    """The first block whose keys no router can compute; as many as there are blocks: none."""
    oddities: tuple[str, ...] = ()


def _extra_keys(fields: Mapping[str, Any], count: int, at_root: bool, adapter: str) -> _Keys:
    """What entered the hashes beside the tokens.

    Each block has nil or an untagged list: the adapter's name in every block, media items, the salt in the prompt's
    first block only, digests of embeddings.
    """
    if not adapter and fields.get("lora_id") is not None:
        return _Keys("", 0)  # releases before 0.14 number adapters, and clients name them
    per_block = fields.get("extra_keys")
    if per_block is None:
        return _Keys("", count)
    if any(keys is not None and (type(keys) is not list or None in keys) for keys in per_block):
        raise BadValue(
            "field_type", "extra_keys holds something that is neither nil nor an array of keys"
        )
    if len(per_block) != count:
        return _Keys("", 0, ("extra_keys_count",))
    salt = ""
    for index, keys in enumerate(per_block):
        rest = list(keys or ())
        if adapter:
            if rest[:1] != [adapter]:
                return _Keys(salt, index, ("extra_keys_adapter",))
            rest = rest[1:]
        if index == 0 and at_root and len(rest) == 1 and type(rest[0]) is str:
            salt = wire.text("cache_salt", rest.pop())
        if rest:
            return _Keys(salt, index)
    return _Keys(salt, count)


def _removed(fields: Mapping[str, Any], shape: Shape) -> Sequence[Event]:
    hashes, width = wire.pack_hashes(fields["block_hashes"])
    if not hashes:
        raise BadValue("no_hashes", "block_hashes is empty in a removal")
    low, high = _signs(fields["block_hashes"], shape)
    tier = _tier(fields, shape, stored=False)
    if isinstance(tier, Foreign):
        return [tier]
    told = schema.told(fields, _CONSTANT[:1])
    shape = replace(shape, hash_width=width, low=low, high=high, told=told)
    if not PROFILE.tiers[tier].multiset:
        # A chunk is named by each of its hashes, and neighbours share some.
        hashes = wire.distinct(hashes, width)
    return [Removed(shape, tier, _group(fields), hashes, width, reach=_reach(fields, tier))]


def _reach(fields: Mapping[str, Any], tier: int) -> Reach:
    if tier == TIER_GPU:
        return Reach.OWN
    if fields.get("locality") == "REMOTE":
        return Reach.REMOTE
    # What Mooncake's and LMCache's connectors say of their stores.
    return Reach.SHAREABLE if fields.get("medium") == "cpu" else Reach.OWN


def _tier(fields: Mapping[str, Any], shape: Shape, *, stored: bool) -> int | Foreign:
    locality = fields.get("locality")
    if locality not in (None, "LOCAL", "REMOTE"):
        raise BadValue("remote_medium", f"locality {locality!a:.40}; expected LOCAL or REMOTE")
    return schema.tier_of(fields, shape, MEDIA, stored=stored)


def _group(fields: Mapping[str, Any]) -> Group:
    index = fields.get("group_idx")
    if index is not None and not wire.is_integer(index, 0, 64):
        raise BadValue("field_type", "group_idx is neither nil nor an integer below 64")
    kind = wire.text("kv_cache_spec_kind", fields.get("kv_cache_spec_kind")) or None
    window = fields.get("kv_cache_spec_sliding_window")
    if window is not None and not wire.is_integer(window, 0, 2**31):
        raise BadValue("field_type", "kv_cache_spec_sliding_window is no small integer")
    return Group(index, kind, window or 0)


_TYPES: Mapping[str, tuple[type, ...]] = {"locality": TEXT, "ownership": TEXT}
_SCHEMAS: Mapping[str, Schema] = {
    "BlockStored": Schema(
        fields=_STORED,
        lengths=frozenset({6, 7, 8, 9, 10, 12}),
        required=frozenset(_STORED[:7]),
        map_only=frozenset({"locality", "ownership", "session_id", "lookahead_token_ids"}),
        doubt=Doubt.INCOMPLETE,
        build=_stored,
        grave=GRAVE | {"token_type", "token_count", "block_size"},
        types={
            **_TYPES,
            "lora_id": (int, schema.NIL),
            "session_id": TEXT,
            "extra_keys": (list, schema.NIL),
            "lookahead_token_ids": (list, schema.NIL),
        },
        media=MEDIA,
    ),
    "BlockRemoved": Schema(
        fields=_REMOVED,
        lengths=frozenset({2, 3, 4}),
        required=frozenset(_REMOVED[:2]),
        map_only=frozenset({"locality", "ownership"}),
        doubt=Doubt.STALE,
        build=_removed,
        types=_TYPES,
        media=MEDIA,
    ),
    "AllBlocksCleared": schema.CLEARED,
}

ADAPTER = Adapter(PROFILE, decode_payload)
