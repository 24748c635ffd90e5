"""Links to schedulers, against real gRPC servers on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

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


class Scheduler(RelayIntakeServicer):
    """Welcomes, acknowledges, grants one snapshot, and remembers what it was told."""

    def __init__(self, instance: str = "i", *, resumed: bool = False) -> None:
        self.instance = instance
        self.resumed = resumed
        self.told: asyncio.Queue[RelayMessage] = asyncio.Queue(1000)
        self.server = grpc.aio.server()
        add_RelayIntakeServicer_to_server(self, self.server)

    async def start(self, port: int = 0) -> int:
        bound = self.server.add_insecure_port(f"127.0.0.1:{port}")
        await self.server.start()
        return bound

    async def Stream(
        self,
        request_iterator: AsyncIterator[RelayMessage],
        context: grpc.aio.ServicerContext[RelayMessage, SchedulerMessage],
    ) -> AsyncIterator[SchedulerMessage]:
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

    async def until(self, kind: str) -> RelayMessage:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self.told.get()
                if message.WhichOneof("body") == kind:
                    return message

    async def stop(self) -> None:
        await self.server.stop(None)


def proven() -> Pipeline:
    pipeline = Pipeline(PipelineSettings("r", "m", (0,), "s"), 0.0)
    pipeline.socket_up(0, 0.0)
    pipeline.take_replay_requests()
    pipeline.replayed(0, END, 0.0)
    return pipeline


@contextlib.asynccontextmanager
async def linked(pipeline: Pipeline, *targets: str) -> AsyncIterator[None]:
    settings = RelaySettings(
        sockets=(),
        schedulers=targets,
        reconnect_first_s=0.01,
        reconnect_most_s=0.05,
        connect_deadline_s=1.0,
    )
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


def publish(pipeline: Pipeline, seq: int) -> None:
    pipeline.live(0, live(seq, stored([seq + 1], tokens(1, start=100 * seq))), 0.0)


async def test_a_scheduler_hears_hello_snapshot_and_live_deltas() -> None:
    scheduler = Scheduler()
    port = await scheduler.start()
    pipeline = proven()
    publish(pipeline, 0)
    async with linked(pipeline, f"127.0.0.1:{port}"):
        hello = await scheduler.until("hello")
        assert (hello.hello.replica, hello.hello.resume_instance) == ("r", "")
        await scheduler.until("snapshot_begin")
        await scheduler.until("snapshot_end")
        publish(pipeline, 1)
        assert len((await scheduler.until("delta")).delta.hashes) == 8
        assert (await scheduler.until("rank_state")).rank_state.engine_seq == 1
    await scheduler.stop()


async def test_a_scheduler_that_is_away_holds_up_no_other_and_is_resumed_when_it_is_back() -> None:
    away, other = Scheduler("away", resumed=True), Scheduler("other")
    away_port, other_port = await away.start(), await other.start()
    pipeline = proven()
    async with linked(pipeline, f"127.0.0.1:{away_port}", f"127.0.0.1:{other_port}"):
        await away.until("snapshot_end")
        await other.until("snapshot_end")
        await away.stop()
        publish(pipeline, 0)
        await other.until("delta")
        back = Scheduler("away", resumed=True)
        await back.start(away_port)
        assert (await back.until("hello")).hello.resume_instance == "away"
        assert len((await back.until("delta")).delta.hashes) == 8
        await back.stop()
    await other.stop()


async def test_a_scheduler_of_another_life_gets_a_new_session() -> None:
    first = Scheduler("first")
    port = await first.start()
    pipeline = proven()
    publish(pipeline, 0)
    async with linked(pipeline, f"127.0.0.1:{port}"):
        await first.until("snapshot_end")
        await first.stop()
        second = Scheduler("second")
        await second.start(port)
        assert (await second.until("hello")).hello.resume_instance == "first"
        begin = await second.until("snapshot_begin")
        assert begin.seq > 0
        assert len((await second.until("delta")).delta.hashes) == 8
        await second.stop()


async def test_a_name_that_does_not_resolve_is_tried_again_and_holds_up_no_other() -> None:
    scheduler = Scheduler()
    port = await scheduler.start()
    pipeline = proven()
    async with linked(pipeline, "no-such-host.invalid:1", f"127.0.0.1:{port}"):
        await scheduler.until("snapshot_end")
    await scheduler.stop()
