"""A simulated scheduler process: the real scheduler, with a clock, and a life that ends."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from servingfleet_scheduler.service import Scheduler
from servingfleet_scheduler.settings import SchedulerSettings

from . import script
from .clock import Clock, Events
from .engines import Trace
from .violations import Violation

if TYPE_CHECKING:
    from .links import Connection

CREDIT_TTL_S = 8.0


class SimulatedScheduler:
    """One scheduler process; a restart makes a new one."""

    def __init__(
        self,
        number: int,
        plan: script.Script,
        events: Events,
        rng: random.Random,
        say: Trace,
        canonical_tokens: int,
    ) -> None:
        self.name = f"scheduler{number}"
        self.clock = Clock(events, rng.uniform(0, 1e5))
        self.up = False
        self.life = 0
        self.reads_at = 0.0
        """It is stalled until then."""
        self.connections: list[Connection] = []
        self.scheduler: Scheduler
        self.received: dict[str, list[bytes]] = {}
        """Sequenced messages applied, by the relay's stream."""
        self._plan = plan
        self._events = events
        self._rng = rng
        self._say = say
        self._canonical_tokens = canonical_tokens

    def start(self) -> None:
        self.life += 1
        self.up = True
        self.reads_at = 0.0
        self.received = {}
        self.scheduler = Scheduler(
            SchedulerSettings(
                block_tokens=self._canonical_tokens,
                credit_ttl_s=CREDIT_TTL_S,
                hello_s=2.0,
                window_messages=self._plan.window,
                ack_messages=3,
                snapshot_slots=self._plan.slots,
                snapshot_silence_s=2.0,
                snapshot_limit_s=10.0,
                resync_interval_s=1.0,
                takeover_silence_s=1.5,
            ),
            instance_id=f"{self.name}-{self.life}",
            now=self.clock(),
            rng=random.Random(self._rng.random()),
            token_key=b"one key for all schedulers",
        )
        self._say(f"{self.name} starts, instance {self.name}-{self.life}")

    def stop(self) -> None:
        """The process is gone; relays learn it in their time."""
        self.up = False
        for connection in self.connections[:]:
            connection.scheduler_gone()
        self.connections.clear()

    def tick(self) -> None:
        if not self.up or self.reads_at > self._events.now:
            return
        self.scheduler.tick(self.clock())
        self.pump()

    def pump(self) -> None:
        """Sends what the sessions have to say."""
        for connection in self.connections[:]:
            connection.pump_down()
        slots = self.scheduler.streams.slots
        granted = sum(len(each.granted) > 0 for each in self.connections)
        if slots.in_use > self._plan.slots or granted > self._plan.slots + slots.timeouts:
            raise Violation(
                "snapshot slots",
                f"{self.name} has {granted} snapshots under way, {slots.in_use} slots taken "
                f"of {self._plan.slots}",
            )
