"""Which rank learns from which outcome. Pure; the models are `learning`'s, the timing of first tokens is `labels`'s."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from servingfleet_protos.v1 import common_pb2, routing_pb2

from .fleet import POOL_LABEL, Fleet
from .labels import SAME_STEP_S, Sent
from .learning import Pace, Pool
from .policy.candidate import Candidate
from .replicas import Rank, Replica
from .settings import SchedulerSettings
from .tokens import Decision

MAX_POOLS = 256
"""Beyond it the one that was asked for longest ago is forgotten; ranks that still use it keep it."""

FULL_SHARE = 0.95
"""Of the GPU cache in use, beyond which what waits may wait for memory: then first tokens tell nothing of speed."""

_Request = routing_pb2.ReportRequest
_FINISHED = (_Request.STAGE_UNSPECIFIED, _Request.STAGE_FINISHED)
_LOST = (_Request.STAGE_FAILED, _Request.STAGE_ABORTED)
_TIERS = (
    common_pb2.TIER_GPU,
    common_pb2.TIER_HOST,
    common_pb2.TIER_DISK,
    common_pb2.TIER_SHARED,
)


class PoolKey(NamedTuple):
    """Engines that are taken to be alike."""

    model: str
    pool: str
    """As the label says; empty: none."""
    engine: str
    version: str


class Learner:
    """The speeds of all ranks."""

    def __init__(self, fleet: Fleet, settings: SchedulerSettings) -> None:
        self._fleet = fleet
        self._settings = settings
        self._pools: OrderedDict[PoolKey, Pool] = OrderedDict()

    def __iter__(self) -> Iterator[tuple[PoolKey, Pool]]:
        return iter(self._pools.items())

    def pace(self, replica: Replica, rank: Rank) -> Pace:
        """Of one rank; it has one from then on."""
        pool = self._pool(replica)
        pace = rank.pace
        if pace is None or pace.pool is not pool:
            # Another build of the engine, or another pool: what was known of the rank was of something else.
            pace = rank.pace = Pace(pool)
            pace.labels.restarted(rank.incarnation)
        return pace

    # What happens to requests

    def sent(
        self, decision_id: str, replica: Replica, rank: Rank, candidate: Candidate, now: float
    ) -> None:
        """A request goes to a rank now, for which it was this candidate."""
        if not self._settings.learn:
            return
        pace = self.pace(replica, rank)
        if pace.labels.incarnation != rank.incarnation:
            pace.labels.restarted(rank.incarnation)
        reuse = candidate.reuse
        pace.labels.sent(
            decision_id,
            Sent(
                now,
                reuse.prompt_tokens,
                reuse.tiers,
                decodes=candidate.running_requests,
                kv_usage=candidate.kv_usage,
            ),
        )

    def heard(self, report: _Request, decision: Decision, ran: tuple[str, int], now: float) -> None:
        """A report of a decision that had no outcome before. `ran`: (replica, rank) where it really ran."""
        own = self._fleet.rank(decision.replica, decision.rank)
        if ran != (decision.replica, decision.rank):
            elsewhere = self._fleet.rank(*ran)
            if elsewhere is not None and elsewhere[1].pace is not None:
                elsewhere[1].pace.labels.unclear(decision.at, now)
            self.lost(report.decision_id, decision, now)
            return
        if own is None or own[1].pace is None:
            return
        replica, rank = own
        pace = own[1].pace
        if report.stage in _LOST:
            pace.labels.lost(report.decision_id, now)
        elif report.stage == _Request.STAGE_FIRST_TOKEN:
            at = _told(report, decision, now)
            first = now if at is None else at
            pace.labels.first_token(report.decision_id, first, clear=not _full(rank))
        elif report.stage in _FINISHED:
            at = _told(report, decision, now)
            if at is not None:
                pace.labels.first_token(report.decision_id, at, clear=not _full(rank))
            cached, by_tier = _cached(report, decision)
            pace.labels.ended(report.decision_id, now, cached, by_tier)
        if pace.labels.incarnation == rank.incarnation:
            pace.learn(replica.rules)

    def lost(self, decision_id: str, decision: Decision, now: float) -> None:
        """It no longer runs where it was sent, and nobody tells how it went there. One that has ended stays as it is."""
        own = self._fleet.rank(decision.replica, decision.rank)
        if own is not None and own[1].pace is not None:
            own[1].pace.labels.lost(decision_id, now)

    # Inside

    def _pool(self, replica: Replica) -> Pool:
        label = replica.labels.get(POOL_LABEL, "")
        key = PoolKey(replica.model, label, replica.engine, replica.engine_version)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(replica.speeds, price_tiers=self._settings.price_tiers)
            while len(self._pools) > MAX_POOLS:
                self._pools.popitem(last=False)
        else:
            self._pools.move_to_end(key)
        return pool


def _told(report: _Request, decision: Decision, now: float) -> float | None:
    """When its first token came, as the report says. None: it does not, or says that it is yet to come."""
    at = decision.at + report.ttft_s
    return min(at, now) if report.HasField("ttft_s") and at <= now + SAME_STEP_S else None


def _full(rank: Rank) -> bool:
    load = rank.load
    return load is not None and bool(load.waiting_requests) and (load.kv_usage or 0.0) > FULL_SHARE


def _cached(
    report: _Request, decision: Decision
) -> tuple[int | None, tuple[int, int, int, int] | None]:
    if (
        not report.HasField("cached_tokens")
        or report.prompts_in_usage > 1
        or (report.HasField("prompt_tokens") and report.prompt_tokens != decision.prompt)
    ):
        return None, None
    if not report.cached_by_tier:
        return report.cached_tokens, None
    tokens = {each.tier: each.tokens for each in report.cached_by_tier}
    by_tier = tuple(tokens.get(tier, 0) for tier in _TIERS)
    if sum(by_tier) != report.cached_tokens:
        return report.cached_tokens, None
    return report.cached_tokens, (by_tier[0], by_tier[1], by_tier[2], by_tier[3])
