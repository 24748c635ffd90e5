"""Figures of runs made by hand, against sums done by hand."""

from __future__ import annotations

import math

import pytest

from servingfleet_sim.replay.definitions import DEFINITIONS
from servingfleet_sim.replay.digest import digest
from servingfleet_sim.replay.figures import pool_values, quantile, run_values
from servingfleet_sim.replay.losses import Loss, waterfall
from servingfleet_sim.replay.results import Ceilings

from .runs import outcome, rejected, run

CEILINGS = Ceilings(prompt=1000, u1=800, u2=700, u3=650, u4=500)


def test_reuse_figures_divide_sums_over_finished_requests() -> None:
    values = run_values(
        run(
            [
                outcome(0, prompt=100, predicted=60, actual=40, upper=80, lower=50),
                outcome(1, prompt=300, predicted=100, actual=160, upper=160, best_predicted=220),
                outcome(2, prompt=500, fate="failed", ttft_s=math.nan, actual=0),
            ]
        )
    )
    assert values["reused_fraction"] == pytest.approx(200 / 400)
    assert values["index_coverage"] == pytest.approx((40 + 100) / 200)
    assert values["erroneous_credit"] == pytest.approx(20 / 160)
    assert values["erroneous_credit_per_prompt"] == pytest.approx(20 / 400)
    assert values["fleet_ceiling"] == pytest.approx(280 / 400)
    assert values["interval_hit"] == 1 / 2
    assert values["join_rate"] == pytest.approx(2 / 3)
    assert values["failed_share"] == pytest.approx(1 / 3)


def test_a_quantile_is_a_value_that_was_seen() -> None:
    twenty = [float(number) for number in range(1, 21)]
    assert [quantile(twenty, of) for of in (0, 50, 95, 99, 100)] == [1, 10, 19, 20, 20]
    assert math.isnan(quantile([], 50))


def test_times_count_from_the_first_ask() -> None:
    values = run_values(
        run(
            [
                outcome(0, at=10.0, ttft_s=1.0, finished_s=14.0),
                outcome(1, at=20.0, ttft_s=3.0, finished_s=26.0),
                rejected(2),
            ]
        )
    )
    assert values["ttft_mean_s"] == 2.0
    assert values["ttft_p50_s"] == 1.0
    assert values["ttft_p95_s"] == 3.0
    assert values["e2e_mean_s"] == 5.0


def test_goodput_counts_a_rejected_request_as_out_of_target() -> None:
    values = run_values(
        run(
            [
                outcome(0, target_s=2.0, ttft_s=1.0),
                outcome(1, target_s=2.0, ttft_s=2.5),
                rejected(2, target_s=2.0),
                outcome(3, ttft_s=9.0),
            ]
        )
    )
    assert values["goodput"] == pytest.approx(1 / 3)
    assert values["late_share"] == pytest.approx(1 / 3)
    assert values["rejected_share"] == 1 / 4


def test_without_targets_there_is_no_goodput() -> None:
    values = run_values(run([outcome()]))
    assert math.isnan(values["goodput"])
    assert math.isnan(values["late_share"])


def test_unseen_reuse_is_what_another_rank_held() -> None:
    values = run_values(
        run([outcome(0, best_actual=90, actual=60), outcome(1, best_actual=10, actual=60)])
    )
    assert values["unseen_reuse"] == pytest.approx(30 / 200)


def test_only_tokens_that_were_there_in_another_tier_are_misplaced() -> None:
    values = run_values(
        run(
            [
                # 30 of 100 predicted were not there at all, 20 were in host memory instead.
                outcome(
                    0,
                    prompt=200,
                    predicted=100,
                    actual=70,
                    predicted_tiers=(80, 20, 0, 0),
                    actual_tiers=(30, 40, 0, 0),
                )
            ]
        )
    )
    assert values["tier_misplacement"] == pytest.approx((50 - 30) / 100)


def test_ceilings_and_disagreement_are_shares_of_their_own_prompts() -> None:
    values = run_values(run([outcome()]))
    assert [values[f"ceiling_u{number}"] for number in (1, 2, 3, 4)] == [0.8, 0.7, 0.65, 0.5]
    assert values["disagreement"] == 0.02
    assert values["other_choice"] == 0.3


def test_imbalance_speaks_of_ranks_that_did_nothing_too() -> None:
    values = run_values(run([outcome()], busy_s={"a/0": 3.0, "a/1": 1.0, "b/0": 0.0, "b/1": 0.0}))
    assert values["imbalance_max"] == 3.0
    assert values["imbalance_cv"] == pytest.approx(math.sqrt((4 + 0 + 1 + 1) / 4))


def test_the_calibration_of_expected_keeps_its_sign() -> None:
    values = run_values(
        run(
            [
                outcome(0, prompt=100, expected=50.0, predicted=60, actual=40),
                outcome(1, prompt=100, expected=20.0, predicted=30, actual=60),
            ]
        )
    )
    assert values["expected_bias"] == pytest.approx((10 - 40) / 200)
    assert values["expected_error"] == pytest.approx((10 + 40) / 200)
    assert values["predicted_bias"] == pytest.approx((20 - 30) / 200)
    assert values["predicted_error"] == pytest.approx((20 + 30) / 200)


def test_the_calibration_of_seconds_counts_who_is_within_a_deviation() -> None:
    values = run_values(
        run(
            [
                outcome(0, policy_estimate_s=2.0, ttft_s=1.0, sd_s=1.5),
                outcome(1, policy_estimate_s=2.0, ttft_s=4.0, sd_s=1.0),
                outcome(2, policy_estimate_s=1.0, ttft_s=1.0),
                outcome(3, policy_estimate_s=math.nan, ttft_s=50.0),
            ]
        )
    )
    assert values["estimate_bias_s"] == pytest.approx((1 - 2 + 0) / 3)
    assert values["estimate_bias"] == pytest.approx((1 - 2) / 6)
    assert values["estimate_error"] == 0.5
    assert values["estimate_within_sd"] == 1 / 2


def test_each_pool_speaks_for_its_own_requests() -> None:
    found = pool_values(
        run([outcome(0), outcome(1, pool="slow", ttft_s=5.0, prompt=600), rejected(2)])
    )
    assert list(found) == ["fast", "slow"]
    assert found["fast"]["requests"] == found["slow"]["requests"] == 1
    assert found["slow"]["ttft_mean_s"] == 5.0
    assert found["slow"]["reused_fraction"] == pytest.approx(0.1)


def test_a_run_of_nothing_has_every_figure_unknown_but_counts() -> None:
    values = run_values(run([], busy_s={}, wall_s=0.0, simulated_s=0.0))
    known = {name for name, value in values.items() if not math.isnan(value)}
    assert known == {
        *("ceiling_u1", "ceiling_u2", "ceiling_u3", "ceiling_u4"),
        *("disagreement", "other_choice"),
    }
    assert values.keys() == DEFINITIONS.keys()


def test_the_waterfall_names_each_loss() -> None:
    rows = waterfall(
        [
            outcome(
                prompt=1000,
                seen=800,
                best_actual=600,
                best_predicted=450,
                predicted=300,
                actual=200,
            )
        ],
        CEILINGS,
    )
    assert rows == {
        Loss.REUSED: 200,
        Loss.ERROR: 100,
        Loss.PLACEMENT: 150,
        Loss.UNKNOWN: 150,
        Loss.EVICTION: 100,
        Loss.CAPACITY: 100,
        Loss.NEVER_SEEN: 200,
    }


def test_reuse_of_what_came_after_routing_is_no_loss() -> None:
    rows = waterfall(
        [outcome(prompt=100, seen=50, best_actual=0, best_predicted=0, predicted=10, actual=80)],
        CEILINGS,
    )
    assert rows[Loss.REUSED] == 80
    assert rows[Loss.NEVER_SEEN] == 20
    assert sum(rows.values()) == 100


@pytest.mark.parametrize("held", [0, 10, 55, 100])
@pytest.mark.parametrize("actual", [0, 40, 100])
@pytest.mark.parametrize("predicted", [0, 50, 100])
def test_the_rows_add_up_to_the_prompt(held: int, actual: int, predicted: int) -> None:
    rows = waterfall(
        [
            outcome(
                seen=30, best_actual=held, best_predicted=77, predicted=predicted, actual=actual
            ),
            rejected(1),
        ],
        CEILINGS,
    )
    assert sum(rows.values()) == 100
    assert min(rows.values()) >= 0


def test_a_digest_says_whether_the_ledgers_agree() -> None:
    honest = run([outcome(0), outcome(1)])
    assert digest(honest).agrees
    honest.scheduler_sums[0].actual -= 1
    assert not digest(honest).agrees


def test_a_digest_keeps_the_course_and_the_bins() -> None:
    found = digest(
        run(
            [
                outcome(0, at=0.0, ttft_s=1.0, policy_estimate_s=3.0, expected=95.0, actual=60),
                outcome(1, at=1.0, ttft_s=3.0, policy_estimate_s=3.5, expected=91.0, actual=80),
                rejected(2, at=60.0),
                outcome(3, at=math.nan, ttft_s=math.nan, finished_s=math.nan, fate="unfinished"),
            ]
        )
    )
    assert [moment.requests for moment in found.course] == [1, 1, *([0] * 57), 1]
    assert found.course[-1].rejected == 1
    assert found.course[0].at_s == 0.5
    assert found.course[0].ttft_s == 1.0
    (reuse,) = [each for each in found.reuse_bins if each.requests]
    assert reuse is found.reuse_bins[9]
    assert (reuse.said, reuse.came, reuse.weight) == (186.0, 140.0, 200.0)
    (seconds,) = [each for each in found.seconds_bins if each.requests]
    assert (seconds.said, seconds.came, seconds.weight) == (6.5, 4.0, 2.0)
    assert found.ttft_s[0] == 1.0
    assert found.ttft_s[-1] == 3.0
