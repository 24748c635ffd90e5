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

    def __init__(
        self, port: int = 0, replay_port: int = 0, *, connects: bool = False, rank: int = 0
    ) -> None:
        """`connects`: to the port, which the relay binds, as vLLM does given a concrete address."""
        self.ring: list[list[bytes]] = []
        self.rank = rank
        self.context = zmq.asyncio.Context()
        self.publisher = self.context.socket(zmq.XPUB)  # PUB that tells of each subscription
        self.publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.router = self.context.socket(zmq.ROUTER)
        if connects:
            self.port = port
            self.publisher.linger = 0
            self.publisher.connect(f"tcp://127.0.0.1:{port}")
        else:
            self.port = _bind(self.publisher, port)
        self.replay_port = _bind(self.router, replay_port)

    async def publish(self, seq: int, *, life: float = 1.0, heard: bool = True) -> None:
        frames = live(seq, stored([seq + 1], tokens(1, start=100 * seq)), time=life, rank=self.rank)
        self.ring.append(frames)
        if heard:
            await self.publisher.send_multipart(frames)

    async def subscribed(self) -> None:
        """Waits until the relay's subscription has arrived: what is published before is lost."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.publisher.recv() != b"\x01":
                pass  # an earlier one ended

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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.asynccontextmanager
async def connecting(
    port: int, replay_port: int = 0, *, published: int = 0, life: float = 1.0, rank: int = 0
) -> AsyncIterator[Engine]:
    """An engine that connects to a port that the relay binds, and has published before anybody listened."""
    engine = Engine(port, replay_port, connects=True, rank=rank)
    serving = asyncio.create_task(engine.serve())
    for seq in range(published):
        await engine.publish(seq, life=life)
    try:
        yield engine
    finally:
        serving.cancel()
        engine.stop()


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


@contextlib.asynccontextmanager
async def own_context() -> AsyncIterator[zmq.asyncio.Context]:
    """Of one life of the relay: its ports are free again when it ends."""
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    async with own_context() as context:
        yield context


@contextlib.asynccontextmanager
async def tapped(
    context: zmq.asyncio.Context, *sockets: RankSockets
) -> AsyncIterator[tuple[Pipeline, Changes]]:
    """A pipeline whose engine sockets are listened to for the length of the block."""
    ranks = tuple(each.rank for each in sockets)
    pipeline = Pipeline(
        PipelineSettings("r", "m", ranks, "s", replay=sockets[0].replay is not None), 0.0
    )
    settings = RelaySettings(sockets=sockets, schedulers=())
    changes = Changes()
    pipeline.on_output = changes
    async with asyncio.TaskGroup() as group:
        replays = Replays(context, settings, pipeline, group)
        changes.hooks.append(replays.start_wanted)
        taps = [group.create_task(Tap(context, each, settings, pipeline).run()) for each in sockets]
        yield pipeline, changes
        for tap in taps:
            tap.cancel()


def state(pipeline: Pipeline) -> tuple[str, int | None]:
    (one,) = states(pipeline)
    return one


def states(pipeline: Pipeline) -> list[tuple[str, int | None]]:
    return [(rank.state, rank.engine_seq) for rank in pipeline.status().ranks]


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
    port = free_port()
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


async def test_bound_sockets_follow_each_rank_and_restarts_of_relay_and_engine() -> None:
    ports = [(free_port(), free_port()), (free_port(), free_port())]
    sockets = [
        RankSockets(rank, f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay}", bind=True)
        for rank, (port, replay) in enumerate(ports)
    ]
    async with contextlib.AsyncExitStack() as first:
        engines = [
            await first.enter_async_context(connecting(*each, published=2, rank=rank))
            for rank, each in enumerate(ports)
        ]
        async with own_context() as context, tapped(context, *sockets) as (pipeline, changes):
            # Nobody listened when it was published: it comes by replay.
            await changes.until(lambda: states(pipeline) == [("live", 1), ("live", 1)])
        for engine in engines:
            await engine.subscribed()
            await engine.publish(2)  # while there is no relay
        async with own_context() as context, tapped(context, *sockets) as (pipeline, changes):
            await changes.until(lambda: states(pipeline) == [("live", 2), ("live", 2)])
            await engines[0].subscribed()
            await engines[0].publish(3)
            await changes.until(lambda: states(pipeline) == [("live", 3), ("live", 2)])
            await first.aclose()
            await changes.until(lambda: states(pipeline) == [("unproven", 3), ("unproven", 2)])
            async with contextlib.AsyncExitStack() as second:
                for rank, each in enumerate(ports):
                    following = connecting(*each, published=1, life=2.0, rank=rank)
                    await second.enter_async_context(following)
                await changes.until(lambda: states(pipeline) == [("live", 0), ("live", 0)])
                assert [rank.incarnation for rank in pipeline.status().ranks] == [2, 2]


async def test_the_next_engine_may_connect_before_the_last_one_is_seen_to_end(
    context: zmq.asyncio.Context,
) -> None:
    port = free_port()
    sockets = RankSockets(0, f"tcp://127.0.0.1:{port}", None, bind=True)
    async with tapped(context, sockets) as (pipeline, changes):
        async with connecting(port) as last:
            await last.subscribed()
            await last.publish(0)
            await changes.until(lambda: state(pipeline) == ("live", 0))
            following = Engine(port, connects=True)
            await following.subscribed()
        await changes.until(lambda: state(pipeline)[0] == "unproven")
        await following.publish(0, life=2.0)
        await changes.until(lambda: state(pipeline) == ("live", 0))
        assert pipeline.status().ranks[0].incarnation == 2
        following.stop()


async def test_a_stranger_at_a_bound_socket_is_no_engine(context: zmq.asyncio.Context) -> None:
    port = free_port()
    sockets = RankSockets(0, f"tcp://127.0.0.1:{port}", None, bind=True)
    async with tapped(context, sockets) as (pipeline, changes), connecting(port) as engine:
        await engine.subscribed()
        await engine.publish(0)
        await changes.until(lambda: state(pipeline) == ("live", 0))
        _, stranger = await asyncio.open_connection("127.0.0.1", port)
        stranger.close()
        await stranger.wait_closed()
        await engine.publish(1)
        await changes.until(lambda: pipeline.status().ranks[0].engine_seq == 1)


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
