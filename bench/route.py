"""`Route` over the wire beside an echo on the same stack, and inside one process.

Closed loops: a client asks, reports the outcome, and asks again. Only `Route` is timed; reports keep the scheduler's
credits and decisions as few as they are in service.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from figures import AT_LEAST_AS_FAST, Row, less_is_better, p50, p95
from fleet import (
    BLOCK_TOKENS,
    ECHO,
    HASH_BYTES,
    MODEL,
    SCHEDULER,
    Server,
    SyntheticRelay,
    hashes_of,
    hello,
    holds,
    prompt_tokens,
    serving,
)
from servingfleet_protos.v1 import routing_pb2, stream_pb2
from servingfleet_protos.v1.routing_pb2_grpc import RouterStub
from servingfleet_protos.v1.stream_pb2 import Delta, RelayMessage
from servingfleet_scheduler.service import Scheduler
from servingfleet_scheduler.settings import SchedulerSettings

if TYPE_CHECKING:  # this name exists for type checkers only
    from servingfleet_protos.v1.routing_pb2_grpc import RouterAsyncStub

REPLICAS = 64
HOLDERS = 4
PROMPTS = 64
SIZES = {"2 KB": 32, "128 KB": 2048}
"""Blocks of a prompt by its size in tokens of 4 bytes."""
CONCURRENCY = (1, 16)
SNAPSHOT_BLOCKS = 4096
DYNAMO_SELECT_MS = {64: 0.40, 512: 0.89, 2048: 3.7}
"""Dynamo's SelectionService in process, from tokens, 64 workers, p50, as measured on a quiet machine of this kind; it
is not on the package index, so that this run can't measure it again."""


@dataclass
class Fleet:
    """Prompts, and which replica holds how much of which."""

    prompts: dict[int, list[bytes]]
    """Packed tokens, by the number of blocks."""
    held: dict[int, list[Delta]]
    """What each replica holds: the first half of some prompts."""

    @classmethod
    def of(cls, sizes: Iterable[int], seed: int = 1) -> Fleet:
        rng = random.Random(seed)
        fleet = cls({}, {number: [] for number in range(REPLICAS)})
        for blocks in sizes:
            fleet.prompts[blocks] = [prompt_tokens(rng, blocks) for _ in range(PROMPTS)]
            for tokens in fleet.prompts[blocks]:
                half = hashes_of(tokens)[: blocks // 2 * HASH_BYTES]
                for number in rng.sample(range(REPLICAS), HOLDERS):
                    fleet.held[number] += holds(half, SNAPSHOT_BLOCKS)
        return fleet


def route_request(tokens: bytes) -> routing_pb2.RouteRequest:
    """Of a prompt in packed tokens."""
    return routing_pb2.RouteRequest(model=MODEL, prompt=routing_pb2.Prompt(tokens_le32=tokens))


def outcome(response: routing_pb2.RouteResponse) -> routing_pb2.ReportRequest:
    """The engine reused what was predicted."""
    prediction = response.prediction
    return routing_pb2.ReportRequest(
        decision_id=response.decision_id,
        stage=routing_pb2.ReportRequest.STAGE_FINISHED,
        prompt_tokens=prediction.prompt_tokens,
        cached_tokens=prediction.predicted,
    )


@dataclass
class Loop:
    """What one client or sixteen saw of one server with one size."""

    seconds: list[float] = field(default_factory=list)
    """Of each Route."""
    cpu_s: float = 0.0

    @property
    def cpu_ms(self) -> float:
        """The server's own, for each Route with its Report."""
        return self.cpu_s * 1e3 / len(self.seconds)


async def rows(quick: bool) -> list[Row]:
    """All rows of `Route`."""
    fleet = Fleet.of(SIZES.values())
    slices, slice_s = (2, 0.3) if quick else (4, 0.75)
    loops: defaultdict[tuple[str, str, int], Loop] = defaultdict(Loop)
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(serving("scheduler", SCHEDULER)),
            await stack.enter_async_context(serving("echo", ECHO)),
        ]
        await stack.enter_async_context(_Relays(servers[0], fleet))
        stubs = []
        for server in servers:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.target))
            stubs.append(RouterStub(channel))
        await _check(stubs[0], fleet)
        for size, blocks in SIZES.items():
            requests = [route_request(tokens) for tokens in fleet.prompts[blocks]]
            for clients in CONCURRENCY:
                for number in range(slices):
                    for server, stub in zip(servers, stubs, strict=True):
                        loop = loops[server.name, size, clients]
                        if number == 0:  # warms both
                            await _drive(stub, requests, clients, slice_s / 4)
                        before = server.cpu_s()
                        loop.seconds += await _drive(stub, requests, clients, slice_s)
                        loop.cpu_s += server.cpu_s() - before
    found = []
    for size in SIZES:
        for clients in CONCURRENCY:
            ours, echo = (loops[name, size, clients] for name in ("scheduler", "echo"))
            name = f"Route, prompt of {size}, {clients} at once"
            for word, quantile in (("p50", p50), ("p95", p95)):
                found.append(
                    less_is_better(
                        f"{name}, {word} / echo",
                        quantile(ours.seconds) * 1e3,
                        quantile(echo.seconds) * 1e3,
                        "ms",
                    )
                )
            found.append(
                less_is_better(
                    f"{name}, server's processor time with its Report / echo",
                    ours.cpu_ms,
                    echo.cpu_ms,
                    "ms",
                )
            )
    return found


class _Relays:
    """64 streams that have told all and stay open."""

    def __init__(self, server: Server, fleet: Fleet) -> None:
        self._server = server
        self._fleet = fleet
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._server.target)
        self._relays = [
            SyntheticRelay(self._channel, f"replica-{number:02}") for number in self._fleet.held
        ]
        opening = zip(self._relays, self._fleet.held.values(), strict=True)
        await asyncio.gather(*(relay.open(held) for relay, held in opening))
        self._tasks = [asyncio.create_task(relay.drain()) for relay in self._relays]

    async def __aexit__(self, *error: object) -> None:
        for relay in self._relays:
            relay.close()
        await asyncio.gather(*self._tasks)
        await self._channel.close()


async def _check(stub: RouterAsyncStub, fleet: Fleet) -> None:
    """The scheduler knows what was sent: else the figures would be of an empty index."""
    for blocks, prompts in fleet.prompts.items():
        explained = await stub.Explain(route_request(prompts[-1]))
        expected = blocks // 2 * BLOCK_TOKENS
        if explained.best_predicted != expected or len(explained.candidates) != REPLICAS:
            raise RuntimeError(
                f"{len(explained.candidates)} candidates, best {explained.best_predicted}; "
                f"expected {REPLICAS} and {expected}"
            )


async def _drive(
    stub: RouterAsyncStub,
    requests: list[routing_pb2.RouteRequest],
    clients: int,
    seconds: float,
) -> list[float]:
    """Seconds of each Route of some clients that each wait for the answer before they ask again."""
    taken: list[float] = []
    until = time.perf_counter() + seconds

    async def client(first: int) -> None:
        at = first
        while (start := time.perf_counter()) < until:
            response = await stub.Route(requests[at % len(requests)])
            taken.append(time.perf_counter() - start)
            await stub.Report(outcome(response))
            at += clients

    await asyncio.gather(*(client(number) for number in range(clients)))
    return taken


def in_process_rows(quick: bool) -> list[Row]:
    """`Scheduler.route` without a wire, from tokens."""
    found = []
    for blocks, peer in DYNAMO_SELECT_MS.items():
        fleet = Fleet.of([blocks])
        scheduler = _in_process(fleet)
        requests = [route_request(tokens) for tokens in fleet.prompts[blocks]]
        taken = []
        for number in range(100 if quick else 1000):
            request = requests[number % len(requests)]
            now = 1.0 + number * 1e-3
            start = time.thread_time_ns()
            response = scheduler.route(request, now)
            taken.append(time.thread_time_ns() - start)
            scheduler.report(outcome(response), now)
        name = f"route in process, 64 replicas, {blocks} blocks, p50 / Dynamo SelectionService, as recorded"
        found.append(less_is_better(name, p50(taken) / 1e6, peer, "ms", AT_LEAST_AS_FAST))
    return found


def _in_process(fleet: Fleet) -> Scheduler:
    scheduler = Scheduler(
        SchedulerSettings(block_tokens=BLOCK_TOKENS, snapshot_slots=REPLICAS),
        instance_id="bench",
        now=0.0,
        rng=random.Random(1),
        token_key=b"0123456789abcdef",
    )
    for number, held in fleet.held.items():
        session = scheduler.open_session(0.0)
        session.receive(hello(f"replica-{number:02}"), 0.0)
        begin = stream_pb2.SnapshotBegin(rank=0, incarnation=1)
        end = stream_pb2.SnapshotEnd(rank=0)
        messages = [
            RelayMessage(snapshot_begin=begin),
            *(RelayMessage(delta=delta) for delta in held),
            RelayMessage(snapshot_end=end),
        ]
        for seq, message in enumerate(messages, 1):
            message.seq = seq
            session.receive(message, 0.0)
        session.take()
    return scheduler
