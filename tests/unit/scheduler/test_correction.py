from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_scheduler.correction import NONE, Corrections, CorrectionSettings, Factors

TARGET = ("r1", 0)


def learned(corrections: Corrections, count: int, *, now: float = 0.0, **outcome: int) -> None:
    for _ in range(count):
        corrections.learn(TARGET, **outcome, now=now)


@given(st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 100_000), st.floats(0, 1e4))))
def test_an_engine_whose_predictions_are_right_keeps_exactly_one(
    prompts: list[tuple[int, int, float]],
) -> None:
    corrections = Corrections()
    now = 0.0
    for lower, more, seconds in prompts:
        now += seconds
        corrections.learn(TARGET, lower=lower, predicted=lower + more, actual=lower + more, now=now)
        assert corrections.factors(TARGET, now) == Factors(1.0, 1.0)


def test_more_than_predicted_changes_nothing() -> None:
    corrections = Corrections()
    learned(corrections, 100, lower=1000, predicted=1000, actual=5000)
    assert corrections.factors(TARGET, 0.0) == NONE


def test_what_is_only_possible_is_judged_apart_from_what_is_sure() -> None:
    corrections = Corrections()
    # Half of what is predicted beyond the confirmed blocks is there.
    learned(corrections, 40, lower=1000, predicted=3000, actual=2000)
    factors = corrections.factors(TARGET, 0.0)
    assert factors.sure == 1.0
    # (40 * 1000 + 8192) / (40 * 2000 + 8192)
    assert factors.unsure == pytest.approx(48_192 / 88_192)


def test_a_loss_now_and_then_changes_nothing() -> None:
    corrections = Corrections()
    for number in range(200):
        lost = number % 20 == 0
        corrections.learn(
            TARGET, lower=5000, predicted=5000, actual=0 if lost else 5000, now=float(number)
        )
        if number >= 10:
            assert corrections.factors(TARGET, float(number)) == NONE


def test_a_few_outcomes_change_nothing_yet() -> None:
    corrections = Corrections()
    learned(corrections, 4, lower=50_000, predicted=50_000, actual=0)
    assert corrections.factors(TARGET, 0.0) == NONE
    learned(corrections, 1, lower=50_000, predicted=50_000, actual=0)
    assert corrections.factors(TARGET, 0.0).sure == 0.1  # the floor


def test_trust_comes_back_when_outcomes_stop() -> None:
    corrections = Corrections()
    learned(corrections, 100, lower=1000, predicted=1000, actual=500)
    seen = [corrections.factors(TARGET, 600.0 * half).sure for half in range(6)]
    assert seen == sorted(seen)
    assert seen[0] == pytest.approx(58_192 / 108_192)
    assert seen[1] == pytest.approx((25_000 + 8192) / (50_000 + 8192))
    assert seen[-1] == 1.0  # 100 outcomes of five half-lives ago are three
    assert corrections.factors(TARGET, 3600.0).sure > 0.9


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**7), st.floats(0, 1e5)
        )
    )
)
def test_factors_stay_within_their_bounds(outcomes: list[tuple[int, int, int, float]]) -> None:
    corrections = Corrections()
    now = 0.0
    for lower, more, actual, seconds in outcomes:
        now += seconds
        corrections.learn(TARGET, lower=lower, predicted=lower + more, actual=actual, now=now)
        assert all(0.1 <= factor <= 1.0 for factor in corrections.factors(TARGET, now))


def test_targets_are_told_apart_and_the_oldest_is_forgotten() -> None:
    corrections = Corrections(CorrectionSettings(max_keys=2))
    for name in ("a", "b", "c"):
        for _ in range(50):
            corrections.learn((name, 0), lower=1000, predicted=1000, actual=0, now=0.0)
    assert len(corrections) == 2
    assert corrections.factors(("a", 0), 0.0) == NONE
    assert corrections.factors(("c", 0), 0.0).sure < 1.0
