"""Everything the scheduler refuses, as one small tree.

    SchedulerError
    ├── InvalidRequest        INVALID_ARGUMENT     the caller sent something malformed: names the field
    ├── ModelUnknown          NOT_FOUND            nobody announced that model
    ├── TargetUnknown         NOT_FOUND            none of the targets that the request allows is known
    ├── ReplicaUnknown        NOT_FOUND            no relay has spoken for that replica here
    ├── NoReplicas            UNAVAILABLE          every known target is excluded or away
    ├── NotAdmitted           RESOURCE_EXHAUSTED   turned away early
    │   ├── DeadlineUnreachable                    no target can answer before the request's deadline
    │   ├── TargetUnreachable                      none can within the target of the request's class
    │   └── QueueFull                              more work waits everywhere than that class may wait for
    ├── OwnerSilent           UNAVAILABLE          the scheduler that decided may have counted the report, or not
    └── Refused               (given)
        ├── AccessRefused     (given)              the caller has not proven who it is, or may not do this
        └── SessionRefused    (given)              a relay's stream can't go on

Each carries what the edge needs for google.rpc details; codes are google.rpc.Code numbers, so that no pure module
needs gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from google.rpc import code_pb2

DOMAIN = "servingfleet.dev"
"""ErrorInfo.domain of every error."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request and what is wrong with it."""

    field: str
    description: str


class SchedulerError(Exception):
    """Root of all refusals. `reason` is an upper-case word from a bounded set."""

    code: int = code_pb2.INTERNAL
    reason: str = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        fields: Sequence[FieldViolation] = (),
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = dict(metadata or {})
        self.fields = tuple(fields)
        self.retry_s = retry_s


class InvalidRequest(SchedulerError):
    """The caller sent a field that can't be served: correct it before trying again."""

    code = code_pb2.INVALID_ARGUMENT
    reason = "INVALID_FIELD"

    def __init__(self, field: str, description: str) -> None:
        super().__init__(
            f"{field}: {description}",
            metadata={"field": field},
            fields=[FieldViolation(field, description)],
        )
        self.field = field


class ModelUnknown(SchedulerError):
    """Neither a relay nor the configuration names this model."""

    code = code_pb2.NOT_FOUND
    reason = "MODEL_UNKNOWN"


class TargetUnknown(SchedulerError):
    """The request allows only targets that nobody knows."""

    code = code_pb2.NOT_FOUND
    reason = "TARGET_UNKNOWN"


class ReplicaUnknown(SchedulerError):
    """Neither a relay nor the configuration names this replica."""

    code = code_pb2.NOT_FOUND
    reason = "REPLICA_UNKNOWN"


class NoReplicas(SchedulerError):
    """Targets are known, but none may be used now."""

    code = code_pb2.UNAVAILABLE
    reason = "NO_REPLICAS"


class NotAdmitted(SchedulerError):
    """The request is turned away early."""

    code = code_pb2.RESOURCE_EXHAUSTED
    reason = "NOT_ADMITTED"


class DeadlineUnreachable(NotAdmitted):
    """No target is expected to give the first token before the deadline."""

    reason = "DEADLINE_UNREACHABLE"


class TargetUnreachable(NotAdmitted):
    """No target is expected to give the first token within what the request's class is promised."""

    reason = "TARGET_UNREACHABLE"


class QueueFull(NotAdmitted):
    """The room that is left is kept for more important classes."""

    reason = "QUEUE_FULL"


class OwnerSilent(SchedulerError):
    """The scheduler that decided got the report and did not answer in time: report again, it counts once."""

    code = code_pb2.UNAVAILABLE
    reason = "OWNER_SILENT"


class Refused(SchedulerError):
    """A call ends here; `reason` says why, the message what the caller must change."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message, metadata=metadata, retry_s=retry_s)
        self.code = code
        self.reason = reason


class AccessRefused(Refused):
    """The caller has not proven who it is, or may not do this."""


class SessionRefused(Refused):
    """A relay's stream ends here."""
