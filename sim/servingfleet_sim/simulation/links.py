"""The links between relays and schedulers, as the gRPC edges of both would keep them."""

from __future__ import annotations

import random

from servingfleet_protos.v1.stream_pb2 import RelayMessage, SchedulerMessage
from servingfleet_scheduler.errors import SessionRefused
from servingfleet_scheduler.sessions import Session

from .clock import Channel, Events
from .engines import Trace
from .relays import SimulatedRelay
from .schedulers import SimulatedScheduler
from .violations import Violation

UNDER_WAY = 12
"""Messages that flow control lets a relay have on the wire unread."""
WELCOME_DEADLINE_S = 4.0
ACK_DEADLINE_S = 8.0


class Connection:
    """One gRPC call from a relay to a scheduler, until both sides know that it has ended."""

    def __init__(
        self, link: Link, scheduler: SimulatedScheduler, events: Events, rng: random.Random
    ) -> None:
        self.link = link
        self.relay_life = link.relay.life
        self.followed = link.relay.followed
        self.stream = link.relay.pipeline.settings.stream_id
        self.scheduler = scheduler
        self.session: Session = scheduler.scheduler.open_session(scheduler.clock())
        self.granted: set[int] = set()
        """Ranks whose snapshot was granted and has not ended."""
        self.heard = events.now
        """When the scheduler answered last, or owed no answer."""
        self._welcomed = False
        self._events = events
        self._rng = rng
        self._instance = scheduler.life
        self._expected = 0
        self._resumed = False
        self._open_here = True
        self._open_there = True
        self.up = Channel[RelayMessage | None](
            events, rng, link.delay_s, self._receive_up, lambda: scheduler.reads_at
        )
        self.down = Channel[SchedulerMessage | None](events, rng, link.delay_s, self._receive_down)
        scheduler.connections.append(self)

    # The relay's side

    def pump_up(self) -> None:
        """Writes as much as flow control allows."""
        pipeline, name = self.link.relay.pipeline, self.link.name
        if not self._open_here:
            return
        while (room := UNDER_WAY - self.up.under_way) > 0:
            messages = pipeline.take(name, room)
            for message in messages:
                self.up.send(message)
            if len(messages) < room:
                break
        if pipeline.broken(name):
            self.link.say(f"{self.link} must start anew")
            self.relay_closes()

    def _receive_down(self, message: SchedulerMessage | None) -> None:
        if not self._open_here:
            return
        self.heard = self._events.now
        if message is None:
            self.link.say(f"{self.link} was ended by the scheduler")
            self.relay_closes()
            return
        self._welcomed = True
        self.link.relay.pipeline.receive(self.link.name, message, self.link.relay.clock())
        self.link.relay.pump()

    def check_silence(self) -> None:
        """Gives up a scheduler that owes an answer."""
        now = self._events.now
        if not self._open_here:
            return
        if self._welcomed and not self.link.relay.pipeline.unacknowledged(self.link.name):
            self.heard = now
        silent = now - self.heard
        if silent > (ACK_DEADLINE_S if self._welcomed else WELCOME_DEADLINE_S):
            self.link.say(f"{self.link} is given up, silent for {silent:.1f} s")
            self.relay_closes()

    def relay_closes(self) -> None:
        """Nothing more is read here. What is on the way to the scheduler may still arrive."""
        if not self._open_here:
            return
        self._open_here = False
        self.down.close()
        self.link.relay.pipeline.close_link(self.link.name)
        self.link.closed(self)
        if self.up.open and self._rng.random() < 0.5:
            self.up.send(None)
        else:
            self.up.close()
            self._events.after(self._rng.uniform(0.0, 1.0), self.scheduler_closes)

    def relay_gone(self) -> None:
        """The relay's process has ended."""
        self._open_here = False
        self.down.close()
        self.up.close()
        self._events.after(self._rng.uniform(0.0, 1.0), self.scheduler_closes)

    # The scheduler's side

    def _receive_up(self, message: RelayMessage | None) -> None:
        if not self._open_there:
            return
        scheduler = self.scheduler
        if message is None:
            self.scheduler_closes()
            return
        try:
            self.session.receive(message, scheduler.clock())
        except SessionRefused as refusal:
            self.link.say(f"{self.link} refused: {refusal.reason}")
        else:
            self._account(message)
        scheduler.pump()
        if self._open_here:
            # There is room for one more.
            self.pump_up()

    def _account(self, message: RelayMessage) -> None:
        """Holds what was applied to an unbroken numbering, in which a repetition repeats."""
        if message.HasField("snapshot_end"):
            self.granted.discard(message.snapshot_end.rank)
        if not message.seq:
            return
        received = self.scheduler.received[self.stream]
        if message.seq <= len(received):
            same = received[message.seq - 1] == _content(message)
            if not self._resumed or not same:
                raise Violation(
                    "messages applied in order", f"{self.link}: {message.seq} came twice, {same=}"
                )
        elif message.seq == len(received) + 1:
            received.append(_content(message))
        else:
            raise Violation(
                "messages applied in order",
                f"{self.link}: {message.seq} was taken after {len(received)}",
            )

    def pump_down(self) -> None:
        """Sends what the session has to say; ends a session that was refused."""
        if not self._open_there:
            return
        for message in self.session.take():
            self._observe(message)
            self.down.send(message)
        if self.session.refused is not None:
            self.down.send(None)
            self.scheduler_closes()

    def _observe(self, message: SchedulerMessage) -> None:
        received = self.scheduler.received
        if message.HasField("welcome"):
            self._resumed = message.welcome.resumed
            if not self._resumed:
                received[self.stream] = []
            self._expect(message.welcome.expected_seq - 1)
        elif message.HasField("ack"):
            self._expect(message.ack.seq)
        elif message.HasField("grant_snapshot"):
            self.granted.update(message.grant_snapshot.ranks)

    def _expect(self, applied: int) -> None:
        known = len(self.scheduler.received.get(self.stream, []))
        if applied != known:
            raise Violation(
                "nothing acknowledged is lost",
                f"{self.link}: the scheduler says that {applied} are applied, {known} were",
            )

    def scheduler_closes(self) -> None:
        """The scheduler's side knows that it has ended."""
        if not self._open_there:
            return
        self._open_there = False
        scheduler = self.scheduler
        if self in scheduler.connections:
            scheduler.connections.remove(self)
        if scheduler.up and scheduler.life == self._instance:
            self.session.close(scheduler.clock())
            scheduler.pump()

    def scheduler_gone(self) -> None:
        """The scheduler's process has ended."""
        self._open_there = False
        self.up.close()
        self.down.close()
        self._events.after(self._rng.uniform(0.0, 1.0), self.relay_closes)

    def cut(self) -> None:
        """The network between them is gone; both notice in their own time."""
        self.up.close()
        self.down.close()
        self._events.after(self._rng.uniform(0.0, 1.5), self.relay_closes)
        self._events.after(self._rng.uniform(0.0, 1.5), self.scheduler_closes)


class Link:
    """One relay's link to one scheduler: dials, and dials again."""

    def __init__(
        self,
        relay: SimulatedRelay,
        scheduler: SimulatedScheduler,
        events: Events,
        rng: random.Random,
        say: Trace,
        usual_delay_s: float,
    ) -> None:
        self.relay = relay
        self.scheduler = scheduler
        self.name = scheduler.name
        self.say = say
        self.connection: Connection | None = None
        self.slow_until = 0.0
        self.gone_until = 0.0
        self._events = events
        self._rng = rng
        self._usual_delay_s = usual_delay_s
        self._dials = 0

    def __str__(self) -> str:
        return f"{self.relay.name} to {self.scheduler.name}"

    def delay_s(self) -> float:
        slow = 10 if self.slow_until > self._events.now else 1
        return self._usual_delay_s * slow

    def dial(self, backoff: float = 0.1) -> None:
        """Connects in a while, or tries again."""
        self._dials += 1
        number = self._dials

        def now() -> None:
            if number != self._dials or not self.relay.up or self.connection is not None:
                return
            ready = self.scheduler.up and self.scheduler.reads_at <= self._events.now
            if not ready or self.gone_until > self._events.now:
                self.dial(min(2 * backoff, 2.0))
                return
            self.connection = Connection(self, self.scheduler, self._events, self._rng)
            hello = self.relay.pipeline.open_link(self.name, self.relay.clock())
            resumes = f" to resume at {hello.hello.resume_from}" if hello.hello.resume_from else ""
            self.say(f"{self} connected{resumes}")
            self.connection.up.send(hello)

        self._events.after(self._rng.uniform(0.0, backoff), now)

    def closed(self, connection: Connection) -> None:
        if self.connection is connection:
            self.connection = None
            self.dial()

    def pump(self) -> None:
        if self.connection is not None:
            self.connection.pump_up()

    def forget(self, span: float) -> None:
        """The address no longer resolves, for a while."""
        self.gone_until = self._events.now + span
        if self.connection is not None:
            self.connection.relay_closes()
        self.relay.pipeline.forget_link(self.name)

    def relay_gone(self) -> None:
        """The relay's process has ended; its next life dials anew."""
        self._dials += 1
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.relay_gone()


def _content(message: RelayMessage) -> bytes:
    return message.SerializeToString(deterministic=True)
