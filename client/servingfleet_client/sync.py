"""The client for programs without asyncio."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self, Unpack

import grpc

from servingfleet_protos.v1 import routing_pb2
from servingfleet_protos.v1.routing_pb2_grpc import RouterStub

from .asking import Asking
from .connection import Scheduler
from .errors import error_of
from .requests import RouteOptions, Tokens
from .routed import Failures, Routed


class Client(Asking[grpc.Channel]):
    """Asks one fleet for one model. May be used by several threads."""

    def __init__(self, scheduler: Scheduler, model: str) -> None:
        """`model`: as the engines serve it. Raises UnusableFile; the scheduler need not be there yet."""
        super().__init__(scheduler, model, grpc)
        self._changed = threading.Condition()
        self._sending = 0
        self._closed = False

    def route(
        self, tokens: Tokens, *, failures: Failures = Exception, **options: Unpack[RouteOptions]
    ) -> Routed:
        """Where the prompt should go. What is routed must be told its end: see `request`.

        Raises FleetError, ValueError. `failures`: what ends a block of it as the engine's failure.
        """
        request = self._request(tokens, options)
        try:
            decision = self._router().Route(request, **self._to_route())
        except grpc.RpcError as error:
            raise error_of(error) from error
        return self._routed(decision, request, self._send, failures)

    @contextmanager
    def request(
        self, tokens: Tokens, *, failures: Failures = Exception, **options: Unpack[RouteOptions]
    ) -> Iterator[Routed]:
        """`route` as a block: however it ends, the scheduler is told. Raises as `route` does, on entry only."""
        with self.route(tokens, failures=failures, **options) as routed:
            yield routed

    def report(self, report: routing_pb2.ReportRequest) -> routing_pb2.ReportResponse:
        """Reports, waits, and returns what became of it. Raises FleetError."""
        try:
            return self._router().Report(report, **self._to_report())
        except grpc.RpcError as error:
            raise error_of(error) from error

    def close(self) -> None:
        """Waits for the reports that are under way, at most for their deadline."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._sending)
        for channel in self._link.channels():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _router(self) -> RouterStub:
        channel, closable = self._link.channel()
        if closable is not None:
            closable.close()
        return RouterStub(channel)

    def _send(self, report: routing_pb2.ReportRequest) -> None:
        with self._changed:
            if not self._deliveries.room(self._sending, closed=self._closed):
                return
            self._sending += 1
        future = self._router().Report.future(report, **self._to_report())
        future.add_done_callback(lambda _: self._delivered(future))

    def _delivered(self, call: grpc.Call) -> None:
        """Called by gRPC's own thread."""
        with self._changed:
            if call.code() is grpc.StatusCode.OK:
                self._deliveries.taken()
            else:
                self._deliveries.failed(error_of(call))
            self._sending -= 1
            self._changed.notify_all()
