"""Times and work of played requests, with intervals over conversations. Pure.

Requests of one conversation share its history, so that conversations are drawn anew, not requests. The intervals tell
how much the conversations differ; another run on another machine differs by more.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from .clients import End, Request

DRAWS = 1000
MIN_SESSIONS = 20
"""From fewer conversations nothing is said."""


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval; None where too few conversations speak."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Difference:
    """The same turns under two policies: each mean, and first minus second."""

    first: float | None
    second: float | None
    difference: Estimate


def p95(values: Sequence[float]) -> float:
    """The value that 95 of 100 don't exceed."""
    ordered = sorted(values)
    return ordered[-(-len(ordered) * 95 // 100) - 1]


def ttft(requests: Iterable[Request], of: Callable[[Sequence[float]], float]) -> Estimate:
    """Seconds to the first token over finished requests: `of` is the mean or a quantile."""
    by_session: dict[int, list[float]] = defaultdict(list)
    for request in requests:
        if request.end is End.FINISHED and request.ttft_s is not None:
            by_session[request.session].append(request.ttft_s)
    return _estimate(list(by_session.values()), of)


def ttft_difference(first: Iterable[Request], second: Iterable[Request]) -> Difference:
    """Mean seconds to the first token over the turns that finished under both policies."""
    return _difference(_ttfts(first), _ttfts(second))


def work_difference(first: Iterable[Request], second: Iterable[Request]) -> Difference:
    """Prompt tokens computed per request, likewise."""
    return _difference(_computed(first), _computed(second))


def _ttfts(requests: Iterable[Request]) -> dict[tuple[int, int], float]:
    return {
        (each.session, each.turn): each.ttft_s
        for each in requests
        if each.end is End.FINISHED and each.ttft_s is not None
    }


def _computed(requests: Iterable[Request]) -> dict[tuple[int, int], float]:
    return {
        (each.session, each.turn): float(each.prompt_tokens - each.cached_tokens)
        for each in requests
        if each.end is End.FINISHED
        and each.prompt_tokens is not None
        and each.cached_tokens is not None
    }


def _difference(
    first: Mapping[tuple[int, int], float], second: Mapping[tuple[int, int], float]
) -> Difference:
    common = sorted(first.keys() & second.keys())
    if not common:
        return Difference(None, None, Estimate())
    by_session: dict[int, list[float]] = defaultdict(list)
    for session, turn in common:
        by_session[session].append(first[session, turn] - second[session, turn])
    return Difference(
        fmean(first[turn] for turn in common),
        fmean(second[turn] for turn in common),
        _estimate(list(by_session.values()), fmean),
    )


def _estimate(
    sessions: Sequence[Sequence[float]], of: Callable[[Sequence[float]], float]
) -> Estimate:
    if len(sessions) < MIN_SESSIONS:
        return Estimate()
    rng = random.Random(0)  # the same conversations give the same interval
    drawn = sorted(
        of([value for session in rng.choices(sessions, k=len(sessions)) for value in session])
        for _ in range(DRAWS)
    )
    value = of([value for session in sessions for value in session])
    return Estimate(value, drawn[round(0.025 * DRAWS)], drawn[round(0.975 * DRAWS) - 1])
