"""The scheduler without its ports: streams in, decisions out, outcomes back.

Pure: `now` is seconds since the epoch and never falls; chance comes from `rng`. One thread (or one event loop) calls it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass

from servingfleet_core.reports import reuse_report
from servingfleet_protos.v1 import fleet_pb2, routing_pb2

from . import answers
from .admission import admit, earliest_seconds
from .candidates import Considered, basis, options
from .credits import Credits
from .decisions import Decisions
from .dispatches import Dispatches
from .errors import (
    DeadlineUnreachable,
    InvalidRequest,
    ModelUnknown,
    NoReplicas,
    SchedulerError,
    TargetUnknown,
)
from .fleet import Fleet
from .ledger import Ledger, Row, by_model
from .outcomes import Outcomes
from .policy import make_policy
from .policy.estimate import estimate, estimates
from .prompts import prepare
from .requests import check_route_request, names
from .sessions import Session
from .settings import SchedulerSettings
from .streams import Streams
from .tokens import BadToken, Decision, ForeignToken, Tokens

RETRY_NO_REPLICAS_S = 2.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """How warm the index is. Routing works from the first second, whatever this says."""

    warm: float | None
    """Share of ranks with a relay whose snapshot is complete; None: no relay has spoken."""
    models: int
    replicas: int
    connected: int
    snapshots_running: int
    snapshots_waiting: int


class Scheduler:
    """Holds everything; each method is one RPC, or a step of time."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        instance_id: str,
        now: float,
        rng: random.Random,
        token_key: bytes,
        address: str = "",
    ) -> None:
        """`address`: host:port where the other schedulers of the fleet reach this one. Empty: nowhere."""
        self.settings = settings
        self.instance_id = instance_id
        self.address = address
        self.fleet = Fleet(settings)
        self.credits = Credits(
            self.fleet, max_credits=settings.max_credits, max_blocks=settings.max_credit_blocks
        )
        self.decisions = Decisions(
            ttl_s=settings.decision_ttl_s,
            max_open=settings.max_decisions,
            max_ended=settings.max_ended,
        )
        self.streams = Streams(
            self.fleet, self.credits, settings, instance_id, self.decisions.ended
        )
        self.ledger = Ledger(
            started=now,
            window_s=settings.window_s,
            bucket_s=settings.bucket_s,
            max_keys=settings.max_ledger_keys,
        )
        self.routes: Counter[tuple[str, routing_pb2.Basis.ValueType]] = Counter()
        """Decisions by model and basis."""
        self.refusals: Counter[str] = Counter()
        """Routes refused, by reason."""
        self._policy = make_policy(settings.policy)
        self._rng = rng
        self._tokens = Tokens(token_key)
        self._dispatches = Dispatches(
            self.fleet,
            self.credits,
            self.decisions,
            self.streams,
            settings,
            write_token=self._tokens.write,
            instance_id=instance_id,
            address=address,
            policy=self._policy.name,
            rng=rng,
        )
        self._outcomes = Outcomes(
            instance_id=instance_id,
            ttl_s=settings.decision_ttl_s,
            decisions=self.decisions,
            ledger=self.ledger,
            read_token=self._read_token,
            release=self._dispatches.release,
            first_token=self._dispatches.first_token,
            tell=self._dispatches.tell,
        )

    # Relay streams

    def open_session(self, now: float, only_replica: str | None = None) -> Session:
        """A relay has connected. `only_replica`: the one that it has proven to be; None: it may speak for any."""
        return Session(self.streams, now, only_replica)

    # Routing

    def route(self, request: routing_pb2.RouteRequest, now: float) -> routing_pb2.RouteResponse:
        """Picks a target, opens its credit, remembers the decision.

        Raises InvalidRequest, ModelUnknown, TargetUnknown, NoReplicas, DeadlineUnreachable.
        """
        try:
            return self._route(request, now)
        except SchedulerError as error:
            self.refusals[error.reason] += 1
            raise

    def explain(self, request: routing_pb2.RouteRequest, now: float) -> routing_pb2.ExplainResponse:
        """What `route` would do now, with every candidate. Changes nothing. Raises like `route`, but for refusals
        of single candidates, which it lists."""
        check_route_request(request)
        # A copy: the next route then breaks ties as shown here.
        rng = random.Random()
        rng.setstate(self._rng.getstate())
        considered = self._consider(request, now, rng)
        fitting, refused = [], []
        for each in considered.ordered:
            earliest = earliest_seconds(each.candidate)
            if request.HasField("deadline_s") and earliest > request.deadline_s:
                refused.append((each, f"{earliest:.3f} s is beyond the deadline"))
            else:
                fitting.append((each, ""))
        for option in considered.options.values():
            if option.refused:
                refused.append((estimate(option.candidate), option.refused))
        return routing_pb2.ExplainResponse(
            candidates=[
                answers.candidate(
                    considered.option(each),
                    each,
                    chosen=bool(fitting) and index == 0,
                    refused=why,
                    now=now,
                )
                for index, (each, why) in enumerate(fitting + refused)
            ],
            basis=basis(considered.allowed),
            policy=self._policy.name,
            best_predicted=considered.best,
        )

    def report(self, request: routing_pb2.ReportRequest, now: float) -> routing_pb2.ReportResponse:
        """What became of a decision. Raises InvalidRequest for an id that is none, or counts that can't be."""
        return self._outcomes.report(request, now)

    def owner_elsewhere(self, decision_id: str) -> str:
        """Address of the other scheduler whose decision this is. Empty: this one's, nobody's, or not to be reached."""
        if self.decisions.get(decision_id) is not None:
            return ""
        try:
            decision = self._read_token(decision_id)
        except (BadToken, ForeignToken):
            return ""
        # The owner was at this very address, and is gone: this process took its place.
        here = decision.owner == self.instance_id or decision.owner_address == self.address
        return "" if here else decision.owner_address

    # The fleet

    def get_reuse(
        self, request: fleet_pb2.GetReuseRequest, now: float
    ) -> fleet_pb2.GetReuseResponse:
        """Figures of the window. Raises InvalidRequest for a window that is no length of time."""
        if not 0.0 <= request.window_s < math.inf:
            raise InvalidRequest("window_s", f"is {request.window_s}; expected seconds, finite")
        rows, window_s = self.ledger.rows(now, request.window_s)
        models = by_model(rows)
        for model in self.fleet.models:
            models.setdefault(model, Row())
        least = self.settings.min_pairs
        reports = []
        for model in sorted(models):
            if request.model not in ("", model):
                continue
            row = models[model]
            reports.append(reuse_report(model, "", row.sums, row.set_aside, least))
            if request.by_replica:
                reports.extend(
                    reuse_report(model, replica, each.sums, each.set_aside, least)
                    for (of, replica), each in sorted(rows.items())
                    if of == model and replica
                )
        return fleet_pb2.GetReuseResponse(
            reports=reports, window_s=window_s, instance_id=self.instance_id, min_pairs=least
        )

    def list_replicas(
        self, request: fleet_pb2.ListReplicasRequest, now: float
    ) -> fleet_pb2.ListReplicasResponse:
        """Every known replica, its streams and what they hold."""
        replicas: list[fleet_pb2.Replica] = []
        for model in self.fleet.models:
            index = self.fleet.index(model)
            if index is not None and request.model in ("", model):
                replicas.extend(
                    answers.replica(each, index, now) for each in self.fleet.of_model(model)
                )
        return fleet_pb2.ListReplicasResponse(
            replicas=replicas, warm=self.fleet.warm(), instance_id=self.instance_id
        )

    def ready(self) -> Readiness:
        """How warm the index is."""
        return Readiness(
            warm=self.fleet.warm(),
            models=len(self.fleet.models),
            replicas=sum(1 for _ in self.fleet),
            connected=sum(each.connected for each in self.fleet),
            snapshots_running=self.streams.slots.in_use,
            snapshots_waiting=self.streams.slots.waiting,
        )

    # Time

    def tick(self, now: float) -> None:
        """What is due: ends of credits, decisions without outcome, snapshot slots, replicas that are gone."""
        self.credits.expire(now)
        for pending in self.decisions.expire(now):
            decision = pending.decision
            self._dispatches.release(pending.response.decision_id, decision)
            self.ledger.set_aside("expired", decision.at, decision.model, decision.replica)
        self.streams.tick(now)
        self.ledger.expire(now)

    # Inside

    def _read_token(self, token: str) -> Decision:
        return self._tokens.read(token, self.fleet.models)

    def _route(self, request: routing_pb2.RouteRequest, now: float) -> routing_pb2.RouteResponse:
        check_route_request(request)
        before = self._before(request)
        if before is not None:
            return before
        considered = self._consider(request, now, self._rng)
        if not considered.ordered:
            raise NoReplicas(
                f"all {len(considered.options)} targets of the model are excluded by the request",
                metadata={"targets": str(len(considered.options))},
                retry_s=RETRY_NO_REPLICAS_S,
            )
        deadline_s = request.deadline_s if request.HasField("deadline_s") else None
        try:
            admitted = admit(considered.ordered, deadline_s, self._rng)
        except DeadlineUnreachable:
            self.ledger.rejected(request.model, now)
            raise
        response = self._dispatches.dispatch(request, considered, admitted, now)
        self.ledger.decided(request.model, response.target.replica, now)
        self.routes[request.model, response.basis] += 1
        return response

    def _before(self, request: routing_pb2.RouteRequest) -> routing_pb2.RouteResponse | None:
        """The open decision that this request got before, if it still allows it."""
        if not request.request_id:
            return None
        pending = self.decisions.of_request(request.model, request.request_id)
        if pending is None:
            return None
        target = pending.response.target
        # A gateway that tries elsewhere excludes what failed: it wants a new decision.
        if names(request.exclude, target.replica, target.rank) or (
            request.only and not names(request.only, target.replica, target.rank)
        ):
            return None
        return pending.response

    def _consider(
        self, request: routing_pb2.RouteRequest, now: float, rng: random.Random
    ) -> Considered:
        prompt = prepare(
            request.prompt,
            request.model,
            block_tokens=self.settings.block_tokens,
            max_prompt_tokens=self.settings.max_prompt_tokens,
        )
        if self.fleet.index(request.model) is None:
            known = self.fleet.models
            raise ModelUnknown(
                f"no replica serves model {request.model!r}; known: "
                f"{', '.join(known[:10]) or 'none yet'}",
                metadata={"known": str(len(known))},
            )
        found = options(self.fleet, self.settings, request, prompt, now)
        if request.only and not any(
            names(request.only, option.replica.name, option.rank.number) for option in found
        ):
            raise TargetUnknown(
                f"none of the {len(request.only)} targets in `only` serves model {request.model!r}",
                metadata={"targets": str(len(found))},
            )
        allowed = [option.candidate for option in found if not option.refused]
        return Considered(
            prompt,
            {option.key: option for option in found},
            self._policy.order(estimates(allowed), rng),
        )
