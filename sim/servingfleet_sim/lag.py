"""Whether this machine kept up: how late its own clock and the emulated engines answer.

Emulated time is wall time. On a machine that is too busy engines, relays and clients are late, and what they measure is
the machine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import httpx

from .emulator.rank import MAX_LAG_S

TICK_S = 0.02
PROBE_S = 0.5
PROBE_DEADLINE_S = 5.0
KEPT = 100_000
"""Latest measurements kept: half an hour of ticks."""


@dataclass
class Lag:
    """Seconds by which things came late."""

    loop: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """This process's timers."""
    engines: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    """Round trips to an engine's /health: an engine that is on time answers at once."""

    async def watch_loop(self) -> None:
        """Measures for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self.loop.append(max(0.0, clock() - due))

    async def watch_engine(self, http: httpx.AsyncClient, base: str) -> None:
        """Measures for ever. An engine that does not answer counts as late by the deadline."""
        clock = asyncio.get_running_loop().time
        while True:
            asked = clock()
            try:
                await http.get(f"{base}/health", timeout=PROBE_DEADLINE_S)
            except httpx.HTTPError:
                self.engines.append(PROBE_DEADLINE_S)
            else:
                self.engines.append(clock() - asked)
            await asyncio.sleep(PROBE_S)

    @property
    def kept_up(self) -> bool:
        """99 of 100 were less late than emulated engines can make up for."""
        return max(quantile(self.loop, 0.99), quantile(self.engines, 0.99)) <= MAX_LAG_S


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which that share of them lies; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
