"""`servingfleet demo`: a whole fleet of emulated engines on this machine, and how it was predicted."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import click
import grpc
from rich.live import Live
from rich.text import Text

from servingfleet_protos.v1 import fleet_pb2
from servingfleet_scheduler.policy import POLICIES
from servingfleet_sim.arm import Arm, Running, run_arm
from servingfleet_sim.clients import CALL_S, Progress
from servingfleet_sim.local_fleet import EngineSpec, mixed_engines
from servingfleet_sim.processes import ProcessFailed
from servingfleet_sim.workload import Session, Shape, sessions

from . import exits
from .demo_report import Demo, as_dict, print_report
from .interrupts import run_to_end
from .output import console, format_option, print_json
from .recorded_demo import play_recordings
from .top import Meter, frame

CONTROL = "round-robin"

START_S = 2.0
"""What starting and ending a fleet takes for each replica, on a machine of two cores that has more to do."""
LEAST_LOAD_S = 3.0
SESSIONS_PER_S = 0.75
"""Of each replica: what the slowest engine can still take under round-robin, and two cores can play."""
LOOK_S = 0.5

OF_ENGINES = ("seed", "replicas", "minutes", "policy", "logs")


@click.command(epilog=exits.HELP)
@click.argument("folders", nargs=-1, metavar="[DIR...]", type=click.Path(path_type=Path))
@click.option("--seed", default=1, show_default=True, help="The same seed asks the same prompts.")
@click.option(
    "--replicas",
    type=click.IntRange(4, 16),
    default=6,
    show_default=True,
    help="Engines, of different speed and cache size; load grows with them.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0.2, 60),
    default=2.0,
    show_default=True,
    help="Time for everything; half for each policy.",
)
@click.option(
    "--policy",
    type=click.Choice(sorted(POLICIES)),
    default="cost",
    show_default=True,
    help=f"The policy that is compared with {CONTROL}.",
)
@click.option(
    "--logs",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep here what each process logged, and the engines' own accounts.",
)
@format_option
@click.pass_context
def demo(
    context: click.Context,
    folders: tuple[Path, ...],
    seed: int,
    replicas: int,
    minutes: float,
    policy: str,
    logs: Path | None,
    output: str,
) -> None:
    """Run a fleet on this machine: emulated engines, real relays, a real scheduler, real sockets.

    Conversations with shared system prompts are played twice, under round-robin and under --policy, each on fresh
    engines. Then every prediction is compared with what the engines report and with their own accounts. Exits with 1
    if a prediction missed for no good reason, or if a count differs.

    With DIR: plays recorded streams of real engines instead, each DIR as one replica.
    """
    if folders:
        given = [name for name in OF_ENGINES if _given(context, name)]
        if given:
            raise click.UsageError(f"--{given[0]} is for emulated engines, DIR for recorded ones")
        play_recordings(folders, output)
        return
    try:
        result = run_to_end(_compare(seed, replicas, minutes, policy, logs, show=output == "table"))
    except (ProcessFailed, grpc.RpcError) as error:
        raise exits.Exit(str(error), exits.UNREACHABLE) from error
    if output == "json":
        print_json(as_dict(result))
    else:
        print_report(result)
    if not all(arm.agrees for arm in result.arms):
        raise SystemExit(exits.NO)


def _given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


async def _compare(
    seed: int, replicas: int, minutes: float, policy: str, logs: Path | None, *, show: bool
) -> Demo:
    engines = mixed_engines(replicas)
    seconds = max(LEAST_LOAD_S, 30 * minutes - START_S * replicas)
    served = Counter(engine.model for engine in engines)
    shape = Shape(
        seconds=seconds,
        sessions_per_s=SESSIONS_PER_S * replicas,
        models=tuple((model, count / replicas) for model, count in served.items()),
    )
    workload = list(sessions(shape, seed))
    view = _View(engines, seconds, show=show)
    temporary: AbstractContextManager[str]
    if logs is None:
        temporary = tempfile.TemporaryDirectory(prefix="servingfleet-demo-")
    else:
        temporary = nullcontext(str(logs))
    with temporary as folder, view:
        control_logs, policy_logs = _folders(Path(folder))
        control = await _arm(view, engines, CONTROL, workload, seconds, control_logs)
        chosen = await _arm(view, engines, policy, workload, seconds, policy_logs)
    return Demo(seed, minutes, seconds, shape, engines, chosen, control)


def _folders(parent: Path) -> tuple[Path, Path]:
    """One for each policy, both new. Raises exits.Exit."""
    found = parent / "control", parent / "policy"
    try:
        for folder in found:
            folder.mkdir(parents=True)
    except OSError as error:
        raise exits.Exit(f"--logs: {error}; expected a folder for new logs", exits.USAGE) from error
    return found


async def _arm(
    view: _View,
    engines: tuple[EngineSpec, ...],
    policy: str,
    workload: list[Session],
    seconds: float,
    logs: Path,
) -> Arm:
    view.starting(policy)
    return await run_arm(engines, policy, workload, seconds, logs, view.watch)


class _View:
    """What is seen meanwhile: a live picture on a terminal, else a line for each policy, or nothing."""

    def __init__(self, engines: tuple[EngineSpec, ...], seconds: float, *, show: bool) -> None:
        self._what = f"{len(engines)} emulated engines, {sum(e.ranks for e in engines)} ranks"
        self._seconds = seconds
        self._console = console()
        self._lines = show and not self._console.is_terminal
        self._live: Live | None = None
        if show and self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> None:
        if self._live is not None:
            self._live.start()

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def starting(self, policy: str) -> None:
        """A fleet is about to start."""
        if self._live is not None:
            self._live.update(Text(f"{policy}: starting {self._what}"), refresh=True)
        elif self._lines:
            self._console.print(f"{policy}: {self._what}, {self._seconds:.0f} s of load")

    async def watch(self, running: Running) -> None:
        """Shows a fleet under load until it is cancelled."""
        if self._live is None:
            return
        meter = Meter()
        clock = time.monotonic
        start = clock()
        while True:
            replicas = await running.stub.ListReplicas(
                fleet_pb2.ListReplicasRequest(), timeout=CALL_S
            )
            reuse = await running.stub.GetReuse(
                fleet_pb2.GetReuseRequest(by_replica=True), timeout=CALL_S
            )
            meter.add(reuse, clock())
            heading = self._heading(running.policy, clock() - start, running.progress)
            self._live.update(frame(heading, replicas, reuse, meter), refresh=True)
            await asyncio.sleep(LOOK_S)

    def _heading(self, policy: str, passed_s: float, progress: Progress) -> str:
        if passed_s < self._seconds:
            when = f"{passed_s:.0f} of {self._seconds:.0f} s"
        else:
            when = "waiting for the last answers"
        ends = ", ".join(f"{count} {end}" for end, count in sorted(progress.ends.items()))
        return (
            f"{policy}, {when}: {self._what}; {progress.open} requests open, {ends or 'none ended'}"
        )
