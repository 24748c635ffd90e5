"""Expected seconds to first token, from plain defaults.

    seconds = queue + (step + token*n + attention*n*(h + n/2)) + load of what lies beyond GPU memory
              + the risk that the engine is gone

with n prompt tokens to compute and h reused ones; the numbers are `speeds`.
"""

from __future__ import annotations

from collections.abc import Iterable

from .candidate import Candidate, Estimate, Reuse, Term
from .speeds import TIER_NAMES, Speeds, TierSpeed


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


def estimate(candidate: Candidate) -> Estimate:
    """The terms of one candidate."""
    reuse, speeds = candidate.reuse, candidate.speeds
    computed = reuse.prompt_tokens - reuse.predicted
    terms = [
        Term("queue", candidate.queue_s),
        Term("prefill", prefill_seconds(speeds, computed, reuse.predicted)),
        *load_terms(speeds, reuse.tiers),
    ]
    if candidate.unproven:
        terms.append(Term("unproven", speeds.unproven_s))
    return Estimate(candidate, tuple(terms), sum(term.seconds for term in terms))


def estimates(candidates: Iterable[Candidate]) -> list[Estimate]:
    """`estimate` of each. Most targets hold nothing of a prompt and are equal: those are worked out once."""
    known: dict[tuple[Reuse, float, bool, int], Estimate] = {}
    found = []
    for candidate in candidates:
        # A pool's speeds are one object: comparing its numbers would cost more than working the estimate out.
        speeds = id(candidate.speeds)
        key = (candidate.reuse, candidate.queue_s, candidate.unproven, speeds)
        equal = known.get(key)
        if equal is None:
            known[key] = made = estimate(candidate)
        else:
            made = Estimate(candidate, equal.terms, equal.seconds)
        found.append(made)
    return found
