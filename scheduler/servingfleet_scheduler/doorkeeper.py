"""The gRPC edge of the gate: every call passes it before its message is read."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc

from .errors import SchedulerError
from .gate import Gate
from .rich_errors import Context, abort

log = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Doorkeeper(grpc.aio.ServerInterceptor):
    """Refuses calls that the gate refuses."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        call = handler_call_details
        try:
            await self._gate.check(call.method, call.invocation_metadata or ())
        except SchedulerError as error:
            return _refusing(error)
        except Exception:
            log.exception("defect", extra={"method": call.method})
            return _refusing(SchedulerError("a defect in the scheduler: see its log"))
        return await continuation(call)


def _refusing(error: SchedulerError) -> Handler:
    async def refuse(requests: AsyncIterator[bytes], context: Context) -> NoReturn:
        await abort(context, error)

    # Of streams, whatever the method is: so nothing that the caller sends is read.
    return grpc.stream_stream_rpc_method_handler(refuse)
