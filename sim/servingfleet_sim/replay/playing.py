"""The clients of a run: who sends what when, and what the engines and schedulers make of it. Pure."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

from servingfleet_protos.v1 import common_pb2, routing_pb2
from servingfleet_scheduler.errors import SchedulerError

from .ceilings import ceilings
from .fleet import FleetSpec
from .memory import Job
from .options import ORACLE, Options
from .plays import TIERS, Play, outcome
from .results import Ceilings, Disagreement, Fate, Outcome, Run
from .traces import Request
from .world import MODEL, World

Report = routing_pb2.ReportRequest
MIN_RETRY_S = 0.1
"""A client that is turned away comes back no sooner, whatever it was told."""


class Playing:
    """The clients of a run, and what becomes of their requests."""

    def __init__(
        self,
        requests: Sequence[Request],
        fleet: FleetSpec,
        options: Options,
        seed: int,
        progress: Callable[[int], None] = lambda ended: None,
    ) -> None:
        self._requests = requests
        self._fleet = fleet
        self._options = options
        self._seed = seed
        self._progress = progress
        self.counters: Counter[str] = Counter()
        self.world = World(fleet, options, seed, self, self.counters)
        self.clock = self.world.clock
        self._outcomes: dict[int, Outcome] = {}
        self._running: dict[int, Play] = {}
        self._sessions: dict[str, deque[tuple[int, Request]]] = {}
        self._turn = 0
        self._first: float | None = None
        self._last = 0.0
        self._compared = [0, 0, 0, 0]

    def play(self) -> None:
        """From the first arrival until every request has ended and the schedulers have heard of it."""
        rng = random.Random(f"arrivals {self._seed}")
        for number, request in enumerate(self._requests):
            late = rng.uniform(0.0, self._options.jitter_s)
            if self._options.closed_loop and request.session:
                line = self._sessions.setdefault(request.session, deque())
                line.append((number, request))
                if len(line) > 1:
                    continue
            self._arrives(Play(number, request), request.at + late)
        # Where nothing is due but what comes again and again, nothing will come of the rest.
        self.world.begin(lambda: self.clock.work > 0)
        while self.clock.step():
            pass
        self.world.rest()

    # Clients

    def _arrives(self, play: Play, at: float) -> None:
        self.clock.at(at, lambda: self._ask(play))

    def _ask(self, play: Play) -> None:
        """The client has a request to send."""
        play.asked_at = play.since = self.clock.now
        play.hashes = play.request.blocks.packed()
        if self._first is None:
            self._first = self.clock.now
        play.seen = self.world.seen(play.hashes, play.request.prompt_tokens)
        play.exclude = self.world.too_small(play.request)
        if len(play.exclude) == len(self.world.relays):
            self.counters["too_long"] += 1
            self._end(play, "failed", "too_long")
            return
        self._route(play)

    def _route(self, play: Play) -> None:
        now = self.clock.now
        play.scheduler = self._turn % len(self.world.schedulers)
        self._turn += 1
        play.best_actual = self.world.best(play.hashes, play.request.prompt_tokens)
        request = self._request(play)
        if len(self.world.schedulers) > 1 and self._turn % self._options.compare_every == 0:
            self._compare(play, request)
        scheduler = self.world.schedulers[play.scheduler]
        try:
            response = scheduler.route(request, now)
        except SchedulerError as error:
            self._refused(play, error)
            return
        finally:
            self.world.pump()
        pending = scheduler.decisions.get(response.decision_id)
        play.best_predicted = pending.decision.best if pending is not None else 0
        play.response = response
        play.decision_id = response.decision_id
        play.replica, play.rank = response.target.replica, response.target.rank
        play.sent_at = now
        play.attempts += 1
        self._send(play)

    def _request(self, play: Play) -> routing_pb2.RouteRequest:
        asked = play.request
        request = routing_pb2.RouteRequest(
            model=MODEL,
            prompt=routing_pb2.Prompt(block_hashes=play.hashes, prompt_tokens=asked.prompt_tokens),
            session_id=asked.session,
            priority=asked.priority,
            exclude=[common_pb2.Target(replica=each) for each in play.exclude],
        )
        if self._options.deadlines and not math.isnan(asked.target_s):
            left = asked.target_s - (self.clock.now - play.since)
            request.deadline_s = max(0.0, left)
        if self._options.policy == ORACLE:
            target = self.world.oracle(play.hashes, asked.prompt_tokens, play.exclude)
            if target is not None:
                request.only.append(common_pb2.Target(replica=target[0], rank=target[1]))
        return request

    def _send(self, play: Play) -> None:
        engine = self.world.engine(play.replica, play.rank)
        asked = play.request
        job = Job(play.number, asked.prompt_tokens, asked.output_tokens, play.hashes)
        if engine is None:
            self._failed(play, "engine_away")
            return
        play.job = job
        self._running[play.number] = play
        engine.submit(job)

    # Engines

    def first_token(self, job: Job) -> None:
        """The first token of a job has come."""
        play = self._running[job.number]
        now = self.clock.now
        play.ttft_s = now - play.asked_at
        self._report(play, Report.STAGE_FIRST_TOKEN, ttft_s=now - play.sent_at)

    def finished(self, job: Job) -> None:
        """The last one has."""
        play = self._running.pop(job.number)
        tells = self.world.pools[play.replica].tells_tiers
        tiers = [
            routing_pb2.TierTokens(tier=tier, tokens=tokens)
            for tier, tokens in zip(TIERS, job.reused_tiers, strict=False)
            if tells and tokens
        ]
        self._report(
            play,
            Report.STAGE_FINISHED,
            prompt_tokens=job.prompt,
            cached_tokens=job.reused,
            cached_by_tier=tiers,
            output_tokens=job.output,
            ttft_s=job.first_token_at - play.sent_at,
        )
        self._end(play, "finished")

    def lost(self, job: Job) -> None:
        """Its engine has died."""
        self._failed(self._running.pop(job.number), "engine_died")

    # Ends

    def _failed(self, play: Play, reason: str) -> None:
        self._report(play, Report.STAGE_FAILED)
        self.counters[reason] += 1
        play.exclude.append(play.replica)
        if play.attempts < self._options.attempts:
            play.job, play.ttft_s = None, math.nan
            self._route(play)
        else:
            self._end(play, "failed", reason)

    def _refused(self, play: Play, error: SchedulerError) -> None:
        self.counters[f"refused_{error.reason.lower()}"] += 1
        play.turned_away += 1
        again = self._options.closed_loop and play.turned_away <= self._options.retries
        if again and error.retry_s is not None:
            play.since = self.clock.now + max(MIN_RETRY_S, error.retry_s)
            self.clock.at(play.since, lambda: self._route(play))
            return
        play.replica, play.rank, play.response = "", -1, None
        self._end(play, "rejected", error.reason)

    def _report(self, play: Play, stage: Report.Stage.ValueType, **counts: object) -> None:
        report = Report(decision_id=play.decision_id, stage=stage, **counts)  # type: ignore[arg-type]
        self.world.schedulers[play.scheduler].report(report, self.clock.now)
        self.world.pump()

    def _end(self, play: Play, fate: Fate, reason: str = "") -> None:
        self._outcomes[play.number] = outcome(
            play, fate, reason, self.world.pool_of(play.replica), self.clock.now
        )
        self._last = self.clock.now
        play.hashes = b""
        self._progress(len(self._outcomes))
        line = self._sessions.get(play.request.session)
        if line and line[0][0] == play.number:
            line.popleft()
            if line:
                number, request = line[0]
                self._arrives(Play(number, request), self.clock.now + request.think_s)

    # What is measured beside

    def _compare(self, play: Play, request: routing_pb2.RouteRequest) -> None:
        """Asks every scheduler what it would do with this prompt."""
        predicted: dict[tuple[str, int], list[int]] = {}
        chosen: list[tuple[str, int]] = []
        for scheduler in self.world.schedulers:
            try:
                found = scheduler.explain(request, self.clock.now)
            except SchedulerError:
                return
            for each in found.candidates:
                key = (each.target.replica, each.target.rank)
                predicted.setdefault(key, []).append(each.prediction.predicted)
                if each.chosen:
                    chosen.append(key)
        if len(chosen) < len(self.world.schedulers):
            return
        there = predicted[chosen[play.scheduler]]
        more = (1, play.request.prompt_tokens, max(there) - min(there), len(set(chosen)) > 1)
        self._compared = [a + b for a, b in zip(self._compared, more, strict=True)]

    def run(self, wall_s: float) -> Run:
        """What the run left."""
        world = self.world
        outcomes = [
            self._outcomes.get(number)
            or outcome(Play(number, request), "unfinished", "", "", math.nan)
            for number, request in enumerate(self._requests)
        ]
        return Run(
            policy=self._options.policy,
            seed=self._seed,
            outcomes=outcomes,
            wall_s=wall_s,
            simulated_s=max(0.0, self._last - (self._first or 0.0)),
            computed_tokens=world.computed(),
            busy_s=world.busy(),
            scheduler_sums=world.sums(),
            ceilings=self._ceilings(outcomes),
            disagreement=Disagreement(*self._compared),
            counters=dict(sorted(self.counters.items())),
        )

    def _ceilings(self, outcomes: Sequence[Outcome]) -> Ceilings:
        # Those that never came are last.
        ordered = sorted(outcomes, key=lambda each: (math.isnan(each.at), each.at, each.number))
        requests = [self._requests[each.number] for each in ordered]
        return ceilings(requests, self._fleet, self._options.block_tokens)
