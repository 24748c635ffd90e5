"""What a policy may look at, and what it must answer.

A policy is one small class: it orders estimates, best first. It keeps no state of its own, so that `Explain` can ask
it without consequence; what it needs to remember is in the candidates.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reuse:
    """Prompt tokens that a target is expected to reuse: lower <= predicted <= upper."""

    prompt_tokens: int
    lower: int
    predicted: int
    upper: int
    tiers: tuple[int, int, int, int] = (0, 0, 0, 0)
    """`predicted` from gpu, host, disk, shared."""


@dataclass(frozen=True, slots=True)
class Candidate:
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
    last_dispatch: int = 0
    """Number of the last dispatch there, rising over all targets; 0: never."""


@dataclass(frozen=True, slots=True)
class Term:
    """A part of the estimate, in seconds."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A candidate and its expected seconds to first token."""

    candidate: Candidate
    terms: tuple[Term, ...]

    @property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms)


class Policy(Protocol):
    """Orders candidates, best first."""

    name: str

    def order(self, estimates: Sequence[Estimate], rng: random.Random) -> list[Estimate]:
        """A permutation of `estimates`. Chance, where it is wanted, comes from `rng` only."""
        ...
