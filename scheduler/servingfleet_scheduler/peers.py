"""Passes reports on to the scheduler that made the decision. Edge."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from servingfleet_protos.v1 import routing_pb2
from servingfleet_protos.v1.routing_pb2_grpc import RouterStub

from .errors import OwnerSilent
from .metrics import Metrics
from .rich_errors import Context
from .settings import PeerSettings

if TYPE_CHECKING:
    from servingfleet_protos.v1.routing_pb2_grpc import RouterAsyncStub

log = logging.getLogger(__name__)

PASSED_ON = "servingfleet-passed-on"
"""Metadata of a report that has made its one hop."""

MAX_PEERS = 64
"""Channels kept; schedulers of one fleet are few, and their addresses change."""
RETRY_S = 1.0
CLOSE_S = 5.0

_DETAILS = "grpc-status-details-bin"
_OPTIONS: tuple[tuple[str, str | int], ...] = (
    # A peer that is back after a moment must not count as gone for two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    # Peers are reached directly, whatever the environment says of proxies.
    ("grpc.enable_http_proxy", 0),
)


def peer_address(advertise: str, port: int) -> str:
    """host:port of `--advertise`, which may leave out the port that this scheduler listens on."""
    try:
        bare = ipaddress.ip_address(advertise)
    except ValueError:
        return advertise if not advertise or ":" in advertise else f"{advertise}:{port}"
    return f"[{bare}]:{port}" if bare.version == 6 else f"{bare}:{port}"


def passed_on(context: Context) -> bool:
    """Another scheduler has sent it: it goes no further."""
    return any(key == PASSED_ON for key, _ in context.invocation_metadata() or ())


class Peers:
    """The fleet's other schedulers, by address."""

    def __init__(self, settings: PeerSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._trusted = b""
        self._trouble: str | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def report(
        self, address: str, request: routing_pb2.ReportRequest, context: Context
    ) -> routing_pb2.ReportResponse | None:
        """The owner's answer; None: it is gone, and what it counted with it. Raises OwnerSilent.

        The owner's refusal ends the call as if it were this scheduler's.
        """
        channel = self._channel(address)
        if channel is None:
            self._metrics.passed_on("gone")
            return None
        stub: RouterAsyncStub = RouterStub(channel)
        remaining = context.time_remaining()
        timeout = self._settings.timeout_s
        try:
            answer = await stub.Report(
                request,
                timeout=timeout if remaining is None else min(timeout, remaining),
                metadata=self._metadata(context),
            )
        except grpc.aio.AioRpcError as error:
            details = tuple(each for each in error.trailing_metadata() if each[0] == _DETAILS)
            if details:  # only a scheduler says so much
                self._metrics.passed_on("refused")
                await context.abort(error.code(), error.details() or "", details)
            connected = channel.get_state() is grpc.ChannelConnectivity.READY
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and connected:
                # It may have counted the report: counting it here as well would count it twice.
                self._metrics.passed_on("silent")
                raise OwnerSilent(
                    f"the scheduler at {address}, whose decision it is, does not answer: report again",
                    retry_s=RETRY_S,
                ) from None
            self._metrics.passed_on("gone")
            return None
        self._metrics.passed_on("answered")
        return answer

    async def close(self) -> None:
        """Closes all channels."""
        self._forget(len(self._channels))
        await asyncio.gather(*self._closing)

    def _metadata(self, context: Context) -> tuple[tuple[str, str], ...]:
        metadata = [(PASSED_ON, "1")]
        if self._settings.ca_file is not None:  # a token goes nowhere in plain text
            metadata += [
                (key, value)
                for key, value in context.invocation_metadata() or ()
                if key == "authorization" and isinstance(value, str)
            ]
        return tuple(metadata)

    def _channel(self, address: str) -> grpc.aio.Channel | None:
        """None: who signs the peer's certificate can't be read."""
        ca_file = self._settings.ca_file
        if ca_file is not None and not self._trust(ca_file):
            return None
        channel = self._channels.get(address)
        if channel is None:
            self._channels[address] = channel = self._dial(address)
            self._forget(len(self._channels) - MAX_PEERS)
        self._channels.move_to_end(address)
        return channel

    def _trust(self, ca_file: Path) -> bool:
        try:
            now = ca_file.read_bytes()
        except OSError as error:
            if error.strerror != self._trouble:
                self._trouble = error.strerror
                log.warning("certificate authority not readable", extra={"error": self._trouble})
            return bool(self._trusted)
        self._trouble = None
        if now != self._trusted:
            # A channel keeps the roots that it was made with.
            self._trusted = now
            self._forget(len(self._channels))
        return True

    def _dial(self, address: str) -> grpc.aio.Channel:
        if self._settings.ca_file is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        options = _OPTIONS
        if self._settings.server_name:
            options += (("grpc.ssl_target_name_override", self._settings.server_name),)
        trusted = grpc.ssl_channel_credentials(self._trusted)
        return grpc.aio.secure_channel(address, trusted, options=options)

    def _forget(self, count: int) -> None:
        """Closes the channels used least recently, when their calls have ended."""
        for _ in range(count):
            _, channel = self._channels.popitem(last=False)
            task = asyncio.create_task(channel.close(CLOSE_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
