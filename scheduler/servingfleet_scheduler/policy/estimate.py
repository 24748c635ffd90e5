"""Expected seconds to first token, from plain defaults.

    seconds = queue + (step + token*n + attention*n*(h + n/2)) + load of what lies beyond GPU memory
              + the risk that the engine is gone

with n prompt tokens to compute and h reused ones. The defaults describe an 8B model on one H100-class GPU; what
matters for a choice is their order of size, and a pool that differs sets its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .candidate import Candidate, Estimate, Reuse, Term

TIER_NAMES = ("gpu", "host", "disk", "shared")


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """Time to load cached tokens into GPU memory: `fixed_s + tokens * token_s`."""

    fixed_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds that an engine needs. Priors, not measurements of this fleet."""

    step_s: float = 0.040
    """Per request, whatever its length: tokenising, scheduling, one step. Fits of public series gave 40 and 45 ms."""
    token_s: float = 5e-5
    """Per computed token: 20,000 tokens a second; public series lie between 8,000 and 50,000."""
    attention_s: float = 1.7e-9
    """Per pair of computed and attended token: equals the linear part at about 30,000 tokens of context."""
    host: TierSpeed = TierSpeed(fixed_s=0.003, token_s=3.3e-6)
    """128 KiB a token over PCIe 5 at 40 GB/s."""
    disk: TierSpeed = TierSpeed(fixed_s=0.008, token_s=2.6e-5)
    """The same from local NVMe at 5 GB/s."""
    shared: TierSpeed = TierSpeed(fixed_s=0.008, token_s=1.6e-5)
    """The same from a shared store at 8 GB/s a node."""
    request_tokens: int = 1024
    """Uncached tokens of a waiting request of which nothing else is known."""
    unproven_s: float = 1.0
    """Price of an engine whose stream broke off: it may be dead, and a failed request must go elsewhere. A dead
    engine has no queue, so that without this it would look best."""


def prefill_seconds(speeds: Speeds, computed: int, reused: int) -> float:
    """Time to compute `computed` tokens after `reused` ones: superlinear, since each attends to all before it."""
    return (
        speeds.step_s
        + speeds.token_s * computed
        + speeds.attention_s * computed * (reused + computed / 2)
    )


def load_terms(speeds: Speeds, tiers: tuple[int, int, int, int]) -> tuple[Term, ...]:
    """Load time for each tier beyond the GPU that is used. Charged in full: no overlap is assumed."""
    terms = []
    for name, tokens in zip(TIER_NAMES[1:], tiers[1:], strict=True):
        if tokens:
            speed: TierSpeed = getattr(speeds, name)
            terms.append(Term(f"load_{name}", speed.fixed_s + speed.token_s * tokens))
    return tuple(terms)


def work_seconds(speeds: Speeds, reuse: Reuse) -> float:
    """Time that this prompt takes once its turn has come."""
    computed = reuse.prompt_tokens - reuse.predicted
    return prefill_seconds(speeds, computed, reuse.predicted) + sum(
        term.seconds for term in load_terms(speeds, reuse.tiers)
    )


def unknown_request_seconds(speeds: Speeds) -> float:
    """Work of a request of which nothing is known but that it waits."""
    return prefill_seconds(speeds, speeds.request_tokens, 0)


def estimate(speeds: Speeds, candidate: Candidate) -> Estimate:
    """The terms of one candidate."""
    reuse = candidate.reuse
    computed = reuse.prompt_tokens - reuse.predicted
    terms = [
        Term("queue", candidate.queue_s),
        Term("prefill", prefill_seconds(speeds, computed, reuse.predicted)),
        *load_terms(speeds, reuse.tiers),
    ]
    if candidate.unproven:
        terms.append(Term("unproven", speeds.unproven_s))
    return Estimate(candidate, tuple(terms), sum(term.seconds for term in terms))


def estimates(speeds: Speeds, candidates: Iterable[Candidate]) -> list[Estimate]:
    """`estimate` of each. Most targets hold nothing of a prompt and are equal: those are worked out once."""
    known: dict[tuple[Reuse, float, bool], Estimate] = {}
    found = []
    for candidate in candidates:
        key = (candidate.reuse, candidate.queue_s, candidate.unproven)
        equal = known.get(key)
        if equal is None:
            known[key] = made = estimate(speeds, candidate)
        else:
            made = Estimate(candidate, equal.terms, equal.seconds)
        found.append(made)
    return found
