"""Seconds of prefill work ahead on one rank, from the engine's report and from what was sent there.

Pure. Nothing is counted twice: a request that was sent before the report was read is in the report; one sent after is
not. The engine works first come, first served, one request after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

READING_JITTER_S = 0.05
"""A dispatch so shortly before the reading may not have reached the engine's queue yet."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A request sent to a rank. `work_s`: its own expected prefill and load."""

    at: float
    work_s: float
    number: int
    first_token: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine said of itself at `read_at`. None: it does not say."""

    read_at: float
    running_requests: int | None = None
    waiting_requests: int | None = None
    waiting_tokens: int | None = None
    kv_usage: float | None = None


def backlog_seconds(
    dispatches: Iterable[Dispatch],
    load: Load | None,
    now: float,
    *,
    token_s: float,
    request_s: float,
) -> float:
    """`token_s`: seconds per uncached token; `request_s`: of a request of which nothing is known."""
    waiting = sorted((each for each in dispatches if not each.first_token), key=lambda d: d.at)
    if load is None:
        return _drain(0.0, now, waiting, now)
    horizon = load.read_at - READING_JITTER_S
    before = [each for each in waiting if each.at <= horizon]
    after = [each for each in waiting if each.at > horizon]
    if load.waiting_tokens is not None:
        reported = load.waiting_tokens * token_s
    elif load.waiting_requests is not None:
        # The engine knows how many wait, the dispatches how long each takes: the last sent are those that wait still.
        known = before[len(before) - min(load.waiting_requests, len(before)) :]
        reported = sum(each.work_s for each in known)
        reported += (load.waiting_requests - len(known)) * request_s
    else:
        return _drain(0.0, now, waiting, now)
    return _drain(reported, load.read_at, after, now)


def _drain(work: float, at: float, arrivals: Iterable[Dispatch], now: float) -> float:
    """Work left at `now` of a server that had `work` seconds at `at` and took `arrivals`, in order of time."""
    for each in arrivals:
        work = max(0.0, work - max(0.0, each.at - at)) + each.work_s
        at = each.at
    return max(0.0, work - max(0.0, now - at))
