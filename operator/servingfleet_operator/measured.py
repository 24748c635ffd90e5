"""A fleet's figures from its schedulers' reports, and how they are written for people. Pure.

`docs/measures.md` defines the figures. One that too few pairs speak for has no value, and is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servingfleet_core.reports import added
from servingfleet_protos.v1 import fleet_pb2

from .observed import SchedulerReport

NONE = "<none>"
"""Stands for a figure without a value, as kubectl writes what is not there."""

_LEAST = 0.0001
"""Smallest share that is written as a number."""

_SHOWN = {
    "reusedFraction": "reused_fraction",
    "indexCoverage": "index_coverage",
    "erroneousCredit": "erroneous_credit",
    "erroneousCreditPerPrompt": "erroneous_credit_per_prompt",
    "joinRate": "join_rate",
}
_COUNTS = {
    "decisions": "decisions",
    "pairs": "pairs",
    "promptTokens": "prompt",
    "reusedTokens": "actual",
    "predictedTokens": "predicted",
    "agreedTokens": "agreed",
    "erroneousTokens": "erroneous",
}


@dataclass(frozen=True)
class Measured:
    """The fleet's figures over one window."""

    sums: fleet_pb2.ReuseSums
    figures: Mapping[str, fleet_pb2.Figure]
    """By name."""
    set_aside: Mapping[str, int]
    """Outcomes that joined nothing, by reason."""
    window_s: float
    min_pairs: int


def measured(reports: Sequence[SchedulerReport], model: str, window_s: float) -> Measured:
    """The figures of one model over all reports. Raises servingfleet_core.reports.NotAddable.

    window_s: what the schedulers were told; they speak for up to a minute more, and for less after their start.
    """
    total = added(report.reuse for report in reports)
    found = fleet_pb2.ReuseReport()
    set_aside: Counter[str] = Counter()
    for report in total.reports:
        if report.replica or report.model not in ("", model):
            continue
        # Outcomes whose decision id says nothing belong to no model.
        set_aside.update(report.set_aside)
        if report.model == model:
            found = report
    return Measured(
        found.sums,
        {figure.name: figure for figure in found.figures},
        set_aside,
        min(total.window_s, window_s),
        total.min_pairs,
    )


def reuse(found: Measured) -> dict[str, Any]:
    """`.status.reuse`."""
    said: dict[str, Any] = {key: getattr(found.sums, name) for key, name in _COUNTS.items()}
    # Whole minutes, so that a status doesn't change while nothing happens.
    said["window"] = span(
        found.window_s - found.window_s % 60 if found.window_s > 60 else found.window_s
    )
    for key, name in _SHOWN.items():
        figure = found.figures.get(name)
        if figure is not None and figure.HasField("value"):
            said[key] = percentage(figure.value)
            said[f"{key}Interval"] = f"{percentage(figure.low)} - {percentage(figure.high)} (95%)"
    return said


def in_brief(found: Measured | None, name: str) -> str:
    """A figure and the larger half of its interval in percentage points: "61.4% ±1.8"."""
    figure = found.figures.get(name) if found is not None else None
    if figure is None or not figure.HasField("value"):
        return NONE
    half = max(figure.high - figure.value, figure.value - figure.low)
    return f"{percentage(figure.value)} ±{percentage(half).removesuffix('%')}"


def percentage(share: float) -> str:
    """A share from 0 to 1. Close to the ends a digit more, so that little is not nothing, nor much all."""
    if share in (0, 1):
        return f"{share:.0%}"
    if not _LEAST <= share <= 1 - _LEAST:
        return f"<{_LEAST:.2%}" if share < _LEAST else f">{1 - _LEAST:.2%}"
    return f"{share:.1%}" if 0.01 <= share <= 0.99 else f"{share:.2%}"


def span(seconds: float) -> str:
    """A span as it is written in a spec: "1h30m"."""
    left = round(seconds)
    hours, left = divmod(left, 3600)
    minutes, left = divmod(left, 60)
    parts = ((hours, "h"), (minutes, "m"), (left, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"
