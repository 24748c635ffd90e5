"""Real processes for a test: schedulers, relays, recorded engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from servingfleet_protos.v1 import fleet_pb2
from servingfleet_protos.v1.fleet_pb2_grpc import FleetStub
from servingfleet_protos.v1.routing_pb2_grpc import RouterStub
from servingfleet_sim.playing import Player, relay_arguments
from servingfleet_sim.processes import Process, running
from servingfleet_sim.recordings import Recording
from servingfleet_sim.wire import RecordedEngine

if TYPE_CHECKING:
    from servingfleet_protos.v1.fleet_pb2_grpc import FleetAsyncStub
    from servingfleet_protos.v1.routing_pb2_grpc import RouterAsyncStub

PATIENCE_S = 30.0


@dataclass
class Scheduler:
    """A scheduler process and the stubs that ask it."""

    process: Process
    target: str
    router: RouterAsyncStub
    fleet: FleetAsyncStub

    async def replicas(self, model: str = "") -> dict[str, fleet_pb2.Replica]:
        answer = await self.fleet.ListReplicas(
            fleet_pb2.ListReplicasRequest(model=model), timeout=PATIENCE_S
        )
        return {replica.replica: replica for replica in answer.replicas}

    async def until(
        self, reached: Callable[[dict[str, fleet_pb2.Replica]], bool], what: str
    ) -> dict[str, fleet_pb2.Replica]:
        """Waits for a state of the replicas."""
        seen: dict[str, fleet_pb2.Replica] = {}
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not reached(seen := await self.replicas()):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"never saw {what}; last: {seen}") from None
        return seen


@dataclass
class Fleet:
    """Everything that one test started; `stack` ends it."""

    logs: Path
    stack: AsyncExitStack
    started: int = field(default=0)

    async def scheduler(self, *arguments: str, listen: str = "127.0.0.1:0") -> Scheduler:
        log = self._log("scheduler")
        process = await self.stack.enter_async_context(
            running(
                "servingfleet_scheduler",
                ["--listen", listen, "--http-port", "0", *arguments],
                log,
            )
        )
        target = f"127.0.0.1:{(await process.event('listening'))['port']}"
        return await self.asked(process, target)

    async def asked(self, process: Process, target: str) -> Scheduler:
        """The stubs of a scheduler that listens on `target`."""
        # Of its own: a shared one would remember that the life before it at this address was lost.
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = await self.stack.enter_async_context(
            grpc.aio.insecure_channel(target, options=options)
        )
        return Scheduler(process, target, RouterStub(channel), FleetStub(channel))

    async def process(self, module: str, *arguments: str, log: Path | None = None) -> Process:
        """Any other process of the project. `log`: where its standard error goes instead."""
        sink = log or self._log(module.rpartition(".")[2])
        return await self.stack.enter_async_context(running(module, arguments, sink))

    async def engine(self, recording: Recording) -> RecordedEngine:
        return await self.stack.enter_async_context(
            RecordedEngine(recording.ranks, recording.adapter)
        )

    async def relay(
        self,
        engine: RecordedEngine,
        replica: str,
        model: str,
        *schedulers: str,
        recording: Recording | None = None,
    ) -> Process:
        arguments = relay_arguments(engine, replica, model, *schedulers, recording=recording)
        return await self.stack.enter_async_context(
            running("servingfleet_relay", arguments, self._log("relay"))
        )

    async def player(self, recording: Recording, scheduler: Scheduler) -> Player:
        """A recorded engine with its relay, connected to the scheduler."""
        engine = await self.engine(recording)
        replica = model = recording.name
        await self.relay(engine, replica, model, scheduler.target, recording=recording)
        player = Player(recording, engine, replica, model, scheduler.router, scheduler.fleet)
        await player.connected()
        return player

    def _log(self, name: str) -> Path:
        self.started += 1
        return self.logs / f"{self.started}-{name}.log"


@asynccontextmanager
async def fleet_in(logs: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(logs, stack)
