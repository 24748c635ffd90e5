"""An engine's event sockets as vLLM opens them: PUB and replay ROUTER per rank, for recorded and emulated engines."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio

from servingfleet_relay.frames import END_OF_REPLAY

from .recordings import Message

END = END_OF_REPLAY.to_bytes(8, "big")
"""Sequence number of the replay's end marker: -1."""


def free_ports(count: int) -> int:
    """First of `count` consecutive TCP ports that are free on loopback now."""
    while True:
        with contextlib.ExitStack() as held:
            first = held.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            base = int(first.getsockname()[1])
            try:
                for port in range(base + 1, base + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue
            return base


@dataclass(frozen=True)
class Endpoints:
    """Where an engine publishes and replays: rank r on the given ports plus r."""

    events_port: int
    replay_port: int
    """0: no replay."""
    host: str = "127.0.0.1"
    """Address to bind; `*` for all."""
    connect: bool = False
    """Publish to a subscriber that binds the event ports at `host`, as vLLM does given a concrete address."""


class EventSockets:
    """The sockets of one engine: publishes messages to who listens, and replays them to who asks."""

    def __init__(
        self,
        ranks: int,
        endpoints: Endpoints,
        *,
        buffer_steps: int | None = None,
        replay_topic: bool = True,
    ) -> None:
        """`buffer_steps`: messages kept for replay, None for all; `replay_topic`: they hold the topic, as since 0.26."""
        self.ranks = ranks
        self.endpoints = endpoints
        self._replay_topic = replay_topic
        self._buffer_steps = buffer_steps
        self._ring: list[deque[tuple[int, tuple[bytes, ...]]]] = [
            deque(maxlen=buffer_steps) for _ in range(ranks)
        ]
        self._publishers: list[zmq.asyncio.Socket] = []
        self._routers: list[zmq.asyncio.Socket] = []
        self._replays: list[asyncio.Task[None]] = []
        self._context: zmq.asyncio.Context | None = None

    def start(self) -> None:
        """Opens the sockets: a new engine, which has published nothing. Raises zmq.ZMQError where a port is taken."""
        self._context = zmq.asyncio.Context()
        for rank in range(self.ranks):
            self._ring[rank].clear()
            publisher = self._context.socket(zmq.PUB)
            self._publishers.append(publisher)
            address = f"tcp://{self.endpoints.host}:{self.endpoints.events_port + rank}"
            if self.endpoints.connect:
                publisher.connect(address)
            else:
                publisher.bind(address)
            if not self.endpoints.replay_port:
                continue
            router = self._context.socket(zmq.ROUTER)
            self._routers.append(router)
            if self._buffer_steps is not None:
                # Room for a whole replay and its end marker, as vLLM makes since 0.33.
                router.setsockopt(zmq.SNDHWM, 2 * (self._buffer_steps + 1))
            router.bind(f"tcp://{self.endpoints.host}:{self.endpoints.replay_port + rank}")
            self._replays.append(asyncio.create_task(self._serve(router, rank)))

    async def stop(self) -> None:
        """Closes the sockets, as an engine that dies: subscribers see the connections end."""
        for task in self._replays:
            task.cancel()
        await asyncio.gather(*self._replays, return_exceptions=True)
        self._replays.clear()
        for open_socket in (*self._publishers, *self._routers):
            open_socket.close(linger=0)
        self._publishers.clear()
        self._routers.clear()
        if self._context is not None:
            self._context.term()
            self._context = None

    async def send(
        self, rank: int, seq: int, frames: Sequence[bytes], *, live: bool = True, keep: bool = True
    ) -> None:
        """Sends a message to the subscribers of its rank and keeps it for replay.

        Without `live` or `keep` it is lost on that way, as a message can be.
        """
        if keep:
            self._ring[rank].append((seq, tuple(frames)))
        if live:
            await self._publishers[rank].send_multipart(list(frames))

    async def _serve(self, router: zmq.asyncio.Socket, rank: int) -> None:
        while True:
            frames: list[Any] = await router.recv_multipart()
            # Like vLLM: identity, empty, start; anything else is not answered.
            if len(frames) != 3:
                continue
            identity, _, start = frames
            for answer in self._answers(rank, int.from_bytes(start, "big")):
                await router.send_multipart([identity, b"", *answer])

    def _answers(self, rank: int, start: int) -> Iterator[tuple[bytes, ...]]:
        for seq, frames in tuple(self._ring[rank]):
            if seq >= start:
                yield frames if self._replay_topic else frames[1:]
        yield (b"", END, b"") if self._replay_topic else (END, b"")


class RecordedEngine:
    """Publishes recorded messages, and replays them to who asks.

    Rank r publishes on `events_port + r` and answers replays on `replay_port + r`.
    """

    def __init__(self, ranks: int, adapter: str = "vllm") -> None:
        """`adapter`: the engine whose messages these are."""
        self.ranks = ranks
        self.adapter = adapter
        base = free_ports(2 * ranks)
        self.events_port, self.replay_port = base, base + ranks
        self._sockets = EventSockets(ranks, Endpoints(self.events_port, self.replay_port))

    @property
    def events(self) -> str:
        """Endpoint of rank 0's events."""
        return f"tcp://127.0.0.1:{self.events_port}"

    @property
    def replay(self) -> str:
        """Endpoint of rank 0's replay."""
        return f"tcp://127.0.0.1:{self.replay_port}"

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def start(self) -> None:
        """Opens the sockets: a new engine, which has published nothing."""
        self._sockets.start()

    async def stop(self) -> None:
        """Closes the sockets, as an engine that dies: subscribers see the connections end."""
        await self._sockets.stop()

    async def publish(self, message: Message) -> None:
        """Sends a message to the subscribers of its rank and keeps it for replay."""
        await self._sockets.send(message.rank, message.seq or 0, message.frames)
