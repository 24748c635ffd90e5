"""What a policy may look at, and what it must answer.

A policy is one small class: it orders estimates, best first. It keeps no state of its own, so that `Explain` can ask
it without consequence; what it needs to remember is in the candidates.

Values are named tuples: every request makes some for every target, and nothing immutable is made faster.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .speeds import DEFAULTS, Speeds


class Reuse(NamedTuple):
    """Prompt tokens that a target is expected to reuse: lower <= predicted <= upper."""

    prompt_tokens: int
    lower: int
    predicted: int
    upper: int
    expected: float
    """What the cost counts on: `predicted` less the chance of eviction, and as such predictions turned out before."""
    tiers: tuple[int, int, int, int] = (0, 0, 0, 0)
    """`predicted` from gpu, host, disk, shared."""


class Candidate(NamedTuple):
    """One (replica, rank) as known now, for one prompt."""

    replica: str
    rank: int
    reuse: Reuse
    queue_s: float
    """Seconds of prefill work ahead."""
    certain: bool
    """The stream is live and its snapshot complete: the prediction rests on all the engine holds."""
    unproven: bool = False
    """The stream broke off: the engine may be gone."""
    running_requests: int = 0
    waiting_requests: int = 0
    dispatched_requests: int = 0
    """Sent by this scheduler and not yet ended."""
    gone: float = 0.0
    """Chance that the last predicted block is evicted before the engine gets to it."""
    last_dispatch: int = 0
    """Number of the last dispatch there, rising over all targets; 0: never."""
    speeds: Speeds = DEFAULTS
    """Of its pool."""


class Term(NamedTuple):
    """A part of the estimate, in seconds."""

    name: str
    seconds: float


class Estimate(NamedTuple):
    """A candidate and its expected seconds to first token."""

    candidate: Candidate
    terms: tuple[Term, ...]
    seconds: float
    """Sum of the terms."""
    sd_s: float = 0.0
    """Standard deviation of `seconds`."""
    propensity: float = 1.0
    """Probability with which the policy would put it first; 0 for all others where no chance was in play."""


class Policy(Protocol):
    """Orders candidates, best first."""

    name: str

    def order(self, estimates: Sequence[Estimate], rng: random.Random) -> list[Estimate]:
        """A permutation of `estimates`. Chance, where it is wanted, comes from `rng` only."""
        ...
