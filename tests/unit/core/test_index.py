"""Cases of the index worth reading one by one; tests/property holds it to a naive model."""

from __future__ import annotations

import struct

import pytest

from servingfleet_core import Index, Match, Profile

BLOCK = 16
GPU = (0, 1, 1, 0, 0, BLOCK, False)  # lane, tier, class, group, window, unit, upper_in_predicted
HOST = (1, 2, 1, 0, 0, BLOCK, False)


def packed(*hashes: int) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


PROMPT = packed(*range(101, 105))


def index_of(*lanes: tuple[int, int, int, int, int, int, bool]) -> tuple[Index, int]:
    index = Index(BLOCK)
    replica = index.add_replica(Profile(list(lanes), []))
    index.set_rank(replica, 0, trusted=True, complete=True)
    return index, replica


def only(matches: list[Match]) -> Match:
    [match] = matches
    return match


def test_a_rank_that_can_reuse_nothing_is_left_out() -> None:
    index, replica = index_of(GPU)
    assert index.match(PROMPT, 65) == []
    index.hold(replica, 0, 0, 1, 0, PROMPT)
    assert index.match(packed(105), 17) == []
    assert only(index.match(PROMPT, 65)).predicted == 64


def test_answers_come_by_replica_and_rank_whoever_stored_first() -> None:
    index, first = index_of(GPU)
    second = index.add_replica(Profile([GPU], []))
    for rank in (7, 2):
        index.set_rank(second, rank, trusted=True, complete=True)
    for replica, rank in ((second, 7), (first, 0), (second, 2)):
        index.hold(replica, rank, 0, 1, 0, PROMPT)
    found = [(match.replica, match.rank, match.lower) for match in index.match(PROMPT, 65)]
    assert found == [(first, 0, 64), (second, 2, 64), (second, 7, 64)]


def test_a_hole_hides_the_blocks_behind_it_until_it_is_filled() -> None:
    index, replica = index_of(GPU)
    index.hold(replica, 0, 0, 1, 0, PROMPT)
    index.drop(replica, 0, 0, packed(102))
    assert only(index.match(PROMPT, 65)).predicted == 16
    index.hold(replica, 0, 0, 1, 101, packed(102))
    assert only(index.match(PROMPT, 65)).predicted == 64


def test_the_parent_is_only_a_hint() -> None:
    index, replica = index_of(GPU)
    index.hold(replica, 0, 0, 1, 999, packed(103, 104))
    index.hold(replica, 0, 0, 1, 104, packed(101, 102))
    assert only(index.match(PROMPT, 65)).predicted == 64


def test_a_hold_replaces_the_other_confidence() -> None:
    index, replica = index_of(GPU)
    assert index.hold(replica, 0, 0, 2, 0, PROMPT) == 4
    assert only(index.match(PROMPT, 65)).upper == 64
    assert index.hold(replica, 0, 0, 1, 0, PROMPT) == 4
    assert index.hold(replica, 0, 0, 1, 0, PROMPT) == 0
    assert (index.held(replica, 0), index.counts()["entries"]) == ([(0, 4)], 4)
    assert only(index.match(PROMPT, 65)).lower == 64


def test_a_lost_replica_takes_its_blocks_and_credits_with_it() -> None:
    index, replica = index_of(GPU)
    other = index.add_replica(Profile([GPU], []))
    index.set_rank(other, 0, trusted=True, complete=True)
    index.hold(replica, 0, 0, 1, 0, PROMPT)
    index.hold(other, 0, 0, 1, 0, packed(101))
    index.open_credit("d", replica, 0, PROMPT, 64)
    index.remove_replica(replica)
    match = only(index.match(PROMPT, 65))
    assert (match.replica, match.predicted) == (other, 16)
    counts = index.counts()
    assert (counts["entries"], counts["blocks"], counts["credits"]) == (1, 1, 0)
    assert not index.close_credit("d")


def test_a_credit_counts_until_the_engine_speaks_of_the_block() -> None:
    index, replica = index_of(GPU)
    assert index.open_credit("d", replica, 0, PROMPT, 64)
    assert not index.open_credit("d", replica, 0, PROMPT, 64)
    match = only(index.match(PROMPT, 65))
    assert (match.lower, match.predicted, match.credited) == (0, 64, 64)
    index.hold(replica, 0, 0, 1, 0, PROMPT)
    index.drop(replica, 0, 0, packed(104))
    assert only(index.match(PROMPT, 65)).predicted == 48
    assert index.close_credit("d")
    assert only(index.match(PROMPT, 65)).lower == 48


def test_of_two_credits_for_a_block_one_remains() -> None:
    index, replica = index_of(GPU)
    index.open_credit("a", replica, 0, PROMPT, 64)
    index.open_credit("b", replica, 0, packed(101, 102), 32)
    index.close_credit("a")
    assert only(index.match(PROMPT, 65)).predicted == 32
    assert index.close_credits(replica, 0) == 1
    assert index.match(PROMPT, 65) == []


def test_a_credit_opened_after_a_hold_outlives_one_opened_before() -> None:
    index, replica = index_of(GPU)
    index.open_credit("before", replica, 0, PROMPT, 64)
    index.hold(replica, 0, 0, 1, 0, PROMPT)
    index.open_credit("after", replica, 0, PROMPT, 64)
    index.clear(replica, 0)
    index.close_credit("before")
    assert only(index.match(PROMPT, 65)).predicted == 64


def test_a_window_lane_is_credited_up_to_the_last_token_only() -> None:
    window = (1, 1, 2, 1, 17, BLOCK, False)
    index, replica = index_of(GPU, window)
    index.open_credit("d", replica, 0, PROMPT, 64)
    assert only(index.match(PROMPT, 65)).predicted == 48


def test_a_profile_without_lanes_counts_credits() -> None:
    index, replica = index_of()
    index.open_credit("d", replica, 0, PROMPT, 64)
    assert only(index.match(PROMPT, 65)).tiers == (64, 0, 0, 0)


def test_a_rank_that_is_not_trusted_may_reuse_nothing_or_all() -> None:
    index, replica = index_of(GPU)
    index.hold(replica, 0, 0, 1, 0, PROMPT)
    index.set_rank(replica, 0, trusted=False, complete=True)
    match = only(index.match(PROMPT, 65))
    assert (match.lower, match.predicted, match.upper) == (0, 0, 64)


def test_a_rank_that_is_not_complete_counts_what_it_has() -> None:
    index, replica = index_of(GPU)
    index.hold(replica, 0, 0, 1, 0, packed(101))
    index.set_rank(replica, 0, trusted=True, complete=False)
    match = only(index.match(PROMPT, 64))
    assert (match.lower, match.predicted, match.upper) == (16, 16, 48)


def test_a_request_that_can_reuse_nothing_gets_nothing_from_anybody() -> None:
    index, replica = index_of(GPU)
    index.set_rank(replica, 1, trusted=False, complete=False)
    index.hold(replica, 0, 0, 1, 0, PROMPT)
    assert len(index.match(PROMPT, 65)) == 2
    assert index.match(PROMPT, 65, no_reuse=True) == []


def test_part_of_a_block_of_small_units_may_be_there() -> None:
    index, replica = index_of((0, 1, 1, 0, 0, 1, False))
    index.hold(replica, 0, 0, 1, 0, packed(101))
    match = only(index.match(PROMPT, 65))
    assert (match.predicted, match.upper) == (16, 31)


def test_an_index_beyond_its_bound_forgets_the_oldest_and_says_so() -> None:
    index = Index(BLOCK, max_entries=100)
    old, new = (index.add_replica(Profile([GPU], [])) for _ in range(2))
    for replica in (old, new):
        index.set_rank(replica, 0, trusted=True, complete=True)
    index.hold(old, 0, 0, 1, 0, packed(*range(1, 61)))
    index.hold(new, 0, 0, 1, 0, packed(*range(1001, 1061)))
    counts = index.counts()
    assert (counts["entries"], counts["evicted"]) == (60, 60)
    forgotten = only(index.match(packed(1), 17))
    assert (forgotten.replica, forgotten.predicted, forgotten.upper) == (old, 0, 16)
    index.clear(old, 0)
    assert index.match(packed(1), 17) == []


def test_memory_is_given_back_when_nobody_holds_a_block() -> None:
    index, replica = index_of(GPU)
    for first in range(1, 10_001, 100):
        index.hold(replica, 0, 0, 1, 0, packed(*range(first, first + 100)))
    for first in range(1, 10_001, 100):
        index.drop(replica, 0, 0, packed(*range(first, first + 100)))
    counts = index.counts()
    assert (counts["entries"], counts["blocks"], counts["runs"]) == (0, 0, 0)


@pytest.mark.parametrize(
    "lane",
    [
        (64, 1, 1, 0, 0, 16, False),
        (0, 0, 1, 0, 0, 16, False),
        (0, 5, 1, 0, 0, 16, False),
        (0, 1, 0, 0, 0, 16, False),
        (0, 1, 4, 0, 0, 16, False),
        (0, 1, 1, 0, 0, 0, False),
        (-1, 1, 1, 0, 0, 16, False),
        (0, 1, 1, 0, 0, 2**32, False),
    ],
)
def test_a_lane_that_cannot_be_is_a_value_error(
    lane: tuple[int, int, int, int, int, int, bool],
) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (each case names what is wrong)
        Profile([lane], [])


def test_a_unit_that_fits_no_block_is_refused_by_the_index() -> None:
    index, replica = index_of(GPU)
    with pytest.raises(ValueError, match="24"):
        index.set_profile(replica, Profile([(0, 1, 1, 0, 0, 24, False)], []))
    index.hold(replica, 0, 0, 1, 0, PROMPT)


def test_malformed_arguments_change_nothing() -> None:
    index, replica = index_of(GPU)
    calls = (
        lambda: index.hold(replica, 0, 0, 1, 0, b"1234567"),
        lambda: index.hold(replica, 0, 0, 3, 0, PROMPT),
        lambda: index.hold(replica, 0, 0, 1, 0, packed(101, 0)),
        lambda: index.hold(replica, 0, 0, 1, -1, PROMPT),
        lambda: index.drop(replica, 0, 0, b"1"),
        lambda: index.match(PROMPT, 63),
        lambda: index.match(PROMPT, -1),
        lambda: index.open_credit("d", replica, 0, PROMPT, 63),
        lambda: Index(0),
    )
    for call in calls:
        with pytest.raises(ValueError):  # noqa: PT011
            call()
    assert (index.counts()["entries"], index.counts()["credits"]) == (0, 0)


def test_unknown_replicas_ranks_and_lanes_are_key_errors() -> None:
    index, replica = index_of(GPU, HOST)
    calls = (
        lambda: index.hold(replica + 1, 0, 0, 1, 0, PROMPT),
        lambda: index.hold(replica, 7, 0, 1, 0, PROMPT),
        lambda: index.hold(replica, 0, 7, 1, 0, PROMPT),
        lambda: index.drop(replica, 0, 2, PROMPT),
        lambda: index.clear(replica, 0, 2),
        lambda: index.clear(replica, 1),
        lambda: index.set_rank(replica + 1, 0, trusted=True, complete=True),
        lambda: index.set_profile(replica + 1, Profile([], [])),
        lambda: index.remove_replica(replica + 1),
        lambda: index.open_credit("d", replica, 1, PROMPT, 64),
        lambda: index.close_credits(replica, 1),
        lambda: index.credits(replica, 1),
        lambda: index.held(replica, 1),
    )
    for call in calls:
        with pytest.raises(KeyError):
            call()


HOST = (1, 2, 1, 0, 0, BLOCK, False)


def test_a_prompts_end_tells_for_how_long_it_was_not_used() -> None:
    index, replica = index_of(GPU)
    index.hold(replica, 0, 0, 1, 0, PROMPT, 100.0)
    match = only(index.match(PROMPT, 65, now=130.0))
    assert (match.tail_tier, match.idle_s, match.turnover_s) == (1, 30.0, None)
    index.touch(replica, 0, PROMPT, 150.0)
    assert only(index.match(PROMPT, 65, now=130.0)).idle_s == -20.0
    assert index.idle(replica, 0, PROMPT, 160.0) == [(4, 10.0)]
    assert only(index.match(PROMPT, 65)).idle_s is None


def test_blocks_held_before_anybody_told_the_time_have_none() -> None:
    index, replica = index_of(GPU)
    index.hold(replica, 0, 0, 1, 0, PROMPT)
    match = only(index.match(PROMPT, 65, now=130.0))
    assert (match.tail_tier, match.idle_s) == (1, None)
    # Told once more, or with another confidence, is not used.
    index.hold(replica, 0, 0, 1, 0, PROMPT, 131.0)
    index.hold(replica, 0, 0, 2, 0, PROMPT, 131.0)
    index.hold(replica, 0, 0, 1, 0, PROMPT, 131.0)
    assert only(index.match(PROMPT, 65, now=132.0)).idle_s is None
    index.touch(replica, 0, PROMPT, 133.0)
    assert only(index.match(PROMPT, 65, now=134.0)).idle_s == 1.0


def test_the_slowest_copy_decides_when_a_block_is_gone() -> None:
    index, replica = index_of(GPU, HOST)
    index.hold(replica, 0, 0, 1, 0, PROMPT, 100.0)
    index.hold(replica, 0, 1, 1, 0, PROMPT, 110.0)
    match = only(index.match(PROMPT, 65, now=120.0))
    assert (match.tiers, match.tail_tier, match.idle_s) == ((64, 0, 0, 0), 2, 10.0)


def evicted(index: Index, replica: int, ages: list[float]) -> None:
    for number, age in enumerate(ages):
        block = packed(1000 + number)
        index.hold(replica, 0, 0, 1, 0, block, 1000.0)
        index.drop(replica, 0, 0, block, 1000.0 + age)


def test_a_turnover_is_the_median_age_of_the_last_removals() -> None:
    index, replica = index_of(GPU)
    evicted(index, replica, [5.0] * 15)
    assert index.turnover(replica, 0) == [(1, 15, None)]
    evicted(index, replica, [5.0])
    assert index.turnover(replica, 0) == [(1, 16, 5.0)]
    evicted(index, replica, [float(age) for age in range(64)])
    assert index.turnover(replica, 0) == [(1, 80, 32.0)]
    index.hold(replica, 0, 0, 1, 0, PROMPT, 2000.0)
    assert only(index.match(PROMPT, 65, now=2001.0)).turnover_s == 32.0


def test_what_moves_or_is_cleared_was_not_evicted() -> None:
    index, replica = index_of(GPU, HOST)
    for number in range(20):
        block = packed(1000 + number)
        index.hold(replica, 0, 0, 1, 0, block, 1000.0)
        index.hold(replica, 0, 1, 1, 0, block, 1000.0)
        index.drop(replica, 0, 0, block, 1010.0)
    assert index.turnover(replica, 0) == []
    index.drop(replica, 0, 1, packed(*range(1000, 1020)), 1030.0)
    assert [tier for tier, _, _ in index.turnover(replica, 0)] == [2]
    index.hold(replica, 0, 0, 1, 0, PROMPT, 1040.0)
    index.clear(replica, 0, 0)
    index.hold(replica, 0, 0, 1, 0, PROMPT)
    index.drop(replica, 0, 0, PROMPT, 1050.0)  # held since nobody knows when
    assert [tier for tier, _, _ in index.turnover(replica, 0)] == [2]
    index.clear(replica, 0)
    assert index.turnover(replica, 0) == []


def test_a_credited_end_is_used_when_its_prompt_is_served() -> None:
    index, replica = index_of(GPU)
    index.open_credit("a", replica, 0, PROMPT, 64, 150.0)
    index.open_credit("b", replica, 0, PROMPT, 64, 170.0)
    match = only(index.match(PROMPT, 65, now=100.0))
    assert (match.tail_tier, match.idle_s) == (1, -70.0)
