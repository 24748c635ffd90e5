"""Simulated engines: the emulator's block pools and steps, the event sockets, the replay ring, and what goes wrong there."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from servingfleet_relay.frames import END_OF_REPLAY

from ..emulator import events as wire
from ..emulator.scheduler import Scheduler
from ..emulator.sequence import Asked, Phase, Sequence
from ..emulator.steps import DoesNotFit, Limits
from . import script
from .clock import Events
from .history import Block, History

STEP_S = 0.03
"""A step of an engine takes up to this."""
END = END_OF_REPLAY.to_bytes(8, "big")

Frames = list[bytes]
Trace = Callable[[str], None]


@dataclass
class Running:
    """A prompt in an engine."""

    sequence: Sequence
    first_seen: Callable[[], None]
    """Called once, when the engine has looked what it can reuse."""
    ended: Callable[[bool], None]
    """Called once; True: it finished."""
    admitted: bool = False


@dataclass
class Wire:
    """The event socket of one rank, and what was done to it."""

    connected: bool = False
    """A relay listens."""
    lose: int = 0
    skip: int = 0
    lose_replies: int = 0
    mute_until: float = 0.0
    queue: deque[Frames] = field(default_factory=deque)
    """On the way to the relay, in order."""
    last: float = 0.0
    epoch: int = 0


class EngineRank:
    """One rank: a scheduler of the emulator, which a new process replaces."""

    def __init__(self, engine: SimulatedEngine, number: int) -> None:
        self.engine = engine
        self.number = number
        self.history = History(engine.spec.block_tokens)
        self.wire = Wire()
        self.ring: deque[tuple[int, Frames]] = deque(maxlen=engine.spec.ring)
        self.running: list[Running] = []
        self.scheduler: Scheduler | None = None
        self._published = 0
        self._names: dict[bytes, Block] = {}
        self._stepping = False

    @property
    def name(self) -> str:
        return f"{self.engine.name}/{self.number}"

    def start(self, life: int) -> None:
        """A new process: empty, counting from 0."""
        spec = self.engine.spec
        seed = life.to_bytes(4, "big") if spec.new_seed else b"seed"
        limits = Limits(
            blocks=spec.blocks,
            block_size=spec.block_tokens,
            max_sequences=3,
            max_step_tokens=24,
        )
        self.scheduler = Scheduler(limits, seed)
        self.ring.clear()
        self._published = 0
        self._names.clear()
        self._stepping = False
        self.history.started(life)

    def stop(self) -> None:
        """The process is gone with all that ran in it."""
        self.scheduler = None
        gone, self.running = self.running, []
        for each in gone:
            each.ended(False)

    def submit(self, running: Running) -> bool:
        """Queues a prompt. False: refused."""
        if self.scheduler is None:
            return False
        try:
            self.scheduler.add(running.sequence)
        except DoesNotFit:
            return False
        self.running.append(running)
        self._step()
        return True

    def abort(self, running: Running) -> None:
        """The client is gone."""
        if self.scheduler is not None and running in self.running:
            self.running.remove(running)
            self.scheduler.abort(running.sequence)
            self._changed()

    def reset(self, *, running: bool) -> bool:
        """Empties the cache. Nobody is told before the next step that has events."""
        done = self.scheduler is not None and self.scheduler.reset(running=running)
        self._changed()
        self._step()
        return done

    def _step(self) -> None:
        scheduler = self.scheduler
        if scheduler is None or self._stepping:
            return
        step = scheduler.schedule(self.engine.events.now)
        self._changed()
        if step is None:
            return
        for each in self.running:
            if not each.admitted and each.sequence.cached_tokens is not None:
                each.admitted = True
                each.first_seen()

        def complete() -> None:
            if self.scheduler is not scheduler:
                return
            outcome = scheduler.complete(step)
            self._changed()
            self._stepping = False
            if outcome.events:
                self._publish(outcome.events)
            for each in [e for e in self.running if e.sequence.phase is Phase.FINISHED]:
                self.running.remove(each)
                each.ended(True)
            self._step()

        self._stepping = True
        self.engine.events.after(STEP_S * self.engine.rng.random(), complete)

    def _changed(self) -> None:
        if self.scheduler is None:
            return
        size = self.engine.spec.block_tokens
        for each in self.running:
            sequence = each.sequence
            for number in range(len(sequence.hashes) - 1, -1, -1):
                if sequence.hashes[number] in self._names:
                    break
                prefix = tuple(sequence.tokens[: (number + 1) * size])
                self._names[sequence.hashes[number]] = (sequence.asked.cache_salt or "", prefix)
        self.history.now = frozenset(self._names[h] for h in self.scheduler.caches.pool.content())

    def _publish(self, events: Iterable[wire.Event]) -> None:
        events = list(events)
        seq, self._published = self._published, self._published + 1
        form = self.engine.form
        payload = wire.encode(events, self.engine.stamp(), self.number, form)
        self._note(events, seq, payload)
        frames = [b"kv", seq.to_bytes(8, "big"), payload]
        if self.wire.skip:
            self.wire.skip -= 1
            self.engine.say(f"{self.name} fails to send batch {seq}")
            return
        self.ring.append((seq, frames))
        if self.wire.lose:
            self.wire.lose -= 1
            self.engine.say(f"{self.name} batch {seq} is lost: {_shown(events)}")
        elif self.wire.connected:
            self.engine.say(f"{self.name} publishes {seq}: {_shown(events)}")
            self.engine.send(self, frames)
        else:
            self.engine.say(f"{self.name} publishes {seq} to nobody: {_shown(events)}")

    def _note(self, events: list[wire.Event], seq: int, payload: bytes) -> None:
        history = self.history
        before = set(history.records[-1].after)
        named: set[Block] = set()
        for event in events:
            if isinstance(event, wire.Cleared):
                named |= before
                before.clear()
                continue
            blocks = {self._names[digest] for digest in event.hashes}
            named |= blocks
            if isinstance(event, wire.Removed):
                before -= blocks - history.now
            else:
                if event.parent is None:
                    history.blurred |= blocks & before
                before |= blocks
        history.published(self.engine.life, seq, payload, named)


class SimulatedEngine:
    """All ranks of one engine. `send` puts a batch on the way to the relay."""

    def __init__(
        self,
        number: int,
        spec: script.Engine,
        events: Events,
        rng: random.Random,
        say: Trace,
        send: Callable[[EngineRank, Frames], None],
    ) -> None:
        self.spec = spec
        self.name = f"engine{number}"
        self.events = events
        self.rng = rng
        self.say = say
        self.send = send
        self.life = 0
        self.up = False
        self.started = 0.0
        form = wire.HashForm.BYTES if spec.wide_hashes else wire.HashForm.INTEGER
        self.form = wire.generation(spec.version, form)
        self.ranks = [EngineRank(self, rank) for rank in range(spec.ranks)]
        self._stamp = 0
        self._numbers = 0

    def start(self) -> None:
        self.life += 1
        self.up = True
        self.started = self.events.now
        for rank in self.ranks:
            rank.start(self.life)

    def stop(self) -> None:
        self.up = False
        for rank in self.ranks:
            rank.stop()

    def stamp(self) -> float:
        """Time of a batch: no two are alike."""
        self._stamp += 1
        return 1e9 + self._stamp

    def sequence(
        self, prompt: tuple[int, ...], salt: str, outputs: int, *, report_reused: bool = False
    ) -> Sequence:
        """A prompt for any rank. `report_reused`: what it reuses is announced again, which is no store."""
        self._numbers += 1
        asked = Asked(
            prompt=prompt,
            max_tokens=outputs,
            cache_salt=salt or None,
            vocabulary=12,
            report_reused=report_reused,
        )
        return Sequence(self._numbers, asked)


def replies(rank: EngineRank, start: int) -> list[Frames]:
    """What the replay socket answers, the end included; lost ones left out."""
    topic = [b"kv"] if rank.engine.form.replay_topic else []
    frames = [[b"", *topic, *each[1:]] for seq, each in rank.ring if seq >= start]
    frames.append([b"", *([b""] if topic else []), END, b""])
    lost = min(rank.wire.lose_replies, len(frames))
    rank.wire.lose_replies -= lost
    # The last ones: those that no longer fit a queue.
    return frames[: len(frames) - lost]


def _shown(events: Iterable[wire.Event]) -> str:
    said = []
    for event in events:
        if isinstance(event, wire.Cleared):
            said.append("cleared")
        else:
            verb = "stored" if isinstance(event, wire.Stored) else "removed"
            said.append(f"{verb} {' '.join(digest[-2:].hex() for digest in event.hashes)}")
    return ", ".join(said)
