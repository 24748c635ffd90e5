"""The gRPC edge of the fleet's figures, of its streams, and of who takes requests."""

from __future__ import annotations

from servingfleet_protos.v1 import fleet_pb2, fleet_pb2_grpc

from .clock import Clock
from .rich_errors import Context, answer
from .service import Scheduler


class FleetServicer(fleet_pb2_grpc.FleetServicer):
    """Each call is one call into the scheduler, with the time."""

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler = scheduler
        self._clock = clock

    async def GetReuse(
        self, request: fleet_pb2.GetReuseRequest, context: Context
    ) -> fleet_pb2.GetReuseResponse:
        return await answer(context, lambda: self._scheduler.get_reuse(request, self._clock()))

    async def ListReplicas(
        self, request: fleet_pb2.ListReplicasRequest, context: Context
    ) -> fleet_pb2.ListReplicasResponse:
        return await answer(context, lambda: self._scheduler.list_replicas(request, self._clock()))

    async def SetDraining(
        self, request: fleet_pb2.SetDrainingRequest, context: Context
    ) -> fleet_pb2.SetDrainingResponse:
        return await answer(context, lambda: self._scheduler.set_draining(request))
