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
from .admission import Admission, Limit
from .candidates import basis
from .considering import Considering, reasons
from .constraints import still_allows
from .credits import Credits
from .decisions import Decisions
from .dispatches import Dispatches
from .errors import (
    InvalidRequest,
    NoReplicas,
    NotAdmitted,
    ReplicaUnknown,
    SchedulerError,
)
from .eviction import Tail
from .expectation import Expectations
from .fleet import Fleet
from .health import Health
from .learner import Learner
from .ledger import Ledger, Row, by_model
from .memory import Memory
from .outcomes import Outcomes
from .pins import Pins
from .policy import make_policy
from .policy.candidate import Estimate, Reuse
from .policy.estimate import estimate
from .policy.others import others_seconds
from .requests import MAX_DRAINERS, check_draining_request, check_route_request
from .sessions import Session
from .settings import SchedulerSettings
from .streams import Disagreement, Streams
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
        self.pins = Pins(token_key, most=settings.max_pins, ttl_s=settings.pin_ttl_s)
        self.streams = Streams(
            self.fleet, self.credits, self.pins, settings, instance_id, self.decisions.ended
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
        self.pinning: Counter[str] = Counter()
        """Decisions that were to stay where their session was: kept, moved, or new to this scheduler."""
        self.last_resorts = 0
        """Decisions for a target on which requests keep failing, there being no other."""
        self.expectations = Expectations(learn=settings.learn)
        self.admission = Admission(settings.admission, rng)
        self.learner = Learner(self.fleet, settings)
        self._policy = make_policy(
            settings.policy, settings.explore_share, price_others=settings.price_others
        )
        self._memory = Memory(max_ranks=settings.max_replicas) if self._policy.from_memory else None
        self._considering = Considering(
            settings,
            self.fleet,
            self._policy,
            self.pins,
            self.learner,
            self.expectations,
            self._memory,
        )
        self._rng = rng
        self._tokens = Tokens(token_key)
        self._dispatches = Dispatches(
            self.fleet,
            self.credits,
            self.decisions,
            self.streams,
            self.learner,
            settings,
            memory=self._memory,
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
            overheard=self._dispatches.overheard,
            tell=self._dispatches.tell,
            learned=self._learned,
            health=Health(self.fleet, settings.breaker, rng),
            learner=self.learner,
            pins=self.pins,
        )

    # Relay streams

    def open_session(self, now: float, only_replica: str | None = None) -> Session:
        """A relay has connected. `only_replica`: the one that it has proven to be; None: it may speak for any."""
        return Session(self.streams, now, only_replica)

    # Routing

    def route(self, request: routing_pb2.RouteRequest, now: float) -> routing_pb2.RouteResponse:
        """Picks a target, opens its credit, remembers the decision.

        Raises InvalidRequest, ModelUnknown, TargetUnknown, NoReplicas, NotAdmitted.
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
        considered = self._considering.consider(request, now, rng)
        limit = self._limit(request)
        fitting: list[tuple[Estimate, str]] = []
        refused: list[tuple[Estimate, str]] = []
        for each in considered.ordered:
            why = self.admission.refused(request.model, each, limit, now)
            (refused if why else fitting).append((each, why))
        stays = bool(fitting) and considered.option(fitting[0][0]).key == considered.pinned
        if refused and not stays:
            again = self._policy.order([each for each, _ in fitting], rng)
            fitting = [(each, "") for each in again]
        for option in considered.options.values():
            if option.refused:
                refused.append((estimate(option.candidate), option.refused))
        choice = [each for each, _ in fitting]
        others = others_seconds(choice) + [0.0] * len(refused)
        return routing_pb2.ExplainResponse(
            candidates=[
                answers.candidate(
                    considered.option(each),
                    each,
                    chosen=bool(fitting) and index == 0,
                    refused=why,
                    others_s=others[index],
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

    def withdraw(self, decision_id: str, now: float) -> None:
        """Whoever asked was gone before the answer: an abort, unless another call was given the same decision."""
        pending = self.decisions.get(decision_id)
        if pending is None:
            return
        pending.given -= 1
        if not pending.given:
            stage = routing_pb2.ReportRequest.STAGE_ABORTED
            self.report(routing_pb2.ReportRequest(decision_id=decision_id, stage=stage), now)

    def overhear(self, report: routing_pb2.ReportRequest, decision: Decision, now: float) -> None:
        """A report that goes on to the scheduler whose decision it is. Only the queue here changes at once."""
        self._outcomes.overhear(report, decision, now)

    def of_peer(self, decision_id: str) -> Decision | None:
        """A decision of another scheduler, with the address of that. None: this one's, nobody's, or not to be reached."""
        if self.decisions.get(decision_id) is not None:
            return None
        try:
            decision = self._read_token(decision_id)
        except (BadToken, ForeignToken):
            return None
        # The owner was at this very address, and is gone: this process took its place.
        here = decision.owner == self.instance_id or decision.owner_address == self.address
        return None if here or not decision.owner_address else decision

    @property
    def disagreement(self) -> Disagreement:
        """How far its predictions are from its peers'."""
        return self.streams.disagreement

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

    def set_draining(self, request: fleet_pb2.SetDrainingRequest) -> fleet_pb2.SetDrainingResponse:
        """Takes a replica out of routing in somebody's name, or takes that back. Idempotent.

        Raises InvalidRequest, ReplicaUnknown.
        """
        check_draining_request(request)
        replica = self.fleet.get(request.replica)
        if replica is None:
            raise ReplicaUnknown(
                f"no relay has spoken for replica {request.replica!r}: expected a pod's uid, or a "
                "configured id",
                metadata={"replica": request.replica},
            )
        drainers = replica.draining_by
        if not request.draining:
            drainers.discard(request.by)
        elif request.by not in drainers and len(drainers) >= MAX_DRAINERS:
            raise InvalidRequest(
                "by", f"would be one of more than {MAX_DRAINERS} that drain {request.replica!r}"
            )
        else:
            drainers.add(request.by)
        return fleet_pb2.SetDrainingResponse(
            dispatched_requests=sum(len(rank.dispatches) for rank in replica.ranks.values()),
            draining_by=sorted(drainers),
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
        self.pins.expire(now)
        for pending in self.decisions.expire(now):
            decision = pending.decision
            self._dispatches.release(pending.response.decision_id, decision, now)
            self.ledger.set_aside("expired", decision.at, decision.model, decision.replica)
        self.streams.tick(now)
        self.ledger.expire(now)

    # Inside

    def _limit(self, request: routing_pb2.RouteRequest) -> Limit | None:
        deadline_s = request.deadline_s if request.HasField("deadline_s") else None
        return self.admission.limit(request.priority, deadline_s)

    def _learned(
        self, target: tuple[str, int], reuse: Reuse, tail: Tail | None, actual: int, now: float
    ) -> None:
        replica = self.fleet.get(target[0])
        if replica is not None:
            self.expectations.learn(replica, target[1], reuse, tail, actual, now)

    def _read_token(self, token: str) -> Decision:
        return self._tokens.read(token, self.fleet.models)

    def _route(self, request: routing_pb2.RouteRequest, now: float) -> routing_pb2.RouteResponse:
        check_route_request(request)
        before = self._before(request)
        if before is not None:
            return before
        considered = self._considering.consider(request, now, self._rng)
        if not considered.ordered:
            raise NoReplicas(
                f"none of the model's {len(considered.options)} targets may be chosen: "
                f"{reasons(considered)}",
                metadata={"targets": str(len(considered.options))},
                retry_s=RETRY_NO_REPLICAS_S,
            )
        try:
            admitted = self.admission.admit(
                request.model, considered.ordered, self._limit(request), now
            )
        except NotAdmitted:
            self.ledger.rejected(request.model, now)
            raise
        stays = considered.option(admitted[0]).key == considered.pinned
        if len(admitted) < len(considered.ordered) and not stays:
            # Chance had part in the order: only among those that it may choose from is it said truly how much.
            admitted = self._policy.order(admitted, self._rng)
        response = self._dispatches.dispatch(request, considered, admitted, now)
        self.ledger.decided(request.model, response.target.replica, now)
        self.routes[request.model, response.basis] += 1
        self.last_resorts += response.last_resort
        if request.pin_session:
            known = self.pins.get(considered.session, now)
            self.pinning["kept" if response.pinned else "moved" if known else "new"] += 1
        target = response.target
        self.pins.note(considered.session, target.replica, target.rank, now)
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
        replica = self.fleet.get(target.replica)
        if not still_allows(request, replica, (target.replica, target.rank)):
            return None
        pending.given += 1
        return pending.response
