"""Means and intervals over conversations."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import fmean

from servingfleet_sim.clients import End, Request
from servingfleet_sim.summary import (
    MIN_SESSIONS,
    Estimate,
    p95,
    ttft,
    ttft_difference,
    work_difference,
)


def requests(sessions: int, ttft_s: Callable[[int, int], float]) -> list[Request]:
    made = []
    for session in range(sessions):
        for turn in range(3):
            each = Request(session, turn, "m", (), late_s=0.0, end=End.FINISHED)
            each.ttft_s = ttft_s(session, turn)
            each.prompt_tokens, each.cached_tokens = 100, 40
            made.append(each)
    return made


def test_few_conversations_say_nothing() -> None:
    assert ttft(requests(MIN_SESSIONS - 1, lambda s, t: 1.0), fmean) == Estimate()


def test_the_interval_holds_the_mean_and_narrows_with_more_conversations() -> None:
    rng = random.Random(1)
    few, many = (ttft(requests(n, lambda s, t: rng.random()), fmean) for n in (30, 300))
    for found in (few, many):
        assert found.value is not None
        assert found.low is not None
        assert found.high is not None
        assert found.low < found.value < found.high
        assert found.low < 0.5 < found.high
    assert many.high is not None
    assert many.low is not None
    assert few.high is not None
    assert few.low is not None
    assert many.high - many.low < (few.high - few.low) / 2


def test_conversations_that_differ_widen_it_more_than_requests_that_do() -> None:
    # The same values, once all alike within a conversation, once spread over all.
    alike = ttft(requests(30, lambda s, t: float(s % 3)), fmean)
    spread = ttft(requests(30, lambda s, t: float(t)), fmean)
    assert alike.value == spread.value == 1.0
    assert spread.low == spread.high == 1.0
    assert alike.low is not None
    assert alike.low < 0.9


def test_unfinished_requests_have_no_time() -> None:
    made = requests(30, lambda s, t: 1.0)
    made[0].end, made[0].ttft_s = End.ABORTED, 1000.0
    assert ttft(made, p95).value == 1.0


def test_a_difference_is_over_the_turns_that_finished_under_both() -> None:
    first = requests(30, lambda s, t: 1.0)
    second = requests(30, lambda s, t: 3.0)
    second[0].end = End.FAILED
    first[0].ttft_s = 1000.0
    found = ttft_difference(first, second)
    assert (found.first, found.second) == (1.0, 3.0)
    assert found.difference == Estimate(-2.0, -2.0, -2.0)
    assert work_difference(first, second).first == 60.0


def test_p95_is_one_of_the_values() -> None:
    assert p95([float(n) for n in range(1, 101)]) == 95.0
    assert p95([7.0]) == 7.0
