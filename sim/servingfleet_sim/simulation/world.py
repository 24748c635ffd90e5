"""A whole simulated fleet: carries out a script, lets everything come to rest, and holds every claim to the truth."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from . import script
from .checks import CANONICAL_TOKENS, check_rest
from .clients import Clients
from .clock import Events
from .engines import EngineRank, Frames, Running, SimulatedEngine
from .links import Link
from .relays import SimulatedRelay
from .schedulers import CREDIT_TTL_S, SimulatedScheduler
from .script import Kind, Step

START_S = 3.0
"""An engine process needs that long at least: relays tell two lives apart by it."""
TICK_S = 0.3
REST_TICK_S = 0.8
SETTLE_S = 4.0
"""Time for replays to fail, links to be given up and made again, snapshots to be granted."""


@dataclass
class Report:
    """What a schedule came to."""

    states: dict[str, int] = field(default_factory=dict)
    """Ranks by the state of their stream at the end."""
    counts: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)


class World:
    """One schedule. `run` carries it out once."""

    def __init__(self, plan: script.Script, *, trace: bool = False) -> None:
        self.plan = plan
        self.report = Report()
        self.events = Events()
        self._trace = trace
        self._busy = True
        self.engines = [
            SimulatedEngine(n, spec, self.events, self._rng(f"engine{n}"), self.say, self._send)
            for n, spec in enumerate(plan.engines)
        ]
        self.relays = [
            SimulatedRelay(
                n, plan, engine, self.events, self._rng(f"relay{n}"), self.say, CANONICAL_TOKENS
            )
            for n, engine in enumerate(self.engines)
        ]
        self.schedulers = [
            SimulatedScheduler(
                n, plan, self.events, self._rng(f"scheduler{n}"), self.say, CANONICAL_TOKENS
            )
            for n in range(2)
        ]
        self.links = {
            relay.name: [
                Link(
                    relay,
                    scheduler,
                    self.events,
                    self._rng(f"{relay.name} to {scheduler.name}"),
                    self.say,
                    plan.delay_s,
                )
                for scheduler in self.schedulers
            ]
            for relay in self.relays
        }
        for relay in self.relays:
            relay.on_change = self._pump_of(relay)
        self._clients = Clients(
            self.events,
            self._rng("clients"),
            self.say,
            self.relays,
            self.schedulers,
            self.report.counts,
        )

    def say(self, text: str) -> None:
        """Notes something for people."""
        if self._trace:
            self.report.trace.append(f"{self.events.now:7.3f}  {text}")

    def run(self) -> Report:
        """Raises Violation."""
        for engine in self.engines:
            engine.start()
        for scheduler in self.schedulers:
            scheduler.start()
        for relay in self.relays:
            self._start_relay(relay)
        self._tick()
        for step in self.plan.steps:
            self.events.at(step.at, lambda step=step: self._step(step))  # type: ignore[misc]
        end = self.plan.steps[-1].at if self.plan.steps else 0.0
        self.events.run(end)
        self._rest()
        whole = {n for n in range(len(self.engines)) if self._nothing_is_lost(n)}
        self.report.states = check_rest(self.schedulers, self.relays, whole)
        return self.report

    def _nothing_is_lost(self, engine: int) -> bool:
        """Whether every batch of this engine could be replayed, whatever happened."""
        spec = self.plan.engines[engine]
        kinds = {step.kind for step in self.plan.steps if step.engine == engine}
        return spec.replay and spec.ring >= script.WHOLE_RING and not kinds & script.LOSING

    def _rng(self, name: str) -> random.Random:
        # One for each part: a script with a step less draws the other delays as before.
        return random.Random(f"{self.plan.seed} {name}")

    def _tick(self) -> None:
        for relay in self.relays:
            relay.tick()
            for link in self.links[relay.name]:
                if relay.up and link.connection is not None:
                    link.connection.check_silence()
        for scheduler in self.schedulers:
            scheduler.tick()
        self.events.after(TICK_S if self._busy else REST_TICK_S, self._tick)

    def _pump_of(self, relay: SimulatedRelay) -> Callable[[], None]:
        links = self.links[relay.name]

        def pump() -> None:
            for link in links:
                link.pump()

        return pump

    def _send(self, rank: EngineRank, frames: Frames) -> None:
        relay = self.relays[self.engines.index(rank.engine)]
        relay.publish(rank, frames)

    def _start_relay(self, relay: SimulatedRelay) -> None:
        relay.start()
        for link in self.links[relay.name]:
            link.dial()

    # Coming to rest

    def _rest(self) -> None:
        """No more trouble; every engine says something after whatever it kept silent; time passes."""
        self.say("no more trouble")
        self._busy = False
        for engine in self.engines:
            for rank in engine.ranks:
                wire = rank.wire
                wire.lose = wire.skip = wire.lose_replies = 0
                wire.mute_until = 0.0
        # What is down comes back by itself: every restart has its end among the events.
        while not self._all_up():
            self.events.run(self.events.now + 1.0)
        self.events.run(self.events.now + SETTLE_S)
        for number in range(2):
            for engine in self.engines:
                for rank in engine.ranks:
                    self._poke(rank, number)
            self.events.run(self.events.now + SETTLE_S)
        self.events.run(self.events.now + CREDIT_TTL_S)

    def _all_up(self) -> bool:
        links = (link for each in self.links.values() for link in each)
        return (
            all(each.up for each in self.engines)
            and all(each.up for each in self.relays)
            and all(each.up for each in self.schedulers)
            and all(each.reads_at <= self.events.now for each in self.schedulers)
            and all(max(each.slow_until, each.gone_until) <= self.events.now for each in links)
        )

    def _poke(self, rank: EngineRank, number: int) -> None:
        """A prompt that nobody has asked before, so that the engine publishes something."""
        sequence = rank.engine.sequence((900 + number,) * 9, "", 1)
        rank.submit(Running(sequence, lambda: None, lambda done: None))

    # Steps

    def _step(self, step: Step) -> None:
        self.say(str(step.kind))
        self.report.counts[step.kind] += 1
        engine = self.engines[step.engine]
        relay = self.relays[step.engine]
        rank = engine.ranks[step.rank]
        scheduler = self.schedulers[step.scheduler]
        link = self.links[relay.name][step.scheduler]
        match step.kind:
            case Kind.REQUEST:
                self._clients.request(step)
            case Kind.LOCAL:
                prompt, salt = self._clients.prompt(step)
                self._clients.local(rank, prompt, salt, step.outputs, report_reused=step.flag)
            case Kind.ABORT:
                self._clients.abort()
            case Kind.RESET:
                self.say(f"{rank.name} reset: {rank.reset(running=step.flag)}")
            case Kind.RESTART_ENGINE:
                self._restart_engine(step, engine, relay)
            case Kind.FLAP:
                if engine.up and relay.up:
                    known = relay.disconnect(rank)
                    self._connect_at(known + step.span, relay, [rank])
            case Kind.LOSE:
                rank.wire.lose += step.amount
            case Kind.HOLE:
                rank.wire.skip += step.amount
            case Kind.LOSE_REPLIES:
                rank.wire.lose_replies += step.amount
            case Kind.MUTE_REPLAY:
                rank.wire.mute_until = self.events.now + step.span
            case Kind.RESTART_RELAY:
                if relay.up:
                    self.say(f"{relay.name} dies")
                    relay.stop()
                    for each in self.links[relay.name]:
                        each.relay_gone()
                    self.events.after(step.span, lambda: self._start_relay(relay))
            case Kind.RESTART_SCHEDULER:
                if scheduler.up:
                    self.say(f"{scheduler.name} dies")
                    scheduler.stop()
                    self.events.after(step.span, scheduler.start)
            case Kind.BREAK:
                if link.connection is not None:
                    self.say(f"{link} breaks")
                    link.connection.cut()
            case Kind.FORGET:
                if relay.up:
                    link.forget(step.span)
                    link.dial()
            case Kind.SLOW:
                link.slow_until = self.events.now + step.span
            case Kind.STALL:
                scheduler.reads_at = self.events.now + step.span
            case Kind.JUMP_RELAY:
                relay.clock.offset += step.own
            case Kind.JUMP_SCHEDULER:
                scheduler.clock.offset += step.own

    def _restart_engine(self, step: Step, engine: SimulatedEngine, relay: SimulatedRelay) -> None:
        if not engine.up:
            return
        self.say(f"{engine.name} dies")
        if relay.up:
            for rank in engine.ranks:
                relay.disconnect(rank)
        engine.stop()

        def start() -> None:
            engine.start()
            self.say(f"{engine.name} starts, life {engine.life}")
            for rank in engine.ranks:
                for number in range(step.amount if step.flag else 0):
                    prompt = tuple(self._rng(f"early {number}").choices(range(40), k=6))
                    self._clients.local(rank, prompt, "", 5)
            if relay.up:
                later = 0.5 if step.flag else 0.0
                self._connect_at(self.events.now + later, relay, engine.ranks)

        self.events.after(START_S + step.span, start)

    def _connect_at(self, time: float, relay: SimulatedRelay, ranks: list[EngineRank]) -> None:
        """The subscriptions come back, if both processes are still the same."""
        engine = relay.engine
        life = (engine.life, relay.life)

        def connect() -> None:
            if engine.up and relay.up and life == (engine.life, relay.life):
                for rank in ranks:
                    relay.connect(rank)

        self.events.at(time, connect)
