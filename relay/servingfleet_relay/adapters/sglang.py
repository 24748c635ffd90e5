"""Turns SGLang's event batches, of every wire generation since 0.4.6, into events.

Pure. SGLang's hashes are SHA-256 chains over the tokens of a page, without a seed for plain requests: the first page of
a prompt shows whether it is one. A first page that the known recipes don't give belongs to a namespace that the wire
doesn't name, and is held as opaque. Releases that hash pages without what is before them are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from servingfleet_protos.v1.common_pb2 import TIER_GPU, TIER_HOST
from servingfleet_protos.v1.stream_pb2 import TierRule

from . import claims, schema, wire
from .events import (
    Adapter,
    Batch,
    Doubt,
    Dropped,
    EngineProfile,
    Event,
    Foreign,
    Group,
    Removed,
    Shape,
    Stored,
    TierTraits,
)
from .schema import GRAVE, TEXT, Schema
from .wire import BadValue

__all__ = ["ADAPTER", "PROFILE", "decode", "decode_payload"]

PROFILE = EngineProfile(
    engine="sglang",
    tiers={
        # One copy for each place in the tree. Requests with an extra_key have trees of their own, whose pages share
        # hashes with the plain one's: then what is held is an upper bound, and the best guess all the same.
        TIER_GPU: TierTraits(
            multiset=False,
            whole_prompt=False,
            upper_in_predicted=True,
            stray_removal=Doubt.AMBIGUOUS,
            root_once=True,
        ),
        # A layer is loaded while the one before it is computed. One profile of a large model hid nothing, the enqueueing
        # being what took time; the design hides all but the first layer: half, until somebody measures it.
        TIER_HOST: TierTraits(
            multiset=False,
            whole_prompt=False,
            upper_in_predicted=True,
            overlap=TierRule.OVERLAP_COMPUTE,
            overlap_share=0.5,
            always_loads=True,
        ),
    },
    cleared_tiers=frozenset({TIER_GPU, TIER_HOST}),
    attention_kinds=frozenset({None}),
    proves_roots=True,
    copies_first=True,
    fixed_unit=True,
    adapters_since=(0, 5, 23),
    recorded=(0, 5, 23),
    # The header is read since March 2026 (#19832); the second name is the older one, and still taken.
    rank_fields=("routed_dp_rank", "data_parallel_rank"),
    report_flag="--enable-cache-report",
    replayed=claims.SGLANG_REPLAYED,
    claims=claims.SGLANG,
    generations=(
        schema.arrays((0, 4, 6), 6, 2, batch_length=2),
        schema.arrays((0, 4, 8), 6, 2),
        schema.arrays((0, 5, 9), 7, 3),
        schema.maps((0, 5, 20)),
    ),
)

# DISK and EXTERNAL have names in 0.5.23 and nothing that says them: unknown until seen.
MEDIA: Mapping[str, int] = {"GPU": TIER_GPU, "CPU_PINNED": TIER_HOST}

PAGES_PROVEN = 64
"""Pages of a prompt whose hashes are computed again: two microseconds each."""
CHAIN_BROKEN = "pages whose hashes are not the chain of their token_ids"

_SALT_TAG = b"sglang-cache-salt-v1\0"
_NAMESPACE_TAG = b"sglang-kv-event-namespace-v1"
_EMPTY_TUPLE = 5740354900026072187
"""Python's hash(()): the parent of a prompt's first page before 0.5.1."""

MAX_TOKEN = 2**32
"""The values that stand for an image's tokens may be beyond any vocabulary."""

_EIGHTH = "eighth element"
"""No map has this key."""
_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    _EIGHTH,
)
_REMOVED = ("block_hashes", "medium")


def decode(frames: Sequence[bytes]) -> Batch:
    """One live message, frames as received. Never raises: trouble is among the batch's events."""
    return schema.decode(frames, _SCHEMAS)


def decode_payload(payload: bytes) -> Batch:
    """One batch. Never raises: trouble is among the batch's events."""
    batch = schema.decode_payload(payload, _SCHEMAS)
    if batch.length == 2:
        # Before 0.4.8: one hash for a whole tree node, of any length.
        return replace(batch, events=(_content_hashes("batches of 2 elements"), *batch.events))
    return batch


def _content_hashes(seen: str) -> Dropped:
    return Dropped(
        "content_hash",
        f"{seen}: a release that hashes pages without what is before them; expected 0.5.6 or newer",
        Doubt.QUARANTINED,
    )


def _stored(fields: Mapping[str, Any], shape: Shape) -> Sequence[Event]:
    hashes, width = _hashes(fields["block_hashes"])
    parent_value = fields["parent_block_hash"]
    parent = None if parent_value is None else _hashes([parent_value], "parent_block_hash")[0]
    if not hashes:
        raise BadValue("no_hashes", "block_hashes is empty")
    unit = fields["block_size"]
    if not wire.is_integer(unit, 1, 2**20):
        raise BadValue("block_size", f"block_size is {unit!r:.40}; expected 1 to 2^20")
    tokens, pairs = _tokens(fields["token_ids"])
    count = len(hashes) // width
    keys = len(tokens) // 4 - pairs
    if keys != count * unit:
        raise BadValue(
            "token_count", f"token_ids has {keys} keys; expected {count} pages of block_size {unit}"
        )
    is_map = shape.form == "map"
    low, high = wire.signs([*fields["block_hashes"], parent_value])
    shape = replace(
        shape,
        # The eighth element comes only with a salt.
        form=shape.form if shape.form != "array 8" else "array 7",
        hash_width=width,
        low=low,
        high=high,
        tells_adapters=is_map,
        tells_salts=is_map,
        pairs=pairs,
    )
    tier = schema.tier_of(fields, shape, MEDIA, stored=True)
    if isinstance(tier, Foreign):
        return [tier]
    salt = wire.text("cache_salt", _salt(fields, is_map))
    adapter = wire.text("lora_name", fields.get("lora_name"))
    event = Stored(shape, tier, Group(), hashes, width, parent, tokens, unit, adapter, salt)
    if shape.form == "array 6" and parent_value == _EMPTY_TUPLE:
        return [_content_hashes("a parent that is the hash of nothing")]
    return [_namespaced(event, pairs) if parent is None else replace(event, doubtful=bool(adapter))]


def _namespaced(event: Stored, pairs: bool) -> Event:
    """A prompt's first pages, in the namespace that their first hash proves."""
    first = event.hashes[: event.width]
    keys = _page(event, 0, pairs)
    if not event.cache_salt:
        known = {_packed(sha256(keys).digest())}
    else:
        seed = sha256(_SALT_TAG + event.cache_salt.encode()).digest()
        plain = sha256(seed + keys).digest()
        known = {_packed(plain), _packed(sha256(_namespace(event.cache_salt) + plain[:8]).digest())}
    if event.adapter:
        if first in known:
            return Dropped(
                "shared_hash",
                "pages of an adapter share hashes with the base model's: expected 0.5.23 or newer",
                Doubt.AMBIGUOUS,
            )
        # The adapter's own key is not on the wire: another load of it, or an extra_key, looks the same.
        return replace(event, doubtful=True)
    if first in known:
        return event if _chained(event, pairs) else _content_hashes(CHAIN_BROKEN)
    if event.shape.form != "map" and not event.cache_salt:
        return _content_hashes("a first page whose hash is not that of its tokens")
    return replace(event, opaque=True)


def _chained(event: Stored, pairs: bool) -> bool:
    """Whether the pages' hashes are those of their tokens, page after page, as far as is looked at."""
    if event.cache_salt:
        return True  # one of two recipes: its first page has shown which
    digest = b""
    for at in range(min(len(event.hashes) // event.width, PAGES_PROVEN)):
        digest = sha256(digest + _page(event, at, pairs)).digest()
        if event.hashes[at * 8 : at * 8 + 8] != _packed(digest):
            return False
    return True


def _page(event: Stored, at: int, pairs: bool) -> bytes:
    """What the engine hashes of a page."""
    unit = event.unit_tokens
    return _keys(event.tokens[at * unit * 4 : ((at + 1) * unit + pairs) * 4], pairs)


def _namespace(salt: str) -> bytes:
    """Seed of the "dynamo" format for a salt without an extra_key."""
    encoded = salt.encode()
    return sha256(
        _NAMESPACE_TAG + b"\x00\x01" + len(encoded).to_bytes(8, "little") + encoded
    ).digest()


def _keys(tokens: bytes, pairs: bool) -> bytes:
    """What the engine hashes of a page: its tokens, or both tokens of each pair."""
    if not pairs:
        return tokens
    starts = range(0, len(tokens) - 4, 4)
    return b"".join(tokens[at : at + 8] for at in starts)


def _packed(digest: bytes) -> bytes:
    """A digest as the wire's integer, packed as hashes are."""
    return digest[7::-1]


def _hashes(values: object, name: str = "block_hashes") -> tuple[bytes, int]:
    """As `wire.pack_hashes`, of signed 64-bit integers only."""
    packed, width = wire.pack_hashes(values, name)
    if width == 32 or wire.signs(values if type(values) is list else [])[1]:
        raise BadValue("hash_type", f"{name} holds something that is no signed 64-bit integer")
    return packed, width


def _tokens(values: object) -> tuple[bytes, bool]:
    """Token ids, packed, and whether they came as pairs: then one more than there are pairs."""
    if type(values) is not list or not values or type(values[0]) is not list:
        if type(values) is list and any(type(value) is list for value in values):
            raise BadValue("pairs_mixed", "token_ids mixes tokens and pairs")
        return wire.pack_tokens(values, MAX_TOKEN), False
    if any(type(pair) is not list or len(pair) != 2 for pair in values):
        raise BadValue("pairs_mixed", "token_ids holds pairs, and something else")
    firsts = [pair[0] for pair in values]
    seconds = [pair[1] for pair in values]
    if firsts[1:] != seconds[:-1]:
        raise BadValue(
            "pairs_apart",
            "token_ids: a pair does not begin with the token that ends the one before",
        )
    return wire.pack_tokens([*firsts, seconds[-1]], MAX_TOKEN), True


def _salt(fields: Mapping[str, Any], is_map: bool) -> object:
    if is_map or _EIGHTH not in fields:
        return fields.get("cache_salt")
    extra = fields[_EIGHTH]
    if type(extra) is not dict or set(extra) != {"cache_salt"}:
        raise BadValue("field_type", "the eighth element is no map of a cache salt alone")
    return extra["cache_salt"]


def _removed(fields: Mapping[str, Any], shape: Shape) -> Sequence[Event]:
    hashes, width = _hashes(fields["block_hashes"])
    if not hashes:
        raise BadValue("no_hashes", "block_hashes is empty in a removal")
    low, high = wire.signs(fields["block_hashes"])
    shape = replace(shape, hash_width=width, low=low, high=high)
    tier = schema.tier_of(fields, shape, MEDIA, stored=False)
    if isinstance(tier, Foreign):
        return [tier]
    named = wire.distinct(hashes, width)
    return [Removed(shape, tier, Group(), named, width, twice=len(named) < len(hashes))]


_SCHEMAS: Mapping[str, Schema] = {
    "BlockStored": Schema(
        fields=_STORED,
        lengths=frozenset({6, 7, 8}),
        required=frozenset(_STORED[:5]),
        map_only=frozenset({"cache_salt", "session_id", "lora_name"}),
        doubt=Doubt.INCOMPLETE,
        build=_stored,
        grave=GRAVE
        | {"no_hashes", "token_count", "token_type", "block_size", "pairs_mixed", "pairs_apart"},
        types={"lora_id": (int, schema.NIL), "session_id": TEXT},
        media=MEDIA,
    ),
    "BlockRemoved": Schema(
        fields=_REMOVED,
        lengths=frozenset({2, 3}),
        required=frozenset({"block_hashes"}),
        map_only=frozenset(),
        doubt=Doubt.STALE,
        build=_removed,
        media=MEDIA,
    ),
    "AllBlocksCleared": schema.CLEARED,
}

ADAPTER = Adapter(PROFILE, decode_payload)
