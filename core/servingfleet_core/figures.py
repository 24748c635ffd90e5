"""The figures of docs/measures.md, from sums over joined pairs.

Pure arithmetic, shared by all who count and all who add up what others counted: `reports` brings sums over the wire. A
figure is a ratio of two sums over requests, or a share of requests. Its 95% interval comes from the delta method for
ratios and from Wilson's score for shares. A figure from too few pairs has no value at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from statistics import NormalDist

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


@dataclass(slots=True)
class Sums:
    """Sums over requests, in prompt tokens: enough for every figure and its interval, and additive.

    A pair `xx_yy` is the sum of products. Integers, so that adding and taking apart is exact.
    """

    decisions: int = 0
    rejected: int = 0
    joined: int = 0
    """Decisions of this scheduler that found their outcome."""
    pairs: int = 0
    """Joined pairs, also those whose decision was another scheduler's."""
    interval_hits: int = 0
    prompt: int = 0
    best: int = 0
    predicted: int = 0
    actual: int = 0
    agreed: int = 0
    erroneous: int = 0
    expected: int = 0
    prompt_prompt: int = 0
    best_best: int = 0
    predicted_predicted: int = 0
    actual_actual: int = 0
    agreed_agreed: int = 0
    erroneous_erroneous: int = 0
    expected_expected: int = 0
    actual_prompt: int = 0
    agreed_actual: int = 0
    erroneous_predicted: int = 0
    erroneous_prompt: int = 0
    best_prompt: int = 0
    expected_actual: int = 0

    def add_pair(
        self,
        *,
        prompt: int,
        best: int,
        predicted: int,
        lower: int,
        upper: int,
        expected: int,
        actual: int,
    ) -> None:
        """One joined pair."""
        agreed = min(predicted, actual)
        erroneous = erroneous_credit(predicted, actual)
        self.pairs += 1
        self.interval_hits += lower <= actual <= upper
        self.prompt += prompt
        self.best += best
        self.predicted += predicted
        self.actual += actual
        self.agreed += agreed
        self.erroneous += erroneous
        self.expected += expected
        self.prompt_prompt += prompt * prompt
        self.best_best += best * best
        self.predicted_predicted += predicted * predicted
        self.actual_actual += actual * actual
        self.agreed_agreed += agreed * agreed
        self.erroneous_erroneous += erroneous * erroneous
        self.expected_expected += expected * expected
        self.expected_actual += expected * actual
        self.actual_prompt += actual * prompt
        self.agreed_actual += agreed * actual
        self.erroneous_predicted += erroneous * predicted
        self.erroneous_prompt += erroneous * prompt
        self.best_prompt += best * prompt

    def add(self, other: Sums) -> None:
        """Adds another's sums to these."""
        for name in SUM_NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))


SUM_NAMES = tuple(each.name for each in fields(Sums))


def erroneous_credit(predicted: int, actual: int) -> int:
    """Tokens credited to a replica that its engine computed again.

    Reuse beyond the prediction is no error here: index coverage counts it as not known of.
    """
    return max(0, predicted - actual)


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure; `value`, `low` and `high` are None where too few pairs speak, or where nothing is divided by."""

    name: str
    definition: str
    numerator: int
    denominator: int
    pairs: int
    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class _Ratio:
    name: str
    numerator: str
    denominator: str
    product: str
    definition: str
    within: bool = True
    """The numerator is no larger than the denominator, in every request."""


RATIOS = (
    _Ratio(
        "reused_fraction",
        "actual",
        "prompt",
        "actual_prompt",
        "tokens reported reused / prompt tokens",
    ),
    _Ratio(
        "index_coverage",
        "agreed",
        "actual",
        "agreed_actual",
        "tokens predicted and reported reused / tokens reported reused",
    ),
    _Ratio(
        "erroneous_credit",
        "erroneous",
        "predicted",
        "erroneous_predicted",
        "tokens predicted but not reported reused / tokens predicted",
    ),
    _Ratio(
        "erroneous_credit_per_prompt",
        "erroneous",
        "prompt",
        "erroneous_prompt",
        "tokens predicted but not reported reused / prompt tokens",
    ),
    _Ratio(
        "fleet_ceiling",
        "best",
        "prompt",
        "best_prompt",
        "longest reuse predicted on any replica at routing time / prompt tokens",
    ),
    _Ratio(
        "expected_over_actual",
        "expected",
        "actual",
        "expected_actual",
        "tokens that the cost counted on / tokens reported reused",
        within=False,
    ),
)


def figures(sums: Sums, min_pairs: int) -> list[Figure]:
    """All figures that need no experiment. Below `min_pairs` pairs (decisions, for join_rate) a value is unknown."""
    found = [_ratio(each, sums, min_pairs) for each in RATIOS]
    found.append(
        _share(
            "interval_hit",
            "pairs with lower <= reported reuse <= upper / pairs",
            sums.interval_hits,
            sums.pairs,
            min_pairs,
        )
    )
    found.append(
        _share(
            "join_rate",
            "decisions whose outcome was joined / decisions",
            sums.joined,
            sums.decisions,
            min_pairs,
        )
    )
    return found


def ratio_interval(
    pairs: int, y: int, x: int, yy: int, xx: int, xy: int, *, within: bool = True
) -> tuple[float, float, float]:
    """Σy/Σx over requests and its 95% interval. `within`: 0 <= y <= x in every request, so that it ends at 0 and 1.

    Delta method: var(r) = n/(n-1) * Σ(y - r x)² / (Σx)². Where every request agrees on 0 or on 1 that variance is zero
    and says nothing of what a next request may do: Wilson's interval stands in, over the effective number of
    requests (Σx)²/Σx², since those that weigh nothing prove nothing. Likewise where all agree on another ratio: a next one
    may be as far off as that, either way.
    """
    ratio = y / x
    # Exact until the division: these sums are large and nearly cancel.
    cancelled = yy * x * x - 2 * y * x * xy + y * y * xx
    effective = x * x / xx
    if within and y in (0, x):
        low, high = wilson_interval(effective if y else 0.0, effective)
        return ratio, low, high
    if not within and not cancelled:
        low, high = wilson_interval(effective if y else 0.0, effective)
        return (ratio, ratio * low, ratio / low) if y else (ratio, 0.0, high)
    residual = cancelled / (x * x)
    spread = pairs / max(1, pairs - 1) * max(0.0, residual)
    half = Z * math.sqrt(spread) / x
    high = ratio + half
    return ratio, max(0.0, ratio - half), min(1.0, high) if within else high


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """Wilson's 95% score interval of a share; `trials` > 0."""
    share = successes / trials
    z2 = Z * Z
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    # The ends are exact where no other share was seen.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high


def _ratio(ratio: _Ratio, sums: Sums, min_pairs: int) -> Figure:
    y, x = getattr(sums, ratio.numerator), getattr(sums, ratio.denominator)
    if sums.pairs < max(1, min_pairs) or not x:
        return Figure(ratio.name, ratio.definition, y, x, sums.pairs)
    yy = getattr(sums, f"{ratio.numerator}_{ratio.numerator}")
    xx = getattr(sums, f"{ratio.denominator}_{ratio.denominator}")
    xy = getattr(sums, ratio.product)
    value, low, high = ratio_interval(sums.pairs, y, x, yy, xx, xy, within=ratio.within)
    return Figure(ratio.name, ratio.definition, y, x, sums.pairs, value, low, high)


def _share(name: str, definition: str, successes: int, trials: int, least: int) -> Figure:
    if trials < max(1, least):
        return Figure(name, definition, successes, trials, trials)
    low, high = wilson_interval(successes, trials)
    return Figure(name, definition, successes, trials, trials, successes / trials, low, high)
