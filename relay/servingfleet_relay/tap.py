"""Listens to the event socket of one rank, watches the connection, and fetches replays.

Edge: the only place that knows ZeroMQ. Every await outward has a deadline, every queue a size.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from .frames import END_OF_REPLAY, BadFrames, replay_request, reply_frame
from .pipeline import Pipeline, ReplayRequest
from .settings import RankSockets, RelaySettings

log = logging.getLogger(__name__)

_OPENED = (zmq.Event.CONNECTED, zmq.Event.ACCEPTED)
_UP = zmq.Event.HANDSHAKE_SUCCEEDED
_CLOSED = zmq.Event.DISCONNECTED
MESSAGES_PER_TURN = 256
"""Batches applied before other tasks get their turn."""


class Tap:
    """The sockets of one rank."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        sockets: RankSockets,
        settings: RelaySettings,
        pipeline: Pipeline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._sockets = sockets
        self._settings = settings
        self._pipeline = pipeline
        self._clock = clock
        self._open = 0
        """Connections, the engine's and others that a bound socket took."""
        self._up = False
        self._fields = {"replica": pipeline.settings.replica, "rank": sockets.rank}

    async def run(self) -> None:
        """Listens until it is cancelled. Raises zmq.ZMQError for an endpoint that can't be used."""
        subscription = self._context.socket(zmq.SUB)
        subscription.linger = 0
        subscription.rcvhwm = self._settings.receive_high_water_messages
        subscription.setsockopt(zmq.MAXMSGSIZE, self._settings.max_message_bytes)
        subscription.setsockopt(zmq.SUBSCRIBE, b"")
        # A peer that vanished without a word would look alive for ever.
        subscription.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
        subscription.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6_000)
        monitor = subscription.get_monitor_socket(int(sum(_OPENED) | _UP | _CLOSED))
        monitor.linger = 0
        try:
            if self._sockets.bind:
                subscription.bind(self._sockets.events)
            else:
                subscription.connect(self._sockets.events)
            await self._listen(subscription, monitor)
        finally:
            subscription.disable_monitor()
            subscription.close()

    async def _listen(self, subscription: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        poller = zmq.asyncio.Poller()
        poller.register(subscription, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while True:
            await poller.poll()
            for _ in range(MESSAGES_PER_TURN):
                # The monitor first: a batch must not be taken for one of a connection that is gone, nor be dropped
                # because its connection is not known yet.
                await self._watch(monitor)
                if not await subscription.poll(0):
                    break
                frames = await subscription.recv_multipart()
                self._pipeline.live(self._sockets.rank, frames, self._clock())
            await asyncio.sleep(0)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while await monitor.poll(0):
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            if event in _OPENED:
                self._open += 1
            elif event == _UP:
                self._connected()
            elif event == _CLOSED:
                self._open -= 1
                self._disconnected()

    def _connected(self) -> None:
        log.info("engine socket up", extra=self._fields)
        self._up = True
        self._pipeline.socket_up(self._sockets.rank, self._clock())

    def _disconnected(self) -> None:
        if not self._up:
            return  # it never was one of an engine
        log.warning("engine socket down", extra=self._fields)
        self._up = False
        self._pipeline.socket_down(self._sockets.rank, self._clock())
        if self._open:
            # A bound socket took the next engine's connection before the last one's was seen to end.
            self._connected()


class Replays:
    """Serves the pipeline's replay requests, one at a time for each rank."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        settings: RelaySettings,
        pipeline: Pipeline,
        tasks: asyncio.TaskGroup,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._settings = settings
        self._endpoints = {sockets.rank: sockets.replay for sockets in settings.sockets}
        self._pipeline = pipeline
        self._tasks = tasks
        self._clock = clock
        self._running: dict[int, asyncio.Task[None]] = {}

    def start_wanted(self) -> None:
        """Starts what the pipeline wants now; a newer request of a rank ends the older."""
        for request in self._pipeline.take_replay_requests():
            running = self._running.get(request.rank)
            if running is not None:
                running.cancel()
            self._running[request.rank] = self._tasks.create_task(
                self._fetch(request), name=f"replay of rank {request.rank}"
            )

    async def _fetch(self, request: ReplayRequest) -> None:
        endpoint = self._endpoints.get(request.rank)
        fields = {
            "replica": self._pipeline.settings.replica,
            "rank": request.rank,
            "seq": request.start_seq,
        }
        if endpoint is None:
            self._pipeline.replay_failed(request.rank, "no replay socket", self._clock())
            return
        # A silent engine is asked again and again.
        log.log(logging.DEBUG if request.probe else logging.INFO, "replay wanted", extra=fields)
        # A fresh socket: answers to an older request can't be mistaken for this one's.
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.rcvhwm = self._settings.receive_high_water_messages
        socket.setsockopt(zmq.MAXMSGSIZE, self._settings.max_message_bytes)
        try:
            socket.connect(endpoint)
            await self._receive(socket, request)
        except TimeoutError:
            log.warning("replay failed", extra=fields)
            self._pipeline.replay_failed(request.rank, "no answer in time", self._clock())
        except zmq.ZMQError as error:
            log.warning("replay failed", extra={**fields, "error": str(error)})
            self._pipeline.replay_failed(request.rank, f"socket: {error}", self._clock())
        finally:
            socket.close()

    async def _receive(self, socket: zmq.asyncio.Socket, request: ReplayRequest) -> None:
        deadline = self._pipeline.settings.replay_deadline_s
        async with asyncio.timeout(deadline):
            await socket.send_multipart(replay_request(request.start_seq))
        received = 0
        while True:
            async with asyncio.timeout(deadline):
                frames = await socket.recv_multipart()
            self._pipeline.replayed(request.rank, frames, self._clock())
            if _is_end(frames) or self._running.get(request.rank) is not asyncio.current_task():
                # Superseded by what that reply led to: a cancellation is felt only at the next real wait, and until
                # then further replies would pass for answers to the newer request.
                return
            received += 1
            if received % MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)


def _is_end(frames: list[bytes]) -> bool:
    try:
        return reply_frame(frames).seq == END_OF_REPLAY
    except BadFrames:
        return False
