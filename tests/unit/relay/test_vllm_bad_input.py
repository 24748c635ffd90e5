"""Whatever arrives is read or dropped under its reason; one bad event never costs its batch."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servingfleet_relay.adapters import vllm
from servingfleet_relay.adapters.events import Dropped, Removed, Stored
from servingfleet_relay.adapters.wire import MAX_PAYLOAD_BYTES
from tests.unit.relay.batches import payload, removed, stored, stored_array, tokens


def reasons(body: bytes) -> list[str]:
    return [e.reason for e in vllm.decode_payload(body).events if isinstance(e, Dropped)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "truncated"),
        (b"\xc1", "malformed_msgpack"),
        (payload(stored([1], tokens(1)))[:-9], "truncated"),
        (payload() + b"\x00", "malformed_msgpack"),
        (b"\xdd\xff\xff\xff\xff", "truncated"),
        (b"\xdf\xff\xff\xff\xff", "truncated"),
        (b"\xc6\xff\xff\xff\xff", "truncated"),
        (b"\x91" * 100_000, "malformed_msgpack"),
        (msgpack.packb({}), "batch_shape"),
        (msgpack.packb([1.0]), "batch_shape"),
        (msgpack.packb([1.0, [], 0, 0]), "batch_shape"),
        (msgpack.packb(["now", []]), "batch_shape"),
        (msgpack.packb([1.0, {}, 0]), "batch_shape"),
        (msgpack.packb([1.0, [], "0"]), "batch_shape"),
        (msgpack.packb([1.0, [], True]), "batch_shape"),
        (msgpack.packb([1.0, [], -1]), "batch_shape"),
        (
            b"\x92\xcb" + bytes(8) + b"\x91\x81\x90\x01",
            "malformed_msgpack",
        ),  # a list as a map's key
        (b"\x92\xd7\xff" + b"\xff" * 8 + b"\x90", "malformed_msgpack"),  # an impossible timestamp
        (b"\x00" * (MAX_PAYLOAD_BYTES + 1), "payload_size"),
    ],
)
def test_a_batch_that_is_none_is_dropped_under_its_reason(body: bytes, reason: str) -> None:
    assert reasons(body) == [reason]


def test_claimed_lengths_reserve_no_memory() -> None:
    body = b"\xdd\x00\x0f\xff\xff" * 900 + bytes(1_100_000)
    tracemalloc.start()
    try:
        assert reasons(body) == ["truncated"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * len(body)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored([1], [*tokens(1)[:-1], 2**31]), "token_range"),
        (stored([1], [*tokens(1)[:-1], -1]), "token_range"),
        (stored([1], [*tokens(1)[:-1], True]), "token_type"),
        (stored([1], [*tokens(1)[:-1], "7"]), "token_type"),
        (stored([1], [*tokens(1)[:-1], 7.0]), "token_type"),
        (stored([1], [[n, n + 1] for n in tokens(1)]), "token_type"),
        (stored([1], None), "field_type"),  # type: ignore[arg-type]
        (stored([1], tokens(1), block=-16), "block_size"),
        (stored([1], tokens(1), block=True), "block_size"),
        (stored([1], tokens(1), block=2**40), "block_size"),
        (stored([1], tokens(1), block=16.0), "block_size"),
        (stored([1], tokens(1), block=0), "token_count"),
        (stored([1], tokens(2)), "token_count"),
        (stored([1, 2], tokens(1)), "token_count"),
        (stored([1], []), "token_count"),
        (stored([], tokens(1)), "no_hashes"),
        (stored([], [], block=0), "no_hashes"),
        (stored([2**64 - 1, 1], tokens(2)), ""),
        (stored([2**64 - 1, -1], tokens(2)), "hash_range"),
        (stored(["1"], tokens(1)), "hash_type"),
        (stored([True], tokens(1)), "hash_type"),
        (stored([1.0], tokens(1)), "hash_type"),
        (stored([None], tokens(1)), "hash_type"),
        (stored([1, b"\x00" * 32], tokens(2)), "hash_type"),
        (stored([1], tokens(1), parent=b"\x00" * 32), "hash_type"),
        (stored([b"\x00" * 31], tokens(1)), "hash_width"),
        (stored([b"\x00" * 8], tokens(1)), "hash_width"),
        (stored({}, tokens(1)), "field_type"),  # type: ignore[arg-type]
        (stored([1], tokens(1), lora_name=5), "field_type"),
        (stored([1], tokens(1), extra_keys="salt"), "field_type"),
        (stored([1], tokens(1), group_idx=-1), "field_type"),
        (stored([1], tokens(1), group_idx=True), "field_type"),
        (stored([1], tokens(1), kv_cache_spec_kind=3), "field_type"),
        (stored([1], tokens(1), kv_cache_spec_sliding_window="w"), "field_type"),
        ({"type": "BlockStored", "block_hashes": [1]}, "field_missing"),
        ({"type": "BlockRemoved"}, "field_missing"),
        (stored_array(12, [1], tokens(1))[:11], "event_length"),
        ([*stored_array(12, [1], tokens(1)), 1], "event_length"),
        (stored_array(12, [1], tokens(1))[:5], "event_length"),
        (["BlockRemoved"], "event_length"),
        (["AllBlocksCleared", 1], "event_length"),
        ({"type": "BlockMoved"}, "unknown_event"),
        ({"type": 7}, "unknown_event"),
        ({}, "unknown_event"),
        ([], "unknown_event"),
        (["BlockMoved"], "unknown_event"),
        ([["BlockStored"]], "unknown_event"),
        (None, "unknown_event"),
        (1, "unknown_event"),
        (removed(None), "field_type"),  # type: ignore[arg-type]
        (removed([None]), "hash_type"),
    ],
)
def test_a_bad_event_is_dropped_under_its_reason_and_its_batch_goes_on(
    event: Any, reason: str
) -> None:
    events = vllm.decode_payload(payload(stored([8], tokens(1)), event, removed([8]))).events
    assert isinstance(events[0], Stored)
    assert isinstance(events[-1], Removed)
    assert [e.reason for e in events if isinstance(e, Dropped)] == ([reason] if reason else [])


def test_text_that_is_not_utf8_costs_its_event_only() -> None:
    body = payload(stored([1], tokens(1), lora_name="ad--ap"), removed([1]))
    events = vllm.decode_payload(body.replace(b"ad--ap", b"ad\xff\xfeap")).events
    assert isinstance(events[0], Dropped)
    assert events[0].reason == "invalid_utf8"
    assert isinstance(events[1], Removed)


def test_a_field_name_that_is_not_utf8_can_be_told_to_people() -> None:
    body = payload(stored([1], tokens(1), novelty=1)).replace(
        b"novelty", b"\xff\xfe\xfd\xfc\xfb\xfa\xf9"
    )
    event = vllm.decode_payload(body).events[0]
    assert isinstance(event, Stored)
    assert event.shape.unknown_fields[0].encode()


def test_wrong_frames_are_dropped() -> None:
    for frames in ([], [b"", b""], [b"t", bytes(7), b""], [b"t", b"\xff" * 8, b""], [b""] * 4):
        (event,) = vllm.decode(frames).events
        assert isinstance(event, Dropped)
        assert event.reason in {"frame_count", "frame_sequence"}


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=12), inner, max_size=6)
    ),
    max_leaves=30,
)
names = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])
keys = st.sampled_from(
    [*stored([], []), "extra_keys", "group_idx", "kv_cache_spec_kind", "locality"]
)
almost = st.builds(
    lambda tag, fields: {**fields, "type": tag}, names, st.dictionaries(keys, plain)
) | st.builds(lambda tag, rest: [tag, *rest], names, st.lists(plain, max_size=13))


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_raise(body: bytes) -> None:
    vllm.decode_payload(body)


@settings(deadline=None)
@given(st.lists(almost | plain, max_size=5))
def test_no_well_formed_message_raises(events: list[Any]) -> None:
    batch = vllm.decode_payload(payload(*events))
    assert len(batch.events) >= len(events)
