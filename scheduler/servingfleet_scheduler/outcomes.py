"""What becomes of a reported outcome: joined with its decision, noted, or set aside under a bounded reason. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from servingfleet_protos.v1 import common_pb2, routing_pb2

from .decisions import Decisions, Pending
from .errors import InvalidRequest
from .hello import MAX_REPLICA_BYTES
from .ledger import Ledger
from .policy.candidate import Reuse
from .requests import check_size
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


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Joins reports. `read_token` gives a decision id's content, `release` ends its credit and its dispatch."""

    instance_id: str
    ttl_s: float
    decisions: Decisions
    ledger: Ledger
    read_token: Callable[[str], Decision]
    release: Callable[[str, Decision], None]
    first_token: Callable[[str, Decision], None]
    tell: Callable[[str, int, int, int], None]
    """The replica's relay hears of an outcome: replica, rank, tokens predicted and tokens reported."""

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
        if report.stage not in _ENDS:
            return self._progress(report, decision)
        decision_id = report.decision_id
        if self.decisions.ended(decision_id):
            response = self._set_aside("duplicate", now, decision)
            response.disposition = Response.DISPOSITION_DUPLICATE
            return response
        pending = self.decisions.end(decision_id, now)
        self.release(decision_id, decision)
        if now - decision.at > self.ttl_s:
            response = self._set_aside("late", now, decision)
            response.disposition = Response.DISPOSITION_LATE
            return response
        return self._end(report, decision, pending, now)

    def _progress(self, report: Request, decision: Decision) -> Response:
        if ran_target(report, decision) != (decision.replica, decision.rank):
            # Not there: nothing to wait for, nothing to credit.
            self.release(report.decision_id, decision)
        elif report.stage == Request.STAGE_FIRST_TOKEN:
            self.first_token(report.decision_id, decision)
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
            decision.predicted,
        )
        if target != (decision.replica, decision.rank):
            self.ledger.set_aside("ran_elsewhere", now, decision.model, decision.replica)
            there = pending.predictions.get(target) if pending else None
            if there is None:
                return Response(
                    disposition=Response.DISPOSITION_SET_ASIDE,
                    detail=f"ran_elsewhere: {target[0]} rank {target[1]} was not among the best",
                )
            reuse = there
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
        # More than predicted, but not more than called possible: that says nothing against the stream.
        actual = report.cached_tokens
        honest = reuse.predicted <= actual <= reuse.upper
        self.tell(*target, actual if honest else reuse.predicted, actual)
        if pending is None:
            return Response(
                disposition=Response.DISPOSITION_ORPHAN_JOIN,
                detail="this scheduler does not remember the decision: counted from its id",
            )
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


def ran_target(report: Request, decision: Decision) -> tuple[str, int]:
    """Where the request really ran."""
    if not report.HasField("ran_on"):
        return (decision.replica, decision.rank)
    return (report.ran_on.replica or decision.replica, report.ran_on.rank)


def _check_counts(report: Request) -> None:
    if report.stage not in _STAGES:
        raise InvalidRequest("stage", f"is {report.stage}, which this release does not know")
    check_size("ran_on.replica", report.ran_on.replica, 0, MAX_REPLICA_BYTES)
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
