"""Turns a request away early when no target can answer before its deadline.

Pure. Only what is known may speak against a request: where the index is not sure what a target holds, the most that it
could reuse is assumed, and the risk that an engine is gone costs nothing here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from .errors import DeadlineUnreachable
from .policy.candidate import Candidate, Estimate
from .policy.estimate import load_terms, prefill_seconds

RETRY_LEAST_S = 1.0
RETRY_MOST_S = 30.0
RETRY_JITTER = 0.2
"""Share by which retry delays differ, so that refused clients don't come back at once."""


def earliest_seconds(candidate: Candidate) -> float:
    """Seconds to first token that can't be held against the target for lack of our own data."""
    reuse, speeds = candidate.reuse, candidate.speeds
    if candidate.certain:
        reused, load = reuse.predicted, sum(t.seconds for t in load_terms(speeds, reuse.tiers))
    else:
        reused, load = reuse.upper, 0.0
    return candidate.queue_s + prefill_seconds(speeds, reuse.prompt_tokens - reused, reused) + load


def admit(
    ordered: Sequence[Estimate], deadline_s: float | None, rng: random.Random
) -> list[Estimate]:
    """Those that can meet the deadline, in the policy's order; all of them if there is none.

    Raises DeadlineUnreachable, with the estimates and a delay after which the shortest queue will have drained enough.
    """
    if deadline_s is None:
        return list(ordered)
    earliest = [(earliest_seconds(each.candidate), each) for each in ordered]
    admitted = [each for seconds, each in earliest if seconds <= deadline_s]
    if admitted:
        return admitted
    seconds, best = min(earliest, key=lambda pair: pair[0])
    queue = best.candidate.queue_s
    idle = seconds - queue
    # Without a queue a retry can't help, unless caches fill meanwhile: then the longest delay.
    delay = seconds - deadline_s if idle <= deadline_s else RETRY_MOST_S
    jitter = 1.0 + rng.uniform(-RETRY_JITTER, RETRY_JITTER)
    raise DeadlineUnreachable(
        f"no target gives a first token within {deadline_s:.3f} s: the earliest is "
        f"{best.candidate.replica} rank {best.candidate.rank} in {seconds:.3f} s, "
        f"{queue:.3f} s of it queue; allow more time or retry later",
        metadata={
            "deadline_s": f"{deadline_s:.3f}",
            "estimate_s": f"{seconds:.3f}",
            "queue_s": f"{queue:.3f}",
            "idle_estimate_s": f"{idle:.3f}",
            "replica": best.candidate.replica,
            "rank": str(best.candidate.rank),
            "targets": str(len(ordered)),
        },
        retry_s=min(RETRY_MOST_S, max(RETRY_LEAST_S, delay * jitter)),
    )
