"""Weighted shares instead of seconds: how much of the prompt is cached, how many wait, how full the cache is.

The usual control of a router that knows caches: the weights are the defaults of llm-d's scorers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from .candidate import Candidate, Estimate
from .ties import shared_first

OVERLAP_WEIGHT = 3.0
"""Of the cached share of the prompt. The three weights are llm-d's defaults."""
QUEUE_WEIGHT = 2.0
"""Of the shortest queue, down to 0 for the longest."""
USAGE_WEIGHT = 2.0
"""Of an empty cache, down to 0 for a full one."""
TIER_WEIGHTS = (1.0, 0.8, 0.8, 0.8)
"""Of a cached token on the GPU, and beyond it."""


class PrefixOverlap:
    """Orders by 3 * cached share + 2 * (1 - waiting, as a share of the range) + 2 * (1 - cache in use)."""

    name = "prefix-overlap"
    from_memory = False

    def order(self, estimates: Sequence[Estimate], rng: random.Random) -> list[Estimate]:
        waiting = [_waiting(each.candidate) for each in estimates]
        least, most = min(waiting, default=0), max(waiting, default=0)
        scores = [
            -_score(each.candidate, (most - count) / (most - least) if most > least else 1.0)
            for each, count in zip(estimates, waiting, strict=True)
        ]
        return shared_first(estimates, scores, rng)


def _score(candidate: Candidate, free: float) -> float:
    reuse = candidate.reuse
    cached = sum(weight * tokens for weight, tokens in zip(TIER_WEIGHTS, reuse.tiers, strict=True))
    return (
        OVERLAP_WEIGHT * cached / reuse.prompt_tokens
        + QUEUE_WEIGHT * free
        + USAGE_WEIGHT * (1.0 - candidate.kv_usage)
    )


def _waiting(candidate: Candidate) -> int:
    # What was sent and does not run yet waits, also where the engine's figures are older than that.
    return max(
        candidate.waiting_requests, candidate.dispatched_requests - candidate.running_requests
    )
