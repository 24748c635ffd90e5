"""Simulated time: what is due, in order; equal times in the order in which they were put there."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """A heap of what is due. `now` is seconds since the run began."""

    def __init__(self) -> None:
        self.now = 0.0
        self.work = 0
        """How much is due that is not idle."""
        self._count = 0
        self._due: list[tuple[float, int, bool, Callable[[], None]]] = []

    def at(self, time: float, what: Callable[[], None], *, idle: bool = False) -> None:
        """Does it then; at once, if then is past. `idle`: it comes again and again, and brings no request on."""
        self._count += 1
        self.work += not idle
        heapq.heappush(self._due, (max(time, self.now), self._count, idle, what))

    def step(self) -> bool:
        """Goes to the next time at which something is due, and does it. False: nothing is."""
        if not self._due:
            return False
        self.now, _, idle, what = heapq.heappop(self._due)
        self.work -= not idle
        what()
        return True
