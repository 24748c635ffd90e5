"""A whole fleet on this machine, as processes: a scheduler, emulated engines, a relay beside each.

Whatever ends the block, all of them end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from servingfleet_protos.v1 import fleet_pb2

from .playing import UNPROVEN
from .processes import START_PATIENCE_S, STOP_PATIENCE_S, Process, ProcessFailed, running
from .workload import MODEL

if TYPE_CHECKING:  # this name exists for type checkers only
    from servingfleet_protos.v1.fleet_pb2_grpc import FleetAsyncStub

POLL_S = 0.05


@dataclass(frozen=True)
class EngineSpec:
    """One emulated engine."""

    replica: str
    gpu: str
    ranks: int
    blocks: int
    """GPU blocks, or pages, of a rank."""
    step_tokens: int
    """Tokens of one step: vLLM's default for the GPU's memory."""
    host_blocks: int = 0
    """Blocks, or pages, of the host tier of a rank; 0: none."""
    engine: str = "vllm"
    """Whose caches, events and API it has."""
    model: str = MODEL
    """Served name of its model."""
    layer_groups: tuple[str, ...] = ()
    """Of a model with other layers than full attention, as the emulator's --layer-group takes them."""
    block_tokens: int = 16
    """Tokens in a block, or page."""
    speed: float = 0.5
    """Times as fast as an 8B model on that GPU. Half stands for a model of some 16B, and keeps the steps so long that
    one machine can make those of a whole fleet."""

    @property
    def pool(self) -> str:
        """The pool that it belongs to: engines of one kind with one model."""
        return self.engine + self.model.removeprefix(MODEL)


# Models whose layers don't all keep every token. Each is a model of its own: what one holds is of no use to another.
# The layers are those of gpt-oss, of which every other looks back 128 tokens, and of Qwen3-Next, of which three in four
# are recurrent: their state is so large that a block has 528 tokens.
_KINDS = (
    EngineSpec("b200-large", "b200", 1, 4000, 16_384),
    EngineSpec("h100", "h100", 1, 700, 8192, 2000, engine="sglang", block_tokens=32),
    EngineSpec("h100", "h100", 1, 700, 8192, engine="trtllm", block_tokens=32),
    EngineSpec(
        "a100",
        "a100",
        2,
        2500,
        2048,
        model=f"{MODEL}-window",
        layer_groups=("sliding_window:128", "full_attention"),
    ),
    EngineSpec("l40s-host-tier", "l40s", 1, 1200, 2048, host_blocks=4000),
    EngineSpec(
        "h100",
        "h100",
        1,
        240,
        8192,
        block_tokens=528,
        model=f"{MODEL}-state",
        layer_groups=("mamba", "mamba", "mamba", "full_attention"),
    ),
)


def mixed_engines(count: int) -> tuple[EngineSpec, ...]:
    """`count` engines of different speed and size.

    Of the first four one is SGLang with a host tier, one TensorRT-LLM, and one serves a model with window layers on two
    ranks; of the next two one serves a model with recurrent layers.
    """
    engines = []
    for number in range(count):
        kind = _KINDS[number % len(_KINDS)]
        again = number // len(_KINDS)
        # Those of the next round are smaller.
        engines.append(
            replace(
                kind,
                replica=f"{number}-{kind.pool}-{kind.replica}",
                blocks=kind.blocks * 3 // (3 + again),
            )
        )
    return tuple(engines)


@dataclass
class LocalFleet:
    """Everything that was started, and where it can be reached."""

    engines: tuple[EngineSpec, ...]
    logs: Path
    """A log of each process, and each engine's account of what happened."""
    scheduler: str = ""
    """host:port of the scheduler."""
    http: dict[str, str] = field(default_factory=dict)
    """Base address of each replica's engine."""
    processes: list[Process] = field(default_factory=list)

    def truth(self, replica: str) -> Path:
        """The account that a replica's engine keeps."""
        return self.logs / f"{replica}.truth.jsonl"

    async def ready(self, fleet: FleetAsyncStub) -> None:
        """Waits until the scheduler follows the stream of every rank. Raises ProcessFailed, grpc.RpcError."""
        wanted = {(engine.replica, rank) for engine in self.engines for rank in range(engine.ranks)}
        found: set[tuple[str, int]] = set()
        try:
            async with asyncio.timeout(START_PATIENCE_S):
                while not wanted <= found:
                    await asyncio.sleep(POLL_S)
                    answer = await fleet.ListReplicas(
                        fleet_pb2.ListReplicasRequest(),
                        timeout=START_PATIENCE_S,
                        wait_for_ready=True,
                    )
                    found = {
                        (each.replica, rank.rank)
                        for each in answer.replicas
                        for rank in each.ranks
                        # Known load, too: until then a policy can't tell the engines apart.
                        if each.connected
                        and rank.state not in UNPROVEN
                        and rank.HasField("load_age_s")
                    }
        except TimeoutError:
            missing = ", ".join(
                f"{replica} rank {rank}" for replica, rank in sorted(wanted - found)
            )
            raise ProcessFailed(
                f"no proven stream within {START_PATIENCE_S:.0f} s from {missing}; "
                f"the relays' logs are in {self.logs}"
            ) from None

    async def watch(self) -> NoReturn:
        """Never returns; raises ProcessFailed as soon as a process ends by itself."""
        ends = {asyncio.create_task(each.child.wait()): each for each in self.processes}
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
        ended = ends[done.pop()]
        tail = "\n".join(ended.log.read_text(errors="replace").splitlines()[-10:])
        raise ProcessFailed(
            f"{ended.name} ended with status {ended.child.returncode} while the fleet ran. Its log:\n{tail}"
        )

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to every process that still runs."""
        for process in self.processes:
            if process.child.returncode is None:
                # Not through the child: asyncio's would reap one that has just ended, and lose its status.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.child.pid, number)

    async def stop(self) -> None:
        """Ends every process, all at once."""
        self.signal(signal.SIGTERM)
        ends = [asyncio.create_task(process.child.wait()) for process in self.processes]
        if ends:
            await asyncio.wait(ends, timeout=STOP_PATIENCE_S)


@asynccontextmanager
async def local_fleet(
    engines: tuple[EngineSpec, ...], policy: str, logs: Path
) -> AsyncIterator[LocalFleet]:
    """A running fleet under a policy; `logs` must be an empty folder. Raises ProcessFailed."""
    fleet = LocalFleet(engines, logs)
    try:
        async with AsyncExitStack() as stack:
            try:
                await _start(fleet, policy, stack)
                yield fleet
            finally:
                # The stack would stop them one after the other.
                await fleet.stop()
    finally:
        # Where the wait was too long, or was itself cut short.
        fleet.signal(signal.SIGKILL)


async def _start(fleet: LocalFleet, policy: str, stack: AsyncExitStack) -> None:
    async def start(module: str, name: str, arguments: list[str]) -> Process:
        process = await stack.enter_async_context(
            running(module, arguments, fleet.logs / f"{name}.log")
        )
        fleet.processes.append(process)
        return process

    scheduler = await start(
        "servingfleet_scheduler",
        "scheduler",
        ["--listen", "127.0.0.1:0", "--http-port", "0", "--policy", policy],
    )
    emulators = [
        await start("servingfleet_sim.emulator", each.replica, _engine_arguments(fleet, each))
        for each in fleet.engines
    ]
    fleet.scheduler = f"127.0.0.1:{(await scheduler.event('listening'))['port']}"
    for spec, emulator in zip(fleet.engines, emulators, strict=True):
        ports = await emulator.event("listening")
        endpoint = f"127.0.0.1:{ports['http_port']}"
        if spec.engine == "trtllm":
            # Nothing is published: its relay pulls, and must know the size of a block, which no event tells.
            source = ["--pull", "--engine-block-tokens", str(spec.block_tokens)]
        else:
            source = [
                *("--engine-events", f"tcp://127.0.0.1:{ports['events_port']}"),
                *("--engine-replay", f"tcp://127.0.0.1:{ports['replay_port']}"),
            ]
        fleet.http[spec.replica] = f"http://{endpoint}"
        await start(
            "servingfleet_relay",
            f"{spec.replica}.relay",
            [
                *("--replica", spec.replica),
                *("--model", spec.model),
                *("--ranks", str(spec.ranks)),
                *("--label", f"pool={spec.pool}"),
                *source,
                *("--engine-http", f"http://{endpoint}"),
                *("--endpoint", endpoint),
                *("--scheduler", fleet.scheduler),
            ],
        )


def _engine_arguments(fleet: LocalFleet, spec: EngineSpec) -> list[str]:
    return [
        *("--port", "0", "--events-port", "0", "--replay-port", "0"),
        *("--model", spec.model),
        *(argument for group in spec.layer_groups for argument in ("--layer-group", group)),
        *("--engine", spec.engine, "--block-size", str(spec.block_tokens)),
        *("--gpu", spec.gpu, "--speed", str(spec.speed)),
        *("--ranks", str(spec.ranks)),
        *("--blocks", str(spec.blocks), "--host-blocks", str(spec.host_blocks)),
        *("--max-step-tokens", str(spec.step_tokens)),
        *("--hash-seed", spec.replica),
        *("--log", str(fleet.truth(spec.replica)), "--log-tokens"),
    ]
