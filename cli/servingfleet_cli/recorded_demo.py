"""`servingfleet demo DIR...`: recorded engines, real relays, a real scheduler, and the report at the end."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
from google.protobuf.json_format import MessageToDict
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from servingfleet_protos.v1 import fleet_pb2
from servingfleet_protos.v1.fleet_pb2_grpc import FleetStub
from servingfleet_protos.v1.routing_pb2_grpc import RouterStub
from servingfleet_sim.playing import Player, Stalled, relay_arguments
from servingfleet_sim.processes import ProcessFailed, running
from servingfleet_sim.recordings import Recording, RecordingError, read
from servingfleet_sim.verify import Verdict
from servingfleet_sim.wire import RecordedEngine

from . import exits
from .asking import print_reuse
from .interrupts import run_to_end
from .output import console, print_json, table

MODEL = "demo-model"


def play_recordings(folders: Sequence[Path], output: str) -> None:
    """Plays each folder as one replica, prints the report, and exits by it."""
    try:
        recordings = [read(folder) for folder in folders]
        for pulled in (each for each in recordings if each.pulled_unit_tokens):
            raise RecordingError(
                f"{pulled.name}: its events were pulled, and are played to no socket: servingfleet verify plays them"
            )
    except (RecordingError, OSError) as error:
        hint = "name folders of recorded streams, or none for a fleet of emulated engines"
        raise exits.Exit(f"{error}\n{hint}", exits.USAGE) from error
    try:
        verdicts, report = run_to_end(play_fleet(recordings, show=output == "table"))
    except (ProcessFailed, Stalled, grpc.RpcError) as error:
        raise exits.Exit(str(error), exits.UNREACHABLE) from error
    wrong = sum(verdict.wrong for row in verdicts for verdict in row)
    if output == "json":
        print_json(_as_dict(recordings, verdicts, report))
    else:
        _print(recordings, verdicts, report)
    if wrong:
        raise SystemExit(exits.NO)


async def play_fleet(
    recordings: Sequence[Recording], show: bool
) -> tuple[list[list[Verdict]], fleet_pb2.GetReuseResponse]:
    """Runs the processes, plays every recording at once, and asks for the report.

    Raises ProcessFailed, Stalled, grpc.RpcError.
    """
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="servingfleet-demo-")))
        bars = stack.enter_context(
            Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                console=console(),
                disable=not show,
            )
        )
        tasks = [bars.add_task(r.name, total=len(r.requests), note="starting") for r in recordings]
        scheduler = await stack.enter_async_context(
            running(
                "servingfleet_scheduler",
                ["--listen", "127.0.0.1:0", "--http-port", "0"],
                logs / "scheduler.log",
            )
        )
        target = f"127.0.0.1:{(await scheduler.event('listening'))['port']}"
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(target))
        router, fleet = RouterStub(channel), FleetStub(channel)
        players = []
        for number, recording in enumerate(recordings):
            engine = await stack.enter_async_context(
                RecordedEngine(recording.ranks, recording.adapter)
            )
            replica = f"replica-{number}"
            arguments = relay_arguments(engine, replica, MODEL, target, recording=recording)
            await stack.enter_async_context(
                running("servingfleet_relay", arguments, logs / f"{replica}.log")
            )
            players.append(Player(recording, engine, replica, MODEL, router, fleet))

        async def play(number: int) -> list[Verdict]:
            player, verdicts = players[number], []
            await player.connected()
            async for verdict in player.play():
                verdicts.append(verdict)
                exact = sum(v.exact for v in verdicts)
                bars.update(tasks[number], advance=1, note=f"{exact} predicted exactly")
            return verdicts

        rows = await asyncio.gather(*(play(number) for number in range(len(players))))
        report = await fleet.GetReuse(
            fleet_pb2.GetReuseRequest(model=MODEL, by_replica=True), timeout=10
        )
        return list(rows), report


def _print(
    recordings: Sequence[Recording],
    verdicts: Sequence[Sequence[Verdict]],
    report: fleet_pb2.GetReuseResponse,
) -> None:
    out = console()
    rows = []
    for number, (recording, row) in enumerate(zip(recordings, verdicts, strict=True)):
        exact = sum(v.hit for v in row)
        wrong = sum(v.wrong for v in row)
        causes = ", ".join(sorted({str(v.cause) for v in row if v.cause}))
        counts = [len(row), exact, len(row) - exact - wrong, wrong]
        rows.append([f"replica-{number}", recording.name, *counts, causes])
    columns = ["replica", "recording", ">requests", ">exact", ">explained", ">wrong", "causes"]
    out.print(table("predicted reuse against what the engines reported", columns, rows))
    print_reuse(report)


def _as_dict(
    recordings: Sequence[Recording],
    verdicts: Sequence[Sequence[Verdict]],
    report: fleet_pb2.GetReuseResponse,
) -> dict[str, object]:
    return {
        "replicas": [
            {
                "replica": f"replica-{number}",
                "recording": recording.name,
                "requests": len(row),
                "exact": sum(v.hit for v in row),
                "wrong": sum(v.wrong for v in row),
            }
            for number, (recording, row) in enumerate(zip(recordings, verdicts, strict=True))
        ],
        "reuse": MessageToDict(report, preserving_proto_field_name=True),
    }
