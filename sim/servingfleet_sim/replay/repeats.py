"""Repeats of a replay as one: means with t-intervals, and policies compared on the same seeds.

One run is chaotic: one request sent elsewhere changes every later one. So nothing is said of a policy from a single run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev

from scipy import stats

from servingfleet_core.figures import CONFIDENCE

from .definitions import DEFINITIONS, Better
from .digest import Bin, Digest, Moment
from .losses import Loss

LEAST_REPEATS = 5
"""Fewer say little: the t-interval of three is twice as wide."""


class Verdict(StrEnum):
    """Of a difference whose better side is known: `tie` where its interval holds zero."""

    AHEAD = "ahead"
    BEHIND = "behind"
    TIE = "tie"


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over runs with its 95% t-interval."""

    value: float
    """nan: no run tells it."""
    low: float
    """nan as is `high`: fewer than two runs tell it."""
    high: float
    runs: tuple[float, ...]
    """Of each run, by seed; nan where one doesn't tell it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of a case less that of the baseline, run by run on the same seeds."""

    figure: str
    difference: Interval
    relative: Interval
    """The difference over the baseline's value."""
    verdict: Verdict | None
    """None: neither side is better, or too few runs."""


@dataclass(frozen=True)
class Case:
    """All repeats of one setting."""

    name: str
    runs: tuple[Digest, ...]
    figures: Mapping[str, Interval]
    pools: Mapping[str, Mapping[str, Interval]]
    losses: Mapping[Loss, Interval]
    """Shares of the finished requests' prompt tokens."""
    ttft_s: tuple[float, ...]
    """Mean over runs at each place of the grid."""
    course: tuple[Moment, ...]
    reuse_bins: tuple[Bin, ...]
    seconds_bins: tuple[Bin, ...]

    @property
    def agrees(self) -> bool:
        """In every run the ledgers and the clients told the same."""
        return all(run.agrees for run in self.runs)


def interval(values: Sequence[float]) -> Interval:
    """The mean of what runs tell, with its t-interval; runs that tell nothing (nan) are left out."""
    told = [value for value in values if not math.isnan(value)]
    if not told:
        return Interval(math.nan, math.nan, math.nan, tuple(values))
    mean = fmean(told)
    if len(told) < 2:
        return Interval(mean, math.nan, math.nan, tuple(values))
    quantile = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(told) - 1))
    half = quantile * stdev(told) / math.sqrt(len(told))
    return Interval(mean, mean - half, mean + half, tuple(values))


def as_text(found: Interval, unit: str) -> str:
    """A mean and half its interval; `<none>` where nothing tells it."""
    if math.isnan(found.value):
        return "<none>"
    factor, form = (100, ".2f") if unit == "share" else (1, ".3f")
    value = f"{factor * found.value:{form}}" + ("%" if unit == "share" else "")
    half = factor * (found.high - found.value)
    return value if math.isnan(half) else f"{value} ±{half:{form}}"


def case(name: str, runs: Sequence[Digest]) -> Case:
    """The repeats of one setting; at least one."""
    pools = sorted({pool for run in runs for pool in run.pools})
    return Case(
        name=name,
        runs=tuple(runs),
        figures={each: interval([run.values[each] for run in runs]) for each in DEFINITIONS},
        pools={pool: _pool(pool, runs) for pool in pools},
        losses={loss: interval([_share(run.losses, loss) for run in runs]) for loss in Loss},
        ttft_s=tuple(
            interval(column).value for column in zip(*(run.ttft_s for run in runs), strict=True)
        ),
        course=tuple(_moment(column) for column in zip(*(r.course for r in runs), strict=True)),
        reuse_bins=_bins([run.reuse_bins for run in runs]),
        seconds_bins=_bins([run.seconds_bins for run in runs]),
    )


def comparisons(of: Case, baseline: Case) -> list[Comparison]:
    """Every figure of a case against the baseline's; both ran with the same seeds, in the same order."""
    return [
        comparison(figure, of.figures[figure].runs, baseline.figures[figure].runs)
        for figure in DEFINITIONS
    ]


def comparison(figure: str, these: Sequence[float], those: Sequence[float]) -> Comparison:
    """One figure of two cases, by seed."""
    pairs = list(zip(these, those, strict=True))
    difference = interval([this - that for this, that in pairs])
    relative = interval([this / that - 1 if that else math.nan for this, that in pairs])
    return Comparison(
        figure, difference, relative, _verdict(difference, DEFINITIONS[figure].better)
    )


def _verdict(difference: Interval, better: Better) -> Verdict | None:
    if better == "neither" or math.isnan(difference.low):
        return None
    if difference.low <= 0 <= difference.high:
        return Verdict.TIE
    return Verdict.AHEAD if (difference.value < 0) == (better == "less") else Verdict.BEHIND


def _pool(pool: str, runs: Sequence[Digest]) -> dict[str, Interval]:
    names = next(run.pools[pool] for run in runs if pool in run.pools)
    return {
        name: interval([run.pools.get(pool, {}).get(name, math.nan) for run in runs])
        for name in names
    }


def _share(losses: Mapping[Loss, int], loss: Loss) -> float:
    whole = sum(losses.values())
    return losses[loss] / whole if whole else math.nan


def _moment(same: Sequence[Moment]) -> Moment:
    return Moment(
        at_s=fmean(each.at_s for each in same),
        requests=sum(each.requests for each in same),
        rejected=sum(each.rejected for each in same),
        ttft_s=interval([each.ttft_s for each in same]).value,
    )


def _bins(of_runs: Sequence[Sequence[Bin]]) -> tuple[Bin, ...]:
    found = []
    for column in zip(*of_runs, strict=True):
        whole = Bin()
        for each in column:
            whole = whole.plus(each.said, each.came, each.weight, each.requests)
        found.append(whole)
    return tuple(found)
