"""Whatever arrives is read or dropped under its reason; what can't be SGLang's stops the stream."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servingfleet_relay.adapters import sglang
from servingfleet_relay.adapters.events import Doubt, Dropped, Removed, Stored
from tests.unit.relay.batches import payload, tokens
from tests.unit.relay.pages import removed, stored, stored_array

PROMPT = tokens(2)
PAIRS = [[n, n + 1] for n in PROMPT]


def with_tokens(values: Any) -> dict[str, Any]:
    return stored(PROMPT, token_ids=values)


def with_hashes(values: Any) -> dict[str, Any]:
    return stored(PROMPT, block_hashes=values)


@pytest.mark.parametrize(
    ("event", "reason", "doubt"),
    [
        (with_tokens([*PAIRS[:-1], 3]), "pairs_mixed", Doubt.QUARANTINED),
        (with_tokens([3, *PAIRS[1:]]), "pairs_mixed", Doubt.QUARANTINED),
        (with_tokens([*PAIRS[:-1], [1, 2, 3]]), "pairs_mixed", Doubt.QUARANTINED),
        (with_tokens([*PAIRS[:-1], [1]]), "pairs_mixed", Doubt.QUARANTINED),
        (with_tokens([*PAIRS[:-1], [9, 9]]), "pairs_apart", Doubt.QUARANTINED),
        (with_tokens([[n, [n + 1]] for n in PROMPT]), "pairs_apart", Doubt.QUARANTINED),
        (with_tokens(PROMPT[:-1]), "token_count", Doubt.QUARANTINED),
        (with_tokens([*PROMPT, 1]), "token_count", Doubt.QUARANTINED),
        (with_tokens(PAIRS[:-1]), "token_count", Doubt.QUARANTINED),
        (with_tokens([]), "token_count", Doubt.QUARANTINED),
        (with_tokens(None), "field_type", Doubt.QUARANTINED),
        (with_tokens(["x", *PROMPT[1:]]), "token_type", Doubt.QUARANTINED),
        (with_tokens([-1, *PROMPT[1:]]), "token_range", Doubt.INCOMPLETE),
        (with_tokens([2**32, *PROMPT[1:]]), "token_range", Doubt.INCOMPLETE),
        (with_hashes([]), "no_hashes", Doubt.QUARANTINED),
        (with_hashes([1, 2**63]), "hash_type", Doubt.QUARANTINED),
        (with_hashes([b"\x00" * 32] * 2), "hash_type", Doubt.QUARANTINED),
        (with_hashes(["1", "2"]), "hash_type", Doubt.QUARANTINED),
        (with_hashes(None), "field_type", Doubt.QUARANTINED),
        (stored(PROMPT, block_size=0), "block_size", Doubt.QUARANTINED),
        (stored(PROMPT, block_size=True), "block_size", Doubt.QUARANTINED),
        (stored(PROMPT, parent_block_hash=2**63), "hash_type", Doubt.QUARANTINED),
        (stored(PROMPT, cache_salt=3), "field_type", Doubt.QUARANTINED),
        (stored(PROMPT, lora_name=3), "field_type", Doubt.QUARANTINED),
        ({"type": "BlockStored", "block_hashes": [1]}, "field_missing", Doubt.QUARANTINED),
        ([*stored_array(8, PROMPT, salt="s"), 1], "event_length", Doubt.QUARANTINED),
        (stored_array(6, PROMPT)[:5], "event_length", Doubt.QUARANTINED),
        (
            [*stored_array(7, PROMPT), {"cache_salt": "s", "more": 1}],
            "field_type",
            Doubt.QUARANTINED,
        ),
        ({"type": "BlockMoved"}, "unknown_event", Doubt.STALE),
        ({"type": "PagesEvicted"}, "unknown_event", Doubt.QUARANTINED),
        (removed([]), "no_hashes", Doubt.STALE),
        (stored(PROMPT, lora_id="1"), "field_type", Doubt.QUARANTINED),
        (7, "unknown_event", Doubt.STALE),
        (removed(None), "field_type", Doubt.QUARANTINED),
        (removed([2**63]), "hash_type", Doubt.QUARANTINED),
        (["BlockRemoved", [1], "GPU", 0], "event_length", Doubt.QUARANTINED),
    ],
)
def test_a_bad_event_is_dropped_under_its_reason_and_its_batch_goes_on(
    event: Any, reason: str, doubt: Doubt
) -> None:
    before, odd, after = sglang.decode_payload(payload(stored(PROMPT), event, removed([8]))).events
    assert isinstance(before, Stored)
    assert isinstance(after, Removed)
    assert isinstance(odd, Dropped)
    assert (odd.reason, odd.doubt) == (reason, doubt)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=12), inner, max_size=6)
    ),
    max_leaves=30,
)
names = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])
fields = st.dictionaries(
    st.sampled_from([*stored([]), "cache_salt", "lora_name", "eighth element"]), plain
)
mutated = st.builds(lambda change: {**stored(PROMPT), **change}, fields)
almost = (
    st.builds(lambda tag, rest: {**rest, "type": tag}, names, fields)
    | st.builds(lambda tag, rest: [tag, *rest], names, st.lists(plain, max_size=9))
    | mutated
)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_raise(body: bytes) -> None:
    sglang.decode_payload(body)


@settings(deadline=None)
@given(st.lists(almost | plain, max_size=5))
def test_no_well_formed_message_raises(events: list[Any]) -> None:
    batch = sglang.decode_payload(payload(*events))
    assert len(batch.events) >= len(events)
