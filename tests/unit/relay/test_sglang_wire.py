"""Every generation of SGLang's wire format: read alike, or refused by name."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from servingfleet_protos.v1.common_pb2 import TIER_GPU, TIER_HOST
from servingfleet_relay.adapters import sglang
from servingfleet_relay.adapters.events import (
    Cleared,
    Doubt,
    Dropped,
    Event,
    Foreign,
    Removed,
    Stored,
)
from tests.unit.relay.batches import CLEARED, live, payload, tokens
from tests.unit.relay.pages import (
    in_namespace,
    page_hashes,
    removed,
    stored,
    stored_array,
)

PROMPT = tokens(3)


def only(event: Any, **batch: Any) -> Event:
    (got,) = sglang.decode_payload(payload(event, **batch)).events
    return got


def stored_of(event: Any) -> Stored:
    got = only(event)
    assert isinstance(got, Stored), got
    return got


def dropped_of(event: Any, **batch: Any) -> Dropped:
    got = only(event, **batch)
    assert isinstance(got, Dropped), got
    return got


def packed(*hashes: int) -> bytes:
    return b"".join((value % 2**64).to_bytes(8, "little") for value in hashes)


def ids(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


@pytest.mark.parametrize("length", [6, 7])
def test_a_store_of_the_array_era_reads_as_one_of_today(length: int) -> None:
    got, today = stored_of(stored_array(length, PROMPT)), stored_of(stored(PROMPT))
    assert (got.hashes, got.tokens, got.parent) == (today.hashes, today.tokens, None)
    assert (got.tier, got.unit_tokens, got.opaque, got.doubtful) == (TIER_GPU, 16, False, False)


def test_hashes_are_signed_64_bit_integers() -> None:
    hashes = page_hashes(PROMPT, 16)
    got = stored_of(stored(PROMPT))
    assert min(hashes) < 0, "the case needs a negative hash"
    assert (got.hashes, got.width) == (packed(*hashes), 8)
    assert (got.shape.low, got.shape.high) == (True, False)


def test_a_salt_comes_as_the_eighth_element_and_does_not_change_the_form() -> None:
    got = stored_of(stored_array(8, PROMPT, salt="s"))
    assert (got.cache_salt, got.opaque, got.shape.form) == ("s", False, "array 7")


def test_a_salt_comes_by_name_today() -> None:
    got = stored_of(stored(PROMPT, salt="s"))
    assert (got.cache_salt, got.opaque, got.shape.tells_salts) == ("s", False, True)


def test_a_salt_in_the_dynamo_format_is_proven_likewise() -> None:
    hashes = in_namespace(page_hashes(PROMPT, 16, salt="s"), extra_key=None, salt="s")
    got = stored_of(stored(PROMPT, salt="s", hashes=hashes))
    assert (got.cache_salt, got.opaque) == ("s", False)


@pytest.mark.parametrize("salt", ["", "s"])
def test_a_first_page_that_no_recipe_gives_is_of_an_unknown_namespace(salt: str) -> None:
    hashes = in_namespace(page_hashes(PROMPT, 16, salt=salt), extra_key="ek", salt=salt or None)
    got = stored_of(stored(PROMPT, salt=salt, hashes=hashes))
    assert got.opaque


def test_pages_after_the_first_inherit_their_namespace_and_are_not_judged() -> None:
    got = stored_of(stored(PROMPT, skip=1, hashes=[1, 2, 3]))
    assert (got.parent, got.opaque) == (packed(1), False)


def test_an_adapter_of_which_only_the_name_is_told_is_an_upper_bound() -> None:
    hashes = in_namespace(page_hashes(PROMPT, 16), extra_key="0123456789abcdef")
    got = stored_of(stored(PROMPT, hashes=hashes, lora_name="ad"))
    assert (got.adapter, got.doubtful, got.opaque) == ("ad", True, False)
    later = stored_of(stored(PROMPT, skip=1, hashes=hashes, lora_name="ad"))
    assert (later.adapter, later.doubtful) == ("ad", True)


def test_an_adapter_that_shares_hashes_with_the_base_model_is_not_indexed() -> None:
    got = dropped_of(stored(PROMPT, lora_name="ad"))
    assert (got.reason, got.doubt) == ("shared_hash", Doubt.AMBIGUOUS)
    assert "0.5.23" in got.detail


def test_pairs_become_the_tokens_that_they_cover() -> None:
    prompt = [*PROMPT, 7]
    got = stored_of(stored(prompt, pairs=True))
    assert (got.tokens, got.shape.pairs) == (ids(prompt), True)
    assert (len(got.hashes), got.opaque) == (3 * 8, False)
    assert stored_of(stored(PROMPT)).shape.pairs is False


@pytest.mark.parametrize("page", [1, 4, 64])
def test_every_page_size_reads_alike(page: int) -> None:
    prompt = list(range(128))
    got = stored_of(stored(prompt, page))
    assert (got.unit_tokens, len(got.hashes)) == (page, 128 // page * 8)
    assert not got.opaque


@pytest.mark.parametrize(("medium", "tier"), [("GPU", TIER_GPU), ("CPU_PINNED", TIER_HOST)])
def test_media_are_tiers(medium: str, tier: int) -> None:
    assert stored_of(stored(PROMPT, medium=medium)).tier == tier
    got = only(removed([1], medium))
    assert isinstance(got, Removed)
    assert (got.tier, got.hashes) == (tier, packed(1))


@pytest.mark.parametrize("medium", ["CPU", "DISK", "EXTERNAL", "gpu"])
def test_an_unknown_medium_is_never_the_gpu(medium: str) -> None:
    for event, told in ((stored(PROMPT, medium=medium), True), (removed([1], medium), False)):
        got = only(event)
        assert isinstance(got, Foreign)
        assert (got.medium, got.stored) == (repr(medium), told)
    assert dropped_of(stored(PROMPT, medium=3)).reason == "field_type"


def test_no_medium_is_the_gpu_only_before_media_existed() -> None:
    assert stored_of(stored_array(6, PROMPT)).tier == TIER_GPU
    assert isinstance(only(["BlockRemoved", [1]]), Removed)
    nameless = stored(PROMPT)
    del nameless["medium"]
    assert dropped_of(nameless).reason == "medium_missing"


def test_a_removal_without_a_medium_may_have_been_of_anything() -> None:
    got = dropped_of({"type": "BlockRemoved", "block_hashes": [1]})
    assert (got.reason, got.doubt) == ("medium_missing", Doubt.STALE)


def test_a_page_removed_twice_at_once_is_noticed_and_removed_once() -> None:
    got, plain = only(removed([1, 2, 1])), only(removed([1, 2]))
    assert isinstance(got, Removed)
    assert isinstance(plain, Removed)
    assert (got.hashes, got.twice) == (packed(1, 2), True)
    assert not plain.twice


@pytest.mark.parametrize("event", [["AllBlocksCleared"], CLEARED])
def test_a_clear_is_read_from_array_and_map(event: Any) -> None:
    assert isinstance(only(event), Cleared)


def test_a_session_is_no_oddity() -> None:
    assert stored_of(stored(PROMPT, session_id="x")).shape.unknown_fields == ()
    assert stored_of(stored(PROMPT, novelty=1)).shape.unknown_fields == ("'novelty'",)


@pytest.mark.parametrize("length", [6, 7])
def test_releases_that_hash_pages_alone_are_refused(length: int) -> None:
    # 0.5.1 to 0.5.5: no parent, and a hash of the page alone.
    event = stored_array(length, PROMPT)
    event[1] = [hash(tuple(PROMPT[at : at + 16])) for at in (0, 16, 32)]
    got = dropped_of(event)
    assert (got.reason, got.doubt) == ("content_hash", Doubt.QUARANTINED)


def test_releases_whose_first_parent_is_the_hash_of_nothing_are_refused() -> None:
    # 0.4.8 to 0.5.0.
    event = stored_array(6, PROMPT)
    event[2] = hash(())
    assert dropped_of(event).reason == "content_hash"


def test_releases_with_one_hash_for_a_tree_node_are_refused() -> None:
    # 0.4.6 and 0.4.7: batches of two elements.
    node = ["BlockStored", [hash(tuple(PROMPT))], None, PROMPT, len(PROMPT), None]
    first = sglang.decode_payload(payload(node, length=2)).events[0]
    assert isinstance(first, Dropped)
    assert (first.reason, first.doubt) == ("content_hash", Doubt.QUARANTINED)
    assert "0.5.6" in first.detail


def test_the_eighth_element_of_another_engine_is_no_salt() -> None:
    event = [*stored_array(7, PROMPT), "my-lora"]
    assert dropped_of(event).reason == "field_type"


def test_a_live_message_decodes_from_its_frames() -> None:
    batch = sglang.decode(live(3, stored(PROMPT), rank=1))
    assert (batch.rank, batch.length, len(batch.events)) == (1, 3, 1)
