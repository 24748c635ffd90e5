"""What a replay leaves: one row for each request, and the sums that no row tells.

Times are seconds of simulated time since the run began, counts are tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from servingfleet_core.figures import Sums

Fate = Literal["finished", "rejected", "failed", "unfinished"]

TIERS = ("gpu", "host", "disk", "shared")
"""Names of the places in `actual_tiers` and `predicted_tiers`."""


class Outcome(NamedTuple):
    """One request of one run. Where it was sent more than once, the last attempt speaks."""

    number: int
    """Position in the trace, from 0. The same request has the same number under every policy and seed."""
    at: float
    """When the client first asked: its times count from here."""
    session: str
    prompt: int
    output: int
    priority: int
    replica: str
    """Empty where no scheduler sent it anywhere (rejected), as is `pool`; `rank` is then -1."""
    pool: str
    rank: int
    policy_estimate_s: float
    """Seconds to first token as the scheduler estimated when it chose; nan: never chosen."""
    ttft_s: float
    """From `at` to the first token, waits between attempts included; nan: none came."""
    finished_s: float
    """When the last token came, since the run began; nan: it never did."""
    lower: int
    predicted: int
    upper: int
    expected: float
    """What the cost reckoned with, after eviction chance and learned correction."""
    best_predicted: int
    """Longest predicted reuse on any rank when it was routed."""
    actual: int
    """Reused, as the engine reports it. 0 where it never began."""
    actual_tiers: tuple[int, int, int, int]
    predicted_tiers: tuple[int, int, int, int]
    best_actual: int
    """Longest truly reusable prefix on any rank when it was routed, by the engines' own caches."""
    seen: int
    """Longest prefix that any prompt sent before had too: what one endless cache for all would reuse (U1)."""
    target_s: float
    """Time to first token that the request asks for; nan: none."""
    fate: Fate
    scheduler: int
    """Which of them decided, from 0."""
    reason: str = ""
    """Why it was rejected or failed, as the scheduler words it. Empty otherwise."""
    sd_s: float = math.nan
    """Standard deviation of the scheduler's estimate; nan: its policy gives none."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What other placements could have reused of the same requests, in order of arrival. Tokens."""

    prompt: int
    """All prompt tokens: the denominator of the others."""
    u1: int
    """One endless cache that all share."""
    u2: int
    """One cache as large as the fleet's together, which forgets what is needed last (Belady)."""
    u3: int
    """The same, which forgets what was used longest ago (LRU)."""
    u4: int
    """The fleet's own caches, each request placed for the most reuse, by perfect knowledge and whatever the time."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """How much the predictions of several schedulers differ for one and the same prompt and rank, when it is routed."""

    samples: int = 0
    """Prompts that all schedulers were asked for."""
    prompt: int = 0
    """Their tokens."""
    tokens: int = 0
    """Of those, summed: the largest difference between any two schedulers on the rank that the request was sent to."""
    other_choice: int = 0
    """Samples where another scheduler would have chosen another rank."""


@dataclass(frozen=True)
class Run:
    """One repeat: the same trace and fleet under one policy, arrivals jittered by `seed`."""

    policy: str
    seed: int
    outcomes: list[Outcome]
    """By number; one for every request of the trace."""
    wall_s: float
    """Seconds the simulation itself took."""
    simulated_s: float
    """From the first arrival to the last event."""
    computed_tokens: dict[str, int]
    """Prompt tokens computed, by replica: for imbalance."""
    busy_s: dict[str, float]
    """Seconds in steps, by rank ("replica/rank")."""
    scheduler_sums: list[Sums]
    """The production ledgers' totals, one for each scheduler."""
    ceilings: Ceilings
    disagreement: Disagreement = field(default_factory=Disagreement)
    counters: dict[str, int] = field(default_factory=dict)
    """What happened besides, by bounded names: events lost, resyncs, engine failures, attempts repeated, ..."""
