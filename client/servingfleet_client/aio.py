"""The client for programs on asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self, Unpack

import grpc

from servingfleet_protos.v1 import routing_pb2
from servingfleet_protos.v1.routing_pb2_grpc import RouterStub

from .asking import Asking
from .connection import Scheduler
from .errors import FleetError, error_of
from .requests import RouteOptions, Tokens
from .routed import Failures, Routed

if TYPE_CHECKING:  # this name exists for type checkers only
    from servingfleet_protos.v1.routing_pb2_grpc import RouterAsyncStub


class AsyncClient(Asking[grpc.aio.Channel]):
    """Asks one fleet for one model. Made, used and closed within one event loop."""

    def __init__(self, scheduler: Scheduler, model: str) -> None:
        """`model`: as the engines serve it. Raises UnusableFile; the scheduler need not be there yet."""
        super().__init__(scheduler, model, grpc.aio)
        self._sending: set[asyncio.Task[None]] = set()
        self._closed = False

    async def route(
        self, tokens: Tokens, *, failures: Failures = Exception, **options: Unpack[RouteOptions]
    ) -> Routed:
        """Where the prompt should go. What is routed must be told its end: see `request`.

        Raises FleetError, ValueError. `failures`: what ends a block of it as the engine's failure.
        """
        request = self._request(tokens, options)
        try:
            decision = await (await self._router()).Route(request, **self._to_route())
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
        return self._routed(decision, request, self._send, failures)

    @asynccontextmanager
    async def request(
        self, tokens: Tokens, *, failures: Failures = Exception, **options: Unpack[RouteOptions]
    ) -> AsyncIterator[Routed]:
        """`route` as a block: however it ends, the scheduler is told. Raises as `route` does, on entry only."""
        with await self.route(tokens, failures=failures, **options) as routed:
            yield routed

    async def report(self, report: routing_pb2.ReportRequest) -> routing_pb2.ReportResponse:
        """Reports, waits, and returns what became of it. Raises FleetError."""
        try:
            return await (await self._router()).Report(report, **self._to_report())
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error

    async def close(self) -> None:
        """Waits for the reports that are under way, at most for their deadline."""
        self._closed = True
        if self._sending:
            await asyncio.wait(self._sending)
        for channel in self._link.channels():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _router(self) -> RouterAsyncStub:
        channel, closable = self._link.channel()
        if closable is not None:
            await closable.close()
        return RouterStub(channel)

    def _send(self, report: routing_pb2.ReportRequest) -> None:
        if not self._deliveries.room(len(self._sending), closed=self._closed):
            return
        task = asyncio.create_task(self._deliver(report))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _deliver(self, report: routing_pb2.ReportRequest) -> None:
        try:
            await self.report(report)
        except FleetError as error:
            self._deliveries.failed(error)
        else:
            self._deliveries.taken()
