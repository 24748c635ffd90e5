"""How many prompts come to one rank, how much of its time they take, and what they would lose elsewhere. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY_S = 60.0
"""Time constant: a minute is long against a prompt, and short against a day's load."""


@dataclass(slots=True)
class Traffic:
    """Exponentially fading averages of what was sent to a rank, by whatever scheduler."""

    _arrivals_per_s: float = 0.0
    _busy: float = 0.0
    _gaps: float = 0.0
    _chosen: float = 0.0
    """Prompts whose gap is known, as `_gaps`: those of this scheduler."""
    _at: float = 0.0

    def sent(self, now: float, work_s: float, gap_s: float | None = None) -> None:
        """A prompt that takes so many seconds of the engine, and would have waited `gap_s` longer at the next best rank.
        None: nobody said."""
        fading = self._fading(now)
        self._arrivals_per_s = self._arrivals_per_s * fading + 1.0 / MEMORY_S
        self._busy = self._busy * fading + work_s / MEMORY_S
        self._gaps *= fading
        self._chosen *= fading
        if gap_s is not None:
            self._gaps += gap_s
            self._chosen += 1.0
        self._at = max(self._at, now)

    def read(self, now: float) -> tuple[float, float, float]:
        """Prompts a second, the share of the engine's time that they take (above 1: more than it has), and the mean
        seconds that they would lose elsewhere (0: not known)."""
        # Written out, as every route asks every rank.
        fading = math.exp((self._at - now) / MEMORY_S) if now > self._at else 1.0
        gap_s = self._gaps / self._chosen if self._chosen else 0.0
        return self._arrivals_per_s * fading, self._busy * fading, gap_s

    def _fading(self, now: float) -> float:
        return math.exp(-max(0.0, now - self._at) / MEMORY_S)
