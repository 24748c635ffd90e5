"""Speeds learned from outcomes: one linear model for each pool, and a factor for each of its ranks.

    seconds of a group = factor * (step * steps + token * n + attention * n(h + n/2) + loads + drag)

Bayesian recursive least squares. It starts from the pool's priors, with noise in proportion to the time; outliers weigh
less (Huber), old outcomes fade, a drift opens the model again, and coefficients stay positive: so the cost stays monotone
whatever the labels are. Pure, without numpy: a seven by seven update takes less than a call into it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .labels import Group, Labels, Sent
from .policy.estimate import cut
from .policy.rules import UNKNOWN, Overlap, Rules
from .policy.speeds import (
    NOISE_SHARE,
    PRIOR_SHARE,
    Covariance,
    Speeds,
    TierSpeed,
)

FORGETTING = 0.998
"""Weight of an outcome for each one after it: the last 500 count."""
OUTLIER_SD = 2.0
"""Beyond so many standard deviations an outcome pulls no stronger. 2% of 5 s events then cost nothing measurable."""
DRIFT_SHARE, DRIFT_COUNT, DRIFT_OF = 0.15, 10, 12
"""So many of the last residuals beyond this share with one sign: the engine has changed."""
FACTOR_SD = 0.15
"""Standard deviation of a rank's factor within its pool: the same hardware differs by clocks, heat and neighbours."""
FACTOR_LEAST, FACTOR_MOST = 0.2, 5.0
"""A rank that differs more is of another kind, and needs a pool of its own."""
LEAST_SHARE, MOST_SHARE = 0.01, 100.0
"""A coefficient stays within these multiples of its prior."""
ATTENTION_CORRELATION = 0.9
"""Of the prior errors of token and attention: both come from the GPU. Without long contexts their ratio so stays."""
TIMING_S = 0.010
"""Standard deviation of a group's seconds that no length explains: a prompt comes in the midst of a decode step, which takes
10 to 40 ms."""
STEP_SD_S = 0.020
"""Standard deviation of a step's seconds at least, before anything is known: they contain half a decode step, the network, and
what clients add, of which no prior knows."""
NOISE_STEP = 1.05
"""The typical residual moves by so much at each outcome, up or down: outliers count like any other."""
TYPICAL_OF_SD = 0.6745
"""Half of all residuals are within this share of their standard deviation."""
NOISE_LEAST, NOISE_MOST = 0.03, 0.5
"""No engine is steadier; and beyond a half the model says nothing, so that nothing more is lost."""
NOISE_WIDENING = 1.3
"""Intervals covered 86 of 95% with outliers: they are made wider by so much."""

TOKENS, PAIRS = 1e3, 1e8
"""Units of the features, to keep them near one."""
_SIZE = 7
_Vector = list[float]


class Observation(NamedTuple):
    """One group of prompts as the model sees it."""

    steps: float
    tokens: float
    pairs: float
    """Computed times attended."""
    loads: tuple[float, float, float]
    """Tokens from host, disk and shared whose load was waited for."""
    known_s: float
    """Seconds of the loads that are no question of their bandwidth: fixed parts, less what hid them."""
    drag: float
    """Share of running decodes' state in the cache, 0 where they take part in no step."""
    seconds: float


class Pool:
    """Speeds of like engines."""

    def __init__(self, prior: Speeds, *, price_tiers: bool = True) -> None:
        self._prior = prior
        self._price_tiers = price_tiers
        self._mean: _Vector = [
            prior.step_s,
            prior.token_s * TOKENS,
            prior.attention_s * PAIRS,
            prior.host.token_s * TOKENS,
            prior.disk.token_s * TOKENS,
            prior.shared.token_s * TOKENS,
            prior.drag_share,
        ]
        self._start = list(self._mean)
        self._prior_covariance = _diagonal(self._mean)
        self._covariance = [list(row) for row in self._prior_covariance]
        self._noise = NOISE_SHARE
        self._signs: deque[int] = deque(maxlen=DRIFT_OF)
        self.labels = 0
        """Outcomes learned from."""
        self.drifts = 0
        """Times that the engines were found to have changed."""
        self.known = self._snapshot()
        """As known now: another object after each outcome."""
        self.speeds = self._priced()
        """The same, as the cost is to see it."""

    def features(self, seen: Observation) -> _Vector:
        """What the coefficients are multiplied by."""
        mean = self._mean
        tokens, pairs = seen.tokens / TOKENS, seen.pairs / PAIRS
        computing = mean[0] * seen.steps + mean[1] * tokens + mean[2] * pairs
        return [
            seen.steps,
            tokens,
            pairs,
            seen.loads[0] / TOKENS,
            seen.loads[1] / TOKENS,
            seen.loads[2] / TOKENS,
            computing * seen.drag,
        ]

    def learn(self, seen: Observation, factor: Factor) -> None:
        """One outcome of a rank with this factor; both share what it says by how uncertain they are."""
        x = self.features(seen)
        mean, matrix = self._mean, self._covariance
        at_pool = _dot(x, mean)
        scale = factor.value
        expected = scale * at_pool
        # A load's fixed part is known; what remains stays positive, however far off that is.
        seconds = max(seen.seconds - scale * seen.known_s, 0.1 * seen.seconds)
        self._forget()
        gain = [scale * _dot(row, x) for row in matrix]
        from_pool = scale * _dot(gain, x)
        from_factor = at_pool * at_pool * factor.variance
        noise = (self._noise * expected) ** 2 + TIMING_S**2
        total = from_pool + from_factor + noise
        residual = seconds - expected
        deviations = abs(residual) / math.sqrt(total)
        weight = 1.0 if deviations <= OUTLIER_SD else OUTLIER_SD / deviations
        pull = residual * weight / total
        spread = total + noise * (1.0 / weight - 1.0)
        for at in range(_SIZE):
            mean[at] = min(
                max(mean[at] + gain[at] * pull, LEAST_SHARE * self._start[at]),
                MOST_SHARE * self._start[at],
            )
            row, share = matrix[at], gain[at] / spread
            for other in range(_SIZE):
                row[other] -= share * gain[other]
        factor.learn(at_pool, pull, spread)
        relative = residual / expected
        self._measure_noise(relative)
        self._drift(relative)
        if factor.drifted(relative):
            factor.open()
        self.labels += 1
        self.known = self._snapshot()
        self.speeds = self._priced()

    # Inside

    def _forget(self) -> None:
        matrix, most = self._covariance, self._prior_covariance
        for row in matrix:
            for at in range(_SIZE):
                row[at] /= FORGETTING
        # Never wider than the prior: what is not seen is not forgotten.
        for at in range(_SIZE):
            if matrix[at][at] > most[at][at]:
                shrink = math.sqrt(most[at][at] / matrix[at][at])
                for other in range(_SIZE):
                    matrix[at][other] *= shrink
                    matrix[other][at] *= shrink

    def _measure_noise(self, relative: float) -> None:
        above = abs(relative) > TYPICAL_OF_SD * self._noise
        noise = self._noise * NOISE_STEP if above else self._noise / NOISE_STEP
        self._noise = min(max(noise, NOISE_LEAST), NOISE_MOST)

    def _drift(self, relative: float) -> None:
        self._signs.append(_sign(relative))
        if _one_way(self._signs):
            self._signs.clear()
            self.drifts += 1
            self._covariance = [[each / 4.0 for each in row] for row in self._prior_covariance]

    def _priced(self) -> Speeds:
        if self._price_tiers:
            return self.known
        free = TierSpeed(0.0, 0.0)
        return replace(self.known, host=free, disk=free, shared=free)

    def _snapshot(self) -> Speeds:
        mean, matrix, prior = self._mean, self._covariance, self._prior
        host, disk, shared = (
            TierSpeed(tier.fixed_s, mean[at] / TOKENS, _share(matrix[at][at], mean[at]))
            for at, tier in ((3, prior.host), (4, prior.disk), (5, prior.shared))
        )
        return Speeds(
            mean[0],
            mean[1] / TOKENS,
            mean[2] / PAIRS,
            host,
            # What comes from further away takes the host's way to the GPU, too.
            _no_faster(disk, host),
            _no_faster(shared, host),
            prior.step_tokens,
            mean[6],
            prior.request_tokens,
            prior.unproven_s,
            Covariance(
                matrix[0][0],
                matrix[0][1] / TOKENS,
                matrix[0][2] / PAIRS,
                matrix[1][1] / TOKENS**2,
                matrix[1][2] / TOKENS / PAIRS,
                matrix[2][2] / PAIRS**2,
            ),
            NOISE_WIDENING * self._noise if self.labels else prior.noise_share,
            prior.assumed and not self.labels,
        )


@dataclass(slots=True)
class Factor:
    """What one rank takes of its pool's seconds."""

    value: float = 1.0
    variance: float = FACTOR_SD**2
    sd: float = FACTOR_SD
    """Standard deviation of `value`."""
    _signs: deque[int] = field(default_factory=lambda: deque(maxlen=DRIFT_OF))

    def learn(self, at_pool: float, pull: float, spread: float) -> None:
        """The rank's share of one outcome: seconds at the pool's speeds, residual over variance, and the variance."""
        self.variance = min(self.variance / FORGETTING, FACTOR_SD**2)
        gain = self.variance * at_pool
        self.value = min(max(self.value + gain * pull, FACTOR_LEAST), FACTOR_MOST)
        self.variance = max(1e-6, self.variance - gain * gain / spread)
        self.sd = math.sqrt(self.variance)

    def drifted(self, relative: float) -> bool:
        """After one more residual, as a share of what was expected."""
        self._signs.append(_sign(relative))
        return _one_way(self._signs)

    def open(self) -> None:
        """All that was known may be wrong now."""
        self._signs.clear()
        self.variance, self.sd = FACTOR_SD**2, FACTOR_SD


@dataclass(slots=True)
class Pace:
    """One rank: its pool, its factor, and the first tokens that it is known by."""

    pool: Pool
    factor: Factor = field(default_factory=Factor)
    labels: Labels = field(default_factory=Labels)
    learned: int = 0
    """Outcomes of this rank that were learned from."""

    @property
    def speeds(self) -> Speeds:
        """The rank's own."""
        return self.pool.speeds.scaled(self.factor.value)

    def learn(self, rules: Rules) -> None:
        """From what is complete."""
        for group in self.labels.take(self.pool.speeds.step_s * self.factor.value):
            self.pool.learn(observation(group, self.pool.known, rules), self.factor)
            self.learned += 1


def observation(group: Group, speeds: Speeds, rules: Rules = UNKNOWN) -> Observation:
    """What was computed and loaded, from what the engine reported of each member."""
    tokens, pairs, known_s = 0.0, 0.0, 0.0
    loads = [0.0, 0.0, 0.0]
    for each in group.members:
        by_tier = _by_tier(each)
        reused = sum(by_tier)
        computed = max(1.0, each.prompt - reused)
        tokens += computed
        pairs += computed * (reused + computed / 2)
        waited = max(0.0, group.start - each.at)
        computing = speeds.token_s * computed
        for at, tier in enumerate((speeds.host, speeds.disk, speeds.shared)):
            if not by_tier[at + 1]:
                continue
            full = tier.seconds(by_tier[at + 1])
            rule = rules.loads[at]
            hidden = 0.0
            if rule.overlap is Overlap.QUEUE:
                hidden = rule.share * waited
            elif rule.overlap is Overlap.COMPUTE:
                hidden = min(rule.share * computing, full - tier.fixed_s)
            if full > hidden:
                loads[at] += by_tier[at + 1]
                known_s += tier.fixed_s - hidden
    drag = 1.0
    usage = 0.0
    if rules.mixed_steps:
        last = group.members[-1]
        decodes = min(last.decodes, speeds.step_tokens // 2)
        drag = 1.0 + decodes / (speeds.step_tokens - decodes)
        usage = last.kv_usage
    return Observation(
        steps=drag * speeds.steps(tokens),
        tokens=drag * tokens,
        pairs=drag * pairs,
        loads=(loads[0], loads[1], loads[2]),
        known_s=known_s,
        drag=usage / drag,
        seconds=group.seconds,
    )


def _by_tier(sent: Sent) -> tuple[float, ...]:
    if sent.cached_tiers is not None:
        return sent.cached_tiers
    assert sent.cached is not None
    return cut(sent.tiers, sent.cached)


def _no_faster(tier: TierSpeed, than: TierSpeed) -> TierSpeed:
    if tier.token_s >= than.token_s and tier.fixed_s >= than.fixed_s:
        return tier
    return TierSpeed(
        max(tier.fixed_s, than.fixed_s), max(tier.token_s, than.token_s), tier.sd_share
    )


def _diagonal(mean: Sequence[float]) -> list[_Vector]:
    matrix = [[0.0] * _SIZE for _ in range(_SIZE)]
    for at, value in enumerate(mean):
        matrix[at][at] = (PRIOR_SHARE * value) ** 2
    matrix[0][0] = max(matrix[0][0], STEP_SD_S**2)
    matrix[1][2] = matrix[2][1] = (
        ATTENTION_CORRELATION * PRIOR_SHARE * mean[1] * PRIOR_SHARE * mean[2]
    )
    return matrix


def _share(variance: float, mean: float) -> float:
    return math.sqrt(max(0.0, variance)) / mean if mean > 0.0 else 0.0


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _sign(relative: float) -> int:
    return 0 if abs(relative) <= DRIFT_SHARE else (1 if relative > 0 else -1)


def _one_way(signs: deque[int]) -> bool:
    return max(signs.count(1), signs.count(-1)) >= DRIFT_COUNT
