"""`servingfleet top`: a running fleet at a glance, again and again; and the same frame for the demo."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import click
import grpc
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from servingfleet_protos.v1 import common_pb2, fleet_pb2
from servingfleet_protos.v1.fleet_pb2_grpc import FleetStub

from . import exits
from .asking import trouble
from .connecting import Scheduler, scheduler_options
from .output import console, share, table

SPAN_S = 5.0
"""Rates are means over about so long."""

SHOWN = ("reused_fraction", "fleet_ceiling", "index_coverage", "erroneous_credit", "interval_hit")

STATES = {
    common_pb2.STREAM_STATE_LIVE: "green",
    common_pb2.STREAM_STATE_HISTORY_LOST: "yellow",
    common_pb2.STREAM_STATE_RESYNCING: "yellow",
    common_pb2.STREAM_STATE_UNPROVEN: "red",
    common_pb2.STREAM_STATE_QUARANTINED: "red",
}

Key = tuple[str, str]
"""Model and replica; an empty replica is all of the model's."""


@dataclass(frozen=True)
class Rate:
    """Per second, over requests that ended."""

    requests: float = 0.0
    prompt: float = 0.0
    reused: float = 0.0


@dataclass
class Meter:
    """Rates from the sums of successive answers."""

    _seen: deque[tuple[float, dict[Key, fleet_pb2.ReuseSums]]] = field(default_factory=deque)

    def add(self, reuse: fleet_pb2.GetReuseResponse, now: float) -> None:
        """Another answer. `now` must rise."""
        self._seen.append((now, {(each.model, each.replica): each.sums for each in reuse.reports}))
        while len(self._seen) > 2 and self._seen[1][0] <= now - SPAN_S:
            self._seen.popleft()

    def rate(self, key: Key) -> Rate:
        """Zero where nothing is known yet."""
        if len(self._seen) < 2:
            return Rate()
        (since, before), (now, after) = self._seen[0], self._seen[-1]
        first = before.get(key, fleet_pb2.ReuseSums())
        last = after.get(key, fleet_pb2.ReuseSums())

        def per_second(name: str) -> float:
            # Sums fall where the scheduler's window moves on, or where it has restarted.
            return float(max(0, getattr(last, name) - getattr(first, name))) / (now - since)

        return Rate(per_second("pairs"), per_second("prompt"), per_second("actual"))


def frame(
    heading: str,
    replicas: fleet_pb2.ListReplicasResponse,
    reuse: fleet_pb2.GetReuseResponse,
    meter: Meter,
) -> RenderableType:
    """One picture of a fleet."""
    parts: list[RenderableType] = [Text(heading, style="bold")]
    models = sorted({r.model for r in replicas.replicas} | {r.model for r in reuse.reports})
    for model in models:
        parts.append(Text(f"{model}: {_throughput(meter.rate((model, '')))}"))
        overall = [r for r in reuse.reports if r.model == model and not r.replica]
        parts.extend(Text(_figures(report)) for report in overall)
        rows = [
            _row(replica, rank, meter, first=number == 0)
            for replica in replicas.replicas
            if replica.model == model
            for number, rank in enumerate(replica.ranks)
        ]
        columns = ["replica", ">req/s", ">reused", ">rank", "stream", "blocks held"]
        columns += [">run", ">wait", ">open", ">credits"]
        parts.append(table("", columns, rows))
    if not models:
        parts.append(Text("no replicas, and nothing was routed"))
    return Group(*parts)


def _throughput(rate: Rate) -> str:
    return (
        f"{rate.requests:.1f} requests/s, {rate.prompt:,.0f} prompt tokens/s, of which "
        f"{rate.reused:,.0f} reused and {rate.prompt - rate.reused:,.0f} computed"
    )


def _figures(report: fleet_pb2.ReuseReport) -> str:
    known = {f.name: f for f in report.figures}
    texts = []
    for name in SHOWN:
        if name in known:
            value = share(known[name].value) if known[name].HasField("value") else "<none>"
            texts.append(f"{name.replace('_', ' ')} {value}")
    return f"{', '.join(texts)} ({report.sums.pairs} outcomes of {report.sums.decisions} decisions)"


def _row(
    replica: fleet_pb2.Replica, rank: fleet_pb2.Rank, meter: Meter, *, first: bool
) -> list[object]:
    # The outcomes are counted by replica, so that its first rank stands for all.
    rate = meter.rate((replica.model, replica.replica)) if first else None
    reused = share(rate.reused / rate.prompt) if rate is not None and rate.prompt else None
    state = common_pb2.StreamState.Name(rank.state).removeprefix("STREAM_STATE_").lower()
    held = ", ".join(
        f"{common_pb2.Tier.Name(lane.tier).removeprefix('TIER_').lower()} {lane.blocks}"
        for lane in rank.lanes
    )
    stream = f"[{STATES.get(rank.state, 'default')}]{state.replace('_', ' ')}[/]"
    if not replica.connected:
        stream = "[red]no relay[/]"
    stream = ", ".join([stream, *(f"[yellow]{each}[/]" for each in trouble(replica, rank))])
    return [
        replica.replica if first else None,
        None if rate is None else f"{rate.requests:.1f}",
        reused,
        rank.rank,
        stream,
        held,
        rank.running_requests if rank.HasField("running_requests") else None,
        rank.waiting_requests if rank.HasField("waiting_requests") else None,
        rank.dispatched_requests,
        rank.credits,
    ]


@click.command(epilog=exits.HELP)
@scheduler_options
@click.option("--model", default="", help="Only this model.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Print one frame and end.")
def top(scheduler: Scheduler, model: str, interval_s: float, once: bool) -> None:
    """Watch a running fleet: throughput, reuse, load and stream of every rank. Ctrl-C ends it.

    `run` and `wait` are what the engine says, `open` are requests that this scheduler sent there and that have not
    ended, `credits` those whose blocks the engine has yet to announce.
    """
    meter = Meter()
    target, timeout = scheduler.target, scheduler.timeout_s
    with scheduler.channel() as channel:
        fleet = FleetStub(channel)

        def look() -> RenderableType:
            replicas = fleet.ListReplicas(
                fleet_pb2.ListReplicasRequest(model=model), timeout=timeout
            )
            reuse = fleet.GetReuse(
                fleet_pb2.GetReuseRequest(model=model, by_replica=True), timeout=timeout
            )
            meter.add(reuse, time.monotonic())
            warm = f", index {share(replicas.warm)} warm" if replicas.HasField("warm") else ""
            return frame(f"scheduler {target}{warm}", replicas, reuse, meter)

        first = look()
        if once:
            console().print(first)
            return
        try:
            with Live(first, console=console(), auto_refresh=False, screen=True) as live:
                while True:
                    time.sleep(interval_s)
                    live.update(_or_why_not(look, target), refresh=True)
        except KeyboardInterrupt:
            return


def _or_why_not(look: Callable[[], RenderableType], target: str) -> RenderableType:
    """A frame, or that the scheduler did not answer: it may be restarting."""
    try:
        return look()
    except grpc.RpcError as error:
        said = error.details() if isinstance(error, grpc.Call) else error
        return Text(f"{target} does not answer: {said}", style="red")
