"""The engine's sockets, against a real publisher and a real replay server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import pytest
import zmq
import zmq.asyncio

from servingfleet_relay.pipeline import Pipeline
from servingfleet_relay.settings import PipelineSettings, RankSockets, RelaySettings
from servingfleet_relay.tap import Replays, Tap
from tests.unit.relay.batches import END, live, stored, tokens

PATIENCE_S = 10.0


class Engine:
    """Publishes as vLLM does, and answers replays from a ring."""

    def __init__(self, port: int = 0, replay_port: int = 0) -> None:
        self.ring: list[list[bytes]] = []
        self.context = zmq.asyncio.Context()
        self.publisher = self.context.socket(zmq.PUB)
        self.router = self.context.socket(zmq.ROUTER)
        self.port = _bind(self.publisher, port)
        self.replay_port = _bind(self.router, replay_port)

    async def publish(self, seq: int, *, life: float = 1.0, heard: bool = True) -> None:
        frames = live(seq, stored([seq + 1], tokens(1, start=100 * seq)), time=life)
        self.ring.append(frames)
        if heard:
            await self.publisher.send_multipart(frames)

    async def serve(self) -> None:
        while True:
            identity, _, start = await self.router.recv_multipart()
            for frames in self.ring:
                if frames[1] >= start:
                    await self.router.send_multipart([identity, b"", *frames])
            await self.router.send_multipart([identity, *END])

    def stop(self) -> None:
        # Waits until the ports are free again.
        self.context.destroy(linger=0)


def _bind(server: zmq.asyncio.Socket, port: int) -> int:
    server.linger = 0
    if port:
        server.bind(f"tcp://127.0.0.1:{port}")
        return port
    return int(server.bind_to_random_port("tcp://127.0.0.1"))


class Changes:
    """Wakes whoever waits whenever the pipeline changed."""

    def __init__(self) -> None:
        self.hooks: list[Callable[[], None]] = []
        self._event = asyncio.Event()

    def __call__(self) -> None:
        for hook in self.hooks:
            hook()
        self._event.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not reached():
                self._event.clear()
                await self._event.wait()


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@contextlib.asynccontextmanager
async def tapped(
    context: zmq.asyncio.Context, sockets: RankSockets
) -> AsyncIterator[tuple[Pipeline, Changes]]:
    """A pipeline whose engine sockets are listened to for the length of the block."""
    pipeline = Pipeline(
        PipelineSettings("r", "m", (0,), "s", replay=sockets.replay is not None), 0.0
    )
    settings = RelaySettings(sockets=(sockets,), schedulers=())
    changes = Changes()
    pipeline.on_output = changes
    async with asyncio.TaskGroup() as group:
        replays = Replays(context, settings, pipeline, group)
        changes.hooks.append(replays.start_wanted)
        tap = group.create_task(Tap(context, sockets, settings, pipeline).run())
        yield pipeline, changes
        tap.cancel()


def state(pipeline: Pipeline) -> tuple[str, int | None]:
    (rank,) = pipeline.status().ranks
    return rank.state, rank.engine_seq


async def test_history_live_batches_a_gap_and_a_restart_are_all_followed(
    context: zmq.asyncio.Context,
) -> None:
    engine = Engine()
    serving = asyncio.create_task(engine.serve())
    await engine.publish(0)
    sockets = RankSockets(
        0, f"tcp://127.0.0.1:{engine.port}", f"tcp://127.0.0.1:{engine.replay_port}"
    )
    async with tapped(context, sockets) as (pipeline, changes):
        await changes.until(lambda: state(pipeline) == ("live", 0))

        await engine.publish(1)
        await changes.until(lambda: state(pipeline) == ("live", 1))

        await engine.publish(2, heard=False)
        await engine.publish(3)
        await changes.until(lambda: state(pipeline) == ("live", 3))
        assert pipeline.counters()["gaps"] == 1

        serving.cancel()
        engine.stop()
        await changes.until(lambda: state(pipeline)[0] == "unproven")

        engine = Engine(engine.port, engine.replay_port)
        serving = asyncio.create_task(engine.serve())
        await changes.until(lambda: state(pipeline) == ("live", None))
        await engine.publish(0, life=2.0)
        await changes.until(lambda: state(pipeline) == ("live", 0))
        assert pipeline.status().ranks[0].incarnation == 2
    serving.cancel()
    engine.stop()


async def test_a_relay_that_binds_hears_an_engine_that_connects(
    context: zmq.asyncio.Context,
) -> None:
    publisher = context.socket(zmq.PUB)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with tapped(context, RankSockets(0, f"tcp://127.0.0.1:{port}", None, bind=True)) as (
        pipeline,
        changes,
    ):
        publisher.linger = 0
        publisher.connect(f"tcp://127.0.0.1:{port}")
        await changes.until(lambda: state(pipeline)[0] == "history_lost")
        await _subscribed(publisher, pipeline)
        await changes.until(lambda: state(pipeline)[1] is not None)
        publisher.close(0)
        await changes.until(lambda: state(pipeline)[0] == "unproven")


async def _subscribed(publisher: zmq.asyncio.Socket, pipeline: Pipeline) -> None:
    """Publishes until something is heard: a subscription takes its time, and nothing tells of it."""
    async with asyncio.timeout(PATIENCE_S):
        seq = 0
        while state(pipeline)[1] is None:
            await publisher.send_multipart(live(seq, stored([seq + 1], tokens(1, start=seq * 100))))
            seq += 1
            await asyncio.sleep(0.01)


async def test_a_replay_that_nobody_answers_is_given_up(context: zmq.asyncio.Context) -> None:
    engine = Engine()  # whose replay socket is bound, and silent
    sockets = RankSockets(
        0, f"tcp://127.0.0.1:{engine.port}", f"tcp://127.0.0.1:{engine.replay_port}"
    )
    pipeline = Pipeline(PipelineSettings("r", "m", (0,), "s", replay_deadline_s=0.05), 0.0)
    settings = RelaySettings(sockets=(sockets,), schedulers=())
    changes = Changes()
    pipeline.on_output = changes
    async with asyncio.TaskGroup() as group:
        replays = Replays(context, settings, pipeline, group)
        changes.hooks.append(replays.start_wanted)
        pipeline.socket_up(0, 0.0)
        await changes.until(lambda: state(pipeline)[0] == "history_lost")
    assert pipeline.counters()["replays_failed"] == 1
    engine.stop()
