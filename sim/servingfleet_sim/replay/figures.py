"""One run as figures. Pure.

The reuse figures are those of docs/measures.md, by the same sums as a live fleet's; what only a replay can know (what was
truly held elsewhere, ceilings, when each token came) is added here. A figure that nothing speaks for is nan.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, pstdev

from servingfleet_core.figures import Sums, figures

from .definitions import DEFINITIONS, OF_POOLS
from .results import Outcome, Run

Values = Mapping[str, float]
"""Figures by name; nan where nothing speaks for one."""


def run_values(run: Run) -> dict[str, float]:
    """Every figure of a run."""
    everyone = run.outcomes
    ceilings, disagreement = run.ceilings, run.disagreement
    ledgers = Sums()
    for sums in run.scheduler_sums:
        ledgers.add(sums)
    values = {
        **_outcome_values(everyone),
        **_ends(everyone),
        "finished_per_s": _ratio(
            sum(each.fate == "finished" for each in everyone), run.simulated_s
        ),
        "join_rate": _ratio(ledgers.joined, ledgers.decisions),
        "ceiling_u1": _ratio(ceilings.u1, ceilings.prompt),
        "ceiling_u2": _ratio(ceilings.u2, ceilings.prompt),
        "ceiling_u3": _ratio(ceilings.u3, ceilings.prompt),
        "ceiling_u4": _ratio(ceilings.u4, ceilings.prompt),
        **_imbalance(list(run.busy_s.values())),
        "disagreement": _ratio(disagreement.tokens, disagreement.prompt),
        "other_choice": _ratio(disagreement.other_choice, disagreement.samples),
        "requests_per_wall_s": _ratio(len(everyone), run.wall_s),
    }
    return {name: values[name] for name in DEFINITIONS}


def pool_values(run: Run) -> dict[str, dict[str, float]]:
    """The figures of each pool's requests, and how many they are ("requests")."""
    pools: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in run.outcomes:
        if outcome.rank >= 0:
            pools[outcome.pool].append(outcome)
    found = {}
    for pool in sorted(pools):
        values = _outcome_values(pools[pool])
        found[pool] = {
            "requests": float(len(pools[pool])),
            **{name: values[name] for name in OF_POOLS},
        }
    return found


def pair_sums(outcomes: Iterable[Outcome]) -> Sums:
    """The sums of a ledger that joined every finished request."""
    sums = Sums()
    for each in outcomes:
        if each.fate == "finished":
            sums.add_pair(
                prompt=each.prompt,
                best=each.best_predicted,
                predicted=each.predicted,
                lower=each.lower,
                upper=each.upper,
                expected=round(each.expected),
                actual=each.actual,
            )
    return sums


def quantile(ordered: Sequence[float], of_100: float) -> float:
    """The least of the ascending values that `of_100` percent of them don't exceed; nan of none."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(len(ordered) * of_100 / 100) - 1)]


def _outcome_values(outcomes: Sequence[Outcome]) -> dict[str, float]:
    finished = [each for each in outcomes if each.fate == "finished"]
    reuse = {each.name: each.value for each in figures(pair_sums(finished), min_pairs=1)}
    del reuse["join_rate"]
    return {
        **_spread("ttft", [each.ttft_s for each in outcomes if not math.isnan(each.ttft_s)]),
        **_spread("e2e", [each.finished_s - each.at for each in finished]),
        **{name: math.nan if value is None else value for name, value in reuse.items()},
        **_audits(finished),
        **_calibration(finished),
    }


def _spread(prefix: str, values: list[float]) -> dict[str, float]:
    values.sort()
    found = {f"{prefix}_mean_s": fmean(values) if values else math.nan}
    for of_100 in (50, 95, 99):
        found[f"{prefix}_p{of_100}_s"] = quantile(values, of_100)
    return found


def _ends(outcomes: Sequence[Outcome]) -> dict[str, float]:
    aimed = [each for each in outcomes if not math.isnan(each.target_s)]
    # Also false where no token came: nan is within no target.
    good = sum(each.fate == "finished" and each.ttft_s <= each.target_s for each in aimed)
    late = sum(each.fate == "finished" and each.ttft_s > each.target_s for each in aimed)
    rejected = sum(each.fate == "rejected" for each in outcomes)
    failed = sum(each.fate in ("failed", "unfinished") for each in outcomes)
    return {
        "goodput": _ratio(good, len(aimed)),
        "late_share": _ratio(late, len(aimed)),
        "rejected_share": _ratio(rejected, len(outcomes)),
        "failed_share": _ratio(failed, len(outcomes)),
    }


def _audits(finished: Sequence[Outcome]) -> dict[str, float]:
    prompt = sum(each.prompt for each in finished)
    predicted = sum(each.predicted for each in finished)
    unseen = sum(max(0, each.best_actual - each.actual) for each in finished)
    misplaced = 0
    for each in finished:
        tiers = zip(each.predicted_tiers, each.actual_tiers, strict=True)
        misplaced += sum(max(0, promised - found) for promised, found in tiers)
        misplaced -= max(0, each.predicted - each.actual)
    return {
        "unseen_reuse": _ratio(unseen, prompt),
        "tier_misplacement": _ratio(misplaced, predicted),
    }


def _imbalance(busy_s: Sequence[float]) -> dict[str, float]:
    mean = fmean(busy_s) if busy_s else 0.0
    return {
        "imbalance_max": _ratio(max(busy_s, default=0.0), mean),
        "imbalance_cv": _ratio(pstdev(busy_s) if busy_s else 0.0, mean),
    }


def _calibration(finished: Sequence[Outcome]) -> dict[str, float]:
    prompt = sum(each.prompt for each in finished)

    def share(tokens: Callable[[Outcome], float]) -> float:
        return _ratio(sum(tokens(each) for each in finished), prompt)

    timed = [e for e in finished if not math.isnan(e.policy_estimate_s) and e.ttft_s > 0]
    errors = [each.policy_estimate_s - each.ttft_s for each in timed]
    relative = sorted(abs(e) / each.ttft_s for e, each in zip(errors, timed, strict=True))
    unsure = [
        (error, each.sd_s)
        for error, each in zip(errors, timed, strict=True)
        if not math.isnan(each.sd_s)
    ]
    return {
        "expected_bias": share(lambda each: each.expected - each.actual),
        "predicted_bias": share(lambda each: each.predicted - each.actual),
        "expected_error": share(lambda each: abs(each.expected - each.actual)),
        "predicted_error": share(lambda each: abs(each.predicted - each.actual)),
        "estimate_bias_s": fmean(errors) if errors else math.nan,
        "estimate_bias": _ratio(sum(errors), sum(each.ttft_s for each in timed)),
        "estimate_error": quantile(relative, 50),
        "estimate_within_sd": _ratio(sum(abs(e) <= sd for e, sd in unsure), len(unsure)),
    }


def _ratio(part: float | None, whole: float) -> float:
    return part / whole if whole and part is not None else math.nan
