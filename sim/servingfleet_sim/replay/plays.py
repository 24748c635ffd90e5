"""A request on its way through a run, and what becomes of it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from servingfleet_protos.v1 import common_pb2, routing_pb2

from .memory import Job
from .results import Fate, Outcome
from .traces import Request

TIERS = (common_pb2.TIER_GPU, common_pb2.TIER_HOST, common_pb2.TIER_DISK, common_pb2.TIER_SHARED)
"""In the order of `results.TIERS`."""


@dataclass(slots=True, eq=False)
class Play:
    """One request on its way."""

    number: int
    request: Request
    hashes: bytes = b""
    asked_at: float = math.nan
    since: float = math.nan
    """From when its target counts: the client has come back anew where it was turned away."""
    attempts: int = 0
    turned_away: int = 0
    exclude: list[str] = field(default_factory=list)
    sent_at: float = 0.0
    decision_id: str = ""
    scheduler: int = 0
    replica: str = ""
    rank: int = -1
    response: routing_pb2.RouteResponse | None = None
    best_predicted: int = 0
    best_actual: int = 0
    seen: int = 0
    ttft_s: float = math.nan
    job: Job | None = None


def outcome(play: Play, fate: Fate, reason: str, pool: str, now: float) -> Outcome:
    response, job, request = play.response, play.job, play.request
    prediction = response.prediction if response is not None else routing_pb2.Prediction()
    by_tier = {each.tier: each.tokens for each in prediction.tiers}
    actual = (*(job.reused_tiers if job is not None else ()), 0, 0, 0, 0)[:4]
    return Outcome(
        number=play.number,
        at=play.asked_at,
        session=request.session,
        prompt=request.prompt_tokens,
        output=request.output_tokens,
        priority=request.priority,
        replica=play.replica,
        pool=pool,
        rank=play.rank,
        policy_estimate_s=response.estimated_ttft_s if response is not None else math.nan,
        ttft_s=play.ttft_s,
        finished_s=now if fate == "finished" else math.nan,
        lower=prediction.lower,
        predicted=prediction.predicted,
        upper=prediction.upper,
        expected=prediction.expected,
        best_predicted=play.best_predicted,
        actual=job.reused if job is not None else 0,
        actual_tiers=(actual[0], actual[1], actual[2], actual[3]),
        predicted_tiers=(
            by_tier.get(TIERS[0], 0),
            by_tier.get(TIERS[1], 0),
            by_tier.get(TIERS[2], 0),
            by_tier.get(TIERS[3], 0),
        ),
        best_actual=play.best_actual,
        seen=play.seen,
        target_s=request.target_s,
        fate=fate,
        scheduler=play.scheduler,
        reason=reason,
        # 0: its policy tells none.
        sd_s=(response.estimated_sd_s or math.nan) if response is not None else math.nan,
    )
