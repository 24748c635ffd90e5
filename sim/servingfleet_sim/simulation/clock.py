"""The simulated time: what happens next, and links whose messages keep their order."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Generic, TypeVar

Message = TypeVar("Message")

MAX_EVENTS = 200_000
"""A schedule that needs more never comes to rest."""


class Restless(RuntimeError):
    """Too many events: something answers itself for ever."""


class Events:
    """A heap of what is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, what: Callable[[], None]) -> None:
        """Does it then, after all that was put there for the same time before."""
        self.count += 1
        heapq.heappush(self._due, (max(time, self.now), self.count, what))

    def after(self, delay: float, what: Callable[[], None]) -> None:
        self.at(self.now + delay, what)

    def run(self, until: float) -> None:
        """Lets time pass. Raises Restless."""
        while self._due and self._due[0][0] <= until:
            self.now, _, what = heapq.heappop(self._due)
            what()
            if self.count > MAX_EVENTS:
                raise Restless(f"{self.count} events by {self.now:.2f} s")
        self.now = until


class Clock:
    """A process's own clock: another zero, and it may jump ahead."""

    def __init__(self, events: Events, offset: float) -> None:
        self.offset = offset
        self._events = events

    def __call__(self) -> float:
        return self._events.now + self.offset


class Channel(Generic[Message]):
    """One direction of one connection: every message is delayed, none overtakes another, none comes after the end."""

    def __init__(
        self,
        events: Events,
        rng: random.Random,
        delay_s: Callable[[], float],
        deliver: Callable[[Message], None],
        reads_at: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`reads_at`: when the receiver reads (again); it may lie in the past."""
        self.under_way = 0
        self.open = True
        self._events = events
        self._rng = rng
        self._delay_s = delay_s
        self._deliver = deliver
        self._reads_at = reads_at
        self._last = 0.0

    def send(self, message: Message) -> None:
        """Lost if the channel is closed, or is closed before it arrives."""
        if not self.open:
            return
        self.under_way += 1
        # Most messages come at once, a few late.
        late = self._delay_s() * self._rng.random() ** 3
        self._last = max(self._last, self._events.now + late)
        self._events.at(self._last, lambda: self._arrive(message))

    def _arrive(self, message: Message) -> None:
        reads_at = self._reads_at()
        if self.open and reads_at > self._events.now:
            self._events.at(reads_at, lambda: self._arrive(message))
            return
        self.under_way -= 1
        if self.open:
            self._deliver(message)

    def close(self) -> None:
        """What is under way is lost."""
        self.open = False
