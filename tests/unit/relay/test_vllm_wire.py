"""Every generation of vLLM's wire format means the same."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from servingfleet_protos.v1.common_pb2 import TIER_DISK, TIER_GPU, TIER_HOST
from servingfleet_relay.adapters import vllm
from servingfleet_relay.adapters.events import (
    Cleared,
    Doubt,
    Dropped,
    Event,
    Foreign,
    Reach,
    Removed,
    Span,
    Stored,
)
from tests.unit.relay.batches import (
    ARRAY_LENGTHS,
    CLEARED,
    REMOVED_LENGTH,
    live,
    payload,
    removed,
    removed_array,
    stored,
    stored_array,
    tokens,
)

BIG = 2**64 - 7


def only(event: Any, **batch: Any) -> Event:
    events = vllm.decode_payload(payload(event, **batch)).events
    assert len(events) == 1
    return events[0]


def stored_of(event: Any) -> Stored:
    got = only(event)
    assert isinstance(got, Stored), got
    return got


def reason_of(event: Any) -> str:
    got = only(event)
    assert isinstance(got, Dropped), got
    return got.reason


def packed(*hashes: int) -> bytes:
    return b"".join((value % 2**64).to_bytes(8, "little") for value in hashes)


@pytest.mark.parametrize("length", ARRAY_LENGTHS)
def test_a_store_reads_the_same_from_arrays_of_every_length(length: int) -> None:
    event = stored_of(stored_array(length, [1, BIG], tokens(2)))
    assert (event.tier, event.hashes, event.width) == (TIER_GPU, packed(1, BIG), 8)
    assert (event.parent, event.unit_tokens) == (None, 16)
    assert event.tokens == struct.pack("<32I", *tokens(2))
    assert event.shape.form == f"array {length}"


@pytest.mark.parametrize("length", sorted(set(REMOVED_LENGTH.values())))
def test_a_removal_reads_the_same_from_arrays_of_every_length(length: int) -> None:
    event = only(removed_array(length, [5]))
    assert isinstance(event, Removed)
    assert (event.tier, event.hashes) == (TIER_GPU, packed(5))


def test_a_store_reads_the_same_from_a_map() -> None:
    event = stored_of(stored([1, BIG], tokens(2), parent=9, group_idx=0, session_id="s"))
    assert (event.hashes, event.parent, event.unit_tokens) == (packed(1, BIG), packed(9), 16)
    assert event.shape.unknown_fields == ()


def test_a_clear_is_read_from_array_and_map() -> None:
    assert isinstance(only(CLEARED), Cleared)
    assert isinstance(only(["AllBlocksCleared"]), Cleared)


@pytest.mark.parametrize("length", [2, 3])
def test_a_batch_may_have_two_or_three_elements(length: int) -> None:
    batch = vllm.decode_payload(payload(CLEARED, rank=4, length=length))
    assert batch.length == length
    assert batch.rank == (4 if length == 3 else None)


def test_signed_hashes_keep_their_bits_and_say_so() -> None:
    event = stored_of(stored_array(6, [-2], tokens(1)))
    assert event.hashes == packed(2**64 - 2)
    assert event.shape.low
    assert not event.shape.high
    assert reason_of(stored([-2], tokens(1))) == "hash_range"


def test_hashes_of_32_bytes_keep_their_width() -> None:
    event = stored_of(stored([b"\x01" * 32], tokens(1), parent=b"\x02" * 32))
    assert (event.width, event.hashes, event.parent) == (32, b"\x01" * 32, b"\x02" * 32)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [("GPU", TIER_GPU), ("CPU", TIER_HOST), ("cpu", TIER_HOST), ("STORAGE", TIER_DISK)],
)
def test_media_are_tiers(medium: str, tier: int) -> None:
    assert stored_of(stored([1], tokens(1), medium=medium)).tier == tier


def test_media_without_removals_are_an_upper_bound() -> None:
    assert stored_of(stored([1], tokens(1), medium="cpu")).doubtful
    assert not stored_of(stored([1], tokens(1), medium="CPU")).doubtful


@pytest.mark.parametrize("medium", ["gpu", "CPU_PINNED", "NVME", ""])
def test_an_unknown_medium_is_never_the_gpu(medium: str) -> None:
    stores, removals = stored([1], tokens(1), medium=medium), removed([1], medium=medium)
    for event, told in ((stores, True), (removals, False)):
        got = only(event)
        assert isinstance(got, Foreign)
        assert (got.medium, got.stored) == (repr(medium), told)


@pytest.mark.parametrize("medium", [7, ["GPU"], b"GPU"])
def test_a_medium_that_is_no_text_is_another_wire_format(medium: object) -> None:
    assert reason_of(stored([1], tokens(1), medium=medium)) == "field_type"
    assert reason_of(removed([1], medium=medium)) == "field_type"


def test_a_removal_without_a_medium_may_have_been_of_anything() -> None:
    event = only(removed([1], medium=None))
    assert isinstance(event, Dropped)
    assert (event.reason, event.doubt) == ("medium_missing", Doubt.STALE)
    unnamed = only({"type": "BlockRemoved", "block_hashes": [1]})
    assert isinstance(unnamed, Dropped)
    assert (unnamed.reason, unnamed.doubt) == ("field_missing", Doubt.QUARANTINED)


def test_no_medium_is_the_gpu_only_before_media_existed() -> None:
    assert stored_of(stored_array(6, [1], tokens(1))).tier == TIER_GPU
    nameless = stored_array(7, [1], tokens(1))
    nameless[6] = None
    assert reason_of(nameless) == "medium_missing"
    assert reason_of(stored([1], tokens(1), medium=None)) == "medium_missing"


@pytest.mark.parametrize(
    ("fields", "reach"),
    [
        ({"medium": "CPU"}, Reach.OWN),
        ({"medium": "CPU", "locality": "LOCAL"}, Reach.OWN),
        ({"medium": "cpu"}, Reach.SHAREABLE),
        ({"medium": "STORAGE", "locality": "REMOTE"}, Reach.REMOTE),
        ({"medium": "GPU", "locality": "REMOTE"}, Reach.OWN),
    ],
)
def test_an_event_says_who_can_load_what_it_speaks_of(fields: dict[str, str], reach: Reach) -> None:
    assert stored_of(stored([1], tokens(1), **fields)).reach is reach
    assert reason_of(stored([1], tokens(1), locality="ELSEWHERE")) == "remote_medium"


def test_adapter_and_salt_leave_the_extra_keys() -> None:
    event = stored_of(
        stored([1, 2], tokens(2), lora_name="ad", extra_keys=[["ad", "pepper"], ["ad"]])
    )
    assert (event.adapter, event.cache_salt, event.opaque) == ("ad", "pepper", False)


def test_a_salt_is_one_only_in_the_first_block_of_a_prompt() -> None:
    event = stored_of(stored([2], tokens(1), parent=1, extra_keys=[["pepper"]]))
    assert (event.cache_salt, event.opaque) == ("", True)


def test_blocks_are_opaque_from_the_first_unknown_key_on() -> None:
    keys = [None, [["image", 3]], None]
    events = vllm.decode_payload(payload(stored([1, 2, 3], tokens(3), extra_keys=keys))).events
    plain, opaque = events
    assert isinstance(plain, Stored)
    assert isinstance(opaque, Stored)
    assert (plain.hashes, plain.opaque, len(plain.tokens)) == (packed(1), False, 64)
    assert (opaque.hashes, opaque.opaque, opaque.parent) == (packed(2, 3), True, packed(1))
    assert opaque.tokens == struct.pack("<32I", *tokens(2, start=16))


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_keys": [None]},
        {"extra_keys": [["other"], None], "lora_name": "ad"},
        {"extra_keys": [[b"digest"], None]},
    ],
)
def test_keys_that_do_not_add_up_make_the_whole_event_opaque(fields: dict[str, Any]) -> None:
    assert stored_of(stored([1, 2], tokens(2), **fields)).opaque


def test_an_adapters_number_without_its_name_was_enough_only_before_names_existed() -> None:
    numbered = stored_array(7, [1], tokens(1))
    numbered[5] = 3
    assert stored_of(numbered).opaque
    assert reason_of(stored([1], tokens(1), lora_id=3)) == "field_type"
    assert reason_of(stored([1], tokens(1), lora_name="ad", lora_id=None)) == "field_type"


def test_a_store_on_the_gpu_that_leaves_its_extra_keys_out_is_no_plain_one() -> None:
    untold = stored([1], tokens(1))
    del untold["extra_keys"]
    assert reason_of(untold) == "field_missing"
    assert not stored_of(stored([1], tokens(1), medium="CPU")).keys_told


def test_a_placeholder_has_neither_tokens_nor_unit() -> None:
    event = stored_of(stored([1, 2], [], block=0, medium="CPU"))
    assert (event.tokens, event.unit_tokens, event.hashes) == (b"", 0, packed(1, 2))


def test_masked_blocks_of_a_window_group_leave_hashes_without_tokens() -> None:
    event = stored_of(
        stored(
            [4],
            tokens(4),
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=64,
            group_idx=0,
        )
    )
    assert (event.hashes, event.tokens, event.unit_tokens) == (packed(4), b"", 16)
    assert (event.group.index, event.group.window_tokens) == (0, 64)
    assert event.span == Span(None, struct.pack("<64I", *tokens(4)))


def test_one_token_too_many_on_the_host_is_lmcaches_slice() -> None:
    event = stored_of(stored([1], [*tokens(1), 99], medium="CPU"))
    assert (len(event.tokens), event.doubtful) == (64, True)


def test_hashes_that_cover_later_tokens_are_marked() -> None:
    event = stored_of(stored([1], tokens(1), lookahead_token_ids=[[7, 8]]))
    assert (event.shape.oddities, event.doubtful) == (("lookahead",), True)
    assert stored_of(stored([1], tokens(1), lookahead_token_ids=[])).shape.oddities == ()


def test_a_key_that_no_release_sends_is_marked_not_fatal() -> None:
    event = stored_of(stored([1], tokens(1), novelty=1, nothing=None))
    assert event.shape.unknown_fields == ("'novelty'",)


def test_what_a_generation_tells_apart_is_known() -> None:
    told = {
        length: stored_of(stored_array(length, [1], tokens(1))).shape for length in ARRAY_LENGTHS
    }
    assert [n for n, shape in told.items() if shape.tells_adapters] == [8, 9, 10, 12]
    assert [n for n, shape in told.items() if shape.tells_salts] == [9, 10, 12]


def test_a_live_message_decodes_from_its_frames() -> None:
    batch = vllm.decode(live(3, CLEARED, rank=None))
    assert isinstance(batch.events[0], Cleared)
    assert batch.rank is None
