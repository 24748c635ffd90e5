"""Only a prediction that rested on what the relay knew says something of the engine's stream."""

from __future__ import annotations

import math

import pytest

from servingfleet_protos.v1.stream_pb2 import Outcome
from servingfleet_relay.conformance.lag import LAG_S, MOMENTS, RESOLUTION_S, Lag

NOW = 1000.0


def said(engine_seq: int | None, *, age_s: float = 0.0, incarnation: int = 1) -> Outcome:
    return Outcome(engine_seq=engine_seq, age_s=age_s, incarnation=incarnation)


def lag(*applied: tuple[float, int]) -> Lag:
    found = Lag()
    for ago, seq in applied:
        found.applied(1, seq, NOW - ago)
    return found


@pytest.mark.parametrize(
    ("outcome", "rested"),
    [
        (said(6, age_s=10.0), True),
        (said(5, age_s=10.0), False),
        (said(None, age_s=10.0), False),
        (said(6, age_s=20.0 - LAG_S), True),
        (said(5, age_s=20.0), True),  # 6 was not there for as long as it may be on its way
        (said(None, age_s=31.0), True),  # nothing was
        (said(7), True),
        (said(6), False),
    ],
)
def test_a_prediction_rests_on_all_that_was_applied_half_a_second_before(
    outcome: Outcome, rested: bool
) -> None:
    assert lag((30.0, 5), (20.0, 6), (5.0, 7)).rested(outcome, 1, NOW) is rested


def test_of_another_life_of_the_engine_no_prediction_counts() -> None:
    assert not lag((30.0, 5)).rested(said(5, incarnation=1), 2, NOW)
    assert not lag((30.0, 5)).rested(said(5, incarnation=2), 2, NOW)


@pytest.mark.parametrize("age_s", [-1.0, math.inf, math.nan])
def test_an_age_that_is_none_is_not_believed(age_s: float) -> None:
    assert not lag((30.0, 5)).rested(said(5, age_s=age_s), 1, NOW)


def test_an_earlier_release_that_does_not_say_is_believed() -> None:
    assert lag((30.0, 5)).rested(Outcome(predicted=1), 1, NOW)


def test_of_times_that_are_forgotten_no_prediction_counts() -> None:
    found = Lag()
    for moment in range(MOMENTS + 10):
        found.applied(1, moment, NOW + moment)
        found.applied(1, moment, NOW + moment + RESOLUTION_S / 2)  # at the same moment
    end = NOW + MOMENTS + 10
    assert not found.rested(said(0, age_s=MOMENTS + 10.0), 1, end)
    assert found.rested(said(MOMENTS + 1, age_s=8.0), 1, end)
