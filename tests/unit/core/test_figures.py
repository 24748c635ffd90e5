from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_core.figures import (
    Figure,
    Sums,
    figures,
    ratio_interval,
    wilson_interval,
)

from .pairs import pairs, summed


def by_name(sums: Sums, min_pairs: int = 1) -> dict[str, Figure]:
    return {each.name: each for each in figures(sums, min_pairs)}


@given(st.lists(pairs(), min_size=1, max_size=50))
def test_every_figure_is_what_a_recount_of_the_pairs_gives(rows: list[dict[str, int]]) -> None:
    found = by_name(summed(rows))

    def total(value: str) -> int:
        return sum(row[value] for row in rows)

    agreed = sum(min(row["predicted"], row["actual"]) for row in rows)
    wrong = sum(max(0, row["predicted"] - row["actual"]) for row in rows)
    hits = sum(row["lower"] <= row["actual"] <= row["upper"] for row in rows)
    expected = {
        "reused_fraction": (total("actual"), total("prompt")),
        "index_coverage": (agreed, total("actual")),
        "erroneous_credit": (wrong, total("predicted")),
        "erroneous_credit_per_prompt": (wrong, total("prompt")),
        "fleet_ceiling": (total("best"), total("prompt")),
        "expected_over_actual": (total("expected"), total("actual")),
        "interval_hit": (hits, len(rows)),
    }
    for name, (numerator, denominator) in expected.items():
        figure = found[name]
        assert (figure.numerator, figure.denominator) == (numerator, denominator)
        if denominator:
            assert figure.value == pytest.approx(numerator / denominator)
        else:
            assert figure.value is None


@given(st.lists(pairs(), min_size=2, max_size=50))
def test_every_interval_holds_its_value_and_stays_within_bounds(
    rows: list[dict[str, int]],
) -> None:
    for figure in figures(summed(rows), 1):
        if figure.value is None or figure.low is None or figure.high is None:
            continue
        assert 0.0 <= figure.low <= figure.value + 1e-12
        assert figure.value - 1e-12 <= figure.high
        assert figure.high <= 1.0 or figure.name == "expected_over_actual"


@given(st.lists(pairs(), min_size=2, max_size=30))
def test_the_delta_method_from_sums_equals_that_from_single_pairs(
    rows: list[dict[str, int]],
) -> None:
    figure = by_name(summed(rows))["reused_fraction"]
    y, x = [row["actual"] for row in rows], [row["prompt"] for row in rows]
    ratio = sum(y) / sum(x)
    if not 0.0 < ratio < 1.0:
        return
    squares = sum((b - ratio * a) ** 2 for a, b in zip(x, y, strict=True))
    half = 1.959964 * math.sqrt(len(x) / (len(x) - 1) * squares) / sum(x)
    assert figure.high == pytest.approx(min(1.0, ratio + half), abs=1e-6)
    assert figure.low == pytest.approx(max(0.0, ratio - half), abs=1e-6)


@given(st.lists(pairs(), max_size=20), st.lists(pairs(), max_size=20))
def test_sums_of_two_windows_add_up(
    first: list[dict[str, int]], second: list[dict[str, int]]
) -> None:
    together = summed(first)
    together.add(summed(second))
    assert together == summed([*first, *second])


def test_a_figure_from_too_few_pairs_is_unknown() -> None:
    row = {"prompt": 100, "best": 80, "lower": 0, "predicted": 80, "upper": 80, "actual": 80}
    row["expected"] = 80
    few, enough = summed([row] * 19), summed([row] * 20)
    assert by_name(few, 20)["reused_fraction"].value is None
    assert by_name(few, 20)["reused_fraction"].pairs == 19
    assert by_name(enough, 20)["reused_fraction"].value == 0.8


def test_nothing_is_known_of_nothing() -> None:
    assert all(figure.value is None for figure in figures(Sums(), 0))


def test_no_error_in_few_requests_does_not_prove_that_there_is_none() -> None:
    _, low, high = ratio_interval(20, y=0, x=20 * 64, yy=0, xx=20 * 64 * 64, xy=0)
    assert (low, round(high, 2)) == (0.0, 0.16)


def test_requests_that_weigh_nothing_prove_nothing() -> None:
    row = {"prompt": 100, "best": 0, "lower": 0, "predicted": 0, "upper": 0, "actual": 0}
    row["expected"] = 0
    credited = row | {"predicted": 50, "best": 50, "actual": 50, "upper": 50}
    figure = by_name(summed([row] * 400 + [credited] * 3))["erroneous_credit"]
    assert figure.high is not None
    assert figure.high > 0.5


def test_what_is_expected_may_be_more_than_what_came() -> None:
    row = {"prompt": 100, "best": 80, "lower": 0, "predicted": 80, "upper": 80, "actual": 40}
    rows = [row | {"expected": 50 + 20 * (number % 2)} for number in range(40)]
    figure = by_name(summed(rows))["expected_over_actual"]
    assert figure.value == 1.5
    # By hand: residuals of 10 tokens each, over 40 * 40 tokens, sqrt(40/39 * 40 * 100) = 64.05.
    assert figure.low == pytest.approx(1.5 - 1.959964 * 64.05 / 1600, abs=1e-4)
    assert figure.high == pytest.approx(1.5 + 1.959964 * 64.05 / 1600, abs=1e-4)


def test_pairs_that_all_agree_leave_a_ratio_in_doubt_both_ways() -> None:
    row = {"prompt": 100, "best": 80, "lower": 0, "predicted": 80, "upper": 80, "actual": 80}
    figure = by_name(summed([row | {"expected": 80}] * 20))["expected_over_actual"]
    low, _ = wilson_interval(20, 20)
    assert (figure.low, figure.value, figure.high) == (low, 1.0, 1 / low)


def test_the_wilson_interval_is_the_published_one() -> None:
    low, high = wilson_interval(8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)


def test_a_ratio_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(5)
    covered = 0
    for _ in range(400):
        sums = Sums()
        for _ in range(100):
            prompt = rng.choice([100, 1_000, 5_000])
            actual = round(prompt * rng.random() * 0.6)
            sums.add_pair(
                prompt=prompt,
                best=0,
                predicted=0,
                lower=0,
                upper=prompt,
                expected=0,
                actual=actual,
            )
        figure = by_name(sums)["reused_fraction"]
        assert figure.low is not None
        assert figure.high is not None
        covered += figure.low <= 0.3 <= figure.high
    assert 0.91 <= covered / 400 <= 0.98
