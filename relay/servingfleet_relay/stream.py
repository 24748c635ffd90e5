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

from servingfleet_protos.v1.stream_pb2 import Credential, RelayMessage, SchedulerMessage
from servingfleet_protos.v1.stream_pb2_grpc import RelayIntakeStub

from .credentials import ChannelOptions, Credentials, Unusable
from .pipeline import Pipeline
from .settings import RelaySettings

if TYPE_CHECKING:
    from servingfleet_protos.v1.stream_pb2_grpc import RelayIntakeAsyncStub

    Call = grpc.aio.StreamStreamCall[RelayMessage, SchedulerMessage]

log = logging.getLogger(__name__)

CHANNEL_OPTIONS: ChannelOptions = (
    # Each link is one scheduler process: a channel shared by address would outlive it.
    ("grpc.use_local_subchannel_pool", 1),
    # Of the pod network, where a proxy for the world outside has no business.
    ("grpc.enable_http_proxy", 0),
    # A scheduler whose machine is gone is noticed although it owes nothing. Schedulers allow pings this often.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)
_ADVICE = {
    grpc.StatusCode.UNAUTHENTICATED: "see that --token-file holds a token of this pod that has not expired, "
    "for the audience that the scheduler expects; without --token-file none is shown",
    grpc.StatusCode.PERMISSION_DENIED: "see that --replica is the uid of the pod whose token --token-file holds, "
    "and that the pod is in the fleet's namespace",
}


class Unreachable(Exception):
    """The scheduler did not answer, or stopped to: dial again later."""


class Links:
    """The links to every address that the configured schedulers resolve to."""

    def __init__(
        self,
        settings: RelaySettings,
        pipeline: Pipeline,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._pipeline = pipeline
        self._rng = rng
        self._credentials = Credentials(settings, self.wake)
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake: dict[str, asyncio.Event] = {}
        self._unresolved: set[str] = set()
        """Targets whose trouble was told."""
        self._readers: set[asyncio.Task[None]] = set()
        """Of the streams that are open."""
        self._leaving = False

    def wake(self) -> None:
        """There may be something to send."""
        for event in self._wake.values():
            event.set()

    async def run(self) -> None:
        """Follows the schedulers' addresses until it is cancelled; then ends the streams in order."""
        known: dict[str, frozenset[str]] = {
            target: frozenset() for target in self._settings.schedulers
        }
        async with asyncio.TaskGroup() as group:
            group.create_task(self._credentials.watch(), name="token")
            try:
                while True:
                    for target, addresses in known.items():
                        # A name that does not resolve just now keeps the links that it has.
                        known[target] = await self._resolve(target) or addresses
                    await self._follow(frozenset().union(*known.values()), group)
                    await asyncio.sleep(self._settings.resolve_interval_s)
            except asyncio.CancelledError:
                await self._leave()
                raise

    async def _follow(self, wanted: frozenset[str], group: asyncio.TaskGroup) -> None:
        for address in self._tasks.keys() - wanted:
            await self._end(address)
        for address in sorted(wanted - self._tasks.keys()):
            self._wake[address] = asyncio.Event()
            self._tasks[address] = group.create_task(self._keep(address), name=f"link to {address}")

    async def _leave(self) -> None:
        """Lets what was written arrive, and schedulers see an end rather than a failure."""
        self._leaving = True
        self.wake()
        if self._readers:
            await asyncio.wait(self._readers, timeout=self._settings.leave_deadline_s)

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
        told = ""
        while not self._leaving:
            welcomed = False
            try:
                async with self._credentials.channel(address, CHANNEL_OPTIONS) as channel:
                    token = self._credentials.read_token()
                    stub: RelayIntakeAsyncStub = RelayIntakeStub(channel)
                    call = stub.Stream(metadata=_proof(token))
                    try:
                        await self._connected(call)
                        await self._greet(address, call)
                        welcomed = True
                        log.info("scheduler connected", extra=fields)
                        await self._converse(address, call, token)
                    finally:
                        call.cancel()
            except Unusable:
                told = "file"  # by whoever reads it
            except (grpc.aio.AioRpcError, Unreachable, TimeoutError) as error:
                kind = _kind(error)
                if (welcomed or kind != told) and not self._leaving:
                    _tell(error, fields)
                told = kind
            except MemoryError:
                raise  # the process is beyond its limit: the next one begins anew
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

    async def _connected(self, call: Call) -> None:
        async with asyncio.timeout(self._settings.connect_deadline_s):
            with _cancelled_by_peer():
                # Unlike the channel's own wait it says why there is no connection.
                await call.wait_for_connection()

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

    async def _converse(self, address: str, call: Call, token: str) -> None:
        reading = asyncio.create_task(self._read(address, call))
        writing = asyncio.create_task(self._write(address, call, token))
        self._readers.add(reading)
        reading.add_done_callback(self._readers.discard)
        try:
            # A writer that returns has said the last word: the answer to it is still to be read.
            done, _ = await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_EXCEPTION)
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

    async def _write(self, address: str, call: Call, token: str) -> None:
        """`token`: the one that opened the stream."""
        wake = self._wake[address]
        while True:
            wake.clear()
            if self._leaving:
                return await call.done_writing()
            if token != self._credentials.token:
                token = self._credentials.token
                await self._send(call, RelayMessage(credential=Credential(token=token)))
            while messages := self._pipeline.take(address, self._settings.batch_messages):
                for message in messages:
                    await self._send(call, message)
            if self._pipeline.broken(address):
                raise Unreachable(
                    "fell too far behind, broke the protocol, or the hello has changed: starts anew"
                )
            await wake.wait()

    async def _send(self, call: Call, message: RelayMessage) -> None:
        # Returns when the message is on its way: the peer's flow control holds it up here.
        async with asyncio.timeout(self._settings.ack_deadline_s):
            await _write(call, message)


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
        # grpc.aio's word for a stream that has ended meanwhile. Reading raises what it ended with, if that was an error.
        await call.read()
        raise Unreachable("the scheduler ended the stream") from None


def _proof(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),) if token else ()


def _tell(error: BaseException, fields: dict[str, str]) -> None:
    if isinstance(error, grpc.aio.AioRpcError) and error.code() in _ADVICE:
        advice = _ADVICE[error.code()]
        log.error("scheduler refuses", extra={**fields, "error": _why(error), "do": advice})
    else:
        log.warning("scheduler away", extra={**fields, "error": _why(error)})


def _kind(error: BaseException) -> str:
    """What distinguishes one trouble from the next: told once each."""
    return error.code().name if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__


def _why(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return "no answer in time" if isinstance(error, TimeoutError) else str(error)
