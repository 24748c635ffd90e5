"""The gRPC edge of Route, Explain and Report."""

from __future__ import annotations

from servingfleet_protos.v1 import routing_pb2, routing_pb2_grpc

from .clock import Clock
from .metrics import Metrics
from .rich_errors import Context, answer
from .service import Scheduler


class RouterServicer(routing_pb2_grpc.RouterServicer):
    """Each call is one call into the scheduler, with the time."""

    def __init__(self, scheduler: Scheduler, clock: Clock, metrics: Metrics) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._metrics = metrics

    async def Route(
        self, request: routing_pb2.RouteRequest, context: Context
    ) -> routing_pb2.RouteResponse:
        with self._metrics.route():
            return await answer(context, lambda: self._scheduler.route(request, self._clock()))

    async def Explain(
        self, request: routing_pb2.RouteRequest, context: Context
    ) -> routing_pb2.ExplainResponse:
        return await answer(context, lambda: self._scheduler.explain(request, self._clock()))

    async def Report(
        self, request: routing_pb2.ReportRequest, context: Context
    ) -> routing_pb2.ReportResponse:
        response = await answer(context, lambda: self._scheduler.report(request, self._clock()))
        self._metrics.reported(response.disposition)
        return response
