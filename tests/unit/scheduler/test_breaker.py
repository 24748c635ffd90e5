"""When a rank on which requests fail is left alone, and when it is tried again."""

from __future__ import annotations

import math
import random

import pytest

from servingfleet_scheduler.breaker import Breaker, BreakerSettings

EXACT = BreakerSettings(
    failures=3, share=0.5, least=10, window_s=60.0, open_s=5.0, longest_s=20.0, jitter=0.0
)
RNG = random.Random(1)


def fail(breaker: Breaker, times: int, now: float) -> None:
    for _ in range(times):
        breaker.failed(now, now, RNG)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(EXACT)
    fail(breaker, 3, now)
    return breaker


def test_it_opens_when_requests_fail_in_a_row() -> None:
    breaker = Breaker(EXACT)
    fail(breaker, 2, 0.0)
    assert breaker.broken_s(0.0) == 0.0
    fail(breaker, 1, 0.0)
    assert (breaker.broken_s(0.0), breaker.broken_s(4.0), breaker.broken_s(5.0)) == (5.0, 1.0, 0.0)


def test_a_first_token_between_them_breaks_the_row() -> None:
    breaker = Breaker(EXACT)
    for _ in range(3):
        fail(breaker, 2, 0.0)
        breaker.answered(0.0, 0.0)
    assert breaker.broken_s(0.0) == 0.0


def test_it_opens_when_half_of_many_fail_though_never_in_a_row() -> None:
    breaker = Breaker(EXACT)
    for number in range(4):
        breaker.finished(number, number)
        fail(breaker, 1, number)
    assert breaker.broken_s(4.0) == 0.0, "too few to say"
    breaker.finished(4.0, 4.0)
    fail(breaker, 1, 4.0)
    breaker.finished(5.0, 5.0)
    fail(breaker, 1, 5.0)
    assert breaker.broken_s(5.0) > 0.0


def test_what_gets_its_first_token_and_then_breaks_off_is_seen_by_the_share() -> None:
    breaker = Breaker(EXACT)
    for _ in range(11):
        breaker.answered(1.0, 1.0)
        fail(breaker, 1, 1.0)
    assert breaker.broken_s(1.0) > 0.0


def test_few_of_many_that_fail_do_not_open_it() -> None:
    breaker = Breaker(EXACT)
    for number in range(300):
        breaker.finished(number, number)
        breaker.finished(number, number)
        fail(breaker, 1, number)
    assert breaker.broken_s(300.0) == 0.0


def test_failures_long_ago_are_forgotten() -> None:
    breaker = Breaker(EXACT)
    for _ in range(9):
        fail(breaker, 1, 0.0)
        breaker.answered(0.0, 0.0)
    for number in range(4):
        breaker.finished(600.0 + number, 600.0 + number)
        fail(breaker, 1, 600.0 + number)
    assert breaker.broken_s(604.0) == 0.0, "4 of 8; with the old ones it would be 13 of 17"


def test_one_probe_goes_when_its_time_is_over_and_no_second() -> None:
    breaker = opened()
    breaker.sent(5.0)
    assert breaker.broken_s(5.0) == 30.0
    breaker.answered(5.0, 6.0)
    assert breaker.broken_s(6.0) == 0.0
    assert breaker.level == 0


def test_a_probe_that_fails_opens_it_for_twice_as_long_up_to_the_longest() -> None:
    breaker = opened()
    now, times = 0.0, []
    for _ in range(4):
        now += breaker.broken_s(now)
        breaker.sent(now)
        breaker.failed(now, now, RNG)
        times.append(breaker.broken_s(now))
    assert times == [10.0, 20.0, 20.0, 20.0]
    assert breaker.level == 5


def test_a_probe_whose_user_went_away_lets_another_go() -> None:
    breaker = opened()
    breaker.sent(5.0)
    breaker.aborted(4.0)
    assert breaker.broken_s(6.0) > 0.0, "that was another request"
    breaker.aborted(5.0)
    assert breaker.broken_s(6.0) == 0.0
    assert breaker.level == 1, "it has not closed"


def test_a_probe_of_which_nothing_is_heard_does_not_block_for_ever() -> None:
    breaker = opened()
    breaker.sent(5.0)
    assert breaker.broken_s(34.0) == 1.0
    assert breaker.broken_s(35.0) == 0.0


def test_what_was_sent_before_it_opened_neither_closes_nor_opens_it_again() -> None:
    breaker = opened(10.0)
    breaker.finished(9.0, 11.0)
    assert breaker.broken_s(11.0) == 4.0
    breaker.failed(9.0, 12.0, RNG)
    assert breaker.broken_s(12.0) == 3.0
    assert breaker.level == 1


def test_what_was_sent_as_a_last_resort_closes_it_when_it_is_answered() -> None:
    breaker = opened()
    breaker.finished(1.0, 2.0)
    assert breaker.broken_s(2.0) == 0.0


def test_one_that_fails_soon_after_it_closed_stays_open_longer() -> None:
    breaker = opened()
    breaker.finished(5.0, 6.0)
    fail(breaker, 3, 7.0)
    assert breaker.broken_s(7.0) == 10.0


def test_one_that_worked_for_long_starts_anew() -> None:
    breaker = opened()
    breaker.finished(5.0, 6.0)
    fail(breaker, 3, 6.0 + EXACT.longest_s + 1.0)
    assert breaker.broken_s(6.0 + EXACT.longest_s + 1.0) == 5.0


@pytest.mark.parametrize("seed", range(5))
def test_times_open_differ_by_the_jitter(seed: int) -> None:
    breaker = Breaker(BreakerSettings(failures=1))
    breaker.failed(0.0, 0.0, random.Random(seed))
    assert 4.0 <= breaker.broken_s(0.0) <= 6.0
    assert not math.isclose(breaker.broken_s(0.0), 5.0)
