"""The chance that a block is evicted before the engine gets to it, and how well that chance turned out.

Pure. A cache that forgets the least recently used has one characteristic time, its turnover T: a block is evicted when it
has not been used for about T (Che's approximation; docs/scheduler.md). The chance that a block outlives an idle time x is

    S(x) = 1 / (1 + (x / T)^(1 / g)),        and of one that is idle for a: alive after d more, S(a + d) / S(a)

Both T and the sharpness of S are corrected by what outcomes say, for each pool and tier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

SPREAD = 0.07
"""g, without unit: how blurred the end of a block's life is. 0.05 to 0.10 on public traces."""
SHORT_TURNOVER_S = 60.0
"""Below it a cache turns over in the time of a burst."""
SHORT_SPREAD = 0.2
"""g of caches that turn over within SHORT_TURNOVER_S: bursts blur their ends."""
SAFE_SHARE = 0.5
"""A block that will not be idle for so much of the turnover stays: nearly all losses were beyond (41% of those lost within
20 s on public traces were of blocks idle for more than half of it, next to none of others)."""
INSERT_WINDOW_S = 120.0
"""Over which the rate of what is stored is taken: long enough for bursts, short against a day's course."""
INSERT_BUCKET_S = 10.0
"""By which that window moves."""
LEAST_IDLE_S = 0.1
"""The index knows times no better."""

OTHER_LOSSES = 0.01
"""Share of predictions that fail for reasons other than eviction: they must not bend the curve."""
FORGET = 0.01
"""Share of the evidence given up for the prior with each outcome that says anything."""
SHIFT_SD = 0.5
"""Prior standard deviation of the logarithm of the true turnover over the measured one: e^0.5 is 1.6."""
SHARPNESS_SD = 0.5
"""Likewise of the sharpness over 1 / g."""
MAX_STEP = 0.05
"""By which one outcome changes a parameter at most: a tenth of its prior deviation."""
MAX_SHIFT = math.log(10.0)
"""The true turnover is within ten times the measured one, either way; beyond that outcomes tell of something else."""
SHARPNESS_BOUNDS = (0.2, 3.0)
"""Times 1 / g: between a curve that says next to nothing and a step."""

LOSS_PRIOR_TOKENS = 8192.0
"""Loss foreseen, in tokens, for which it is believed that all of it comes true: a handful of prompts."""

BINS = 10
"""Of the reliability that is published."""
MAX_KEYS = 256
"""(pool, tier) pairs told apart: four tiers of 64 pools. Those beyond share one."""

_BUCKETS = int(INSERT_WINDOW_S / INSERT_BUCKET_S)
_SHIFT_INFORMATION = 1 / SHIFT_SD**2
_SHARPNESS_INFORMATION = 1 / SHARPNESS_SD**2


class Tail(NamedTuple):
    """The block where a prediction ends, as known when the request was routed. Times in seconds."""

    tier: int
    """The slowest that holds it: 1 is the GPU."""
    idle_s: float
    """Below 0: until it is used next, by a prompt that is ahead."""
    ahead_s: float
    """Until the engine gets to it."""
    turnover_s: float
    gone: float
    """Chance that it is evicted by then."""
    loss: float = 0.0
    """Tokens of the prediction that are lost by then, on average, if all that one chance speaks of goes at once."""


class Inserted:
    """Tokens stored in one lane over the last INSERT_WINDOW_S."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._buckets: dict[int, int] = {}
        """Tokens by number of INSERT_BUCKET_S, ascending."""

    def add(self, tokens: int, now: float) -> None:
        """So many were stored."""
        number = int(now // INSERT_BUCKET_S)
        self._buckets[number] = self._buckets.get(number, 0) + tokens
        while len(self._buckets) > _BUCKETS:
            del self._buckets[next(iter(self._buckets))]

    def rate(self, now: float) -> float | None:
        """Tokens a second; None: not watched for a whole window yet."""
        if now - self._since < INSERT_WINDOW_S:
            return None
        first = int(now // INSERT_BUCKET_S) - _BUCKETS
        recent = [tokens for number, tokens in self._buckets.items() if number > first]
        return sum(recent) / INSERT_WINDOW_S


def cold_turnover(capacity_tokens: int, rate: float | None) -> float | None:
    """Turnover of a cache that was not seen to evict yet: the time to fill it once. None: not known.

    It read 1.05 to 1.25 times the true value on public traces.
    """
    return capacity_tokens / rate if capacity_tokens and rate else None


class Calibration:
    """The curve of one pool and tier: log-odds of death by idle time x are (shift + sharpness * log(x / T)) / g.

    Both parameters start at their prior (0 and 1) and follow outcomes by a Bayesian step each (Laplace's approximation
    of the likelihood of "gone" or "alive", given that the block was there when the request was routed). What is given up
    of the evidence goes to the prior, so that the curve returns to it as the evidence ages.
    """

    __slots__ = ("_aa", "_as", "_ss", "safe_share", "sharpness", "shift")

    def __init__(self) -> None:
        self.shift = 0.0
        self.sharpness = 1.0
        # The information matrix.
        self._aa, self._as, self._ss = _SHIFT_INFORMATION, 0.0, _SHARPNESS_INFORMATION
        self.safe_share = SAFE_SHARE
        """Share of the turnover up to which an idle block is safe."""

    def alive(self, idle_s: float, ahead_s: float, turnover_s: float) -> float:
        """Chance that a block idle for `idle_s` is still there in `ahead_s`."""
        if idle_s + ahead_s <= self.safe_share * turnover_s:
            return 1.0
        before, after, *_ = self._odds(idle_s, ahead_s, turnover_s)
        return math.exp(min(0.0, _softplus(before) - _softplus(after)))

    def learn(self, tail: Tail, gone: bool) -> None:
        """The block turned out to be gone, or was there. One that was safe says nothing of eviction, whatever came of
        it."""
        risky = min(SAFE_SHARE, self.safe_share) * tail.turnover_s
        if tail.idle_s + tail.ahead_s <= risky:
            return
        before, after, log_before, log_after, spread = self._odds(
            tail.idle_s, tail.ahead_s, tail.turnover_s
        )
        alive = math.exp(min(0.0, _softplus(before) - _softplus(after)))
        dead_before, dead_after = _logistic(before), _logistic(after)
        by_shift = (dead_before - dead_after) / spread
        by_sharpness = (dead_before * log_before - dead_after * log_after) / spread
        chance = OTHER_LOSSES + (1 - OTHER_LOSSES) * (1 - alive)
        chance = min(chance, 1 - OTHER_LOSSES)
        # Derivatives of `chance`.
        a = -(1 - OTHER_LOSSES) * alive * by_shift
        s = -(1 - OTHER_LOSSES) * alive * by_sharpness
        weight = 1 / (chance * (1 - chance))
        self._aa = self._kept(self._aa, _SHIFT_INFORMATION) + weight * a * a
        self._as = self._kept(self._as, 0.0) + weight * a * s
        self._ss = self._kept(self._ss, _SHARPNESS_INFORMATION) + weight * s * s
        surprise = weight * (float(gone) - chance)
        pull_a = surprise * a - FORGET * _SHIFT_INFORMATION * self.shift
        pull_s = surprise * s - FORGET * _SHARPNESS_INFORMATION * (self.sharpness - 1)
        whole = self._aa * self._ss - self._as * self._as
        step_a = (self._ss * pull_a - self._as * pull_s) / whole
        step_s = (self._aa * pull_s - self._as * pull_a) / whole
        # Where next to nothing should be gone one loss would be a leap, and may be chance.
        held_back = min(1.0, MAX_STEP / max(abs(step_a), abs(step_s), MAX_STEP))
        self.shift = _within(self.shift + held_back * step_a, -MAX_SHIFT, MAX_SHIFT)
        self.sharpness = _within(self.sharpness + held_back * step_s, *SHARPNESS_BOUNDS)
        self.safe_share = min(1.0, math.exp((math.log(SAFE_SHARE) - self.shift) / self.sharpness))

    @staticmethod
    def _kept(information: float, prior: float) -> float:
        return (1 - FORGET) * information + FORGET * prior

    def _odds(
        self, idle_s: float, ahead_s: float, turnover_s: float
    ) -> tuple[float, float, float, float, float]:
        """Log-odds of death by now and by then, the logarithms of the times that they are of, and g."""
        # A cache may turn over within one tick of the clock.
        turnover_s = max(turnover_s, LEAST_IDLE_S)
        spread = SHORT_SPREAD if turnover_s < SHORT_TURNOVER_S else SPREAD
        before = max(idle_s, LEAST_IDLE_S) / turnover_s
        after = max(idle_s + ahead_s, LEAST_IDLE_S) / turnover_s
        log_before, log_after = math.log(before), math.log(after)
        return (
            (self.shift + self.sharpness * log_before) / spread,
            (self.shift + self.sharpness * log_after) / spread,
            *(log_before, log_after, spread),
        )


class Losses:
    """What share of the loss foreseen comes true: engines evict a prompt from its end, block by block, so that of one
    whose end is gone the rest may still be there."""

    __slots__ = ("_foreseen", "_lost")

    def __init__(self) -> None:
        self._lost = self._foreseen = 0.0

    @property
    def share(self) -> float:
        """At most 1: what else is lost is no matter of eviction."""
        share = (self._lost + LOSS_PRIOR_TOKENS) / (self._foreseen + LOSS_PRIOR_TOKENS)
        return min(1.0, share)

    def learn(self, foreseen: float, lost: float) -> None:
        """Of one prompt, in tokens."""
        self._lost = (1 - FORGET) * self._lost + lost
        self._foreseen = (1 - FORGET) * self._foreseen + foreseen


PRIOR = Calibration()
"""What nothing was learned of. Never taught."""


@dataclass(slots=True)
class Reliability:
    """Outcomes by the chance of eviction that was told, in BINS of equal width, since the start."""

    pairs: list[int] = field(default_factory=lambda: [0] * BINS)
    gone: list[int] = field(default_factory=lambda: [0] * BINS)
    told: list[float] = field(default_factory=lambda: [0.0] * BINS)
    """Sum of the chances told: as many should be gone."""

    def add(self, chance: float, gone: bool) -> None:
        """One outcome."""
        number = min(BINS - 1, int(chance * BINS))
        self.pairs[number] += 1
        self.gone[number] += gone
        self.told[number] += chance


class Evictions:
    """Calibration and reliability of each pool and tier."""

    def __init__(self, *, learn: bool) -> None:
        self._learn = learn
        self._calibrations: dict[tuple[str, int], Calibration] = {}
        self._losses: dict[tuple[str, int], Losses] = {}
        self.reliability: dict[tuple[str, int], Reliability] = {}
        """By (pool, tier)."""

    def calibration(self, pool: str, tier: int) -> Calibration:
        """The curve that holds there now."""
        return self._calibrations.get(self._key(pool, tier), PRIOR)

    def loss_share(self, pool: str, tier: int) -> float:
        """What share of the loss foreseen comes true."""
        losses = self._losses.get(self._key(pool, tier))
        return 1.0 if losses is None else losses.share

    def learn(self, pool: str, tail: Tail, gone: bool, lost: int = 0) -> None:
        """A prediction's end turned out to be gone, or was there; `lost`: tokens that were not."""
        key = self._key(pool, tail.tier)
        self.reliability.setdefault(key, Reliability()).add(tail.gone, gone)
        if self._learn:
            self._calibrations.setdefault(key, Calibration()).learn(tail, gone)
            if tail.loss > 0.0:
                self._losses.setdefault(key, Losses()).learn(tail.loss, lost)

    def _key(self, pool: str, tier: int) -> tuple[str, int]:
        known = (pool, tier) in self.reliability or len(self.reliability) < MAX_KEYS
        return (pool, tier) if known else ("(other)", tier)


def _within(value: float, low: float, high: float) -> float:
    return min(high, max(low, value))


def _softplus(x: float) -> float:
    """log(1 + e^x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _logistic(x: float) -> float:
    if x >= 0:
        return 1 / (1 + math.exp(-x))
    return math.exp(x) / (1 + math.exp(x))
