"""What becomes of a reported outcome: joined with its decision, noted, or set aside under a bounded reason. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from servingfleet_protos.v1 import common_pb2, routing_pb2

from .decisions import Decisions, Footing, Pending
from .errors import InvalidRequest
from .eviction import Tail
from .health import Health
from .hello import MAX_REPLICA_BYTES
from .learner import Learner
from .ledger import Ledger
from .pins import Pins
from .policy.candidate import Reuse
from .requests import MAX_FALLBACKS, check_size
from .tokens import BadToken, Decision, ForeignToken

Request = routing_pb2.ReportRequest
Response = routing_pb2.ReportResponse

REASONS = {
    "bad_token": "the decision id is not one",
    "unknown_decision": "the decision id is signed with another key",
    "duplicate": "an outcome of this decision has come before",
    "late": "the outcome came after the decision's time to live",
    "expired": "the decision's outcome did not come in time",
    "failed": "the engine refused or failed",
    "aborted": "the client went away",
    "missing_counts": "the report gives no prompt or no cached tokens",
    "shared_usage": "the usage speaks for several prompts",
    "prompt_mismatch": "the engine counted another number of prompt tokens than the decision",
    "ran_elsewhere": "it ran on another target; joined there if that target's prediction was kept",
    "cached_exceeds_prompt": "more tokens cached than the prompt has",
    "impossible_counts": "another count that can't be",
}

_STAGES = frozenset(Request.Stage.values())
_TIERS = frozenset(common_pb2.Tier.values()) - {common_pb2.TIER_UNSPECIFIED}
_ENDS = frozenset(
    {
        Request.STAGE_UNSPECIFIED,
        Request.STAGE_FINISHED,
        Request.STAGE_FAILED,
        Request.STAGE_ABORTED,
    }
)


class Release(Protocol):
    """Ends a decision's credit and its dispatch. `served`: the request ran to its end where it was sent."""

    def __call__(
        self, decision_id: str, decision: Decision, now: float, *, served: bool = False
    ) -> None: ...


class Overheard(Protocol):
    """A peer's dispatch waits no more."""

    def __call__(
        self, decision_id: str, decision: Decision, now: float, *, began: bool, served: bool
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Joins reports. `read_token` gives a decision id's content, `release` ends its credit and its dispatch."""

    instance_id: str
    ttl_s: float
    decisions: Decisions
    ledger: Ledger
    read_token: Callable[[str], Decision]
    release: Release
    first_token: Callable[[str, Decision, float], None]
    overheard: Overheard
    tell: Callable[[tuple[str, int], int, int, Footing, float], None]
    """The target's relay hears of an outcome: tokens predicted and tokens reported, what the prediction rested on, and its
    age in seconds."""
    learned: Callable[[tuple[str, int], Reuse, Tail | None, int, float], None]
    """An outcome of a decision that is remembered: target, prediction and where it ends, tokens reported, time."""
    health: Health
    learner: Learner
    pins: Pins

    def report(self, report: Request, now: float) -> Response:
        """Raises InvalidRequest for an id that is none, or counts that can't be; both are counted, and end nothing."""
        try:
            decision = self.read_token(report.decision_id)
        except BadToken as error:
            self.ledger.set_aside("bad_token", now)
            raise InvalidRequest("decision_id", str(error)) from None
        except ForeignToken:
            return self._set_aside("unknown_decision", now, None)
        self._check(report, decision, now)
        if not self.decisions.ended(report.decision_id):
            self._heard(report, decision, now)
        if report.stage not in _ENDS:
            return self._progress(report, decision, now)
        decision_id = report.decision_id
        if self.decisions.ended(decision_id):
            response = self._set_aside("duplicate", now, decision)
            response.disposition = Response.DISPOSITION_DUPLICATE
            return response
        pending = self.decisions.end(decision_id, now)
        self.release(decision_id, decision, now, served=served(report, decision))
        if now - decision.at > self.ttl_s:
            response = self._set_aside("late", now, decision)
            response.disposition = Response.DISPOSITION_LATE
            return response
        return self._end(report, decision, pending, now)

    def overhear(self, report: Request, decision: Decision, now: float) -> None:
        """A report on its way to the scheduler whose decision it is: of it only the queue is changed here."""
        here = ran_target(report, decision) == (decision.replica, decision.rank)
        began = here and report.stage == Request.STAGE_FIRST_TOKEN
        if began or report.stage in _ENDS or not here:
            self.overheard(
                report.decision_id, decision, now, began=began, served=served(report, decision)
            )

    def _heard(self, report: Request, decision: Decision, now: float) -> None:
        """What it says of the engines that had it, whether it can be joined or not."""
        pending = self.decisions.get(report.decision_id)
        own, ran = (decision.replica, decision.rank), ran_target(report, decision)
        self.learner.heard(report, decision, ran, now)
        failed = [(each.replica or decision.replica, each.rank) for each in report.failed_on]
        if report.stage == Request.STAGE_FAILED:
            failed.append(ran)
        told = pending.failed if pending is not None else set[tuple[str, int]]()
        named = {own} if pending is None else _named(pending)
        # Of a decision that is forgotten only its end can come once.
        if pending is not None or report.stage in _ENDS:
            for target in failed:
                # Nobody's word counts for targets that it was not given.
                if target in named and target not in told:
                    told.add(target)
                    self.health.failed(target, decision.at, now)
        if report.stage == Request.STAGE_FIRST_TOKEN:
            self.health.answered(ran, decision.at, now)
        elif report.stage in (Request.STAGE_UNSPECIFIED, Request.STAGE_FINISHED):
            self.health.finished(ran, decision.at, now)
        if ran != own or report.stage == Request.STAGE_ABORTED:
            self.health.aborted(own, decision.at)
        if ran != own and pending is not None and self.pins.get(pending.session, now):
            # What it leaves in a cache is there.
            self.pins.note(pending.session, *ran, now)

    def _progress(self, report: Request, decision: Decision, now: float) -> Response:
        if ran_target(report, decision) != (decision.replica, decision.rank):
            # Not there: nothing to wait for, nothing to credit.
            self.release(report.decision_id, decision, now)
        elif report.stage == Request.STAGE_FIRST_TOKEN:
            self.first_token(report.decision_id, decision, now)
        return Response(disposition=Response.DISPOSITION_NOTED, detail="not the end yet")

    def _end(
        self, report: Request, decision: Decision, pending: Pending | None, now: float
    ) -> Response:
        if report.stage in (Request.STAGE_FAILED, Request.STAGE_ABORTED):
            failed = report.stage == Request.STAGE_FAILED
            return self._noted("failed" if failed else "aborted", now, decision)
        if report.prompts_in_usage > 1:
            return self._set_aside("shared_usage", now, decision)
        if not (report.HasField("prompt_tokens") and report.HasField("cached_tokens")):
            return self._noted("missing_counts", now, decision)
        if report.prompt_tokens != decision.prompt:
            return self._set_aside("prompt_mismatch", now, decision)
        target = ran_target(report, decision)
        reuse = Reuse(
            decision.prompt,
            decision.lower,
            decision.predicted,
            decision.upper,
            decision.expected,
        )
        promise = pending.promises.get(target) if pending else None
        if target != (decision.replica, decision.rank):
            self.ledger.set_aside("ran_elsewhere", now, decision.model, decision.replica)
            if promise is None:
                return Response(
                    disposition=Response.DISPOSITION_SET_ASIDE,
                    detail=f"ran_elsewhere: {target[0]} rank {target[1]} was not among the best",
                )
            reuse = promise.reuse
            self.ledger.moved(decision.model, decision.replica, target[0], decision.at)
        own = decision.owner == self.instance_id
        self.ledger.joined(
            decision.model,
            target[0],
            decision.at,
            reuse,
            best=max(decision.best, reuse.predicted),
            actual=report.cached_tokens,
            own=own,
        )
        actual = report.cached_tokens
        footing = promise.footing if promise is not None else None
        if footing is not None:
            # What rests on credits may not have been computed in time.
            predicted = reuse.lower if footing.credited else reuse.predicted
            # More than predicted, but not more than called possible: that says nothing against the stream.
            honest = predicted <= actual <= reuse.upper
            self.tell(target, actual if honest else predicted, actual, footing, now - decision.at)
        if pending is None:
            return Response(
                disposition=Response.DISPOSITION_ORPHAN_JOIN,
                detail="this scheduler does not remember the decision: counted from its id",
            )
        self.learned(target, reuse, promise.tail if promise is not None else None, actual, now)
        return Response(disposition=Response.DISPOSITION_JOINED)

    def _check(self, report: Request, decision: Decision, now: float) -> None:
        try:
            _check_counts(report)
        except InvalidRequest as refused:
            reason = (
                "cached_exceeds_prompt" if refused.field == "cached_tokens" else "impossible_counts"
            )
            self.ledger.set_aside(reason, now, decision.model, decision.replica)
            raise

    def _noted(self, reason: str, now: float, decision: Decision) -> Response:
        response = self._set_aside(reason, now, decision)
        response.disposition = Response.DISPOSITION_NOTED
        return response

    def _set_aside(self, reason: str, now: float, decision: Decision | None) -> Response:
        if decision is None:
            self.ledger.set_aside(reason, now)
        else:
            self.ledger.set_aside(reason, now, decision.model, decision.replica)
        return Response(
            disposition=Response.DISPOSITION_SET_ASIDE, detail=f"{reason}: {REASONS[reason]}"
        )


def served(report: Request, decision: Decision) -> bool:
    """It ran to its end where it was sent."""
    ended_well = report.stage in (Request.STAGE_UNSPECIFIED, Request.STAGE_FINISHED)
    return ended_well and ran_target(report, decision) == (decision.replica, decision.rank)


def _named(pending: Pending) -> set[tuple[str, int]]:
    """The decision's target and its fallbacks."""
    answer = pending.response
    targets = (answer.target, *(each.target for each in answer.fallbacks))
    return {(each.replica, each.rank) for each in targets}


def ran_target(report: Request, decision: Decision) -> tuple[str, int]:
    """Where the request really ran."""
    if not report.HasField("ran_on"):
        return (decision.replica, decision.rank)
    return (report.ran_on.replica or decision.replica, report.ran_on.rank)


def _check_counts(report: Request) -> None:
    if report.stage not in _STAGES:
        raise InvalidRequest("stage", f"is {report.stage}, which this release does not know")
    check_size("ran_on.replica", report.ran_on.replica, 0, MAX_REPLICA_BYTES)
    if len(report.failed_on) > MAX_FALLBACKS:
        raise InvalidRequest(
            "failed_on", f"has {len(report.failed_on)} targets; at most {MAX_FALLBACKS}"
        )
    for each in report.failed_on:
        check_size("failed_on.replica", each.replica, 0, MAX_REPLICA_BYTES)
    if report.HasField("prompt_tokens"):
        if not report.prompt_tokens:
            raise InvalidRequest("prompt_tokens", "is 0; leave it out if the engine did not say")
        if report.cached_tokens > report.prompt_tokens and report.prompts_in_usage <= 1:
            raise InvalidRequest(
                "cached_tokens",
                f"is {report.cached_tokens}, more than the prompt's {report.prompt_tokens}",
            )
    if any(each.tier not in _TIERS for each in report.cached_by_tier):
        raise InvalidRequest("cached_by_tier", "names a tier that this release does not know")
    by_tier = sum(each.tokens for each in report.cached_by_tier)
    if report.HasField("prompt_tokens") and by_tier > report.prompt_tokens:
        raise InvalidRequest(
            "cached_by_tier", f"adds up to {by_tier}, more than the prompt's {report.prompt_tokens}"
        )
    if report.HasField("ttft_s") and not 0.0 <= report.ttft_s < math.inf:
        raise InvalidRequest("ttft_s", f"is {report.ttft_s}; expected seconds, finite")
