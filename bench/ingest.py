"""Deltas that a scheduler process takes in per second of its own processor time, beside a server that only reads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc

from figures import AT_LEAST_AS_FAST, Row, more_is_better
from fleet import (
    ECHO,
    SCHEDULER,
    Server,
    SyntheticRelay,
    hashes_of,
    holds,
    prompt_tokens,
    serving,
)
from servingfleet_protos.v1 import stream_pb2
from servingfleet_protos.v1.stream_pb2 import Delta, RelayMessage

PROMPT_BLOCKS = 512
DYNAMO_BLOCKS = 0.44
"""Million blocks per processor second that Dynamo's standalone indexer took in, as measured on a machine of this kind;
it is not on the package index, so that this run can't measure it again."""


@dataclass(frozen=True)
class Kind:
    """A kind of traffic."""

    name: str
    op: Delta.Op.ValueType
    blocks: int
    """In one delta."""


KINDS = (
    Kind("holds of 128 blocks (prefill)", Delta.OP_HOLD, 128),
    Kind("holds of 1 block (decode)", Delta.OP_HOLD, 1),
    Kind("drops of 1 block (eviction)", Delta.OP_DROP, 1),
)


async def rows(quick: bool) -> list[Row]:
    """All rows of intake."""
    rounds, deltas = (2, 1_500) if quick else (3, 8_000)
    rng = random.Random(2)
    blocks = deltas * max(kind.blocks for kind in KINDS)
    hashes = b"".join(
        hashes_of(prompt_tokens(rng, PROMPT_BLOCKS))
        for _ in range(min(blocks, 65_536) // PROMPT_BLOCKS)
    )
    speeds: dict[tuple[str, str], list[float]] = {}
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(serving("scheduler", SCHEDULER)),
            await stack.enter_async_context(serving("echo", ECHO)),
        ]
        relays = []
        for server in servers:
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.target))
            relay = SyntheticRelay(channel, "replica")
            stack.callback(relay.close)
            await relay.open([])
            relays.append(relay)
        for _ in range(rounds):
            for kind in KINDS:
                for server, relay in zip(servers, relays, strict=True):
                    speed = await _speed(server, relay, _messages(kind, hashes, deltas))
                    speeds.setdefault((server.name, kind.name), []).append(speed)
    found = []
    for kind in KINDS:
        ours, echo = (
            sorted(speeds[server, kind.name])[rounds // 2] / 1e3 for server in ("scheduler", "echo")
        )
        unit = "thousand deltas/cpu s"
        found.append(
            more_is_better(f"intake, {kind.name} / a server that only reads", ours, echo, unit)
        )
        if kind.blocks > 1:
            name = f"intake, {kind.name} / Dynamo standalone indexer, as recorded"
            millions = ours * kind.blocks / 1e3
            unit = "million blocks/cpu s"
            found.append(more_is_better(name, millions, DYNAMO_BLOCKS, unit, AT_LEAST_AS_FAST))
    return found


def _messages(kind: Kind, hashes: bytes, count: int) -> list[RelayMessage]:
    deltas = holds(hashes, kind.blocks, kind.op)
    repeated = [RelayMessage(delta=deltas[number % len(deltas)]) for number in range(count)]
    # Acknowledged at once by both: the batch is through.
    return [*repeated, RelayMessage(snapshot_end=stream_pb2.SnapshotEnd(rank=0))]


async def _speed(server: Server, relay: SyntheticRelay, messages: Sequence[RelayMessage]) -> float:
    before = server.cpu_s()
    await relay.send(messages)
    return len(messages) / max(server.cpu_s() - before, 0.01)
