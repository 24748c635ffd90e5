"""The gRPC edge of Route, Explain and Report."""

from __future__ import annotations

import grpc

from servingfleet_protos.v1 import routing_pb2, routing_pb2_grpc

from .clock import Clock
from .errors import OwnerSilent
from .metrics import Metrics
from .peers import Peers, passed_on
from .rich_errors import Context, abort, answer
from .service import Scheduler


class RouterServicer(routing_pb2_grpc.RouterServicer):
    """Each call is one call into the scheduler, with the time; reports of a peer's decision are the peer's to answer."""

    def __init__(
        self, scheduler: Scheduler, clock: Clock, metrics: Metrics, peers: Peers | None = None
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._metrics = metrics
        self._peers = peers

    async def Route(
        self, request: routing_pb2.RouteRequest, context: Context
    ) -> routing_pb2.RouteResponse:
        left_s = context.time_remaining()
        if left_s is not None and left_s <= 0.0:
            # It has waited for its turn too long: whoever asked is gone, and would not report what becomes of it.
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "its deadline is over")
        with self._metrics.route():
            response = await answer(context, lambda: self._scheduler.route(request, self._clock()))

        def ended(call: Context) -> None:
            # Not "cancelled": of what the caller cancels gRPC only says that no answer went out.
            if not call.done():
                self._scheduler.withdraw(response.decision_id, self._clock())

        context.add_done_callback(ended)  # type: ignore[arg-type]  # its stub takes no functions
        return response

    async def Explain(
        self, request: routing_pb2.RouteRequest, context: Context
    ) -> routing_pb2.ExplainResponse:
        return await answer(context, lambda: self._scheduler.explain(request, self._clock()))

    async def Report(
        self, request: routing_pb2.ReportRequest, context: Context
    ) -> routing_pb2.ReportResponse:
        response = await self._from_owner(request, context)
        if response is not None:
            return response
        response = await answer(context, lambda: self._scheduler.report(request, self._clock()))
        self._metrics.reported(response.disposition)
        return response

    async def _from_owner(
        self, request: routing_pb2.ReportRequest, context: Context
    ) -> routing_pb2.ReportResponse | None:
        """None: the decision is this scheduler's to join, or its owner is gone."""
        if self._peers is None or passed_on(context):
            return None
        decision = await answer(context, lambda: self._scheduler.of_peer(request.decision_id))
        if decision is None:
            return None
        # At once: the next question of the same client may be right behind it.
        self._scheduler.overhear(request, decision, self._clock())
        try:
            return await self._peers.report(decision.owner_address, request, context)
        except OwnerSilent as silent:
            await abort(context, silent)
