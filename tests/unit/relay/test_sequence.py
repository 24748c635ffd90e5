"""The numbering of batches: every way in which it breaks, and what is made of it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from servingfleet_protos.v1.common_pb2 import (
    STREAM_STATE_HISTORY_LOST,
    STREAM_STATE_LIVE,
    STREAM_STATE_RESYNCING,
    STREAM_STATE_UNPROVEN,
)
from servingfleet_relay.batches import Apply, Ignored, Lost, Restarted, Step
from servingfleet_relay.frames import END_OF_REPLAY
from servingfleet_relay.sequence import Sequence

NOW = 100.0


def sequence(*, replay: bool = True, held: int = 100) -> Sequence:
    return Sequence(
        replay=replay, deadline_s=5.0, probe_s=10.0, max_held_batches=held, max_held_bytes=10_000
    )


def batch(seq: int, life: str = "a") -> tuple[int, bytes]:
    return seq, f"{life}{seq}".encode()


def connected(*, replay: bool = True, upto: int | None = None, held: int = 100) -> Sequence:
    """A proven stream that has applied 0..upto."""
    numbers = sequence(replay=replay, held=held)
    numbers.socket_up(NOW)
    if replay:
        answer(numbers)
    for seq in range((-1 if upto is None else upto) + 1):
        numbers.live(*batch(seq), NOW)
    assert numbers.applied == upto
    return numbers


def answer(numbers: Sequence, seqs: Iterable[int] = (), life: str = "a") -> list[Step]:
    """The engine serves the request that is open."""
    start = numbers.take_request()
    assert start is not None
    steps: list[Step] = []
    for seq in seqs:
        if seq >= start:
            steps += numbers.replayed(*batch(seq, life), NOW)
    return steps + numbers.replayed(END_OF_REPLAY, b"", NOW)


def applied(steps: Iterable[Step]) -> list[int]:
    return [step.seq for step in steps if isinstance(step, Apply)]


def kinds(steps: Iterable[Step]) -> list[str]:
    return [type(step).__name__ for step in steps]


def state(numbers: Sequence) -> int:
    return numbers.state[0]


def test_before_the_socket_is_up_nothing_is_proven() -> None:
    assert state(sequence()) == STREAM_STATE_UNPROVEN


def test_the_first_connection_asks_for_everything() -> None:
    numbers = sequence()
    numbers.socket_up(NOW)
    assert state(numbers) == STREAM_STATE_RESYNCING
    assert numbers.take_request() == 0
    assert numbers.take_request() is None


def test_a_whole_history_makes_the_rank_live() -> None:
    numbers = sequence()
    numbers.socket_up(NOW)
    assert applied(answer(numbers, range(3))) == [0, 1, 2]
    assert state(numbers) == STREAM_STATE_LIVE
    assert numbers.applied == 2


def test_an_engine_that_has_published_nothing_is_live() -> None:
    numbers = connected()
    assert state(numbers) == STREAM_STATE_LIVE
    assert applied(numbers.live(*batch(0), NOW)) == [0]


def test_a_rolled_ring_loses_history_until_the_cache_is_cleared() -> None:
    numbers = sequence()
    numbers.socket_up(NOW)
    assert applied(answer(numbers, range(20, 23))) == [20, 21, 22]
    assert state(numbers) == STREAM_STATE_HISTORY_LOST
    numbers.cleared()
    assert state(numbers) == STREAM_STATE_LIVE


def test_live_batches_wait_for_the_replay_and_its_overlap_is_dropped() -> None:
    numbers = sequence()
    numbers.socket_up(NOW)
    for seq in (1, 2, 3):
        assert numbers.live(*batch(seq), NOW) == []
    steps = answer(numbers, range(3))
    assert applied(steps) == [0, 1, 2, 3]
    assert steps.count(Ignored("duplicate_batch")) == 2
    assert state(numbers) == STREAM_STATE_LIVE


def test_a_gap_is_replayed_from_the_last_batch_applied() -> None:
    numbers = connected(upto=4)
    assert numbers.live(*batch(7), NOW) == []
    assert state(numbers) == STREAM_STATE_RESYNCING
    assert applied(answer(numbers, range(4, 9))) == [5, 6, 7, 8]
    assert state(numbers) == STREAM_STATE_LIVE
    assert (numbers.gaps, numbers.incarnation) == (1, 1)


def test_a_hole_in_the_replay_is_asked_for_again_and_then_given_up() -> None:
    numbers = connected(upto=4)
    numbers.live(*batch(7), NOW)
    for _ in range(3):
        start = numbers.take_request()
        assert start == 4
        assert numbers.replayed(*batch(4), NOW) == []
        steps = numbers.replayed(*batch(6), NOW)
    assert kinds(steps) == ["Lost", "Apply"]
    numbers.replayed(*batch(7), NOW)
    numbers.replayed(END_OF_REPLAY, b"", NOW)
    assert numbers.applied == 7
    assert state(numbers) == STREAM_STATE_HISTORY_LOST
    assert numbers.take_request() is None


def test_every_hole_in_a_replay_is_asked_for_as_often_as_the_first() -> None:
    """An engine drops what a throttled relay does not read: each answer ends in another hole."""
    numbers = connected(upto=4)
    numbers.live(*batch(40), NOW)
    steps: list[Step] = []
    for _ in range(12):
        start = numbers.take_request()
        assert start is not None
        assert start == numbers.applied
        for seq in (start, start + 1, start + 2, start + 3, start + 6):
            steps += numbers.replayed(*batch(seq), NOW)
    steps += answer(numbers, range(40, 42))
    assert applied(steps) == list(range(5, 42))
    assert (state(numbers), numbers.gaps) == (STREAM_STATE_LIVE, 1)


def test_what_a_silent_replay_has_left_out_is_asked_for_while_it_brings_something() -> None:
    numbers = connected(upto=4)
    numbers.live(*batch(13), NOW)
    now = NOW
    for start in (4, 6, 8, 10):
        assert numbers.take_request() == start
        for seq in (start, start + 1, start + 2):
            numbers.replayed(*batch(seq), now)
        assert numbers.tick(now + 5.1) == []
        assert state(numbers) == STREAM_STATE_RESYNCING
        now += 5.1
    assert numbers.take_request() == 12
    assert kinds(numbers.tick(now + 5.1)) == ["Apply"], "13 had waited"
    assert numbers.state == (STREAM_STATE_LIVE, "")


def test_a_replay_that_brings_nothing_new_is_given_up_where_the_one_before_broke_off() -> None:
    numbers = connected(upto=4)
    numbers.live(*batch(13), NOW)
    assert numbers.take_request() == 4
    for seq in (4, 5):
        numbers.replayed(*batch(seq), NOW)
    assert numbers.replay_failed("silent", NOW) == []
    assert numbers.take_request() == 5
    numbers.replayed(*batch(5), NOW)
    assert kinds(numbers.replay_failed("silent", NOW)) == ["Lost", "Apply"]
    assert state(numbers) == STREAM_STATE_HISTORY_LOST


def test_a_gap_beyond_the_ring_clears() -> None:
    numbers = connected(upto=4)
    numbers.live(*batch(30), NOW)
    steps = answer(numbers, range(20, 31))
    assert kinds(steps)[:2] == ["Lost", "Apply"]
    assert applied(steps) == list(range(20, 31))
    assert state(numbers) == STREAM_STATE_HISTORY_LOST


def test_a_gap_without_a_replay_socket_clears() -> None:
    numbers = connected(replay=False, upto=4)
    steps = numbers.live(*batch(7), NOW)
    assert kinds(steps) == ["Lost", "Apply"]
    assert state(numbers) == STREAM_STATE_HISTORY_LOST


def test_without_a_replay_socket_a_stream_from_0_is_live() -> None:
    numbers = connected(replay=False)
    assert state(numbers) == STREAM_STATE_HISTORY_LOST
    numbers.live(*batch(0), NOW)
    assert state(numbers) == STREAM_STATE_LIVE


def test_without_a_replay_socket_a_late_join_loses_history() -> None:
    numbers = connected(replay=False)
    assert applied(numbers.live(*batch(9), NOW)) == [9]
    assert state(numbers) == STREAM_STATE_HISTORY_LOST


def test_a_lost_socket_leaves_nothing_proven_and_its_late_batches_are_ignored() -> None:
    numbers = connected(upto=4)
    numbers.socket_down()
    assert state(numbers) == STREAM_STATE_UNPROVEN
    assert numbers.live(*batch(5), NOW) == [Ignored("socket_down")]
    assert numbers.applied == 4


def test_the_same_bytes_after_a_reconnect_prove_continuity() -> None:
    numbers = connected(upto=4)
    numbers.socket_down()
    numbers.socket_up(NOW)
    assert state(numbers) == STREAM_STATE_UNPROVEN
    assert applied(answer(numbers, range(4, 7))) == [5, 6]
    assert state(numbers) == STREAM_STATE_LIVE
    assert numbers.incarnation == 1


def test_other_bytes_after_a_reconnect_are_a_new_engine() -> None:
    numbers = connected(upto=4)
    numbers.socket_down()
    numbers.socket_up(NOW)
    assert numbers.take_request() == 4
    assert kinds(numbers.replayed(*batch(4, "b"), NOW)) == ["Restarted"]
    assert numbers.incarnation == 2
    assert applied(answer(numbers, range(6), "b")) == [0, 1, 2, 3, 4, 5]
    assert state(numbers) == STREAM_STATE_LIVE


def test_an_engine_that_does_not_know_our_last_batch_is_a_new_one() -> None:
    numbers = connected(upto=4)
    numbers.socket_down()
    numbers.socket_up(NOW)
    assert kinds(answer(numbers)) == ["Restarted"]
    assert answer(numbers) == []
    assert state(numbers) == STREAM_STATE_LIVE
    assert applied(numbers.live(*batch(0, "b"), NOW)) == [0]


def test_an_engine_whose_ring_begins_after_our_last_batch_proves_nothing() -> None:
    numbers = connected(upto=4)
    numbers.socket_down()
    numbers.socket_up(NOW)
    assert kinds(answer(numbers, [5, 6])) == ["Lost", "Apply", "Apply"]
    assert state(numbers) == STREAM_STATE_HISTORY_LOST


def test_numbers_that_fall_back_are_a_new_engine_once_the_replay_says_so() -> None:
    numbers = connected(upto=4)
    assert numbers.live(*batch(0, "b"), NOW) == []
    assert state(numbers) == STREAM_STATE_UNPROVEN
    assert kinds(answer(numbers, [0], "b")) == ["Restarted"]
    assert applied(answer(numbers, [0], "b")) == [0]
    assert (numbers.incarnation, state(numbers)) == (2, STREAM_STATE_LIVE)


def test_numbers_that_fall_back_without_a_replay_socket_are_a_new_engine() -> None:
    numbers = connected(replay=False, upto=4)
    assert kinds(numbers.live(*batch(0, "b"), NOW)) == ["Restarted", "Apply"]
    assert (numbers.incarnation, state(numbers)) == (2, STREAM_STATE_LIVE)


def test_numbers_that_fall_back_in_the_middle_lose_the_new_engines_history() -> None:
    numbers = connected(replay=False, upto=4)
    numbers.live(*batch(2, "b"), NOW)
    assert (numbers.incarnation, state(numbers)) == (2, STREAM_STATE_HISTORY_LOST)


def test_a_batch_seen_before_is_a_duplicate() -> None:
    numbers = connected(upto=4)
    assert numbers.live(*batch(3), NOW) == [Ignored("duplicate_batch")]
    assert state(numbers) == STREAM_STATE_LIVE


def test_numbers_that_fall_back_during_a_replay_start_the_proof_anew() -> None:
    numbers = connected(upto=4)
    numbers.live(*batch(9), NOW)
    assert numbers.take_request() == 4
    numbers.replayed(*batch(4), NOW)
    assert numbers.live(*batch(0, "b"), NOW) == []
    assert state(numbers) == STREAM_STATE_UNPROVEN
    assert kinds(answer(numbers, [0], "b")) == ["Restarted"]
    assert applied(answer(numbers, [0], "b")) == [0]
    assert numbers.applied == 0


def test_an_unproven_reconnect_goes_on_with_the_next_batch_but_history_stays_open() -> None:
    numbers = connected(replay=False, upto=4)
    numbers.socket_down()
    numbers.socket_up(NOW)
    assert state(numbers) == STREAM_STATE_UNPROVEN
    assert applied(numbers.live(*batch(5), NOW)) == [5]
    assert state(numbers) == STREAM_STATE_HISTORY_LOST


def test_a_reconnect_without_replay_to_a_lower_number_is_a_new_engine() -> None:
    numbers = connected(replay=False, upto=4)
    numbers.socket_down()
    numbers.socket_up(NOW)
    assert kinds(numbers.live(*batch(0, "b"), NOW)) == ["Restarted", "Apply"]


def test_a_replay_that_fails_at_first_gives_what_the_live_batches_give() -> None:
    for first, expected in ((0, STREAM_STATE_LIVE), (7, STREAM_STATE_HISTORY_LOST)):
        numbers = sequence()
        numbers.socket_up(NOW)
        numbers.take_request()
        numbers.live(*batch(first), NOW)
        assert applied(numbers.replay_failed("no socket", NOW)) == [first]
        assert state(numbers) == expected


def test_a_replay_that_fails_in_a_gap_clears() -> None:
    numbers = connected(upto=4)
    numbers.live(*batch(7), NOW)
    numbers.take_request()
    assert kinds(numbers.replay_failed("no answer", NOW)) == ["Lost", "Apply"]
    assert state(numbers) == STREAM_STATE_HISTORY_LOST


def test_a_silent_replay_is_given_up_at_its_deadline() -> None:
    numbers = connected(upto=4)
    numbers.live(*batch(7), NOW)
    assert numbers.tick(NOW + 4.9) == []
    assert kinds(numbers.tick(NOW + 5.1)) == ["Lost", "Apply"]


def test_a_replay_that_never_ends_is_proven_by_the_next_batch() -> None:
    numbers = sequence()
    numbers.socket_up(NOW)
    numbers.take_request()
    numbers.replayed(*batch(0), NOW)
    numbers.replay_failed("no end", NOW)
    assert state(numbers) == STREAM_STATE_RESYNCING
    assert numbers.take_request() == 0
    numbers.replay_failed("no answer", NOW)
    assert numbers.state == (STREAM_STATE_UNPROVEN, "the replay from 0 broke off: no end")
    numbers.live(*batch(1), NOW)
    assert state(numbers) == STREAM_STATE_LIVE


def test_what_is_held_during_a_replay_is_bounded() -> None:
    numbers = connected(upto=4, held=10)
    numbers.live(*batch(7), NOW)
    steps: list[Step] = []
    for seq in range(8, 18):
        steps += numbers.live(*batch(seq), NOW)
    assert kinds(steps)[0] == "Lost"
    assert applied(steps) == list(range(7, 18))


def test_replies_nobody_waits_for_change_nothing() -> None:
    numbers = connected(upto=4)
    assert numbers.replayed(*batch(9), NOW) == [Ignored("stray_reply")]
    numbers.live(*batch(7), NOW)
    # Wanted, but not yet asked for: this is of an older request.
    assert numbers.replayed(*batch(5), NOW) == [Ignored("stray_reply")]
    assert numbers.applied == 4


def test_a_process_younger_than_its_events_must_prove_itself() -> None:
    numbers = connected(upto=4)
    assert numbers.process_started(NOW - 60, NOW) == []
    assert state(numbers) == STREAM_STATE_LIVE
    numbers.process_started(NOW + 60, NOW + 61)
    assert state(numbers) == STREAM_STATE_UNPROVEN
    assert kinds(answer(numbers)) == ["Restarted"]


def test_a_process_younger_than_its_events_is_a_new_engine_without_replay() -> None:
    numbers = connected(replay=False, upto=4)
    assert kinds(numbers.process_started(NOW + 60, NOW + 61)) == ["Restarted"]
    # Seen already: the new life began with it.
    assert numbers.process_started(NOW + 60, NOW + 62) == []


@pytest.mark.parametrize("last", [2**40, 2**62])
def test_an_absurd_jump_costs_no_memory(last: int) -> None:
    numbers = connected(replay=False, upto=1)
    steps = numbers.live(last, b"x", NOW)
    assert [type(step) for step in steps] == [Lost, Apply]
    assert isinstance(numbers.live(0, b"y", NOW)[0], Restarted)


def test_a_silent_engine_is_asked_whether_its_last_batches_were_lost() -> None:
    numbers = connected(upto=2)
    assert numbers.tick(NOW + 9.9) == []
    assert numbers.take_request() is None
    numbers.tick(NOW + 10)
    assert state(numbers) == STREAM_STATE_LIVE, "nothing is amiss yet"
    assert applied(answer(numbers, range(5))) == [3, 4]
    assert state(numbers) == STREAM_STATE_LIVE
    assert kinds(numbers.live(*batch(5), NOW + 11)) == ["Apply"]


def test_a_probe_that_finds_nothing_changes_nothing_and_comes_again() -> None:
    numbers = connected(upto=2)
    numbers.tick(NOW + 10)
    assert answer(numbers, range(3)) == []
    numbers.tick(NOW + 19.9)
    assert numbers.take_request() is None
    numbers.tick(NOW + 20)
    assert numbers.take_request() == 2


def test_a_probe_without_an_answer_costs_neither_state_nor_later_replays() -> None:
    numbers = connected(upto=2)
    numbers.tick(NOW + 10)
    assert numbers.take_request() == 2
    assert applied(numbers.live(*batch(3), NOW + 11)) == []
    assert applied(numbers.tick(NOW + 16)) == [3], "what was held meanwhile"
    assert state(numbers) == STREAM_STATE_LIVE
    numbers.live(*batch(5), NOW + 17)
    assert applied(answer(numbers, range(6))) == [4, 5]


def test_a_probe_notices_another_process() -> None:
    numbers = connected(upto=2)
    numbers.tick(NOW + 10)
    assert "Restarted" in kinds(answer(numbers, range(3), life="b"))


def test_no_probe_without_a_replay_socket_or_a_connection() -> None:
    for numbers in (connected(upto=2, replay=False), connected(upto=2)):
        if numbers.replays:
            numbers.socket_down()
        numbers.tick(NOW + 60)
        assert numbers.take_request() is None


def test_a_history_that_does_not_add_up_is_read_again_from_the_start() -> None:
    numbers = connected(upto=3)
    assert kinds(numbers.rebuild("more than fits", NOW)) == ["Lost"]
    assert numbers.state[0] == STREAM_STATE_RESYNCING
    assert numbers.live(*batch(4), NOW) == []
    assert applied(answer(numbers, range(4))) == [0, 1, 2, 3, 4]
    assert numbers.state == (STREAM_STATE_LIVE, "")
    assert numbers.incarnation == 1


def test_a_history_read_again_whose_start_is_gone_is_lost() -> None:
    numbers = connected(upto=3)
    numbers.rebuild("more than fits", NOW)
    assert applied(answer(numbers, [2, 3])) == [2, 3]
    state, reason = numbers.state
    assert state == STREAM_STATE_HISTORY_LOST
    assert "begins at 2" in reason


def test_what_can_not_be_read_again_goes_on_without_its_history() -> None:
    numbers = connected(replay=False, upto=3)
    assert kinds(numbers.rebuild("more than fits", NOW)) == ["Lost"]
    assert numbers.take_request() is None
    assert numbers.state == (STREAM_STATE_HISTORY_LOST, "read again: more than fits")
    assert applied(numbers.live(*batch(4), NOW)) == [4]


def test_a_history_read_again_without_an_answer_goes_on_with_what_comes() -> None:
    numbers = connected(upto=3)
    numbers.rebuild("more than fits", NOW)
    numbers.take_request()
    numbers.replay_failed("silent", NOW)
    assert applied(numbers.live(*batch(4), NOW)) == [4]
    assert numbers.state[0] == STREAM_STATE_HISTORY_LOST
