"""Domain errors to gRPC statuses with google.rpc details."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from .errors import DOMAIN, SchedulerError

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

Context = grpc.aio.ServicerContext[Any, Any]


def status(error: SchedulerError) -> status_pb2.Status:
    """ErrorInfo always; BadRequest where fields are at fault; RetryInfo where a retry can help."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    ]
    if error.fields:
        details.append(
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(
                        field=each.field, description=each.description
                    )
                    for each in error.fields
                ]
            )
        )
    if error.retry_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        into = any_pb2.Any()
        into.Pack(detail)
        packed.append(into)
    return status_pb2.Status(code=error.code, message=error.message, details=packed)


async def abort(context: Context, error: SchedulerError) -> NoReturn:
    """Ends the call with the error."""
    rich = rpc_status.to_status(status(error))
    await context.abort(rich.code, rich.details, rich.trailing_metadata)


async def answer(context: Context, call: Callable[[], Answer]) -> Answer:
    """What `call` gives, or its refusal as a status. A defect here is INTERNAL to the caller and logged."""
    try:
        return call()
    except SchedulerError as error:
        refused = error
    except Exception:
        log.exception("defect")
        refused = SchedulerError("a defect in the scheduler: see its log")
    await abort(context, refused)
