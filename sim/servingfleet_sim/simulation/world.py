"""A whole simulated fleet: carries out a script, lets everything come to rest, and holds every claim to the truth."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from servingfleet_protos.v1 import routing_pb2
from servingfleet_scheduler.errors import SchedulerError

from . import script
from .checks import (
    CANONICAL_TOKENS,
    Routed,
    blocks_of,
    check_execution,
    check_prediction,
    check_rest,
    request_of,
    view_of,
)
from .clock import Events
from .engines import EngineRank, Frames, Running, SimulatedEngine
from .history import Tokens
from .links import CREDIT_TTL_S, Link, SimulatedScheduler
from .relays import SimulatedRelay
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
        self._clients = self._rng("clients")
        self._by_decision: dict[str, Routed] = {}
        self._conversations: dict[int, Tokens] = {}
        self._in_flight: list[tuple[EngineRank, Running]] = []
        self._requests = 0

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
        self.report.states = check_rest(self.schedulers, self.relays)
        return self.report

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

    def _pump_of(self, relay: SimulatedRelay):  # type: ignore[no-untyped-def]
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
            all(each.up for each in (*self.engines, *self.relays, *self.schedulers))
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
                self._request(step)
            case Kind.LOCAL:
                self._local(rank, *self._prompt(step), step.outputs, report_reused=step.flag)
            case Kind.ABORT:
                if self._in_flight:
                    oldest, running = self._in_flight.pop(0)
                    oldest.abort(running)
                    running.ended(False)
            case Kind.RESET:
                self.say(f"{rank.name} reset: {rank.reset(running=step.flag)}")
            case Kind.RESTART_ENGINE:
                self._restart_engine(step, engine, relay)
            case Kind.FLAP:
                if engine.up and relay.up:
                    known = relay.disconnect(rank)
                    life = (engine.life, relay.life)
                    self.events.at(
                        known + step.span,
                        lambda: relay.connect(rank)
                        if engine.up and relay.up and life == (engine.life, relay.life)
                        else None,
                    )
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

    def _restart_engine(
        self, step: Step, engine: SimulatedEngine, relay: SimulatedRelay
    ) -> None:
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
                    self._local(rank, prompt, "", 5)
            if relay.up:
                later = 0.5 if step.flag else 0.0
                life = (engine.life, relay.life)
                self.events.after(
                    later,
                    lambda: [relay.connect(rank) for rank in engine.ranks]
                    if engine.up and relay.up and life == (engine.life, relay.life)
                    else None,
                )

        self.events.after(START_S + step.span, start)

    # Clients

    def _prompt(self, step: Step) -> tuple[Tokens, str]:
        family, shared, own = step.prompt
        # Earlier releases hide the salt, so that nobody can tell salted blocks from others.
        tells_salts = all(engine.form.maps or engine.form.stored_length >= 9 for engine in self.engines)
        salt = "salt" if step.flag and tells_salts else ""
        tail = tuple(random.Random(step.own).choices(range(100, 140), k=own))
        known = self._conversations.get(family)
        if step.own == 0 and known is not None:
            return known + tail, ""
        head = tuple(random.Random(family + 1000).choices(range(40), k=shared))
        return head + tail, salt

    def _local(
        self,
        rank: EngineRank,
        prompt: Tokens,
        salt: str,
        outputs: int,
        *,
        report_reused: bool = False,
    ) -> None:
        sequence = rank.engine.sequence(prompt, salt, outputs, report_reused=report_reused)
        rank.submit(Running(sequence, lambda: None, lambda done: None))

    def _request(self, step: Step) -> None:
        scheduler = self.schedulers[step.scheduler]
        prompt, salt = self._prompt(step)
        if scheduler.up and scheduler.reads_at > self.events.now:
            # It answers when it goes on.
            self.events.at(scheduler.reads_at, lambda: self._request(step))
            return
        request = request_of(prompt, salt)
        if step.pinned:
            relay = self.relays[step.engine]
            request.only.add(replica=relay.replica, rank=step.rank)
        if not scheduler.up:
            return
        try:
            response = scheduler.scheduler.route(request, scheduler.clock())
        except SchedulerError as error:
            self.report.counts["unroutable"] += 1
            self.say(f"{scheduler.name} can't route: {error.reason}")
            return
        routed = self._judge(scheduler, prompt, salt, response)
        scheduler.pump()
        late = self._clients.choice((0.0, 0.0, 0.05, 0.5)) * self._clients.random()
        self.events.after(late, lambda: self._arrive(step, routed))

    def _judge(
        self,
        scheduler: SimulatedScheduler,
        prompt: Tokens,
        salt: str,
        response: routing_pb2.RouteResponse,
    ) -> Routed:
        relay = next(r for r in self.relays if r.replica == response.target.replica)
        target = relay.engine.ranks[response.target.rank]
        view = view_of(scheduler, relay, target.number)
        assert view is not None
        self._requests += 1
        name = f"request {self._requests} by {scheduler.name}"
        prediction = response.prediction
        self.say(
            f"{name} to {target.name}: {len(prompt)} tokens, lower {prediction.lower}, "
            f"predicted {prediction.predicted}, upper {prediction.upper}, "
            f"told {view.rank.engine_seq}"
        )
        promised: set = set()  # type: ignore[type-arg]
        certain: set = set()  # type: ignore[type-arg]
        size = relay.engine.spec.block_tokens
        history = target.history
        for credit in scheduler.scheduler.credits:
            if credit.decision_id == response.decision_id:
                continue
            if (credit.replica, credit.rank) != (relay.replica, target.number):
                continue
            other = self._by_decision[credit.decision_id]
            blocks = blocks_of(other.prompt, other.salt, size)
            promised |= blocks
            mine = (other.scheduler, other.scheduler_life) == (scheduler, scheduler.life)
            if mine and other.life == view.life:
                # Once stored and removed again, a block is no longer on the way.
                for record in history.records[other.position + 1 :]:
                    blocks -= record.named
                certain |= blocks
        if size < CANONICAL_TOKENS and not view.replica.profile.lanes:
            # The engine's blocks are smaller than ours, and nothing has told so yet.
            certain.clear()
        routed = Routed(
            name,
            salt,
            prompt,
            scheduler,
            scheduler.life,
            response.decision_id,
            prediction,
            target,
            view.position,
            view.life,
            history.last,
            certain,
        )
        self._by_decision[response.decision_id] = routed
        exact = check_prediction(view, target, prediction, prompt, salt, promised, name)
        self.report.counts["predictions"] += 1
        self.report.counts["predictions held to the truth"] += exact
        self.report.counts["tokens predicted"] += prediction.predicted
        return routed

    def _arrive(self, step: Step, routed: Routed) -> None:
        target = routed.target
        sequence = target.engine.sequence(routed.prompt, routed.salt, step.outputs)

        def first_seen() -> None:
            reused = sequence.cached_tokens
            assert reused is not None
            self.say(f"{routed.name} reuses {reused}")
            self.report.counts["requests executed"] += 1
            self.report.counts["tokens reused"] += reused
            check_execution(routed, reused)

        ended = False

        def end(done: bool) -> None:
            nonlocal ended
            if ended:
                return
            ended = True
            if running in [each for _, each in self._in_flight]:
                self._in_flight.remove((target, running))
            if done:
                self._conversations[step.prompt[0]] = tuple(sequence.tokens)
            self._finish(routed, done, sequence.cached_tokens)

        running = Running(sequence, first_seen, end)
        self._in_flight.append((target, running))
        if not target.submit(running):
            end(False)

    def _finish(self, routed: Routed, done: bool, reused: int | None) -> None:
        scheduler = routed.scheduler
        if self._clients.random() < 0.1:
            scheduler = self.schedulers[1 - self.schedulers.index(scheduler)]

        def report() -> None:
            if not scheduler.up:
                return
            stage = routing_pb2.ReportRequest.STAGE_FINISHED
            if not done:
                stage = routing_pb2.ReportRequest.STAGE_FAILED
            said = routing_pb2.ReportRequest(decision_id=routed.decision, stage=stage)
            if done:
                said.prompt_tokens = len(routed.prompt)
                said.cached_tokens = reused or 0
            scheduler.scheduler.report(said, scheduler.clock())
            scheduler.pump()

        self.events.after(0.2 * self._clients.random(), report)


