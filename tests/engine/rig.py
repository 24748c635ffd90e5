"""A real engine with the relay and the scheduler that stand beside it in a fleet, each a process of its own."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from servingfleet_protos.v1 import fleet_pb2
from servingfleet_sim.processes import Process
from tests.integration.fleet import Fleet, Scheduler, fleet_in

from .client import REPLICA, Account, Client
from .engine import BLOCK, Engine, engine_running
from .environment import Environment


@dataclass
class Rig:
    """Everything that one module of tests started."""

    engine: Engine
    fleet: Fleet
    scheduler: Scheduler
    relay: Process
    client: Client
    prompts: Prompts

    async def restart_relay(self) -> None:
        """A new relay with the flags of the one that ended."""
        self.relay = await _relay(self.fleet, self.engine, self.scheduler)

    async def rank(self, number: int = 0) -> fleet_pb2.Rank:
        """What the scheduler knows of a rank."""
        ranks = (await self.scheduler.replicas())[REPLICA].ranks
        return next(rank for rank in ranks if rank.rank == number)


class Prompts:
    """Tokens that no prompt before began with."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(10, 1000) for _ in range(count)]


def whole(tokens: int) -> int:
    """What is reused of so many tokens when all are held: whole blocks, and never the last token."""
    return (tokens - 1) // BLOCK * BLOCK


@asynccontextmanager
async def rig_running(
    environment: Environment, account: Account, logs: Path, ranks: int = 1
) -> AsyncIterator[Rig]:
    """Engine, relay and scheduler for the length of the block.."""
    async with fleet_in(logs) as fleet, engine_running(environment, ranks) as engine:
        scheduler = await fleet.scheduler()
        relay = await _relay(fleet, engine, scheduler)
        client = Client(engine, scheduler, account)
        for rank in range(ranks):
            await client.caught_up(rank)
        yield Rig(engine, fleet, scheduler, relay, client, Prompts(ranks))


async def _relay(fleet: Fleet, engine: Engine, scheduler: Scheduler) -> Process:
    # It learns the model's name, and what the engine is, from the engine.
    return await fleet.process(
        "servingfleet_relay",
        *("--replica", REPLICA),
        *("--engine", "auto", "--engine-http", engine.base),
        *("--engine-events", f"tcp://127.0.0.1:{engine.ports.events}"),
        *("--engine-replay", f"tcp://127.0.0.1:{engine.ports.replay}"),
        *("--ranks", str(engine.ranks)),
        *("--scheduler", scheduler.target),
        *("--metrics-port", "0"),
    )
