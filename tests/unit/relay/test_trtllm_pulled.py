"""TensorRT-LLM's pulled entries, constructed from its source."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servingfleet_protos.v1.common_pb2 import TIER_GPU, TIER_HOST
from servingfleet_relay.adapters.events import Cleared, Doubt, Dropped, Removed, Stored
from servingfleet_relay.adapters.trtllm_pulled import Reader, place_of
from servingfleet_relay.pipeline import Pipeline
from tests.unit.relay.batches import tokens
from tests.unit.relay.entries import block, created, entry, removed, stored, updated
from tests.unit.relay.test_pipeline import NOW, UPPER, canonical, pipeline

BIG = 2**64 - 3
IDS = tokens(4)


def packed(*hashes: int) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def dropped(raw: object) -> Dropped:
    (got,) = Reader(32).read(raw)
    assert isinstance(got, Dropped), got
    return got


def test_stores_chain_block_by_block() -> None:
    first, second = Reader(32).read(stored(1, block(1, IDS[:32]), block(BIG, IDS[32:], 1)))
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (first.parent, second.parent) == (None, packed(1))
    assert (first.tier, second.tier) == (TIER_GPU, TIER_HOST)
    assert first.doubtful
    assert second.doubtful


def test_a_block_that_is_not_full_is_no_block_and_its_removal_none() -> None:
    reader = Reader(32)
    assert reader.read(stored(1, block(1, IDS[:5]))) == []
    gone = [each for each in reader.read(removed(2, 1, 2)) if isinstance(each, Removed)]
    assert [(each.tier, each.hashes) for each in gone] == [
        (TIER_GPU, packed(2)),
        (TIER_HOST, packed(2)),
    ]
    assert reader.read(removed(3, 1, 2)) != []


def test_a_block_larger_than_configured_is_another_engines() -> None:
    assert dropped(stored(1, block(1, IDS))).reason == "token_count"


def test_a_move_is_there_before_it_is_gone() -> None:
    there, gone = Reader(32).read(updated(1, 7, 0, 1))
    assert isinstance(there, Stored)
    assert isinstance(gone, Removed)
    assert (there.tier, there.unit_tokens, gone.tier) == (TIER_HOST, 0, TIER_GPU)


def test_a_change_of_priority_alone_is_nothing() -> None:
    assert Reader(32).read(updated(1, 7, None, None)) == []


def test_only_the_largest_window_counts() -> None:
    reader = Reader(32)
    full = block(1, IDS[:32])
    assert len(reader.read(stored(1, full))) == 1
    assert reader.read(stored(2, full, window_size=512)) == []


def test_a_created_cache_holds_nothing() -> None:
    (made,) = Reader(32).read(created())
    assert isinstance(made, Cleared)


def test_a_salt_is_told_by_newer_releases_only() -> None:
    (plain,) = Reader(32).read(stored(1, block(1, IDS[:32])))
    (salted,) = Reader(32).read(stored(1, block(1, IDS[:32], cache_salt="s")))
    assert isinstance(plain, Stored)
    assert isinstance(salted, Stored)
    assert (plain.shape.tells_salts, salted.shape.tells_salts) == (False, True)
    assert salted.cache_salt == "s"


@pytest.mark.parametrize(
    "fields",
    [{"mm_keys": [{"hash": "aa"}]}, {"tokens": [{"token_id": 1, "token_extra_id": 4}] * 32}],
)
def test_keys_that_no_router_knows_make_a_block_opaque(fields: dict[str, Any]) -> None:
    (got,) = Reader(32).read(stored(1, block(1, IDS[:32], **fields)))
    assert isinstance(got, Stored)
    assert got.opaque


def test_fields_that_no_release_sends_are_marked() -> None:
    (got,) = Reader(32).read(stored(1, block(1, IDS[:32], flavour=1), novelty=2))
    assert isinstance(got, Stored)
    assert got.shape.unknown_fields == ("'novelty'", "'flavour'")


def test_another_hash_algorithm_in_one_life_is_another_stream() -> None:
    reader = Reader(32)
    assert len(reader.read(stored(1, block(1, IDS[:32]), hash_algo="v2_sha256"))) == 1
    (got,) = reader.read(stored(2, block(2, IDS[32:]), hash_algo="v2_sha256_64"))
    assert isinstance(got, Dropped)
    assert (got.reason, got.doubt) == ("hash_type", Doubt.QUARANTINED)
    assert "hash_algo" in got.detail


@pytest.mark.parametrize(
    ("raw", "reason", "doubt"),
    [
        (None, "field_missing", Doubt.QUARANTINED),
        ({"event_id": 1, "data": []}, "field_missing", Doubt.QUARANTINED),
        (entry(1, {"type": "stored", "parent_hash": None}), "field_missing", Doubt.QUARANTINED),
        (stored(1, 7), "field_type", Doubt.QUARANTINED),  # type: ignore[arg-type]
        (stored(1, block("x", IDS[:32])), "hash_type", Doubt.QUARANTINED),
        (stored(1, block(-1, IDS[:32])), "hash_type", Doubt.QUARANTINED),
        (stored(1, block(1, IDS[:32], "0")), "unknown_medium", Doubt.STALE),
        (stored(1, block(1, IDS[:32], 7)), "unknown_medium", Doubt.STALE),
        (entry(1, {"type": "removed", "block_hashes": None}), "field_type", Doubt.QUARANTINED),
        (updated(1, 1, 0, 9), "unknown_medium", Doubt.STALE),
        (
            entry(1, {"type": "updated", "block_hash": 1, "cache_level": {"old": 0, "new": 1}}),
            "field_type",
            Doubt.QUARANTINED,
        ),
        (entry(1, {"type": "moved"}), "unknown_event", Doubt.STALE),
        (entry(1, {"type": "evicted"}), "unknown_event", Doubt.QUARANTINED),
        (removed(1, 2, window_size="x"), "field_type", Doubt.QUARANTINED),
    ],
)
def test_an_entry_that_can_not_be_read_is_dropped_under_its_reason(
    raw: object, reason: str, doubt: Doubt
) -> None:
    got = dropped(raw)
    assert (got.reason, got.doubt) == (reason, doubt)


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        (removed(7, 1), (0, 7)),
        (removed(7, 1, attention_dp_rank=3), (3, 7)),
        (removed(7, 1, attention_dp_rank="3"), None),
        ({"event_id": True}, None),
        ([], None),
    ],
)
def test_an_entry_says_its_rank_and_number(raw: object, place: tuple[int, int] | None) -> None:
    assert place_of(raw) == place


def pulling(*entries: object, ranks: tuple[int, ...] = (0,)) -> Pipeline:
    relay = pipeline(engine="trtllm", pull=True, engine_block_tokens=32, ranks=ranks)
    for rank in ranks:
        relay.socket_up(rank, NOW)
    relay.pulled(entries, NOW)
    return relay


def held(relay: Pipeline, rank: int = 0) -> bytes:
    return relay.holdings(rank, 0, UPPER)


FIRST = stored(1, block(1, IDS[:32]), block(2, IDS[32:]))


def test_what_is_pulled_is_held_and_never_certain() -> None:
    relay = pulling(created(), FIRST)
    assert sorted(held(relay)) == sorted(canonical(IDS))
    assert relay.holdings(0, 0, 1) == b""
    assert relay.status().ranks[0].state == "history_lost"
    assert relay.take_replay_requests() == []


def test_a_hole_in_the_numbers_costs_what_was_held() -> None:
    relay = pulling(created(), FIRST)
    relay.pulled([removed(5, 9)], NOW)
    assert held(relay) == b""
    (failure,) = (f for f in relay.status().ranks[0].failures if f.invariant == "C32")
    assert "2 to 4" in failure.detail


def test_numbers_that_begin_again_are_a_new_engine() -> None:
    relay = pulling(created(), FIRST)
    relay.pulled([created(), stored(1, block(5, IDS[:32]))], NOW)
    assert relay.status().ranks[0].incarnation == 2
    assert sorted(held(relay)) == sorted(canonical(IDS[:32]))


def test_ranks_are_numbered_each_by_itself() -> None:
    told = [
        stored(1, block(1, IDS[:32]), attention_dp_rank=1),
        stored(7, block(9, IDS[:32]), attention_dp_rank=0),
        stored(2, block(2, IDS[32:]), parent=1, attention_dp_rank=1),
    ]
    relay = pulling(*told, ranks=(0, 1))
    assert sorted(held(relay, 1)) == sorted(canonical(IDS))
    assert sorted(held(relay, 0)) == sorted(canonical(IDS[:32]))
    assert relay.counters()["gaps"] == 0


def test_an_entry_of_no_rank_may_have_been_a_removal() -> None:
    relay = pulling(created(), FIRST)
    relay.pulled([{"event_id": "x"}], NOW)
    assert held(relay) == b""
    assert relay.counters()["drop_entry"] == 1


def test_pulled_events_need_the_engines_block_and_an_engine_that_has_them() -> None:
    with pytest.raises(ValueError, match="configure"):
        pipeline(engine="trtllm", pull=True)
    with pytest.raises(ValueError, match="no events to pull"):
        pipeline(engine="vllm", pull=True, engine_block_tokens=16)
    waiting = pipeline(engine="auto", pull=True, engine_block_tokens=16)
    with pytest.raises(ValueError, match="no events to pull"):
        waiting.engine_found("sglang", "0.5.23", NOW)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["type", "blocks", "block_hash", "tokens", "cache_level", "old_value", "token_id"]
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
    raw = {**entry(1, {**data, "type": kind}), "window_size": window}
    Reader(32).read(raw)
    pulling(raw, {"event_id": window, "data": data})


@given(st.binary(max_size=60))
def test_no_bytes_raise(body: bytes) -> None:
    Reader(32).decode(body)
    Reader(32).decode(json.dumps(body.decode("latin-1")).encode())
