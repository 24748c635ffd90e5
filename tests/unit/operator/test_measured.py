from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servingfleet_core.figures import Sums, figures
from servingfleet_core.reports import NotAddable, reuse_report
from servingfleet_operator.measured import (
    NONE,
    Measured,
    in_brief,
    measured,
    percentage,
    reuse,
    span,
)
from servingfleet_operator.observed import SchedulerReport
from servingfleet_operator.quantities import Duration

from .observing import MODEL, report, sums


def of(*reports: SchedulerReport, window_s: float = 3600) -> Measured:
    return measured(reports, MODEL, window_s)


def test_a_fleets_figures_are_those_of_all_pairs_together() -> None:
    """Not the mean of its schedulers'."""
    one, other = sums(30), sums(300)
    both = Sums()
    both.add(one)
    both.add(other)
    wanted = {each.name: each for each in figures(both, 20)}
    found = of(report(total=one), report(total=other, name="demo-scheduler-b"))
    for name, figure in found.figures.items():
        assert (figure.value, figure.low, figure.high) == pytest.approx(
            (wanted[name].value, wanted[name].low, wanted[name].high)
        )
    said = reuse(found)
    assert (said["pairs"], said["promptTokens"]) == (330, 330_000)
    assert said["reusedTokens"] == both.actual
    assert said["agreedTokens"] + said["erroneousTokens"] == said["predictedTokens"]


def test_figures_are_written_for_reading_with_their_interval() -> None:
    said = reuse(of(report(total=sums(100))))
    assert said["reusedFraction"] == "54.9%"
    assert said["reusedFractionInterval"] == "54.4% - 55.5% (95%)"
    assert said["indexCoverage"] == "98.4%"
    assert said["erroneousCredit"] == "0.37%"
    assert said["erroneousCreditPerPrompt"] == "0.20%"
    assert said["joinRate"] == "100%"
    assert said["joinRateInterval"] == "96.3% - 100% (95%)"
    assert said["window"] == "1h"


def test_a_figure_that_too_few_pairs_speak_for_is_left_out_and_not_0() -> None:
    said = reuse(of(report(total=sums(19, decisions=40))))
    assert "reusedFraction" not in said
    assert "erroneousCreditInterval" not in said
    # Of decisions there are enough.
    assert said["joinRate"] == "47.5%"
    assert said["pairs"] == 19
    assert in_brief(of(report(total=sums(19))), "reused_fraction") == NONE
    assert in_brief(None, "reused_fraction") == NONE


def test_a_figure_in_brief_shows_the_larger_half_of_its_interval() -> None:
    found = of(report(total=sums(100)))
    assert in_brief(found, "reused_fraction") == "54.9% ±0.57"
    # Nobody claims that the next request can't be another.
    assert in_brief(found, "join_rate") == "100% ±3.7"


def test_other_models_are_not_counted_but_outcomes_without_a_model_are() -> None:
    found = of(report(total=sums(5), set_aside={"late": 2}, unknown={"bad_token": 3}))
    assert found.set_aside == {"late": 2, "bad_token": 3}
    assert measured([report(total=sums(5))], "other", 3600).sums.pairs == 0


def test_what_single_replicas_did_is_not_counted_again() -> None:
    whole = report(total=sums(30), set_aside={"late": 2})
    whole.reuse.reports.append(reuse_report(MODEL, "uid-0", sums(10), {"late": 2}, 20))
    found = of(whole)
    assert (found.sums.pairs, found.set_aside) == (30, {"late": 2})


@pytest.mark.parametrize(
    ("reported_s", "told_s", "said"),
    [
        (3655.2, 3600, "1h"),
        (3540.7, 3600, "59m"),
        (20.4, 3600, "20s"),
        (0, 3600, "0s"),
        (90_000, 86_400, "24h"),
    ],
)
def test_the_window_is_what_was_really_spanned_in_whole_minutes(
    reported_s: float, told_s: float, said: str
) -> None:
    assert reuse(of(report(window_s=reported_s), window_s=told_s))["window"] == said


def test_reports_of_another_release_are_not_added() -> None:
    old = report(total=sums(5))
    old.reuse.reports[0].sums.ClearField("products")
    with pytest.raises(NotAddable):
        of(old)


@settings(deadline=None)
@given(st.floats(0, 1))
def test_a_percentage_never_makes_nothing_of_little_nor_all_of_much(share: float) -> None:
    said = percentage(share)
    number = float(said.strip("<>%"))
    assert (number == 0) == (share == 0)
    assert (number == 100) == (share == 1)
    assert number == pytest.approx(100 * share, abs=0.051)


@settings(deadline=None)
@given(st.integers(0, 200_000))
def test_a_span_is_read_back_as_what_it_was(seconds: int) -> None:
    assert Duration(span(seconds)).seconds == seconds
