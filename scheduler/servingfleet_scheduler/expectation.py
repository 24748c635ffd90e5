"""What a prediction is worth at a target: the chance of eviction, and what outcomes taught. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from servingfleet_core import Match

from .correction import NONE, Corrections
from .eviction import Evictions, Tail, cold_turnover
from .fleet import POOL_LABEL
from .policy.candidate import Reuse
from .replicas import Rank, Replica

AT_RISK = 0.05
"""A loss that was as likely as this was foreseen: it says nothing against the target's predictions as such."""

Stretches = Sequence[tuple[int, float | None]]


class Expectations:
    """Knows what to expect of predictions, and learns from what became of them."""

    def __init__(self, *, learn: bool) -> None:
        self._learn = learn
        self.evictions = Evictions(learn=learn)
        self.corrections = Corrections()

    def tail(
        self, replica: Replica, rank: Rank, match: Match, ahead_s: float, now: float
    ) -> Tail | None:
        """The block where a prediction ends, `ahead_s` before the engine gets to it; None: too little is known of it."""
        tier, idle_s = match.tail_tier, match.idle_s
        if idle_s is None:
            return None
        turnover_s = match.turnover_s
        if turnover_s is None:
            turnover_s = _unseen_turnover(replica, rank, tier, now)
            if turnover_s is None:
                return None
        pool = replica.labels.get(POOL_LABEL, "")
        alive = self.evictions.calibration(pool, tier).alive(idle_s, ahead_s, turnover_s)
        return Tail(tier, idle_s, ahead_s, turnover_s, 1.0 - alive)

    def tokens(
        self,
        replica: Replica,
        rank: Rank,
        match: Match,
        tail: Tail | None,
        stretches: Stretches,
        block_tokens: int,
        now: float,
    ) -> tuple[float, Tail | None]:
        """Tokens to count on; and the tail, with the loss foreseen. `stretches`: of blocks from the first on, with their
        idle times; of use only where the tail may be gone."""
        expected = float(match.predicted)
        if tail is not None and tail.gone > 0.0:
            surviving = self._surviving(replica, tail, stretches, match.predicted, block_tokens)
            tail = tail._replace(loss=match.predicted - surviving)
            pool = replica.labels.get(POOL_LABEL, "")
            expected -= tail.loss * self.evictions.loss_share(pool, tail.tier)
        if self._learn:
            factors = self.corrections.factors((replica.name, rank.number), now)
            if factors != NONE:
                unsure = match.predicted - match.lower
                worth = factors.sure * match.lower + factors.unsure * unsure
                expected *= worth / max(1, match.predicted)
        return expected, tail

    def learn(
        self,
        replica: Replica,
        rank: int,
        reuse: Reuse,
        tail: Tail | None,
        actual: int,
        now: float,
    ) -> None:
        """An outcome of a prompt that ran there, in tokens."""
        if tail is not None:
            unit = max((lane.unit_tokens for lane in replica.profile.lanes), default=0)
            pool = replica.labels.get(POOL_LABEL, "")
            lost = max(0, reuse.predicted - actual)
            self.evictions.learn(pool, tail, lost > unit, lost)
        if self._learn and reuse.predicted and (tail is None or tail.gone < AT_RISK):
            self.corrections.learn(
                (replica.name, rank),
                lower=reuse.lower,
                predicted=reuse.predicted,
                actual=actual,
                now=now,
            )

    def _surviving(
        self, replica: Replica, tail: Tail, stretches: Stretches, predicted: int, block_tokens: int
    ) -> float:
        """Tokens times the chance that each is there: a block is of use only with all before it."""
        pool = replica.labels.get(POOL_LABEL, "")
        curve = self.evictions.calibration(pool, tail.tier)
        expected, at, alive = 0.0, 0, 1.0
        for blocks, idle_s in stretches:
            end = min(predicted, at + blocks * block_tokens)
            if idle_s is not None:
                alive = min(alive, curve.alive(idle_s, tail.ahead_s, tail.turnover_s))
            expected += (end - at) * alive
            at = end
        return expected + (predicted - at) * min(alive, 1.0 - tail.gone)


def _unseen_turnover(replica: Replica, rank: Rank, tier: int, now: float) -> float | None:
    """Of a tier that was not seen to evict enough yet, from its capacity and what is stored there.

    Only of the slowest tier that the engine has: what leaves a faster one mostly moves on.
    """
    if tier != replica.slowest_tier or not rank.inserted:
        return None
    known = []
    for lane, capacity_tokens in replica.slowest_lanes:
        inserted = rank.inserted.get(lane)
        if inserted is not None:
            turnover = cold_turnover(capacity_tokens, inserted.rate(now))
            if turnover is not None:
                known.append(turnover)
    return min(known, default=None)
