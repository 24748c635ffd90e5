"""Keeps one stream to every scheduler replica.

Edge. Each link has a task of its own: a scheduler that is away or slow blocks no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from servingfleet_protos.v1.stream_pb2 import RelayMessage, SchedulerMessage
from servingfleet_protos.v1.stream_pb2_grpc import RelayIntakeStub

from .pipeline import Pipeline
from .settings import RelaySettings

if TYPE_CHECKING:
    from servingfleet_protos.v1.stream_pb2_grpc import RelayIntakeAsyncStub

    Call = grpc.aio.StreamStreamCall[RelayMessage, SchedulerMessage]

log = logging.getLogger(__name__)


class Unreachable(Exception):
    """The scheduler did not answer, or stopped to: dial again later."""


class Links:
    """The links to every address that the configured schedulers resolve to."""

    def __init__(
        self,
        settings: RelaySettings,
        pipeline: Pipeline,
        rng: random.Random,
        credentials: grpc.ChannelCredentials | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`credentials`: None speaks plain HTTP/2."""
        self._settings = settings
        self._pipeline = pipeline
        self._rng = rng
        self._credentials = credentials
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake: dict[str, asyncio.Event] = {}
        self._unresolved: set[str] = set()
        """Targets whose trouble was told."""

    def wake(self) -> None:
        """There may be something to send."""
        for event in self._wake.values():
            event.set()

    async def run(self) -> None:
        """Follows the schedulers' addresses until it is cancelled."""
        known: dict[str, frozenset[str]] = {
            target: frozenset() for target in self._settings.schedulers
        }
        async with asyncio.TaskGroup() as group:
            while True:
                for target, addresses in known.items():
                    # A name that does not resolve just now keeps the links that it has.
                    known[target] = await self._resolve(target) or addresses
                wanted = frozenset().union(*known.values())
                for address in self._tasks.keys() - wanted:
                    await self._end(address)
                for address in sorted(wanted - self._tasks.keys()):
                    self._wake[address] = asyncio.Event()
                    self._tasks[address] = group.create_task(
                        self._keep(address), name=f"link to {address}"
                    )
                await asyncio.sleep(self._settings.resolve_interval_s)

    async def _end(self, address: str) -> None:
        task = self._tasks.pop(address)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        del self._wake[address]
        self._pipeline.forget_link(address)
        log.info("scheduler gone", extra={"scheduler": address})

    async def _resolve(self, target: str) -> frozenset[str]:
        host, _, port = target.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._settings.connect_deadline_s):
                found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            if target not in self._unresolved:
                self._unresolved.add(target)
                fields = {"scheduler": target, "error": _why(error)}
                log.warning("scheduler not resolved", extra=fields)
            return frozenset()
        self._unresolved.discard(target)
        return frozenset(
            f"[{address[0]!s}]:{address[1]!s}"
            if ":" in str(address[0])
            else f"{address[0]!s}:{address[1]!s}"
            for *_, address in found
        )

    async def _keep(self, address: str) -> None:
        """Dials one scheduler again and again."""
        backoff = self._settings.reconnect_first_s
        fields = {"scheduler": address, "replica": self._pipeline.settings.replica}
        told = False
        while True:
            welcomed = False
            try:
                async with self._channel(address) as channel:
                    async with asyncio.timeout(self._settings.connect_deadline_s):
                        await channel.channel_ready()
                    stub: RelayIntakeAsyncStub = RelayIntakeStub(channel)
                    call = stub.Stream()
                    try:
                        await self._greet(address, call)
                        welcomed = True
                        log.info("scheduler connected", extra=fields)
                        await self._converse(address, call)
                    finally:
                        call.cancel()
            except (grpc.aio.AioRpcError, Unreachable, TimeoutError) as error:
                if welcomed or not told:
                    log.warning("scheduler away", extra={**fields, "error": _why(error)})
                told = True
            except Exception:
                # A fault of ours on one link must not take the others down.
                log.exception("link failed", extra=fields)
            finally:
                with contextlib.suppress(
                    KeyError
                ):  # the first dial may fail before there is a link
                    self._pipeline.close_link(address)
            backoff = self._settings.reconnect_first_s if welcomed else backoff * 2
            backoff = min(backoff, self._settings.reconnect_most_s)
            await asyncio.sleep(self._rng.uniform(0, backoff))

    def _channel(self, address: str) -> grpc.aio.Channel:
        # Each link is one scheduler process: a channel shared by address would outlive it.
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._credentials, options=options)

    async def _greet(self, address: str, call: Call) -> None:
        async with asyncio.timeout(self._settings.welcome_deadline_s):
            with _cancelled_by_peer():
                await _write(call, self._pipeline.open_link(address, self._clock()))
                answer = await call.read()
        if not isinstance(answer, SchedulerMessage):
            raise Unreachable("the stream ended before the welcome")
        self._pipeline.receive(address, answer, self._clock())
        if self._pipeline.broken(address):
            raise Unreachable("the scheduler's first answer was no welcome that fits")

    async def _converse(self, address: str, call: Call) -> None:
        reading = asyncio.create_task(self._read(address, call))
        writing = asyncio.create_task(self._write(address, call))
        try:
            done, _ = await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            with _cancelled_by_peer():
                for task in done:
                    task.result()
        finally:
            for task in (reading, writing):
                task.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)

    async def _read(self, address: str, call: Call) -> None:
        while True:
            owed_since: float | None = None
            deadline_s = self._settings.ack_deadline_s
            reading = asyncio.ensure_future(call.read())
            try:
                while not (await asyncio.wait({reading}, timeout=deadline_s / 4))[0]:
                    if not self._pipeline.unacknowledged(address):
                        owed_since = None
                        continue
                    now = self._clock()
                    owed_since = now if owed_since is None else owed_since
                    if now - owed_since >= deadline_s:
                        raise Unreachable(f"owes acknowledgements for {now - owed_since:.0f} s")
                answer = reading.result()
            finally:
                reading.cancel()
            if not isinstance(answer, SchedulerMessage):
                raise Unreachable("the scheduler ended the stream")
            self._pipeline.receive(address, answer, self._clock())

    async def _write(self, address: str, call: Call) -> None:
        wake = self._wake[address]
        while True:
            wake.clear()
            while messages := self._pipeline.take(address, self._settings.batch_messages):
                for message in messages:
                    # Returns when the message is on its way: the peer's flow control holds it up here.
                    async with asyncio.timeout(self._settings.ack_deadline_s):
                        await _write(call, message)
            if self._pipeline.broken(address):
                raise Unreachable(
                    "fell too far behind, broke the protocol, or the hello has changed: starts anew"
                )
            await wake.wait()


@contextlib.contextmanager
def _cancelled_by_peer() -> Iterator[None]:
    """grpc.aio tells of a stream that the peer cancelled as if it were us who are cancelled."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Unreachable("the scheduler cancelled the stream") from None


async def _write(call: Call, message: RelayMessage) -> None:
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        # grpc.aio's word for a stream that has ended meanwhile.
        raise Unreachable("the scheduler ended the stream") from None


def _why(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
