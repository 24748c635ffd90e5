"""What a gateway needs of a fleet: where a prompt should go, and to say what became of it.

    async with AsyncClient(Scheduler("chat-scheduler:7070"), model="qwen3-8b") as client:
        async with client.request(tokens) as routed:
            usage = await ...  # to routed.endpoint, with routed.headers
            routed.finished(usage)

`Client` is the same without asyncio. docs/client.md says what else there is.
"""

from servingfleet_protos.v1.common_pb2 import Target
from servingfleet_protos.v1.routing_pb2 import (
    MediaKey,
    ReportRequest,
    ReportResponse,
    RouteResponse,
)

from .aio import AsyncClient
from .connection import Scheduler
from .errors import (
    FleetError,
    InvalidRequest,
    NoReplicas,
    NotAllowed,
    NotAuthenticated,
    Rejected,
    TimedOut,
    Unavailable,
    Unexpected,
    UnknownModel,
    UnknownTarget,
    UnusableFile,
)
from .requests import RouteOptions
from .routed import Routed
from .sync import Client

__all__ = [
    "AsyncClient",
    "Client",
    "FleetError",
    "InvalidRequest",
    "MediaKey",
    "NoReplicas",
    "NotAllowed",
    "NotAuthenticated",
    "Rejected",
    "ReportRequest",
    "ReportResponse",
    "RouteOptions",
    "RouteResponse",
    "Routed",
    "Scheduler",
    "Target",
    "TimedOut",
    "Unavailable",
    "Unexpected",
    "UnknownModel",
    "UnknownTarget",
    "UnusableFile",
]
