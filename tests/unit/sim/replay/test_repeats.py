"""Intervals over repeats and comparisons by seed, against textbook values."""

from __future__ import annotations

import json
import math

import pytest

from servingfleet_sim.replay.digest import digest
from servingfleet_sim.replay.document import Comparing, as_dict
from servingfleet_sim.replay.losses import Loss
from servingfleet_sim.replay.repeats import Verdict, case, comparison, comparisons, interval

from .runs import outcome, rejected, run

T_4 = 2.7764451051977987
"""97.5% quantile of Student's t with four degrees of freedom, from a printed table."""


def test_five_runs_give_the_interval_of_a_t_table() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = T_4 * math.sqrt(2.5) / math.sqrt(5)
    assert found.value == 3.0
    assert found.low == pytest.approx(3 - half)
    assert found.high == pytest.approx(3 + half)


def test_one_run_has_no_interval() -> None:
    found = interval([2.0])
    assert found.value == 2.0
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_a_run_that_tells_nothing_is_left_out() -> None:
    found = interval([1.0, math.nan, 3.0])
    assert found.value == 2.0
    assert found.low < 1.0
    assert len(found.runs) == 3
    assert math.isnan(interval([math.nan]).value)


def test_equal_runs_are_certain() -> None:
    found = interval([2.0] * 5)
    assert (found.low, found.high) == (2.0, 2.0)


def test_less_time_is_ahead() -> None:
    found = comparison("ttft_mean_s", [1.0, 2.1, 3.0], [2.0, 3.0, 4.1])
    assert found.verdict is Verdict.AHEAD
    assert found.difference.value == pytest.approx(-1.0)
    assert found.relative.value == pytest.approx((-0.5 - 0.3 - 1.1 / 4.1) / 3)


def test_less_reuse_is_behind() -> None:
    found = comparison("reused_fraction", [0.1, 0.2, 0.3], [0.3, 0.41, 0.5])
    assert found.verdict is Verdict.BEHIND


def test_a_difference_that_changes_its_sign_is_a_tie() -> None:
    assert comparison("ttft_mean_s", [1.0, 3.0], [2.0, 2.0]).verdict is Verdict.TIE
    assert comparison("ttft_mean_s", [1.0, 1.0], [1.0, 1.0]).verdict is Verdict.TIE


def test_pairs_of_one_seed_are_compared_not_means() -> None:
    """Seeds differ by far more than policies: unpaired intervals would overlap."""
    these, those = [1.0, 10.0, 100.0], [2.0, 11.0, 101.0]
    assert interval(these).high > interval(those).low
    assert comparison("ttft_mean_s", these, those).verdict is Verdict.AHEAD


def test_nothing_is_ahead_by_a_ceiling_or_by_one_run() -> None:
    assert comparison("ceiling_u1", [1.0, 1.0], [2.0, 2.1]).verdict is None
    assert comparison("ttft_mean_s", [1.0], [2.0]).verdict is None


def test_a_pool_that_one_run_never_used_has_a_value_of_the_others() -> None:
    first = digest(run([outcome(0), outcome(1, pool="slow", ttft_s=4.0)], seed=1))
    second = digest(run([outcome(0), outcome(1)], seed=2))
    found = case("cost", [first, second])
    assert found.pools["slow"]["ttft_mean_s"].value == 4.0
    assert math.isnan(found.pools["slow"]["ttft_mean_s"].low)


def test_losses_are_shares_that_add_up() -> None:
    runs = [
        digest(run([outcome(seen=80, best_actual=70, actual=part)], seed=part))
        for part in (40, 50, 60)
    ]
    found = case("cost", runs)
    assert sum(each.value for each in found.losses.values()) == pytest.approx(1)
    assert found.losses[Loss.REUSED].value == pytest.approx(0.5)


def test_the_document_is_json_without_nan() -> None:
    runs = [digest(run([outcome(), rejected(1)], seed=seed)) for seed in (1, 2)]
    found = Comparing(
        command="servingfleet replay",
        trace={"name": "t"},
        fleet={},
        options={"cost": {"credit": True}, "other": {}},
        cases=(case("cost", runs), case("other", runs)),
    )
    document = json.loads(json.dumps(as_dict(found), allow_nan=False))
    assert document["schema"] == "servingfleet.replay/1"
    assert document["seeds"] == [1, 2]
    assert document["cases"][0]["figures"]["goodput"]["value"] is None
    assert document["cases"][0]["figures"]["rejected_share"]["runs"] == [0.5, 0.5]
    assert document["cases"][0]["losses"]["reused"]["value"] == 0.6
    assert {each["case"] for each in document["comparisons"]} == {"other"}
    assert {each["verdict"] for each in document["comparisons"]} == {"tie", None}
    assert comparisons(found.cases[1], found.baseline)[0].difference.value == 0
