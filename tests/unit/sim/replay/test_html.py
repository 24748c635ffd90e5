"""The page: complete in itself, and safe to open."""

from __future__ import annotations

import math

from servingfleet_sim.replay.digest import digest
from servingfleet_sim.replay.document import Comparing
from servingfleet_sim.replay.html import page
from servingfleet_sim.replay.repeats import case

from .runs import outcome, rejected, run


def _page() -> str:
    runs = [
        digest(run([outcome(0, ttft_s=seed), outcome(1), rejected(2)], seed=seed))
        for seed in (1, 2)
    ]
    return page(
        Comparing(
            command="servingfleet replay '<script>alert(1)</script>'",
            trace={"name": "a&b"},
            fleet={},
            options={},
            cases=(case("cost", runs), case("oracle", runs)),
        )
    )


def test_the_page_loads_nothing_from_elsewhere() -> None:
    text = _page()
    assert "<link" not in text
    assert "<script src" not in text.lower().replace(" charset", "")
    assert text.count('class="plotly-graph-div"') == 6


def test_what_users_wrote_is_text_not_markup() -> None:
    text = _page()
    assert "<script>alert(1)" not in text
    assert "a&amp;b" in text


def test_the_same_figures_give_the_same_page() -> None:
    assert _page() == _page()


def test_figures_that_nothing_tells_are_left_out() -> None:
    assert math.isnan(case("c", [digest(run([outcome()]))]).figures["goodput"].value)
    text = _page()
    assert "<td>ttft_mean_s</td>" in text
    assert "<td>goodput</td>" not in text
