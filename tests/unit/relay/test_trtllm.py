"""TensorRT-LLM's published and pulled events, constructed from its source."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servingfleet_protos.v1.common_pb2 import TIER_GPU, TIER_HOST
from servingfleet_relay.adapters import trtllm
from servingfleet_relay.adapters.events import Cleared, Doubt, Dropped, Event, Removed, Stored
from tests.unit.relay import test_pipeline as pipelines
from tests.unit.relay.batches import CLEARED, live, payload, removed, tokens
from tests.unit.relay.batches import stored as vllm_stored

BIG = 2**64 - 3


def packed(*hashes: int) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def published(event: Any) -> tuple[Event, ...]:
    return trtllm.decode_payload(payload(event)).events


def stored(hashes: list[Any], ids: list[Any], **fields: Any) -> dict[str, Any]:
    return vllm_stored(hashes, ids, block=32, **fields)


def test_a_published_store_is_an_upper_bound() -> None:
    (got,) = published(stored([1, BIG], tokens(2, 32)))
    assert isinstance(got, Stored)
    assert (got.hashes, got.unit_tokens, got.tier) == (packed(1, BIG), 32, TIER_GPU)
    assert (got.doubtful, got.opaque) == (True, False)
    assert (got.shape.tells_adapters, got.shape.tells_salts) == (False, False)


@pytest.mark.parametrize(
    ("fields", "opaque_from"),
    [
        ({"mm_keys": [[], [{"type": "mm_key", "hash": "aa", "start_offset": 0}]]}, 1),
        ({"lora_id": 3}, 0),
        ({"token_ids": [*tokens(1, 32), "digest", *tokens(1, 31)]}, 1),
    ],
)
def test_blocks_with_keys_that_no_router_knows_are_opaque(
    fields: dict[str, Any], opaque_from: int
) -> None:
    events = published({**stored([1, 2], tokens(2, 32)), **fields})
    found = [(e.opaque, e.hashes) for e in events if isinstance(e, Stored)]
    parts = [(False, packed(1))] if opaque_from else []
    assert found == [*parts, (True, packed(2) if opaque_from else packed(1, 2))]


def test_published_removals_and_clears_are_read() -> None:
    assert isinstance(published(removed([1]))[0], Removed)
    assert isinstance(published(CLEARED)[0], Cleared)


@pytest.mark.parametrize(
    ("event", "reason", "doubt"),
    [
        (stored([1], tokens(1, 31)), "token_count", Doubt.QUARANTINED),
        (stored([], []), "no_hashes", Doubt.QUARANTINED),
        (stored([b"\x00" * 32], tokens(1, 32)), "hash_type", Doubt.QUARANTINED),
        (stored([1], tokens(1, 32), medium="CPU"), "unknown_medium", Doubt.INCOMPLETE),
        (removed([1], medium=None), "unknown_medium", Doubt.STALE),
        (["BlockStored", [1], None, [], 32, None], "event_length", Doubt.INCOMPLETE),
        ({"type": "updated"}, "unknown_event", Doubt.STALE),
    ],
)
def test_what_is_published_otherwise_is_dropped(event: Any, reason: str, doubt: Doubt) -> None:
    (got,) = published(event)
    assert isinstance(got, Dropped)
    assert (got.reason, got.doubt) == (reason, doubt)


def test_nothing_of_it_is_ever_certain() -> None:
    relay = pipelines.proven(engine="trtllm")
    relay.live(0, live(0, stored([1, 2], tokens(2, 32))), pipelines.NOW)
    assert pipelines.held(relay) == (b"", pipelines.ascending(pipelines.canonical(tokens(4))))
    assert pipelines.state(relay) == "live"


def entry(data: dict[str, Any], event_id: int = 1, **fields: Any) -> dict[str, Any]:
    return {"event_id": event_id, "window_size": 4096, "data": data, **fields}


def block(hash_: Any, ids: list[int], level: int = 0, **fields: Any) -> dict[str, Any]:
    rows = [{"token_id": each, "token_extra_id": 0} for each in ids]
    return {"block_hash": hash_, "tokens": rows, "cache_level": level, **fields}


def stored_entry(*blocks: dict[str, Any], parent: Any = None, **fields: Any) -> dict[str, Any]:
    return entry({"type": "stored", "parent_hash": parent, "blocks": list(blocks)}, **fields)


def test_pulled_stores_chain_block_by_block() -> None:
    ids = tokens(2, 32)
    got = trtllm.PullReader(32).read(stored_entry(block(1, ids[:32]), block(BIG, ids[32:], 1)))
    assert (got.event_id, got.rank, got.created) == (1, 0, False)
    first, second = got.events
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (first.parent, second.parent) == (None, packed(1))
    assert (first.tier, second.tier) == (TIER_GPU, TIER_HOST)
    assert first.doubtful
    assert second.doubtful


def test_a_block_that_is_not_full_is_no_block_and_its_removal_none() -> None:
    reader = trtllm.PullReader(32)
    assert reader.read(stored_entry(block(1, tokens(1, 5)))).events == ()
    gone = reader.read(entry({"type": "removed", "block_hashes": [1, 2]})).events
    assert [(e.tier, e.hashes) for e in gone if isinstance(e, Removed)] == [
        (TIER_GPU, packed(2)),
        (TIER_HOST, packed(2)),
    ]


def test_a_move_is_there_before_it_is_gone() -> None:
    move = {"type": "updated", "block_hash": 7, "cache_level": {"old": 0, "new": 1}}
    there, gone = trtllm.PullReader(32).read(entry(move)).events
    assert isinstance(there, Stored)
    assert isinstance(gone, Removed)
    assert (there.tier, there.unit_tokens, gone.tier) == (TIER_HOST, 0, TIER_GPU)


def test_a_change_of_priority_alone_is_nothing() -> None:
    change = {"type": "updated", "block_hash": 7, "cache_level": None, "priority": {"old": 1}}
    assert trtllm.PullReader(32).read(entry(change)).events == ()


def test_only_the_largest_window_counts() -> None:
    reader = trtllm.PullReader(32)
    full = block(1, tokens(1, 32))
    assert len(reader.read(stored_entry(full)).events) == 1
    assert reader.read(stored_entry(full, window_size=512)).events == ()


def test_a_created_cache_is_a_new_life_and_ranks_are_told() -> None:
    made = entry({"type": "created", "num_blocks_per_cache_level": [9]}, attention_dp_rank=2)
    got = trtllm.PullReader(32).read(made)
    assert (got.created, got.rank, got.events) == (True, 2, ())


@pytest.mark.parametrize(
    "raw",
    [
        None,
        {},
        {"event_id": 1, "data": []},
        entry({"type": "stored", "blocks": [1]}),
        entry({"type": "stored", "blocks": [block("x", tokens(1, 32))]}),
        entry({"type": "stored", "blocks": [block(1, tokens(1, 32), 7)]}),
        entry({"type": "removed", "block_hashes": None}),
        entry({"type": "updated", "block_hash": 1, "cache_level": {"old": 0, "new": 9}}),
        entry({"type": "moved"}),
    ],
)
def test_an_entry_that_can_not_be_read_may_have_been_a_removal(raw: object) -> None:
    (got,) = trtllm.PullReader(32).read(raw).events
    assert isinstance(got, Dropped)
    assert got.doubt is Doubt.STALE


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["type", "blocks", "block_hash", "tokens", "cache_level", "old", "new", "token_id"]
            ),
            inner,
        )
    ),
    max_leaves=20,
)
kinds = st.sampled_from(["stored", "removed", "updated", "created"])


@settings(deadline=None)
@given(
    kinds,
    st.dictionaries(
        st.sampled_from(["blocks", "block_hashes", "block_hash", "cache_level", "parent_hash"]),
        json_values,
    ),
    json_values,
)
def test_no_entry_raises(kind: str, data: dict[str, Any], window: Any) -> None:
    trtllm.PullReader(32).read({**entry({**data, "type": kind}), "window_size": window})
