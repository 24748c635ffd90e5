"""Hears what a live engine publishes, whole, so that it can be recorded or checked.

Edge. A subscriber that joins late, and one that is sent a gap, asks the engine's replay socket where there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from servingfleet_relay.frames import (
    END_OF_REPLAY,
    BadFrames,
    live_frame,
    replay_request,
    reply_frame,
)
from servingfleet_relay.settings import RankSockets

from .recordings import Message

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""ZeroMQ closes the connection of a larger one, as it does for a relay."""
REPLAY_S = 5.0
"""Longest silence in a replay. An idle vLLM answers within 0.1 s."""
JOIN_S = 0.2
"""From the handshake until the engine surely knows of the subscription: ZeroMQ doesn't tell, and where there is no
replay socket whatever comes before is lost."""
NEVER_QUIET_S = 30.0
"""An engine that is not quiet by then has other clients, and never will be."""

_UP = zmq.Event.HANDSHAKE_SUCCEEDED
_DOWN = zmq.Event.DISCONNECTED


class NotHeard(RuntimeError):
    """The engine can't be listened to: says which address, and what was expected."""


def wall_clock() -> Callable[[], float]:
    """Seconds since 1970 that never go back, whatever is done to the machine's clock meanwhile."""
    zero = time.time() - time.monotonic()
    return lambda: zero + time.monotonic()


@dataclass
class _Rank:
    """What is known of one rank's stream."""

    sockets: RankSockets
    up: asyncio.Event = field(default_factory=asyncio.Event)
    last: int | None = None
    """Sequence number of the last message that was handed on."""
    replayed: dict[int, bytes] = field(default_factory=dict)
    """Payloads that a replay brought and that may still come live, by sequence number."""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Recorder:
    """Hands on every message of every rank."""

    def __init__(
        self,
        sockets: Sequence[RankSockets],
        heard: Callable[[Message], None],
        clock: Callable[[], float],
    ) -> None:
        self.messages = 0
        self.controls: list[dict[str, Any]] = []
        """The engine's sockets as they went and came back, each as a line of requests.jsonl."""
        self.replays_failed = 0
        self._ranks = [_Rank(each) for each in sockets]
        self._hand_on = heard
        self._clock = clock
        self._heard = asyncio.Event()
        self._context = zmq.asyncio.Context()

    async def during(self, work: Callable[[], Awaitable[None]], connect_s: float) -> None:
        """Listens from the moment that every rank is connected until `work` has ended, and what came by then.

        Raises NotHeard, and what `work` raises.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                listening = [tasks.create_task(self._listen(rank)) for rank in self._ranks]
                await self._connected(connect_s)
                await work()
                for task in listening:
                    task.cancel()
            # What is lost at the end shows only in a later message, which never comes.
            for rank in self._ranks:
                if rank.last is not None:
                    await self._fetch(rank, rank.last + 1)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._context.destroy(linger=0)

    async def quiet(self, seconds: float, at_most_s: float = NEVER_QUIET_S) -> None:
        """Waits until nothing was published for so long. Where others keep the engine busy: `at_most_s`, or `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, at_most_s)):
                while True:
                    self._heard.clear()
                    async with asyncio.timeout(seconds):
                        await self._heard.wait()

    async def _connected(self, deadline_s: float) -> None:
        for rank in self._ranks:
            try:
                async with asyncio.timeout(deadline_s):
                    await rank.up.wait()
            except TimeoutError:
                where = rank.sockets.events
                raise NotHeard(
                    f"{where}: no engine has connected; expected one that was given this address, and no relay there"
                    if rank.sockets.bind
                    else f"{where}: nobody publishes there; expected an engine with its events on. Of one that connects to "
                    "its subscriber, as vLLM does given a concrete address, take the relay's place with --bind"
                ) from None
        await asyncio.sleep(JOIN_S)
        for rank in self._ranks:
            async with rank.writing:
                if rank.last is None:
                    await self._fetch(rank, 0)

    async def _listen(self, rank: _Rank) -> None:
        subscription = self._context.socket(zmq.SUB)
        subscription.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        subscription.rcvhwm = 0  # what is waiting is taken, however much it is
        subscription.subscribe(b"")
        monitor = subscription.get_monitor_socket(int(_UP | _DOWN))
        try:
            if rank.sockets.bind:
                subscription.bind(rank.sockets.events)
            else:
                subscription.connect(rank.sockets.events)
        except zmq.ZMQError as error:
            expected = (
                "an address of this machine that is free"
                if rank.sockets.bind
                else "tcp://host:port"
            )
            raise NotHeard(f"{rank.sockets.events}: {error}; expected {expected}") from error
        try:
            poller = zmq.asyncio.Poller()
            poller.register(subscription, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            while True:
                await poller.poll()
                while await monitor.poll(0):
                    event = parse_monitor_message(await monitor.recv_multipart())["event"]
                    self._socket(rank, up=event == _UP)
                while await subscription.poll(0):
                    frames = await subscription.recv_multipart()
                    async with rank.writing:
                        await self._take(rank, frames)
        finally:
            subscription.disable_monitor()
            subscription.close(linger=0)

    def _socket(self, rank: _Rank, *, up: bool) -> None:
        known = any(each["control"] == "engine gone" for each in self.controls[-1:])
        if up:
            rank.up.set()
            if known and all(each.up.is_set() for each in self._ranks):
                self.controls.append({"t": self._clock(), "control": "engine healthy"})
        elif rank.up.is_set():
            rank.up.clear()
            if not known:
                self.controls.append({"t": self._clock(), "control": "engine gone"})

    async def _take(self, rank: _Rank, frames: Sequence[bytes]) -> None:
        try:
            seq = live_frame(frames).seq
        except BadFrames:
            self._write(rank, frames)  # whoever listens is to know that it came
            return
        if rank.replayed.get(seq) == frames[-1]:
            return
        expected = 0 if rank.last is None else rank.last + 1
        if seq != expected:
            # Lower than expected: a new engine, which counts from 0.
            await self._fetch(rank, expected if seq > expected else 0, below=seq)
        self._write(rank, frames)
        rank.last = seq
        rank.replayed.clear()

    async def _fetch(self, rank: _Rank, start: int, below: int = END_OF_REPLAY) -> None:
        """Hands on what the replay socket has from `start` on."""
        if rank.sockets.replay is None:
            return
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        dealer.rcvhwm = 0
        try:
            dealer.connect(rank.sockets.replay)
            await dealer.send_multipart(replay_request(start))
            while True:
                async with asyncio.timeout(REPLAY_S):
                    frames = await dealer.recv_multipart()
                reply = reply_frame(frames)
                if reply.seq == END_OF_REPLAY:
                    return
                if reply.seq >= below:
                    continue
                topic = frames[1] if len(frames) == 4 else b""
                self._write(rank, [topic, *frames[-2:]])
                rank.last = reply.seq
                rank.replayed[reply.seq] = reply.payload
        except (TimeoutError, zmq.ZMQError, BadFrames):
            self.replays_failed += 1
        finally:
            dealer.close(linger=0)

    def _write(self, rank: _Rank, frames: Sequence[bytes]) -> None:
        self._hand_on(Message(self._clock(), rank.sockets.rank, tuple(frames)))
        self.messages += 1
        self._heard.set()
