"""A simulated relay: the real pipeline, with simulated sockets, replays and clock around it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from servingfleet_protos.v1.stream_pb2 import EngineLoad
from servingfleet_relay.batches import Apply, Lost, Restarted, Step
from servingfleet_relay.pipeline import Pipeline, ReplayRequest
from servingfleet_relay.rank import Rank
from servingfleet_relay.settings import PipelineSettings

from . import script
from .clock import Clock, Events
from .engines import EngineRank, Frames, SimulatedEngine, Trace, replies
from .following import Followed
from .history import MODEL

REPLAY_DEADLINE_S = 1.0


@dataclass
class Packet:
    """A batch on its way to the relay."""

    frames: Frames
    done: bool = False


class SimulatedRelay:
    """One relay process beside one engine; a restart makes a new pipeline."""

    def __init__(
        self,
        number: int,
        plan: script.Script,
        engine: SimulatedEngine,
        events: Events,
        rng: random.Random,
        say: Trace,
        canonical_tokens: int,
    ) -> None:
        self.name = f"relay{number}"
        self.replica = f"replica{number}"
        self.engine = engine
        self.clock = Clock(events, rng.uniform(0, 1e5))
        self.up = False
        self.life = 0
        self.on_change: Callable[[], None] = lambda: None
        """Called when there may be something to send."""
        self._plan = plan
        self._events = events
        self._rng = rng
        self._say = say
        self._canonical_tokens = canonical_tokens
        self._queues: list[list[Packet]] = [[] for _ in engine.ranks]
        self._last = [0.0 for _ in engine.ranks]
        self._replays: dict[int, int] = {}
        self._scraped = -1.0
        self._loads: dict[int, tuple[int, int]] = {}
        self._pending = False
        self.pipeline: Pipeline
        self.followed: Followed

    def start(self) -> None:
        """A new process."""
        plan, spec = self._plan, self.engine.spec
        self.life += 1
        self.up = True
        self._scraped = -1.0
        self.pipeline = Pipeline(
            PipelineSettings(
                replica=self.replica,
                model=MODEL,
                ranks=tuple(range(spec.ranks)),
                stream_id=f"{self.name}-{self.life}",
                block_tokens=self._canonical_tokens,
                replay=spec.replay,
                replay_deadline_s=REPLAY_DEADLINE_S,
                max_held_batches=64,
                orphan_ttl_s=1.0,
                resend_window_messages=plan.window,
                outbox_messages=plan.outbox,
                delta_hashes=plan.delta_hashes,
            ),
            self.clock(),
        )
        self.pipeline.on_output = self._wake
        self.followed = Followed(self.engine)
        self._watch()
        self._say(f"{self.name} starts, stream {self.name}-{self.life}")
        for rank in self.engine.ranks:
            self.followed.begins(rank.number, 1)
            if self.engine.up:
                self.connect(rank)

    def stop(self) -> None:
        """The process is gone, and what was on its way to it."""
        self.up = False
        self._replays.clear()
        for rank in self.engine.ranks:
            rank.wire.epoch += 1
            rank.wire.connected = False
            self._forget(rank.number)

    # The event socket

    def connect(self, rank: EngineRank) -> None:
        """The subscription is made (again), in its time."""
        wire = rank.wire
        wire.epoch += 1
        epoch = wire.epoch
        known = self._events.now + self._rng.uniform(0.0, 0.4)

        def subscribed() -> None:
            if wire.epoch == epoch and self.engine.up:
                wire.connected = True

        def up() -> None:
            if wire.epoch != epoch or not self.up or not self.engine.up:
                return
            # What an older connection left was read before a new one was made.
            for packet in list(self._queues[rank.number]):
                self._arrive(rank.number, packet)
            self._say(f"{self.name} socket {rank.number} up")
            self.pipeline.socket_up(rank.number, self.clock())
            self.pump()

        self._events.at(known, up)
        self._events.at(known + self._rng.uniform(0.0, 0.1), subscribed)

    def disconnect(self, rank: EngineRank) -> float:
        """The subscription breaks; the relay learns it in its time, which is returned."""
        wire = rank.wire
        wire.epoch += 1
        wire.connected = False
        life = self.life
        known = self._events.now + self._rng.uniform(0.0, 0.3)

        def down() -> None:
            if self.up and self.life == life:
                self._say(f"{self.name} socket {rank.number} down")
                self.pipeline.socket_down(rank.number, self.clock())
                self.pump()

        self._events.at(known, down)
        return known

    def publish(self, rank: EngineRank, frames: Frames) -> None:
        """The engine sends a batch to the subscription."""
        packet = Packet(frames)
        self._queues[rank.number].append(packet)
        late = self._plan.delay_s * self._rng.random() ** 3
        self._last[rank.number] = max(self._last[rank.number], self._events.now + late)
        self._events.at(self._last[rank.number], lambda: self._arrive(rank.number, packet))

    def _arrive(self, rank: int, packet: Packet) -> None:
        if packet.done:
            return
        packet.done = True
        self._queues[rank].remove(packet)
        self.pipeline.live(rank, packet.frames, self.clock())
        self.pump()

    def _forget(self, rank: int) -> None:
        for packet in self._queues[rank]:
            packet.done = True
        self._queues[rank].clear()

    # Replays

    def _replay(self, request: ReplayRequest) -> None:
        """A fresh connection for each request; a newer request ends the older."""
        rank = self.engine.ranks[request.rank]
        number = self._replays.get(rank.number, 0) + 1
        self._replays[rank.number] = number
        life = self.life
        progress = [self._events.now]
        ended = [False]
        self._say(f"{self.name} asks rank {rank.number} to replay from {request.start_seq}")

        def current() -> bool:
            return self.up and self.life == life and self._replays.get(rank.number) == number

        def ask() -> None:
            if not current() or ended[0]:
                return
            if not self.engine.up or rank.wire.mute_until > self._events.now:
                self._events.after(0.15, ask)
                return
            engine_life = self.engine.life
            at = self._events.now
            answers = replies(rank, request.start_seq)
            for frames in answers:
                at += self._plan.delay_s * 0.3 * self._rng.random() ** 3
                self._events.at(at, lambda frames=frames: answer(frames, engine_life))  # type: ignore[misc]

        def answer(frames: Frames, engine_life: int) -> None:
            if not current() or ended[0] or self.engine.life != engine_life or not self.engine.up:
                return
            progress[0] = self._events.now
            ended[0] = frames[-1] == b""
            self._say(
                f"{self.name} rank {rank.number} replay: "
                + ("end" if ended[0] else f"batch {int.from_bytes(frames[-2], 'big')}")
            )
            self.pipeline.replayed(rank.number, frames, self.clock())
            self.pump()

        def silent() -> None:
            if not current() or ended[0]:
                return
            due = progress[0] + REPLAY_DEADLINE_S
            if self._events.now < due:
                self._events.at(due, silent)
                return
            ended[0] = True
            self._say(f"{self.name} rank {rank.number} replay failed")
            self.pipeline.replay_failed(rank.number, "no answer in time", self.clock())
            self.pump()

        self._events.after(self._rng.uniform(0.0, 0.1), ask)
        self._events.after(REPLAY_DEADLINE_S, silent)

    # Time

    def _wake(self) -> None:
        self._pending = True

    def tick(self) -> None:
        """As the process does, and with it the scrape of the engine's metrics."""
        if not self.up:
            return
        now = self.clock()
        self.pipeline.tick(now)
        if self.engine.up:
            if self._scraped != self.engine.started:
                self._scraped = self.engine.started
                age = self._events.now - self.engine.started
                self.pipeline.engine_started(now - age, now)
            for rank in self.engine.ranks:
                assert rank.scheduler is not None
                load = (rank.scheduler.running_count, rank.scheduler.waiting_count)
                if load != self._loads.get(rank.number):
                    self._loads[rank.number] = load
                    running, waiting = load
                    self.pipeline.load(
                        EngineLoad(
                            rank=rank.number, running_requests=running, waiting_requests=waiting
                        )
                    )
        self.pump()

    def pump(self) -> None:
        """Starts the replays that are wanted, and lets the links send, if there may be something."""
        if not self._pending:
            return
        self._pending = False
        for request in self.pipeline.take_replay_requests():
            self._replay(request)
        for number, rank in self.pipeline._ranks.items():
            self.followed.begins(number, rank.numbering.incarnation)
        self.on_change()

    def _watch(self) -> None:
        """Notes every step of the numbering where it is carried out. Looks inside the pipeline: nothing outside tells."""
        for number, rank in self.pipeline._ranks.items():

            def watched(
                steps: Sequence[Step],
                now: float,
                wall: float | None = None,
                *,
                number: int = number,
                rank: Rank = rank,
            ) -> None:
                restarts = sum(isinstance(step, Restarted) for step in steps)
                incarnation = rank.numbering.incarnation - restarts
                for step in steps:
                    if isinstance(step, Restarted):
                        incarnation += 1
                        self.followed.begins(number, incarnation)
                    elif isinstance(step, Lost):
                        self.followed.loses(number)
                    elif isinstance(step, Apply):
                        self.followed.applies(number, incarnation, step.payload)
                Rank.run(rank, steps, now, wall)

            rank.run = watched  # type: ignore[method-assign]
