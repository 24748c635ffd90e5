"""One policy on a fresh fleet: starts it, plays the workload, stops it, and audits what was predicted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx

from servingfleet_protos.v1 import fleet_pb2
from servingfleet_protos.v1.fleet_pb2_grpc import FleetStub
from servingfleet_protos.v1.routing_pb2_grpc import RouterStub

from .audit import Account, Cause, Miss, misses, read_account
from .clients import CALL_S, REQUEST_S, Clients, Progress, Request
from .lag import Lag
from .local_fleet import EngineSpec, LocalFleet, local_fleet
from .workload import Session

if TYPE_CHECKING:  # this name exists for type checkers only
    from servingfleet_protos.v1.fleet_pb2_grpc import FleetAsyncStub


@dataclass(frozen=True)
class Running:
    """A fleet under load, for who watches it."""

    policy: str
    fleet: LocalFleet
    stub: FleetAsyncStub
    progress: Progress


Watch = Callable[[Running], Awaitable[None]]
"""Called when the fleet is ready; cancelled when the load is over."""


@dataclass(frozen=True)
class Totals:
    """Sums over requests, in tokens but for the first."""

    requests: int
    prompt: int
    cached: int


@dataclass(frozen=True)
class Arm:
    """What one policy did."""

    policy: str
    requests: Sequence[Request]
    progress: Progress
    reuse: fleet_pb2.GetReuseResponse
    lag: Lag
    misses: Sequence[Miss]
    engines: Totals
    """Of joined requests, as the engines' own accounts have them."""
    misheard: int
    """Finished requests for which an account has other counts than the client was told."""

    @property
    def reports(self) -> Mapping[str, fleet_pb2.ReuseReport]:
        """The figures of each model over all its replicas."""
        return {each.model: each for each in self.reuse.reports if not each.replica}

    @property
    def ledger(self) -> Totals:
        """The scheduler's own sums."""
        sums = [report.sums for report in self.reports.values()]
        return Totals(
            sum(each.pairs for each in sums),
            sum(each.prompt for each in sums),
            sum(each.actual for each in sums),
        )

    @property
    def causes(self) -> Counter[Cause]:
        """How many predictions missed for each cause."""
        return Counter(miss.cause for miss in self.misses)

    @property
    def agrees(self) -> bool:
        """The ledger equals the recount to the token, and every miss is explained."""
        return (
            self.ledger == self.engines and not self.misheard and not self.causes[Cause.UNEXPLAINED]
        )


async def run_arm(
    engines: tuple[EngineSpec, ...],
    policy: str,
    workload: Iterable[Session],
    seconds: float,
    logs: Path,
    watch: Watch | None = None,
) -> Arm:
    """Raises ProcessFailed, grpc.RpcError."""
    lag = Lag()
    limits = httpx.Limits(max_connections=None)
    async with (
        local_fleet(engines, policy, logs) as fleet,
        grpc.aio.insecure_channel(fleet.scheduler) as channel,
        httpx.AsyncClient(timeout=REQUEST_S, limits=limits) as http,
    ):
        stub = FleetStub(channel)
        clients = Clients(RouterStub(channel), http)
        await _unless(fleet.ready(stub), [fleet.watch()])
        watchers: list[Coroutine[Any, Any, None]] = [
            fleet.watch(),
            lag.watch_loop(),
            *(lag.watch_engine(http, base) for base in fleet.http.values()),
        ]
        if watch is not None:
            watchers.append(_watched(watch, Running(policy, fleet, stub, clients.progress)))
        await _unless(clients.play(workload, seconds), watchers)
        asked = fleet_pb2.GetReuseRequest(by_replica=True)
        reuse = await stub.GetReuse(asked, timeout=CALL_S)
    # Read when the engines have ended: their accounts are complete.
    accounts = {each.replica: read_account(fleet.truth(each.replica)) for each in engines}
    return Arm(
        policy,
        clients.requests,
        clients.progress,
        reuse,
        lag,
        list(misses(clients.requests, accounts)),
        _totals(clients.requests, accounts),
        sum(not _heard(each, accounts) for each in clients.requests),
    )


async def _watched(watch: Watch, running: Running) -> None:
    await watch(running)
    await asyncio.Event().wait()  # a view that is done does not end the run


async def _unless(
    work: Coroutine[Any, Any, None], others: Sequence[Coroutine[Any, Any, None]]
) -> None:
    """Waits for `work`; the others are cancelled then, or what ended one of them before is raised."""
    tasks = [asyncio.create_task(each) for each in (work, *others)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _row(request: Request, accounts: dict[str, Account]) -> dict[str, Any] | None:
    if request.answer is None:
        return None
    return accounts[request.answer.target.replica].finished.get(request.name)


def _totals(requests: Iterable[Request], accounts: dict[str, Account]) -> Totals:
    rows = [row for each in requests if each.joined and (row := _row(each, accounts)) is not None]
    return Totals(
        len(rows),
        sum(row["prompt_tokens"] for row in rows),
        sum(row["cached_tokens"] for row in rows),
    )


def _heard(request: Request, accounts: dict[str, Account]) -> bool:
    if request.cached_tokens is None:
        return True  # it was told nothing
    row = _row(request, accounts)
    told = (request.prompt_tokens, request.cached_tokens)
    return row is not None and told == (row["prompt_tokens"], row["cached_tokens"])
