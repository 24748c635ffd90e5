"""Keys that wait for work: each at most once, gathered, spaced, and retried with a backoff of its own.

`Schedule` decides and reads no clock; `work` runs it on the event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .errors import ClusterError, OperatorError

log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Seconds, unless the name says otherwise."""

    gather_s: float = 0.1
    """A change waits so long for those that come with it: an apply makes several."""
    spacing_s: float = 0.5
    """From the end of a key's work to its next start: pods that start by the hundred cost two reconciles a second."""
    first_backoff_s: float = 1.0
    longest_backoff_s: float = 300.0
    jitter: float = 0.2
    """Share by which a backoff is stretched at most, so that keys which failed together don't come back together."""
    workers: int = 4


@dataclass(slots=True)
class _Entry:
    due: float | None = None
    """When it is to be worked on. None: not asked for."""
    working: bool = False
    failures: int = 0
    earliest: float = float("-inf")


@dataclass(slots=True)
class Schedule(Generic[K]):
    """When which key is due. Every method takes the time; keys that nobody waits for are forgotten."""

    settings: QueueSettings
    rng: random.Random
    _entries: dict[K, _Entry] = field(default_factory=dict)
    _heap: list[tuple[float, int, K]] = field(default_factory=list)
    _order: int = 0

    def add(self, key: K, now: float, delay_s: float | None = None) -> None:
        """Asks for the key after `delay_s` (None: what gathering takes), or sooner if it was asked for already."""
        due = now + (self.settings.gather_s if delay_s is None else delay_s)
        entry = self._entries.setdefault(key, _Entry())
        due = max(due, entry.earliest)
        if entry.due is not None and entry.due <= due:
            return
        entry.due = due
        if not entry.working:
            self._push(due, key)

    def pop(self, now: float) -> K | None:
        """A key whose time has come and which nobody works on; it is the caller's until `done` or `failed`."""
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            entry = self._entries.get(key)
            if entry is None or entry.working or entry.due != due:
                if entry is not None and not entry.working and entry.due is None:
                    del self._entries[key]  # nobody asked while it kept its distance
                continue
            entry.due, entry.working = None, True
            return key
        return None

    def done(self, key: K, now: float, again_s: float | None) -> None:
        """The work went well; `again_s`: look again after so long at the latest. None: only when asked."""
        entry = self._entries[key]
        entry.failures = 0
        self._finish(key, entry, now, again_s)

    def failed(self, key: K, now: float, retry_s: float | None = None) -> float:
        """The work failed. Returns the seconds until it is tried again: longer each time, `retry_s` at least."""
        entry = self._entries[key]
        backoff = self.settings.first_backoff_s * 2.0 ** min(entry.failures, 32)
        wait = min(backoff, self.settings.longest_backoff_s)
        wait = max(wait, retry_s or 0.0) * (1 + self.rng.uniform(0, self.settings.jitter))
        entry.failures += 1
        self._finish(key, entry, now, wait)
        return wait

    def next_due(self) -> float | None:
        """When the next key is due. None: none waits."""
        return self._heap[0][0] if self._heap else None

    def forget(self, key: K) -> None:
        """Nobody needs the key any more; work in progress is not disturbed."""
        entry = self._entries.get(key)
        if entry is not None and entry.working:
            entry.due = None
        else:
            self._entries.pop(key, None)

    def __len__(self) -> int:
        """Keys that wait or are worked on."""
        return len(self._entries)

    def _finish(self, key: K, entry: _Entry, now: float, again_s: float | None) -> None:
        entry.working = False
        entry.earliest = now + self.settings.spacing_s
        asked = [] if entry.due is None else [max(entry.due, entry.earliest)]
        if again_s is not None:
            asked.append(now + max(again_s, self.settings.spacing_s))
        entry.due = min(asked) if asked else None
        self._push(entry.earliest if entry.due is None else entry.due, key)

    def _push(self, due: float, key: K) -> None:
        self._order += 1
        heapq.heappush(self._heap, (due, self._order, key))


class WorkQueue(Generic[K]):
    """A Schedule on the event loop, and the workers that empty it."""

    def __init__(
        self,
        work: Callable[[K], Awaitable[float | None]],
        settings: QueueSettings,
        rng: random.Random,
    ) -> None:
        """work: does what a key asks for, and returns the seconds until it wants another look (None: only when asked)."""
        self._work = work
        self._workers = settings.workers
        self._schedule: Schedule[K] = Schedule(settings, rng)
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Keys that wait or are worked on."""
        return len(self._schedule)

    def add(self, key: K, delay_s: float | None = None) -> None:
        """Asks for the key; from the event loop only."""
        self._schedule.add(key, asyncio.get_running_loop().time(), delay_s)
        self._changed.set()

    def forget(self, key: K) -> None:
        """Nobody needs the key any more."""
        self._schedule.forget(key)

    async def run(self) -> None:
        """Works for ever."""
        slots = asyncio.Semaphore(self._workers)
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                await slots.acquire()
                key = await self._next(loop)
                task = group.create_task(self._one(key, loop), name=f"reconcile {key}")
                task.add_done_callback(lambda _: slots.release())

    async def _next(self, loop: asyncio.AbstractEventLoop) -> K:
        while True:
            self._changed.clear()
            key = self._schedule.pop(loop.time())
            if key is not None:
                return key
            due = self._schedule.next_due()
            try:
                async with asyncio.timeout_at(due):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _one(self, key: K, loop: asyncio.AbstractEventLoop) -> None:
        try:
            again_s = await self._work(key)
        except OperatorError as error:
            retry_s = error.retry_s if isinstance(error, ClusterError) else None
            wait = self._schedule.failed(key, loop.time(), retry_s)
            log.warning(
                "reconcile failed",
                extra={"key": str(key), "error": str(error), "retry_s": round(wait, 1)},
            )
        except Exception:
            # A defect that one fleet brings out must not end the work for the others.
            wait = self._schedule.failed(key, loop.time())
            log.exception("defect in a reconcile", extra={"key": str(key), "retry_s": wait})
        else:
            self._schedule.done(key, loop.time(), again_s)
        self._changed.set()
