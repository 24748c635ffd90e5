"""How many prompts come to one rank, and how much of its time they take. Pure."""

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
    _at: float = 0.0

    def sent(self, now: float, work_s: float) -> None:
        """A prompt that takes so many seconds of the engine."""
        fading = self._fading(now)
        self._arrivals_per_s = self._arrivals_per_s * fading + 1.0 / MEMORY_S
        self._busy = self._busy * fading + work_s / MEMORY_S
        self._at = max(self._at, now)

    def read(self, now: float) -> tuple[float, float]:
        """Prompts a second, and the share of the engine's time that they take (above 1: more than it has)."""
        # Written out, as every route asks every rank.
        fading = math.exp((self._at - now) / MEMORY_S) if now > self._at else 1.0
        return self._arrivals_per_s * fading, self._busy * fading

    def _fading(self, now: float) -> float:
        return math.exp(-max(0.0, now - self._at) / MEMORY_S)
