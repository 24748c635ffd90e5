"""TensorRT-LLM's published events, constructed from its source."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from servingfleet_protos.v1.common_pb2 import TIER_GPU
from servingfleet_relay.adapters import trtllm
from servingfleet_relay.adapters.events import (
    Cleared,
    Doubt,
    Dropped,
    Event,
    Foreign,
    Removed,
    Stored,
)
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
        (removed([1], medium=None), "medium_missing", Doubt.STALE),
        (["BlockStored", [1], None, [], 32, None], "event_length", Doubt.QUARANTINED),
        ({"type": "updated"}, "unknown_event", Doubt.STALE),
    ],
)
def test_what_is_published_otherwise_is_dropped(event: Any, reason: str, doubt: Doubt) -> None:
    (got,) = published(event)
    assert isinstance(got, Dropped)
    assert (got.reason, got.doubt) == (reason, doubt)


def test_another_medium_than_the_gpu_is_foreign() -> None:
    for event in (stored([1], tokens(1, 32), medium="CPU"), removed([1], medium="CPU")):
        (got,) = published(event)
        assert isinstance(got, Foreign)


def test_nothing_of_it_is_ever_certain() -> None:
    relay = pipelines.proven(engine="trtllm")
    relay.live(0, live(0, stored([1, 2], tokens(2, 32))), pipelines.NOW)
    assert pipelines.held(relay) == (b"", pipelines.ascending(pipelines.canonical(tokens(4))))
    assert pipelines.state(relay) == "history_lost"
    assert "from the engine's source" in relay.status().ranks[0].reason
