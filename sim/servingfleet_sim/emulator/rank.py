"""Drives one rank in real time: makes its steps, lets them take their time, publishes, delivers tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .events import Event, Form
from .sequence import Phase
from .sequence import Sequence as Prompt
from .speed import Speed
from .steps import Scheduling, Step
from .truth import Truth

MAX_LAG_S = 0.05
"""How far steps may run behind the clock and still catch up. A machine that is slower slows the engine down."""

IDLE_STEP_S = 0.001
"""Pause of a step that has nothing to wait for but other sequences."""


class Publishing(Protocol):
    """Where an engine's batches go."""

    def start(self) -> None:
        """A new engine, which has published nothing. Raises zmq.ZMQError where a port is taken."""
        ...

    async def stop(self) -> None:
        """The engine's end."""
        ...

    async def send(
        self, rank: int, seq: int, frames: Sequence[bytes], *, live: bool = True, keep: bool = True
    ) -> None:
        """A batch: topic, number, payload. Without `live` or `keep` it is lost on that way."""
        ...


@dataclass(eq=False)
class Ticket:
    """One prompt in a rank, and the tokens that come out of it."""

    sequence: Prompt
    request_id: str
    arrived: float
    """Seconds since the epoch, as the other times."""
    tokens: asyncio.Queue[tuple[int, bool]] = field(default_factory=asyncio.Queue)
    """Sampled tokens, and whether each is the last. Holds max_tokens at most."""
    scheduled: float | None = None
    first_token: float | None = None


@dataclass
class Faults:
    """What goes wrong on purpose."""

    drop_batches: int = 0
    """Batches still to be kept off the wire."""
    drop_from_replay: bool = False
    """Whether they are missing in the replay as well, as after an encoding failure."""
    stall_until: float = 0.0
    """Event-loop time until which no step is made."""


class Rank:
    """One data-parallel rank: its scheduler, and what leaves it."""

    def __init__(
        self,
        number: int,
        scheduler: Scheduling,
        speed: Speed,
        sockets: Publishing,
        truth: Truth,
        *,
        topic: str,
        form: Form,
    ) -> None:
        self.number = number
        self.scheduler = scheduler
        self.faults = Faults()
        self.published = 0
        """Batches so far: the next one's sequence number."""
        self._speed = speed
        self._sockets = sockets
        self._truth = truth
        self._topic = topic.encode()
        self._form = form
        self._tickets: dict[int, Ticket] = {}
        self._wake = asyncio.Event()

    def submit(self, ticket: Ticket) -> None:
        """Queues a prompt. Raises DoesNotFit."""
        self.scheduler.add(ticket.sequence)
        self._tickets[ticket.sequence.number] = ticket
        self._wake.set()

    def abort(self, ticket: Ticket) -> None:
        """Drops a prompt whose client is gone; nothing where it has ended."""
        if self._tickets.pop(ticket.sequence.number, None) is not None:
            self.scheduler.abort(ticket.sequence)
            self._ended(ticket, "aborted", time.time())

    def reset(self, *, running: bool, host: bool) -> bool:
        """Empties the caches, see `Scheduler.reset`."""
        done = self.scheduler.reset(running=running, host=host)
        self._truth.write("reset", time.time(), rank=self.number, done=done)
        self._wake.set()  # an engine that tells of it at once does so now
        return done

    async def run(self) -> None:
        """Makes steps for ever."""
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            now = clock()
            if now < self.faults.stall_until:
                await asyncio.sleep(self.faults.stall_until - now)
                continue
            step = self.scheduler.schedule(now, self._speed.load_s, self._speed.load_token_s)
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                due = clock()
                continue
            self._note_scheduled(step)
            if step.work:
                # Steps follow one another without the time that this program takes.
                due = max(due, now - MAX_LAG_S) + self._speed.step(step.work) + step.load_s
                await asyncio.sleep(due - clock())
            else:
                await self._wait(step, now)
                due = clock()
            await self._complete(step)

    async def _wait(self, step: Step, now: float) -> None:
        if step.load_until is None:
            await asyncio.sleep(0 if not self.scheduler.waiting_count else IDLE_STEP_S)
            return
        self._wake.clear()
        try:
            async with asyncio.timeout(step.load_until - now):
                await self._wake.wait()  # who arrives need not wait for others' loads
        except TimeoutError:
            pass

    async def _complete(self, step: Step) -> None:
        outcome = self.scheduler.complete(step)
        now = time.time()
        if outcome.events:
            await self._publish(outcome.events, now)
        for sequence, token in outcome.sampled:
            ticket = self._tickets[sequence.number]
            if ticket.first_token is None:
                ticket.first_token = now
            finished = sequence.phase is Phase.FINISHED
            ticket.tokens.put_nowait((token, finished))
            if finished:
                del self._tickets[sequence.number]
                self._ended(ticket, "finished", now)

    async def _publish(self, events: list[Event], now: float) -> None:
        seq, self.published = self.published, self.published + 1
        payload = self._form.encode(events, now, self.number)
        live = keep = True
        if self.faults.drop_batches:
            self.faults.drop_batches -= 1
            live, keep = False, not self.faults.drop_from_replay
            self._truth.write("dropped", now, rank=self.number, seq=seq, replayable=keep)
        frames = (self._topic, seq.to_bytes(8, "big"), payload)
        # Told before it is sent: what a client has seen is in the account.
        self._truth.write_batch(events, now, self.number, seq)
        await self._sockets.send(self.number, seq, frames, live=live, keep=keep)

    def _note_scheduled(self, step: Step) -> None:
        now = time.time()
        for sequence in (*(work.sequence for work in step.work), *self.scheduler.loading):
            ticket = self._tickets[sequence.number]
            if ticket.scheduled is None:
                ticket.scheduled = now
                self._truth.write(
                    "scheduled",
                    now,
                    id=ticket.request_id,
                    rank=self.number,
                    prompt_tokens=sequence.prompt_tokens,
                    cached_tokens=sequence.cached_tokens,
                    host_tokens=sequence.host_tokens,
                )

    def _ended(self, ticket: Ticket, outcome: str, now: float) -> None:
        sequence = ticket.sequence
        self._truth.write(
            "finished",
            now,
            id=ticket.request_id,
            rank=self.number,
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            host_tokens=sequence.host_tokens,
            output_tokens=sequence.output_tokens,
            preemptions=sequence.preemptions,
            outcome=outcome,
            arrived=ticket.arrived,
            scheduled=ticket.scheduled,
            first_token=ticket.first_token,
        )
