"""What both clients are made of: the connection, the requests, and how their reports fare. Neither waits nor sends."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Generic, Protocol, TypedDict, TypeVar

import grpc

from servingfleet_protos.v1 import routing_pb2

from .connection import Link, Metadata, Options, Scheduler
from .requests import RouteOptions, Tokens, route_request
from .routed import Deliveries, Failures, Routed

ChannelT = TypeVar("ChannelT")
ChannelT_co = TypeVar("ChannelT_co", covariant=True)


class Dialler(Protocol[ChannelT_co]):
    """`grpc`, or `grpc.aio`."""

    def insecure_channel(self, target: str, options: Options) -> ChannelT_co: ...
    def secure_channel(
        self, target: str, credentials: grpc.ChannelCredentials, options: Options
    ) -> ChannelT_co: ...


class Call(TypedDict):
    """What goes with a call."""

    timeout: float
    metadata: Metadata


class Asking(Generic[ChannelT]):
    """Asks one fleet for one model."""

    def __init__(self, scheduler: Scheduler, model: str, dialler: Dialler[ChannelT]) -> None:
        """`model`: as the engines serve it. Raises UnusableFile; the scheduler need not be there."""
        self.model = model
        self._scheduler = scheduler
        self._link: Link[ChannelT] = Link(scheduler, _dial(dialler))
        self._deliveries = Deliveries()

    @property
    def lost_reports(self) -> Counter[str]:
        """Reports that no scheduler took, by reason."""
        return self._deliveries.lost

    def _request(self, tokens: Tokens, options: RouteOptions) -> routing_pb2.RouteRequest:
        # Every try of the call under one id: it is one decision.
        options.setdefault("request_id", uuid.uuid4().hex)
        return route_request(self.model, tokens, options)

    def _routed(
        self,
        decision: routing_pb2.RouteResponse,
        request: routing_pb2.RouteRequest,
        send: Callable[[routing_pb2.ReportRequest], None],
        failures: Failures,
    ) -> Routed:
        return Routed(decision, request.request_id, send, time.monotonic, failures)

    def _to_route(self) -> Call:
        return Call(timeout=self._scheduler.route_timeout_s, metadata=self._link.metadata())

    def _to_report(self) -> Call:
        return Call(timeout=self._scheduler.report_timeout_s, metadata=self._link.metadata())


def _dial(dialler: Dialler[ChannelT]) -> Callable[[str, bytes | None, Options], ChannelT]:
    def dial(address: str, trusted: bytes | None, options: Options) -> ChannelT:
        if trusted is None:
            return dialler.insecure_channel(address, options=options)
        credentials = grpc.ssl_channel_credentials(trusted)
        return dialler.secure_channel(address, credentials, options=options)

    return dial
