"""What a policy may look at, and what it must answer.

A policy is one small class: it orders estimates, best first. It keeps no state of its own, so that `Explain` can ask
it without consequence; what it needs to remember is in the candidates.

Values are named tuples: every request makes some for every target, and nothing immutable is made faster.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..eviction import Tail
from .rules import UNKNOWN, Rules
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
    """One (replica, rank) as known now, for one prompt. A new field goes to the end: `candidates` gives them by position."""

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
    queue_sd_s: float = 0.0
    """Standard deviation of `queue_s`: the wider, the older the engine's metrics."""
    queue_noise_s: float = 0.0
    """The same, were the metrics fresh."""
    kv_usage: float = 0.0
    """Share of the GPU cache in use, 0 to 1."""
    scale: float = 1.0
    """What this rank takes of its pool's seconds: 1.2 is a fifth slower."""
    scale_sd: float = 0.0
    """Standard deviation of `scale`."""
    labels: int = 0
    """Outcomes that its speed was learned from."""
    rules: Rules = UNKNOWN
    """Of its engine."""
    tail: Tail | None = None
    """The last predicted block, for what its outcome may teach. None: too little is known of it."""
    quantile: float = 0.5
    """Where between `lower` and `upper` the prompt's reuse is priced; 0.5: at `expected`."""
    arrivals_per_s: float = 0.0
    """Prompts that come there."""
    busy: float = 0.0
    """Share of its time that they take."""
    gap_s: float = 0.0
    """Mean seconds that they would lose at the next best target."""


class Term(NamedTuple):
    """A part of the estimate, in seconds."""

    name: str
    seconds: float


PARTS = (
    "queue",
    "prefill",
    "load_host",
    "load_disk",
    "load_shared",
    "recompute_host",
    "recompute_disk",
    "recompute_shared",
    "evicted",
    "uncertain",
    "decodes",
    "unproven",
)
"""Names of an estimate's parts; docs/scheduler.md says what each is."""
_EVICTED = PARTS.index("evicted")
_ALWAYS = 2
"""Parts that are told also where they are zero."""


class Estimate(NamedTuple):
    """A candidate and its expected seconds to first token."""

    candidate: Candidate
    parts: tuple[float, ...]
    """Seconds, in the order of PARTS."""
    seconds: float
    """Sum of the parts."""
    work_s: float = 0.0
    """Of them, what this prompt takes once its turn has come."""
    variance: float = 0.0
    """Square seconds: what its pool's speeds and the reuse are uncertain by, for a rank like its pool."""
    propensity: float = 1.0
    """Probability with which the policy would put it first; 0 for all others where no chance was in play."""
    engine_s: float = 0.0
    """Of `work_s`, what keeps the engine from others: without loads that run while the prompt waits."""

    def likely(self, propensity: float) -> Estimate:
        """The same, with that propensity."""
        # Written out: near ties are many, and `_replace` takes three times as long.
        candidate, parts, seconds, work_s, variance, _, engine_s = self
        return Estimate(candidate, parts, seconds, work_s, variance, propensity, engine_s)

    @property
    def sd_s(self) -> float:
        """Standard deviation of `seconds`. Worked out when it is asked for: mostly of the first only."""
        candidate, scale, evicted = self.candidate, self.candidate.scale, self.parts[_EVICTED]
        share, noise = candidate.scale_sd / scale, candidate.speeds.noise_share
        variance = (
            scale * scale * self.variance
            + self.work_s * self.work_s * (share * share + noise * noise)
            + candidate.queue_sd_s * candidate.queue_sd_s
        )
        if evicted and 0.0 < candidate.gone < 1.0:
            # Evicted with this chance, or not at all: then `evicted` is that share of the whole loss.
            variance += evicted * evicted * (1.0 - candidate.gone) / candidate.gone
        return math.sqrt(variance)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The parts by name, without those that are nothing."""
        named = zip(PARTS, self.parts, strict=True)
        return tuple(
            Term(name, seconds)
            for number, (name, seconds) in enumerate(named)
            if seconds or number < _ALWAYS
        )


class Policy(Protocol):
    """Orders candidates, best first."""

    name: str
    from_memory: bool
    """It wants candidates whose reuse is what this scheduler remembers to have sent there, not what is known."""

    def order(self, estimates: Sequence[Estimate], rng: random.Random) -> list[Estimate]:
        """A permutation of `estimates`, each with its propensity. Chance, where it is wanted, comes from `rng` only."""
        ...
