"""Who asks the simulated fleet: routes, sends, reports, and holds every prediction to what the engine held and reused."""

from __future__ import annotations

import random
from collections import Counter

from servingfleet_protos.v1 import routing_pb2
from servingfleet_scheduler.errors import SchedulerError

from .checks import (
    CANONICAL_TOKENS,
    Routed,
    View,
    blocks_of,
    check_execution,
    check_prediction,
    request_of,
    view_of,
)
from .clock import Events
from .engines import EngineRank, Running, Trace
from .history import Block, Tokens
from .relays import SimulatedRelay
from .schedulers import SimulatedScheduler
from .script import Step


class Clients:
    """All clients of a fleet."""

    def __init__(
        self,
        events: Events,
        rng: random.Random,
        say: Trace,
        relays: list[SimulatedRelay],
        schedulers: list[SimulatedScheduler],
        counts: Counter[str],
    ) -> None:
        self._events = events
        self._rng = rng
        self._say = say
        self._relays = relays
        self._schedulers = schedulers
        self._counts = counts
        self._by_decision: dict[str, Routed] = {}
        self._conversations: dict[int, Tokens] = {}
        self._in_flight: list[tuple[EngineRank, Running]] = []
        self._requests = 0
        # Earlier releases hide the salt, so that nobody can tell salted blocks from others.
        forms = [relay.engine.form for relay in relays]
        self._tells_salts = all(form.maps or form.stored_length >= 9 for form in forms)

    def abort(self) -> None:
        """The client of the oldest request in flight goes away."""
        if self._in_flight:
            rank, running = self._in_flight.pop(0)
            rank.abort(running)
            running.ended(False)

    def prompt(self, step: Step) -> tuple[Tokens, str]:
        """Tokens and salt of a step's prompt."""
        family, shared, own = step.prompt
        salt = "salt" if step.flag and self._tells_salts else ""
        tail = tuple(random.Random(step.own).choices(range(100, 140), k=own))
        known = self._conversations.get(family)
        if step.own == 0 and known is not None:
            return known + tail, ""
        head = tuple(random.Random(family + 1000).choices(range(40), k=shared))
        return head + tail, salt

    def local(
        self,
        rank: EngineRank,
        prompt: Tokens,
        salt: str,
        outputs: int,
        *,
        report_reused: bool = False,
    ) -> None:
        """Sends a prompt to an engine without asking anybody."""
        sequence = rank.engine.sequence(prompt, salt, outputs, report_reused=report_reused)
        rank.submit(Running(sequence, lambda: None, lambda done: None))

    def request(self, step: Step) -> None:
        """Routes a prompt, and sends it where the answer says."""
        scheduler = self._schedulers[step.scheduler]
        prompt, salt = self.prompt(step)
        if scheduler.up and scheduler.reads_at > self._events.now:
            # It answers when it goes on.
            self._events.at(scheduler.reads_at, lambda: self.request(step))
            return
        request = request_of(prompt, salt)
        if step.pinned:
            relay = self._relays[step.engine]
            request.only.add(replica=relay.replica, rank=step.rank)
        if not scheduler.up:
            return
        try:
            response = scheduler.scheduler.route(request, scheduler.clock())
        except SchedulerError as error:
            self._counts["unroutable"] += 1
            self._say(f"{scheduler.name} can't route: {error.reason}")
            return
        routed = self._judge(scheduler, prompt, salt, response)
        scheduler.pump()
        late = self._rng.choice((0.0, 0.0, 0.05, 0.5)) * self._rng.random()
        self._events.after(late, lambda: self._arrive(step, routed))

    def _judge(
        self,
        scheduler: SimulatedScheduler,
        prompt: Tokens,
        salt: str,
        response: routing_pb2.RouteResponse,
    ) -> Routed:
        relay = next(r for r in self._relays if r.replica == response.target.replica)
        target = relay.engine.ranks[response.target.rank]
        view = view_of(scheduler, relay, target.number)
        assert view is not None
        self._requests += 1
        name = f"request {self._requests} by {scheduler.name}"
        prediction = response.prediction
        self._say(
            f"{name} to {target.name}: {len(prompt)} tokens, lower {prediction.lower}, "
            f"predicted {prediction.predicted}, upper {prediction.upper}, "
            f"told {view.rank.engine_seq}"
        )
        promised, certain = self._credited(scheduler, view, target, response.decision_id)
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
            target.history.last,
            certain,
        )
        self._by_decision[response.decision_id] = routed
        exact = check_prediction(view, target, prediction, prompt, salt, promised, name)
        self._counts["predictions"] += 1
        self._counts["predictions held to the truth"] += exact
        self._counts["tokens predicted"] += prediction.predicted
        return routed

    def _credited(
        self, scheduler: SimulatedScheduler, view: View, target: EngineRank, own: str
    ) -> tuple[set[Block], set[Block]]:
        """Blocks of prompts under credit: all, and those that this scheduler must count."""
        promised: set[Block] = set()
        certain: set[Block] = set()
        history = target.history
        size = history.block_tokens
        for credit in scheduler.scheduler.credits:
            where = (credit.replica, credit.rank)
            if credit.decision_id == own or where != (view.replica.name, target.number):
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
        return promised, certain

    def _arrive(self, step: Step, routed: Routed) -> None:
        target = routed.target
        sequence = target.engine.sequence(routed.prompt, routed.salt, step.outputs)

        def first_seen() -> None:
            reused = sequence.cached_tokens
            assert reused is not None
            self._say(f"{routed.name} reuses {reused}")
            self._counts["requests executed"] += 1
            self._counts["tokens reused"] += reused
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
        if self._rng.random() < 0.1:
            scheduler = self._schedulers[1 - self._schedulers.index(scheduler)]

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

        self._events.after(0.2 * self._rng.random(), report)
