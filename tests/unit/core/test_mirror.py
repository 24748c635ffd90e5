"""Cases of the mirror that engines have shown, and input that no engine should send."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest

from servingfleet_core import Delta, Mirror, Rejected, block_hashes, namespace_root

BLOCK = 4
GPU, HOST = 0, 1
HOLD, DROP, CLEAR = 1, 2, 3
ROOT = namespace_root("m")


def tokens(count: int, first: int = 0) -> bytes:
    return struct.pack(f"<{count}I", *range(first, first + count))


def keys(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def canonical(blocks: int, block: int = BLOCK) -> list[int]:
    return unpacked(block_hashes(ROOT, tokens(blocks * block), block))


def unpacked(hashes: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(hashes) // 8}Q", hashes))


def told(deltas: Sequence[Delta]) -> list[tuple[int, int, int, list[int]]]:
    return [(delta.op, delta.lane, delta.confidence, unpacked(delta.hashes)) for delta in deltas]


def mirror(**settings: float) -> Mirror:
    made = Mirror("m", BLOCK, **settings)  # type: ignore[arg-type]
    made.add_lane(GPU, multiset=True)
    made.add_lane(HOST, multiset=False)
    return made


def store(
    made: Mirror,
    first: int,
    count: int,
    *,
    lane: int = GPU,
    unit: int = BLOCK,
    now: float = 0.0,
    opaque: bool = False,
) -> list[Delta]:
    """Stores units `first` and on of one prompt, under the engine hashes first + 1 and on."""
    named = keys(*range(first + 1, first + count + 1))
    parent = keys(first) if first else None
    payload = tokens(count * unit, first * unit)
    return made.stored(lane, named, 8, parent, payload, unit, now, opaque=opaque)


def held(made: Mirror, lane: int = GPU, confidence: int = 1) -> set[int]:
    return set(unpacked(made.holdings(lane, confidence)))


def test_a_chain_is_told_in_one_delta_behind_its_parent() -> None:
    made = mirror()
    a, b, c = canonical(3)
    assert told(store(made, 0, 1)) == [(HOLD, GPU, 1, [a])]
    [delta] = store(made, 1, 2)
    assert (told([delta]), delta.parent) == ([(HOLD, GPU, 1, [b, c])], a)


def test_the_first_block_has_no_parent() -> None:
    [delta] = store(mirror(), 0, 2)
    assert delta.parent == 0


def test_a_child_before_its_parent_is_told_once_the_parent_is_placed() -> None:
    made = mirror()
    assert store(made, 2, 1) == []
    assert store(made, 1, 1) == []
    assert made.counts()["orphans"] == 2
    assert told(store(made, 0, 1)) == [(HOLD, GPU, 1, canonical(3))]
    assert made.counts()["orphans"] == 0


def test_an_orphan_that_was_removed_still_places_its_children() -> None:
    made = mirror()
    store(made, 1, 1)
    made.removed(GPU, keys(2), 8)
    store(made, 2, 1)
    store(made, 0, 1)
    a, _, c = canonical(3)
    assert held(made) == {a, c}


def test_a_chain_of_ten_thousand_orphans_is_placed_at_once() -> None:
    made = mirror(max_orphans=20_000)
    for first in range(10_000, 0, -1):
        store(made, first, 1)
    [delta] = store(made, 0, 1)
    assert len(delta.hashes) == 8 * 10_001


def test_an_orphan_that_waits_too_long_is_dropped_with_its_copies() -> None:
    made = mirror(orphan_ttl_s=5.0)
    store(made, 1, 2, now=100.0)
    assert made.expire(105.0) == 0
    assert made.expire(105.1) == 2
    made.removed(GPU, keys(2), 8)
    counts = made.counts()
    assert (counts["orphans_expired"], counts["removed_unknown"]) == (2, 1)
    assert told(store(made, 0, 1)) == [(HOLD, GPU, 1, canonical(1))]


def test_orphans_are_bounded_oldest_first() -> None:
    made = mirror(max_orphans=3)
    store(made, 9, 1)
    store(made, 1, 3)
    assert (made.counts()["orphans"], made.counts()["orphans_dropped"]) == (3, 1)
    store(made, 0, 1)
    assert held(made) == set(canonical(4))


def test_one_removal_takes_one_of_two_copies() -> None:
    made = mirror()
    store(made, 0, 1)
    assert store(made, 1, 1) != []
    assert store(made, 1, 1) == []
    _, b = canonical(2)
    assert made.removed(GPU, keys(2), 8) == []
    assert told(made.removed(GPU, keys(2), 8)) == [(DROP, GPU, 1, [b])]
    assert made.counts()["removed_unknown"] == 0


def test_a_set_lane_holds_one_copy() -> None:
    made = mirror()
    store(made, 0, 1, lane=HOST)
    assert store(made, 0, 1, lane=HOST) == []
    assert told(made.removed(HOST, keys(1), 8)) == [(DROP, HOST, 1, canonical(1))]


def test_a_root_anchored_repeat_may_be_a_report_only() -> None:
    made = mirror()
    store(made, 0, 2)
    assert store(made, 0, 2) == []
    assert made.counts()["ambiguous_copies"] == 2
    a, b = canonical(2)
    assert told(made.removed(GPU, keys(2), 8)) == [(HOLD, GPU, 2, [b])]
    assert (held(made), held(made, confidence=2)) == ({a}, {b})
    assert told(made.removed(GPU, keys(2), 8)) == [(DROP, GPU, 1, [b])]


def test_a_new_block_after_a_repeat_proves_second_copies_where_the_history_is_whole() -> None:
    made = mirror()
    store(made, 0, 2)
    made.stored(GPU, keys(1, 2, 3), 8, None, tokens(3 * BLOCK), BLOCK, 0.0, whole=True)
    assert made.counts()["ambiguous_copies"] == 0
    made.removed(GPU, keys(2, 1), 8)
    assert held(made) == set(canonical(3))
    late = mirror()
    store(late, 0, 2)
    late.stored(GPU, keys(1, 2, 3), 8, None, tokens(3 * BLOCK), BLOCK, 0.0)
    assert late.counts()["ambiguous_copies"] == 2


def test_a_repeat_of_known_blocks_only_may_be_a_report_however_whole_the_history() -> None:
    made = mirror()
    store(made, 0, 2)
    made.stored(GPU, keys(1, 2), 8, None, tokens(2 * BLOCK), BLOCK, 0.0, whole=True)
    assert made.counts()["ambiguous_copies"] == 2


def test_blocks_that_were_computed_are_copies_whatever_is_known() -> None:
    made = mirror()
    store(made, 0, 2)
    made.stored(GPU, keys(1, 2), 8, None, tokens(2 * BLOCK), BLOCK, 0.0, computed=True)
    assert made.counts()["ambiguous_copies"] == 0
    made.removed(GPU, keys(2, 1), 8)
    assert held(made) == set(canonical(2))


def test_a_chunk_named_by_its_last_block_covers_all_of_it() -> None:
    made = mirror()
    store(made, 0, 4)
    made.stored(HOST, keys(2, 3), 8, None, b"", 2 * BLOCK, 0.0)
    a, b, c, _ = canonical(4)
    assert held(made, HOST) == {a, b, c}  # the third block ends no chunk
    made.removed(GPU, keys(1, 2, 3, 4), 8)
    assert held(made, HOST) == {a, b, c}
    made.removed(HOST, keys(2), 8)
    assert held(made, HOST) == {c}


def test_blocks_after_masked_ones_are_placed_behind_them() -> None:
    made = mirror()
    made.stored(GPU, keys(3, 4), 8, None, tokens(4 * BLOCK), BLOCK, 0.0, masked=2)
    assert held(made) == set(canonical(4)[2:])
    assert made.place(keys(4)) == (canonical(4)[3], 4)
    payload = tokens(3 * BLOCK, 4 * BLOCK)
    made.stored(GPU, keys(7), 8, keys(4), payload, BLOCK, 0.0, masked=2)
    assert made.place(keys(7)) == (canonical(7)[6], 7)


def test_a_guess_of_masked_blocks_that_contradicts_what_is_known_places_nothing() -> None:
    made = mirror()
    store(made, 0, 3)
    made.stored(GPU, keys(77), 8, None, tokens(3 * BLOCK), BLOCK, 0.0, masked=2)
    assert made.place(keys(77)) is None  # another hash stands there
    made.stored(GPU, keys(2), 8, None, tokens(3 * BLOCK), BLOCK, 0.0, masked=2)
    assert made.place(keys(2)) == (canonical(2)[1], 2)
    made.stored(GPU, keys(88), 8, keys(99), tokens(2 * BLOCK), BLOCK, 0.0, masked=1)
    assert made.place(keys(88)) is None  # after a block of unknown place
    assert (held(made), made.counts()["orphans"]) == (set(canonical(3)), 2)


def test_masked_blocks_need_their_tokens_and_whole_canonical_blocks() -> None:
    made = mirror()
    with pytest.raises(ValueError, match="masked"):
        made.stored(GPU, keys(1), 8, None, b"", BLOCK, 0.0, masked=1)
    with pytest.raises(Rejected, match="token_count"):
        made.stored(GPU, keys(1), 8, None, tokens(BLOCK), BLOCK, 0.0, masked=1)
    with pytest.raises(Rejected, match="unit_size"):
        made.stored(GPU, keys(1), 8, None, tokens(4), 2, 0.0, masked=1)


def test_a_place_that_is_told_late_adds_no_copy() -> None:
    made = mirror()
    made.stored(GPU, keys(3, 4), 8, None, b"", BLOCK, 0.0)
    assert held(made) == set()
    payload = tokens(5 * BLOCK)
    late = made.stored(GPU, keys(3, 4, 5), 8, None, payload, BLOCK, 0.0, masked=2, places_only=True)
    assert told(late) == [(HOLD, GPU, 1, canonical(4)[2:])]
    made.removed(GPU, keys(3), 8)
    assert (held(made), made.place(keys(5))) == ({canonical(4)[3]}, None)


def test_a_removal_of_what_is_not_held_spares_the_rest_of_its_event() -> None:
    made = mirror()
    store(made, 0, 2)
    _, b = canonical(2)
    assert told(made.removed(GPU, keys(77, 2, 78), 8)) == [(DROP, GPU, 1, [b])]
    assert made.counts()["removed_unknown"] == 2


def test_a_removal_names_its_lane_only() -> None:
    made = mirror()
    store(made, 0, 1)
    store(made, 0, 1, lane=HOST)
    assert told(made.removed(GPU, keys(1), 8)) == [(DROP, GPU, 1, canonical(1))]
    assert held(made, HOST) == set(canonical(1))


def test_a_hole_leaves_its_descendants() -> None:
    made = mirror()
    store(made, 0, 3)
    a, _, c = canonical(3)
    made.removed(GPU, keys(2), 8)
    assert held(made) == {a, c}


def test_places_survive_a_clear_so_that_a_placeholder_finds_them() -> None:
    made = mirror()
    store(made, 0, 2)
    assert told(made.cleared([GPU])) == [(CLEAR, GPU, 1, [])]
    deltas = made.stored(HOST, keys(1, 2), 8, None, b"", 0, 0.0)
    assert told(deltas) == [(HOLD, HOST, 1, canonical(2))]


def test_a_placeholder_of_unknown_place_is_told_when_it_gets_one() -> None:
    made = mirror()
    assert made.stored(HOST, keys(1), 8, None, b"", 0, 0.0) == []
    deltas = store(made, 0, 1)
    assert told(deltas) == [(HOLD, GPU, 1, canonical(1)), (HOLD, HOST, 1, canonical(1))]


def test_a_suspect_lane_is_uncertain_until_it_is_stored_again() -> None:
    made = mirror()
    store(made, 0, 2, lane=HOST)
    a, b = canonical(2)
    assert told(made.suspect([HOST])) == [(HOLD, HOST, 2, [a, b])]
    assert told(store(made, 0, 1, lane=HOST)) == [(HOLD, HOST, 1, [a])]
    assert held(made, HOST, 2) == {b}


def test_a_large_unit_covers_several_blocks() -> None:
    made = mirror()
    assert told(store(made, 0, 1, unit=3 * BLOCK)) == [(HOLD, GPU, 1, canonical(3))]
    assert told(made.removed(GPU, keys(1), 8)) == [(DROP, GPU, 1, canonical(3))]


def test_a_block_is_held_when_all_its_small_units_are() -> None:
    made = mirror()
    assert store(made, 0, 3, unit=1) == []
    assert told(store(made, 3, 1, unit=1)) == [(HOLD, GPU, 1, canonical(1))]
    assert told(made.removed(GPU, keys(2), 8)) == [(DROP, GPU, 1, canonical(1))]
    assert told(store(made, 1, 1, unit=1)) == [(HOLD, GPU, 1, canonical(1))]


def test_one_hash_may_end_units_of_two_sizes() -> None:
    made = mirror()
    store(made, 0, 2)
    deltas = made.stored(HOST, keys(2), 8, None, tokens(2 * BLOCK), 2 * BLOCK, 0.0)
    assert told(deltas) == [(HOLD, HOST, 1, canonical(2))]


def test_two_engine_hashes_of_one_block_hold_it_together() -> None:
    made = mirror()
    made.stored(GPU, keys(1), 8, None, tokens(BLOCK), BLOCK, 0.0)
    assert made.stored(GPU, keys(501), 8, None, tokens(BLOCK), BLOCK, 0.0) == []
    assert made.removed(GPU, keys(1), 8) == []
    assert told(made.removed(GPU, keys(501), 8)) == [(DROP, GPU, 1, canonical(1))]


def test_opaque_blocks_are_counted_and_never_told_nor_are_their_descendants() -> None:
    made = mirror()
    store(made, 0, 1)
    assert store(made, 1, 1, opaque=True) == []
    assert store(made, 2, 1) == []
    assert held(made) == set(canonical(1))
    assert (made.counts()["opaque_units"], made.counts()["units_held"]) == (2, 3)


def test_adapters_are_told_apart() -> None:
    made = mirror()
    [delta] = made.stored(GPU, keys(1), 8, None, tokens(BLOCK), BLOCK, 0.0, adapter="lora")
    assert delta.hashes == block_hashes(namespace_root("m", "lora"), tokens(BLOCK), BLOCK)


def test_pairs_hash_one_token_more() -> None:
    made = Mirror("m", BLOCK, pairs=True)
    made.add_lane(GPU, multiset=False)
    first = made.stored(GPU, keys(1), 8, None, tokens(5), BLOCK, 0.0)
    second = made.stored(GPU, keys(2), 8, keys(1), tokens(5, 4), BLOCK, 0.0)
    hashes = b"".join(delta.hashes for delta in first + second)
    assert hashes == block_hashes(namespace_root("m", pairs=True), tokens(9), BLOCK, pairs=True)


def test_wide_hashes_are_told_apart_to_their_last_byte() -> None:
    made = mirror()
    one, other = bytes(31) + b"\x01", bytes(31) + b"\x02"
    made.stored(GPU, one, 32, None, tokens(BLOCK), BLOCK, 0.0)
    [delta] = made.stored(GPU, other, 32, one, tokens(BLOCK, BLOCK), BLOCK, 0.0)
    assert unpacked(delta.hashes) == canonical(2)[1:]


def test_a_new_engine_life_forgets_places_too() -> None:
    made = mirror()
    store(made, 0, 2)
    snapshot = made.begin_snapshot()
    made.reset()
    assert made.next_snapshot(snapshot, 10) == []
    assert (made.counts()["units_placed"], held(made)) == (0, set())
    assert store(made, 1, 1) == []


def test_a_snapshot_is_shallow_first_and_reads_what_is_held_when_it_is_sent() -> None:
    made = mirror()
    store(made, 0, 200)
    hashes = canonical(200)
    snapshot = made.begin_snapshot()
    [first] = made.next_snapshot(snapshot, 100)
    assert unpacked(first.hashes) == hashes[:100]
    made.removed(GPU, keys(102), 8)
    [second] = made.next_snapshot(snapshot, 1)
    assert unpacked(second.hashes) == hashes[100:101]
    [third] = made.next_snapshot(snapshot, 100)
    assert (third.parent, unpacked(third.hashes)) == (hashes[101], hashes[102:])
    assert made.next_snapshot(snapshot, 100) == []


def test_places_make_room_least_recently_used_first_and_are_counted() -> None:
    made = mirror(max_units=3)
    store(made, 0, 3)
    made.removed(GPU, keys(3), 8)
    made.removed(GPU, keys(2), 8)
    assert store(made, 1, 1) != []  # used again: the third block is now the older one
    made.removed(GPU, keys(2), 8)
    assert made.stored(GPU, keys(901), 8, None, tokens(BLOCK, 50), BLOCK, 0.0) != []
    assert made.counts()["places_evicted"] == 1
    assert made.stored(HOST, keys(2), 8, None, b"", 0, 0.0) != []


def test_a_full_mirror_rejects_what_is_new_and_takes_what_it_knows() -> None:
    made = mirror(max_units=2)
    store(made, 0, 2)
    with pytest.raises(Rejected) as caught:
        store(made, 2, 1)
    assert caught.value.args[0] == "mirror_full"
    assert store(made, 1, 1) == []
    made.removed(GPU, keys(2), 8)
    assert made.counts()["units_held"] == 2


@pytest.mark.parametrize(
    ("reason", "named", "parent", "payload", "unit"),
    [
        ("no_hashes", b"", None, tokens(4), BLOCK),
        ("token_count", keys(9), None, tokens(5), BLOCK),
        ("token_count", keys(9), None, tokens(4), 2**31),
        ("unit_size", keys(9), None, tokens(6), 6),
        ("unit_size", keys(9), None, tokens(3), 3),
        ("unit_size", keys(9), None, tokens(4), 0),
        ("self_parent", keys(8, 9), keys(9), tokens(8), BLOCK),
        ("duplicate_in_event", keys(9, 9), None, tokens(8), BLOCK),
        ("hash_conflict", keys(2), None, tokens(4), BLOCK),
        ("hash_conflict", keys(1), None, tokens(4, 1), BLOCK),
    ],
)
def test_a_bad_store_is_rejected_for_its_reason_and_changes_nothing(
    reason: str, named: bytes, parent: bytes | None, payload: bytes, unit: int
) -> None:
    made = mirror()
    store(made, 0, 2)
    before = (made.counts(), held(made))
    with pytest.raises(Rejected) as caught:
        made.stored(GPU, named, 8, parent, payload, unit, 0.0)
    assert caught.value.args[0] == reason
    assert (made.counts(), held(made)) == before


@pytest.mark.parametrize(
    ("named", "width", "parent", "payload"),
    [
        (keys(1)[:7], 8, None, tokens(4)),
        (keys(1), 16, None, tokens(4)),
        (keys(1), 0, None, tokens(4)),
        (keys(1), -8, None, tokens(4)),
        (keys(1), 8, b"", tokens(4)),
        (keys(1), 8, bytes(32), tokens(4)),
        (keys(1), 8, None, b"123"),
    ],
)
def test_malformed_bytes_are_value_errors_not_rejections(
    named: bytes, width: int, parent: bytes | None, payload: bytes
) -> None:
    made = mirror()
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the type below is the point)
        made.stored(GPU, named, width, parent, payload, BLOCK, 0.0)
    assert type(caught.value) is ValueError
    assert made.counts()["units_held"] == 0


def test_an_undeclared_lane_is_a_key_error() -> None:
    made = mirror()
    for call in (
        lambda: store(made, 0, 1, lane=5),
        lambda: made.removed(5, keys(1), 8),
        lambda: made.cleared([GPU, 5]),
        lambda: made.suspect([5]),
        lambda: made.holdings(5, 1),
        lambda: made.next_snapshot(99, 1),
    ):
        with pytest.raises(KeyError):
            call()
    assert made.counts()["clears"] == 0
