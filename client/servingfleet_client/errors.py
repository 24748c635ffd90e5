"""Everything that a call can end with, by who acts.

FleetError
├── InvalidRequest     INVALID_ARGUMENT     the caller: correct the field
├── UnknownModel       NOT_FOUND            the caller, or whoever runs the engines: nobody serves that model
├── UnknownTarget      NOT_FOUND            the caller: `only` names nobody that is known
├── Rejected           RESOURCE_EXHAUSTED   the user: later, or with more time; `facts` has the estimates
├── NoReplicas         UNAVAILABLE          the user: later; all are excluded or away
├── Unavailable        UNAVAILABLE          the caller: again; no scheduler answered, or it could not yet
├── TimedOut           DEADLINE_EXCEEDED    the caller: again
├── NotAuthenticated   UNAUTHENTICATED      whoever deploys the caller: the token
├── NotAllowed         PERMISSION_DENIED    whoever deploys the caller: the right
├── UnusableFile       -                    whoever deploys the caller: the CA or token file
└── Unexpected         (any other)          whoever runs the fleet: the scheduler's log
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status


@dataclass(frozen=True)
class Facts:
    """What a status says beside its message."""

    code: grpc.StatusCode | None = None
    """None: it never became a call."""
    reason: str = ""
    """An upper-case word from a bounded set (docs/scheduler.md). Empty: not a scheduler's own answer."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """For example the estimates behind a rejection."""
    fields: Sequence[tuple[str, str]] = ()
    """Fields of the request that are wrong, and why."""
    retry_after_s: float | None = None
    """Seconds after which trying again makes sense. None: the scheduler does not say."""


class FleetError(Exception):
    """Root of what this package raises on purpose."""

    def __init__(self, message: str, known: Facts | None = None) -> None:
        super().__init__(message)
        known = known or Facts()
        self.message = message
        self.code = known.code
        self.reason = known.reason
        self.facts = known.facts
        self.fields = known.fields
        self.retry_after_s = known.retry_after_s


class InvalidRequest(FleetError):
    """The request can't be served as it is: `fields` says why."""


class UnknownModel(FleetError):
    """No engine has announced that model."""


class UnknownTarget(FleetError):
    """The request allows only targets that nobody knows."""


class Rejected(FleetError):
    """An early no: it would not have been served in time. `retry_after_s` is when to come back."""


class NoReplicas(FleetError):
    """Engines are known, but none may be used now."""


class Unavailable(FleetError):
    """No scheduler answered, or it could not answer yet (`reason`)."""


class TimedOut(FleetError):
    """The scheduler did not answer in time."""


class NotAuthenticated(FleetError):
    """The scheduler does not believe who the caller is."""


class NotAllowed(FleetError):
    """The caller's account lacks the right."""


class UnusableFile(FleetError):
    """The CA or token file can't be read, or holds nothing of use."""


class Unexpected(FleetError):
    """A status that no scheduler of this release answers with on purpose."""


_BY_REASON: Mapping[str, type[FleetError]] = {
    "NO_REPLICAS": NoReplicas,
    "TARGET_UNKNOWN": UnknownTarget,
    "MODEL_UNKNOWN": UnknownModel,
}
_BY_CODE: Mapping[grpc.StatusCode, type[FleetError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Rejected,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    # What gRPC makes of a call that reaches a server in the moment of its stop.
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimedOut,
    grpc.StatusCode.UNAUTHENTICATED: NotAuthenticated,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
}


def error_of(call: grpc.RpcError | grpc.Call) -> FleetError:
    """What a call that failed has to say."""
    code = call.code()
    known = _facts(call, code)
    kind = _BY_REASON.get(known.reason) or _BY_CODE.get(code, Unexpected)
    if kind is Rejected and not known.reason:
        # gRPC's own: a message beyond the size that the scheduler takes, for example.
        kind = Unexpected
    return kind(f"{code.name}: {call.details() or 'no more is known'}", known)


def _facts(call: grpc.RpcError | grpc.Call, code: grpc.StatusCode) -> Facts:
    try:
        status = rpc_status.from_call(call)  # type: ignore[arg-type]  # it reads any error of a call
    except (
        DecodeError,
        ValueError,
    ):  # something on the way wrote another status over the scheduler's
        status = None
    reason, facts, fields, retry_after_s = "", {}, [], None
    for packed in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        wrong = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if packed.Unpack(info):
            reason, facts = info.reason, dict(info.metadata)
        elif packed.Unpack(wrong):
            fields += [(each.field, each.description) for each in wrong.field_violations]
        elif packed.Unpack(retry):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return Facts(code, reason, facts, fields, retry_after_s)
