from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_scheduler.eviction import (
    BINS,
    MAX_KEYS,
    PRIOR,
    Calibration,
    Evictions,
    Inserted,
    Tail,
    cold_turnover,
)

SECONDS = st.floats(0.0, 1e6)
IDLE = st.floats(-1e6, 1e6)
TURNOVERS = st.floats(0.0, 1e6)


def test_survival_is_what_one_works_out_by_hand() -> None:
    # T = 100 s, g = 0.07: S(x) = 1 / (1 + (x / 100)^14.2857).
    assert PRIOR.alive(0.0, 100.0, 100.0) == pytest.approx(0.5, abs=1e-6)
    # S(110) = 1 / (1 + 3.9023) = 0.20398, S(90) = 1 / (1 + 0.22198) = 0.81834.
    assert PRIOR.alive(90.0, 20.0, 100.0) == pytest.approx(0.20398 / 0.81834, abs=1e-4)
    # Below 60 s the end is blurred more, g = 0.2: 1 / (1 + 2^5).
    assert PRIOR.alive(0.0, 80.0, 40.0) == pytest.approx(1 / 33, abs=1e-6)


def test_what_is_idle_for_less_than_half_of_the_turnover_is_safe() -> None:
    assert PRIOR.alive(30.0, 20.0, 100.0) == 1.0
    assert PRIOR.alive(30.0, 20.1, 100.0) < 1.0


@given(IDLE, SECONDS, SECONDS, TURNOVERS)
def test_waiting_longer_never_makes_survival_likelier(
    idle: float, ahead: float, more: float, turnover: float
) -> None:
    soon, late = PRIOR.alive(idle, ahead, turnover), PRIOR.alive(idle, ahead + more, turnover)
    assert 0.0 <= late <= soon + 1e-12 <= 1.0 + 1e-12


def test_a_cache_not_seen_to_evict_turns_over_in_the_time_to_fill_it() -> None:
    inserted = Inserted(1000.0)
    for second in range(120):
        inserted.add(500, 1000.0 + second)
    assert inserted.rate(1119.0) is None
    assert cold_turnover(60_000, inserted.rate(1119.0)) is None
    assert inserted.rate(1120.0) == pytest.approx(500.0, rel=0.1)
    assert cold_turnover(60_000, 500.0) == 120.0
    assert cold_turnover(0, 500.0) is None
    assert inserted.rate(1300.0) == 0.0
    assert cold_turnover(60_000, 0.0) is None


def survives(idle_s: float, turnover_s: float, spread: float) -> float:
    return 1 / (1 + math.exp(math.log(idle_s / turnover_s) / spread))


@pytest.mark.parametrize(("scale", "spread"), [(0.8, 0.1), (1.25, 0.05), (0.7, 0.2), (1.0, 0.07)])
def test_calibration_finds_the_curve_that_outcomes_follow(scale: float, spread: float) -> None:
    """The true turnover is `scale` of the measured one, and its end is `spread` blurred."""
    rng, curve, told = random.Random(3), Calibration(), 200.0
    errors, untaught = [], []
    for number in range(3000):
        idle, ahead = rng.uniform(1, 260), rng.expovariate(1 / 40)
        held = survives(idle, told * scale, spread)
        if rng.random() > held:
            continue
        alive = survives(idle + ahead, told * scale, spread) / held
        if number > 1500:
            errors.append(curve.alive(idle, ahead, told) - alive)
            untaught.append(PRIOR.alive(idle, ahead, told) - alive)
        curve.learn(Tail(1, idle, ahead, told, 0.0), rng.random() > alive)

    def typical(of: list[float]) -> float:
        return math.sqrt(sum(each * each for each in of) / len(of))

    assert typical(errors) < 0.06
    assert (scale, spread) == (1.0, 0.07) or typical(errors) < typical(untaught) / 3


def test_losses_of_other_causes_do_not_bend_the_curve() -> None:
    curve = Calibration()
    for number in range(2000):
        curve.learn(Tail(1, 10.0, 1.0, 200.0, 0.0), gone=number % 50 == 0)
    assert (curve.shift, curve.sharpness) == (0.0, 1.0)


@given(st.lists(st.tuples(IDLE, SECONDS, TURNOVERS, st.booleans()), max_size=60))
def test_whatever_comes_the_curve_stays_within_its_bounds(
    outcomes: list[tuple[float, float, float, bool]],
) -> None:
    curve = Calibration()
    for idle, ahead, turnover, gone in outcomes:
        curve.learn(Tail(1, idle, ahead, turnover, 0.0), gone)
        assert abs(curve.shift) <= math.log(10) + 1e-9
        assert 0.2 <= curve.sharpness <= 3.0
        assert 0.0 <= curve.safe_share <= 1.0
        assert 0.0 <= curve.alive(idle, ahead, turnover) <= 1.0


def test_outcomes_are_kept_by_the_chance_that_was_told() -> None:
    evictions = Evictions(learn=True)
    for chance, gone in [(0.0, False), (0.05, True), (0.95, True), (1.0, True)]:
        evictions.learn("pool", Tail(2, 90.0, 10.0, 100.0, chance), gone)
    row = evictions.reliability["pool", 2]
    assert row.pairs == [2] + [0] * (BINS - 2) + [2]
    assert row.gone == [1] + [0] * (BINS - 2) + [2]
    assert row.told == pytest.approx([0.05] + [0.0] * (BINS - 2) + [1.95])


def test_pools_and_tiers_learn_apart_and_not_without_bound() -> None:
    evictions = Evictions(learn=True)
    for _ in range(50):
        evictions.learn("slow", Tail(1, 60.0, 10.0, 100.0, 0.0), gone=True)
    assert evictions.calibration("slow", 1).alive(60.0, 10.0, 100.0) < 0.9
    assert evictions.calibration("slow", 2).alive(60.0, 10.0, 100.0) > 0.99
    assert evictions.calibration("fast", 1).alive(60.0, 10.0, 100.0) > 0.99
    for number in range(2 * MAX_KEYS):
        evictions.learn(f"pool {number}", Tail(1, 60.0, 10.0, 100.0, 0.0), gone=False)
    assert len(evictions.reliability) <= MAX_KEYS + 4


def test_what_may_not_learn_still_tells_how_reliable_it_is() -> None:
    evictions = Evictions(learn=False)
    for _ in range(50):
        evictions.learn("pool", Tail(1, 60.0, 10.0, 100.0, 0.0), gone=True)
    assert evictions.calibration("pool", 1) is PRIOR
    assert sum(evictions.reliability["pool", 1].gone) == 50


def test_of_the_loss_foreseen_that_share_is_expected_which_came_true() -> None:
    evictions = Evictions(learn=True)
    assert evictions.loss_share("pool", 1) == 1.0
    for _ in range(1000):
        # A quarter of each prompt is gone with its end.
        evictions.learn("pool", Tail(1, 90.0, 30.0, 100.0, 0.99, loss=1000.0), gone=True, lost=250)
    # 100 prompts are remembered: (25,000 + 8192) / (100,000 + 8192).
    assert evictions.loss_share("pool", 1) == pytest.approx(33_192 / 108_192, abs=1e-4)
    for _ in range(1000):
        evictions.learn("pool", Tail(1, 90.0, 30.0, 100.0, 0.5, loss=500.0), gone=True, lost=5000)
    assert evictions.loss_share("pool", 1) == 1.0
