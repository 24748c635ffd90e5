"""Keeps requests from a rank on which they fail.

Pure: time and chance are given. One breaker per (replica, rank) and engine life, fed by the outcomes of requests sent
there. Closed, it lets everything through. It opens when requests fail in a row, or when too large a share of them does,
and stays open for a time that doubles from one opening to the next. After that one request may go there, as a probe: if
it gets its first token the breaker closes, if it fails it opens again. A user who goes away says nothing either way.

What was sent before the breaker opened does not count any more: it would open it again for one and the same cause.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a breaker opens, and for how long."""

    failures: int = 5
    """In a row. Envoy's outlier detection has the same."""
    share: float = 0.5
    """Of the outcomes of about the last `window_s`, failed. resilience4j has the same."""
    least: int = 20
    """Outcomes of that time below which their share says nothing: 3 of 5 is chance."""
    window_s: float = 60.0
    """Time constant by which outcomes are forgotten, seconds."""
    open_s: float = 5.0
    """First time open, seconds: beyond a hiccup, and short against an engine's start, which the doubling reaches."""
    longest_s: float = 120.0
    """Longest time open, seconds: what an engine that is back waits at most."""
    jitter: float = 0.2
    """Share by which times open differ, so that ranks that broke together are not probed together."""
    probe_s: float = 30.0
    """A probe of which nothing was heard for so long, seconds, no longer keeps others away."""


class Breaker:
    """Of one rank, in one life of its engine."""

    __slots__ = (
        "_closed_at",
        "_failed",
        "_in_row",
        "_level",
        "_opened_at",
        "_outcomes",
        "_probe_at",
        "_seen_at",
        "_settings",
        "_until",
    )

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._in_row = 0
        self._failed = 0.0
        self._outcomes = 0.0
        self._seen_at = 0.0
        """When the two counts before were brought up to date."""
        self._opened_at: float | None = None
        """None: closed."""
        self._until = 0.0
        self._level = 0
        """Times it has opened since it last worked for long."""
        self._closed_at = -math.inf
        self._probe_at: float | None = None

    @property
    def level(self) -> int:
        """How bad it is: openings since it last worked for long. 0: closed."""
        return self._level if self._opened_at is not None else 0

    def broken_s(self, now: float) -> float:
        """Seconds for which no request should go there. 0: one may, be it as a probe."""
        if self._opened_at is None:
            return 0.0
        if now < self._until:
            return self._until - now
        if self._probe_at is None:
            return 0.0
        return max(0.0, self._probe_at + self._settings.probe_s - now)

    def sent(self, now: float) -> None:
        """A request goes there."""
        if self._opened_at is not None and now >= self._until and not self.broken_s(now):
            self._probe_at = now

    def answered(self, sent_at: float, now: float) -> None:
        """A request that was sent at `sent_at` got its first token."""
        if self._stale(sent_at):
            return
        self._in_row = 0
        if self._opened_at is not None:
            self._opened_at = self._probe_at = None
            self._closed_at = now
            self._failed = self._outcomes = 0.0

    def finished(self, sent_at: float, now: float) -> None:
        """A request got its whole answer."""
        self.answered(sent_at, now)
        if not self._stale(sent_at):
            self._count(0.0, now)

    def failed(self, sent_at: float, now: float, rng: random.Random) -> None:
        """The engine refused a request, or broke off."""
        if self._stale(sent_at):
            return
        settings = self._settings
        self._in_row += 1
        self._count(1.0, now)
        often = self._outcomes >= settings.least and self._failed >= settings.share * self._outcomes
        if self._opened_at is not None or self._in_row >= settings.failures or often:
            self._open(now, rng)

    def aborted(self, sent_at: float) -> None:
        """Its user went away: if it was the probe, another may go."""
        if self._probe_at == sent_at:
            self._probe_at = None

    def _stale(self, sent_at: float) -> bool:
        """Sent before the last opening."""
        return self._opened_at is not None and sent_at <= self._opened_at

    def _open(self, now: float, rng: random.Random) -> None:
        settings = self._settings
        if self._opened_at is None and now - self._closed_at > settings.longest_s:
            self._level = 0
        times_s = min(settings.longest_s, settings.open_s * 2.0 ** min(self._level, 32))
        self._level += 1
        self._opened_at = now
        self._until = now + times_s * (1.0 + rng.uniform(-settings.jitter, settings.jitter))
        self._probe_at = None
        self._in_row = 0
        self._failed = self._outcomes = 0.0

    def _count(self, failed: float, now: float) -> None:
        kept = math.exp(-max(0.0, now - self._seen_at) / self._settings.window_s)
        self._failed = self._failed * kept + failed
        self._outcomes = self._outcomes * kept + 1.0
        self._seen_at = now
