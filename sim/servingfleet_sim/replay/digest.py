"""What is kept of a run: its figures, and curves of a fixed size instead of its requests. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from servingfleet_core.figures import Sums

from .figures import Values, pair_sums, pool_values, quantile, run_values
from .losses import Loss, waterfall
from .results import Outcome, Run

GRID = (*range(100), *(99 + tenth / 10 for tenth in range(11)))
"""Of 100 requests: where the distribution of times is read, finer at its slow end."""

MOMENTS = 60
"""Points of a run's course."""

REUSE_BINS = 10

SECONDS_EDGES = tuple(0.0625 * 2**step for step in range(12))
"""Upper ends of all bins of estimated seconds but the last: from 1/16 s to 2 min, doubling."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The requests that were first asked in one sixtieth of a run."""

    at_s: float
    """Its middle."""
    requests: int
    rejected: int
    ttft_s: float
    """Mean of those that got a first token; nan: none did."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Sums over requests for which about the same was said."""

    requests: int = 0
    said: float = 0.0
    came: float = 0.0
    weight: float = 0.0
    """What both are divided by: prompt tokens, or requests."""

    def plus(self, said: float, came: float, weight: float, requests: int = 1) -> Bin:
        """With so much more."""
        return Bin(
            self.requests + requests, self.said + said, self.came + came, self.weight + weight
        )


@dataclass(frozen=True, slots=True)
class Digest:
    """One run, without its requests."""

    seed: int
    requests: int
    values: Values
    pools: Mapping[str, Values]
    losses: Mapping[Loss, int]
    """Prompt tokens of finished requests."""
    ttft_s: tuple[float, ...]
    """Seconds to first token at each place of GRID; nan: none came."""
    course: tuple[Moment, ...]
    reuse_bins: tuple[Bin, ...]
    """By tokens expected per prompt token, ten of the same width: expected, reused, prompt tokens."""
    seconds_bins: tuple[Bin, ...]
    """By estimated seconds to first token: estimated, real, requests."""
    agrees: bool
    """The ledgers of the schedulers joined every finished request, with the same tokens."""
    counters: Mapping[str, int]
    wall_s: float
    simulated_s: float


def digest(run: Run) -> Digest:
    """Everything that is told of a run."""
    outcomes = run.outcomes
    came = sorted(each.ttft_s for each in outcomes if not math.isnan(each.ttft_s))
    return Digest(
        seed=run.seed,
        requests=len(outcomes),
        values=run_values(run),
        pools=pool_values(run),
        losses=waterfall(outcomes, run.ceilings),
        ttft_s=tuple(quantile(came, of_100) for of_100 in GRID),
        course=_course(outcomes),
        reuse_bins=_reuse_bins(outcomes),
        seconds_bins=_seconds_bins(outcomes),
        agrees=_agrees(run),
        counters=run.counters,
        wall_s=run.wall_s,
        simulated_s=run.simulated_s,
    )


def _agrees(run: Run) -> bool:
    ledgers = Sums()
    for sums in run.scheduler_sums:
        ledgers.add(sums)
    clients = pair_sums(run.outcomes)
    names = ("pairs", "prompt", "predicted", "actual", "agreed", "erroneous", "interval_hits")
    return all(getattr(ledgers, name) == getattr(clients, name) for name in names)


def _course(outcomes: Sequence[Outcome]) -> tuple[Moment, ...]:
    # In a closed loop the turns after one that never ended are never asked.
    asked = [each for each in outcomes if not math.isnan(each.at)]
    if not asked:
        return ()
    width = max(each.at for each in asked) / MOMENTS or 1.0
    found: list[list[Outcome]] = [[] for _ in range(MOMENTS)]
    for each in asked:
        found[min(MOMENTS - 1, int(each.at / width))].append(each)
    moments = []
    for number, those in enumerate(found):
        came = [each.ttft_s for each in those if not math.isnan(each.ttft_s)]
        rejected = sum(each.fate == "rejected" for each in those)
        middle = (number + 0.5) * width
        moments.append(Moment(middle, len(those), rejected, fmean(came) if came else math.nan))
    return tuple(moments)


def _reuse_bins(outcomes: Sequence[Outcome]) -> tuple[Bin, ...]:
    bins = [Bin()] * REUSE_BINS
    for each in outcomes:
        if each.fate == "finished" and each.prompt:
            place = min(REUSE_BINS - 1, int(REUSE_BINS * each.expected / each.prompt))
            bins[place] = bins[place].plus(each.expected, each.actual, each.prompt)
    return tuple(bins)


def _seconds_bins(outcomes: Sequence[Outcome]) -> tuple[Bin, ...]:
    bins = [Bin()] * (len(SECONDS_EDGES) + 1)
    for each in outcomes:
        if each.fate == "finished" and not math.isnan(each.policy_estimate_s):
            place = sum(edge <= each.policy_estimate_s for edge in SECONDS_EDGES)
            bins[place] = bins[place].plus(each.policy_estimate_s, each.ttft_s, 1)
    return tuple(bins)
