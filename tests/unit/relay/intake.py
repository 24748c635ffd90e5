"""A scheduler's relay intake on loopback, and links that dial it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio

from servingfleet_protos.v1.stream_pb2 import (
    Ack,
    GrantSnapshot,
    RelayMessage,
    SchedulerMessage,
    Welcome,
)
from servingfleet_protos.v1.stream_pb2_grpc import (
    RelayIntakeServicer,
    add_RelayIntakeServicer_to_server,
)
from servingfleet_relay.pipeline import Pipeline
from servingfleet_relay.settings import PipelineSettings, RelaySettings
from servingfleet_relay.stream import Links
from tests.unit.relay.batches import END, live, stored, tokens

PATIENCE_S = 10.0

Context = grpc.aio.ServicerContext[RelayMessage, SchedulerMessage]


class Scheduler(RelayIntakeServicer):
    """Welcomes, acknowledges, grants one snapshot, and remembers what it was told."""

    def __init__(self, instance: str = "i", *, resumed: bool = False) -> None:
        self.instance = instance
        self.resumed = resumed
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.told: asyncio.Queue[RelayMessage] = asyncio.Queue(1000)
        self.proofs: asyncio.Queue[str] = asyncio.Queue(1000)
        """`authorization` of each stream that was opened, "" for none."""
        self.ended = asyncio.Event()
        """A relay said that it has no more to say."""
        self.server = grpc.aio.server()
        add_RelayIntakeServicer_to_server(self, self.server)

    async def start(self, port: int = 0, credentials: grpc.ServerCredentials | None = None) -> int:
        address = f"127.0.0.1:{port}"
        if credentials is None:
            bound = self.server.add_insecure_port(address)
        else:
            bound = self.server.add_secure_port(address, credentials)
        await self.server.start()
        return bound

    async def Stream(
        self, request_iterator: AsyncIterator[RelayMessage], context: Context
    ) -> AsyncIterator[SchedulerMessage]:
        metadata = dict(context.invocation_metadata() or ())
        self.proofs.put_nowait(str(metadata.get("authorization", "")))
        if self.refusal is not None:
            await context.abort(*self.refusal)
        async for message in request_iterator:
            self.told.put_nowait(message)
            if message.HasField("hello"):
                resume = self.resumed and bool(message.hello.resume_instance)
                welcome = Welcome(
                    instance_id=self.instance,
                    resumed=resume,
                    expected_seq=message.hello.resume_from if resume else 0,
                )
                yield SchedulerMessage(welcome=welcome)
                if not resume:
                    yield SchedulerMessage(grant_snapshot=GrantSnapshot(ranks=[0]))
            elif message.seq:
                yield SchedulerMessage(ack=Ack(seq=message.seq))
        self.ended.set()

    async def until(self, kind: str) -> RelayMessage:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.told.get()
                if message.WhichOneof("body") == kind:
                    return message

    async def opened(self) -> str:
        """The proof that the next stream was opened with."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.proofs.get()

    async def stop(self) -> None:
        await self.server.stop(None)


def proven() -> Pipeline:
    pipeline = Pipeline(PipelineSettings("r", "m", (0,), "s"), 0.0)
    pipeline.socket_up(0, 0.0)
    pipeline.take_replay_requests()
    pipeline.replayed(0, END, 0.0)
    return pipeline


def publish(pipeline: Pipeline, seq: int) -> None:
    pipeline.live(0, live(seq, stored([seq + 1], tokens(1, start=100 * seq))), 0.0)


def impatient(targets: Sequence[str]) -> RelaySettings:
    """Settings of links that try again soon."""
    return RelaySettings(
        sockets=(),
        schedulers=tuple(targets),
        reconnect_first_s=0.01,
        reconnect_most_s=0.05,
        connect_deadline_s=1.0,
        renewal_interval_s=0.02,
    )


@contextlib.asynccontextmanager
async def linked(pipeline: Pipeline, settings: RelaySettings) -> AsyncIterator[None]:
    links = Links(settings, pipeline, random.Random(0))
    pipeline.on_output = links.wake
    task = asyncio.create_task(links.run())
    try:
        yield
    finally:
        assert not task.done()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
