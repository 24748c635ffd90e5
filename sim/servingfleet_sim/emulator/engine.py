"""One engine: its ranks, its event sockets, its account of the truth."""

from __future__ import annotations

import asyncio
import itertools
import time

from ..wire import Endpoints, EventSockets, free_ports
from .pull import PullBuffer
from .radix_scheduler import TRTLLM, Habits, RadixScheduler
from .rank import Publishing, Rank
from .scheduler import Scheduler
from .sequence import Asked, Sequence
from .settings import Settings
from .steps import Scheduling
from .truth import Truth


class Engine:
    """Everything of an engine but its HTTP side."""

    def __init__(self, settings: Settings, hash_seed: bytes) -> None:
        """`hash_seed` stands before every first block: other seeds give other hashes. Raises OSError for the log."""
        self.settings = settings
        self.started = time.time()
        self.truth = Truth(settings.log, tokens=settings.log_tokens, name=settings.form.name)
        self.endpoints = _endpoints(settings)
        self.pulled = PullBuffer(settings.ranks, settings.buffer_steps)
        """What TensorRT-LLM keeps for who asks; the others publish."""
        self._sockets: Publishing = self.pulled
        if settings.engine != "trtllm":
            self._sockets = EventSockets(
                settings.ranks,
                self.endpoints,
                buffer_steps=settings.buffer_steps,
                replay_topic=settings.form.replay_topic,
            )
        self.ranks = [
            Rank(
                number,
                _scheduler(settings, hash_seed),
                settings.speed,
                self._sockets,
                self.truth,
                topic=settings.topic,
                form=settings.form,
            )
            for number in range(settings.ranks)
        ]
        self._numbers = itertools.count()

    async def run(self, opened: asyncio.Event) -> None:
        """Opens the sockets and makes steps until cancelled. Raises zmq.ZMQError where a port is taken."""
        try:
            self._sockets.start()
            self.truth.write(
                "started",
                self.started,
                ranks=self.settings.ranks,
                blocks=self.settings.limits.blocks,
                block_size=self.settings.limits.block_size,
                model=self.settings.model,
            )
            async with asyncio.TaskGroup() as tasks:
                for rank in self.ranks:
                    tasks.create_task(rank.run())
                opened.set()
        finally:
            await self._sockets.stop()
            self.truth.close()

    def sequence(self, asked: Asked) -> Sequence:
        """A prompt that no rank has yet."""
        return Sequence(next(self._numbers), asked)

    def least_loaded(self) -> Rank:
        """Where a request goes that names no rank: a waiting one weighs four running ones, as in vLLM."""
        return min(
            self.ranks,
            key=lambda rank: 4 * rank.scheduler.waiting_count + rank.scheduler.running_count,
        )


def _scheduler(settings: Settings, hash_seed: bytes) -> Scheduling:
    match settings.engine:
        case "vllm":
            return Scheduler(settings.limits, hash_seed)
        case "sglang":
            return RadixScheduler(settings.limits, Habits(pairs=settings.pairs))
        case "trtllm":
            return RadixScheduler(settings.limits, TRTLLM)


def _endpoints(settings: Settings) -> Endpoints:
    ranks = settings.ranks
    first = free_ports(2 * ranks)
    replay = 0
    if settings.replay_port is not None:
        replay = settings.replay_port or first + ranks
    host = "*" if settings.host == "0.0.0.0" else settings.host
    if settings.events_connect:
        host = "127.0.0.1"
    return Endpoints(settings.events_port or first, replay, host, settings.events_connect)
