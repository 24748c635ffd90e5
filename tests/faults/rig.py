"""A fleet that can be broken: emulated engines with their relays, schedulers, and a client that keeps the books.

Every request is routed, sent to the engine that the scheduler names, and reported, as a gateway would. What the
schedulers then say is held to the engines' own accounts.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import httpx

from servingfleet_protos.v1 import common_pb2, fleet_pb2, routing_pb2
from servingfleet_sim.wire import free_ports
from tests.faults.account import Account
from tests.faults.engines import MODEL, Engine, Gone, reached
from tests.faults.prompts import Prompt, Prompts
from tests.integration.fleet import PATIENCE_S, Fleet, Scheduler

LIVE = common_pb2.STREAM_STATE_LIVE
HISTORY_LOST = common_pb2.STREAM_STATE_HISTORY_LOST
UNPROVEN = common_pb2.STREAM_STATE_UNPROVEN

Replicas = dict[str, fleet_pb2.Replica]
Report = routing_pb2.ReportRequest
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Sent:
    """A request that was answered and reported."""

    request_id: str
    replica: str
    rank: int
    prediction: routing_pb2.Prediction
    cached: int
    response: routing_pb2.RouteResponse


@dataclass
class Book:
    """What one scheduler process must have in its ledger."""

    decisions: Counter[str] = field(default_factory=Counter)
    """By replica."""
    joined: list[Sent] = field(default_factory=list)
    set_aside: Counter[str] = field(default_factory=Counter)


@dataclass
class Rig:
    """Everything that one test broke or may break."""

    fleet: Fleet
    prompts: Prompts = field(default_factory=lambda: Prompts(4))
    engines: dict[str, Engine] = field(default_factory=dict)
    books: dict[str, Book] = field(default_factory=dict)
    """By scheduler process, see `_book`."""
    failed: set[str] = field(default_factory=set)
    """Requests whose engine did not answer."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    # Starting

    async def engine(
        self,
        name: str,
        *schedulers: Scheduler | str,
        ranks: int = 1,
        options: Sequence[str] = (),
        blocks: int = 400,
        log: Path | None = None,
        relay_log: Path | None = None,
    ) -> Engine:
        """An engine and its relay, connected to these schedulers."""
        port = free_ports(1 + 2 * ranks)
        http = await self.fleet.stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)
        )
        account = Account(self.fleet.logs / f"{name}.truth")
        engine = Engine(
            self.fleet, name, ranks, ("--blocks", str(blocks), *options), http, account, port
        )
        engine.schedulers = tuple(s if isinstance(s, str) else s.target for s in schedulers)
        engine.relay_log = relay_log
        self.engines[name] = engine
        await engine.start(log=log)
        await engine.start_relay()
        return engine

    # Traffic

    async def traffic(self, count: int, *schedulers: Scheduler) -> list[Sent]:
        """Requests one after the other, routed by each scheduler in turn and reported to it."""
        turns = itertools.cycle(schedulers)
        return [await self.send(next(turns), self.prompts.next()) for _ in range(count)]

    async def send(
        self,
        scheduler: Scheduler,
        prompt: Prompt,
        *others: Scheduler,
        to: tuple[str, int] | None = None,
        tokens: int = 20,
    ) -> Sent:
        """Routes, sends, reports; where an engine or a scheduler does not answer, turns to another."""
        alive = (scheduler, *others)
        wanted = request(prompt)
        if to is not None:
            wanted.only.add(replica=to[0], rank=to[1])
        while True:
            answer = await first_of(alive, lambda each: self.route(each, wanted))
            engine = self.engines[answer.target.replica]
            request_id = f"r-{next(self._numbers)}"
            try:
                prompt_tokens, cached = await engine.complete(
                    prompt, request_id=request_id, headers=dict(answer.headers), tokens=tokens
                )
            except Gone:
                await first_of(alive, partial(self._report_failed, request_id, answer))
                wanted.exclude.add(replica=answer.target.replica)
                continue
            assert prompt_tokens == len(prompt)
            target = answer.target
            sent = Sent(request_id, target.replica, target.rank, answer.prediction, cached, answer)
            await first_of(alive, partial(self._report, sent))
            return sent

    @asynccontextmanager
    async def busy(self, *schedulers: Scheduler, clients: int = 3) -> AsyncIterator[None]:
        """Clients that go on sending for the length of the block, at the same time."""
        over = asyncio.Event()

        async def client(number: int) -> None:
            first = number % len(schedulers)
            asked = (*schedulers[first:], *schedulers[:first])
            while not over.is_set():
                await self.send(asked[0], self.prompts.next(), *asked[1:])

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(client(number)) for number in range(clients)]
            yield
            over.set()
        assert all(each.exception() is None for each in running)

    async def route(
        self, scheduler: Scheduler, wanted: routing_pb2.RouteRequest
    ) -> routing_pb2.RouteResponse:
        answer = await scheduler.router.Route(wanted, timeout=PATIENCE_S)
        self._book(scheduler).decisions[answer.target.replica] += 1
        return answer

    async def report(self, scheduler: Scheduler, sent: Sent) -> routing_pb2.ReportResponse:
        """Reports the engine's counts, which must then be in that scheduler's ledger."""
        answer = await scheduler.router.Report(
            Report(
                decision_id=sent.response.decision_id,
                stage=Report.STAGE_FINISHED,
                prompt_tokens=sent.prediction.prompt_tokens,
                cached_tokens=sent.cached,
            ),
            timeout=PATIENCE_S,
        )
        counted = (
            routing_pb2.ReportResponse.DISPOSITION_JOINED,
            routing_pb2.ReportResponse.DISPOSITION_ORPHAN_JOIN,
        )
        assert answer.disposition in counted, answer
        self._book(scheduler).joined.append(sent)
        return answer

    async def report_failed(
        self, scheduler: Scheduler, request_id: str, answer: routing_pb2.RouteResponse
    ) -> None:
        await scheduler.router.Report(
            Report(decision_id=answer.decision_id, stage=Report.STAGE_FAILED), timeout=PATIENCE_S
        )
        self._book(scheduler).set_aside["failed"] += 1
        self.failed.add(request_id)

    async def report_unsent(self, scheduler: Scheduler, answer: routing_pb2.RouteResponse) -> None:
        """Says that the client went away before it sent anything."""
        await scheduler.router.Report(
            Report(decision_id=answer.decision_id, stage=Report.STAGE_ABORTED), timeout=PATIENCE_S
        )
        self._book(scheduler).set_aside["aborted"] += 1

    async def _report(self, sent: Sent, scheduler: Scheduler) -> None:
        await self.report(scheduler, sent)

    async def _report_failed(
        self, request_id: str, answer: routing_pb2.RouteResponse, scheduler: Scheduler
    ) -> None:
        await self.report_failed(scheduler, request_id, answer)

    # Checks

    async def settled(
        self,
        scheduler: Scheduler,
        *engines: Engine,
        states: Collection[int] = (LIVE,),
        patience_s: float = PATIENCE_S,
    ) -> Replicas:
        """Waits until the scheduler has all that these engines (by default all) published, and nothing is open."""
        watched = engines or tuple(self.engines.values())
        seen: list[fleet_pb2.ListReplicasResponse] = []

        async def quiet() -> bool:
            answer = await scheduler.fleet.ListReplicas(
                fleet_pb2.ListReplicasRequest(), timeout=PATIENCE_S
            )
            seen[:] = [answer]
            replicas = {each.replica: each for each in answer.replicas}
            for engine in watched:
                engine.account.refresh()
            return all(_quiet(each, replicas.get(each.name), states) for each in watched) and (
                LIVE not in states or _warm(answer, watched)
            )

        def found() -> str:
            expected = {each.name: dict(each.account.published) for each in watched}
            return f"published: {expected}; seen: {[_shown(each) for each in seen[0].replicas]}"

        await reached(quiet, "a quiet fleet", found, patience_s)
        return {each.replica: each for each in seen[0].replicas}

    async def no_wrong_credit(
        self,
        scheduler: Scheduler,
        *engines: Engine,
        exact: bool = True,
        also: Sequence[Prompt] = (),
    ) -> int:
        """Holds what Explain predicts of the probes, on every rank, to what the engine holds by its own account.

        Not `exact`: what it predicts is at most what is there. Returns how many predictions promised something.
        """
        watched = {each.name: each for each in engines or self.engines.values()}
        promised = 0
        for prompt in (*self.prompts.probes(), *also):
            answer = await scheduler.router.Explain(request(prompt), timeout=PATIENCE_S)
            asked = {(each.target.replica, each.target.rank): each for each in answer.candidates}
            for engine in watched.values():
                for rank in range(engine.ranks):
                    said = asked[engine.name, rank].prediction
                    holds = engine.account.refresh().reusable(rank, prompt)
                    what = f"{engine.name} rank {rank}, {len(prompt)} tokens: holds {holds}"
                    assert said.lower <= holds <= said.upper, f"{what}, said {said}"
                    assert said.predicted <= holds, f"{what}, said {said}"
                    assert not exact or said.predicted == holds, f"{what}, said {said}"
                    promised += said.predicted > 0
        return promised

    async def proven_by_requests(
        self, scheduler: Scheduler, *engines: Engine, states: Collection[int] = (LIVE,)
    ) -> None:
        """Sends probes one by one to every rank: what was predicted is what the engine then reports."""
        for engine in engines or tuple(self.engines.values()):
            for rank in range(engine.ranks):
                for prompt in self.prompts.probes(2):
                    await self.settled(scheduler, engine, states=states)
                    holds = engine.account.reusable(rank, prompt)
                    sent = await self.send(scheduler, prompt, to=(engine.name, rank), tokens=1)
                    said = sent.prediction
                    assert (said.predicted, sent.cached) == (holds, holds), (engine.name, rank)
                    assert said.lower <= sent.cached <= said.upper
        await self.settled(scheduler, *engines, states=states)

    async def recovered(
        self, scheduler: Scheduler, *engines: Engine, patience_s: float = PATIENCE_S
    ) -> None:
        """All that must hold again after a fault."""
        await self.settled(scheduler, *engines, patience_s=patience_s)
        assert await self.no_wrong_credit(scheduler, *engines) > 0
        await self.proven_by_requests(scheduler, *engines)

    async def ledger_is_the_recount(self, scheduler: Scheduler) -> None:
        """The scheduler's sums are those of the engines' accounts, to the token."""
        book = self._book(scheduler)
        answer = await scheduler.fleet.GetReuse(
            fleet_pb2.GetReuseRequest(by_replica=True), timeout=PATIENCE_S
        )
        by_replica = {each.replica: each for each in answer.reports if each.model == MODEL}
        for name in self.engines:
            joined = [sent for sent in book.joined if sent.replica == name]
            expected = self._sums(joined)
            expected["decisions"] = book.decisions[name]
            sums = by_replica[name].sums if name in by_replica else fleet_pb2.ReuseSums()
            assert {key: getattr(sums, key) for key in expected} == expected, name
        whole = by_replica[""]
        expected = self._sums(book.joined)
        expected["decisions"] = book.decisions.total()
        assert {key: getattr(whole.sums, key) for key in expected} == expected
        assert dict(whole.set_aside) == dict(book.set_aside)

    def every_answer_is_reported_once(self) -> None:
        """The requests in the engines' accounts are those in the books: none lost, none counted twice."""
        joined = Counter(sent.request_id for book in self.books.values() for sent in book.joined)
        assert max(joined.values()) == 1
        served = {
            request_id
            for engine in self.engines.values()
            for request_id, row in engine.account.refresh().served.items()
            if request_id.startswith("r-") and row.outcome == "finished"
        }
        assert served - self.failed == joined.keys()

    def _sums(self, joined: Sequence[Sent]) -> dict[str, int]:
        sums: Counter[str] = Counter(
            dict.fromkeys(
                ("pairs", "prompt", "actual", "predicted", "agreed", "erroneous", "interval_hits"),
                0,
            )
        )
        for sent in joined:
            row = self.engines[sent.replica].account.refresh().served[sent.request_id]
            assert (row.outcome, row.rank) == ("finished", sent.rank)
            said = sent.prediction
            sums["pairs"] += 1
            sums["prompt"] += row.prompt
            sums["actual"] += row.cached
            sums["predicted"] += said.predicted
            sums["agreed"] += min(said.predicted, row.cached)
            sums["erroneous"] += max(0, said.predicted - row.cached)
            sums["interval_hits"] += said.lower <= row.cached <= said.upper
        return dict(sums)

    def _book(self, scheduler: Scheduler) -> Book:
        # A process, not an address: a ledger lives as long as its process.
        return self.books.setdefault(str(scheduler.process.child.pid), Book())


def request(prompt: Sequence[int]) -> routing_pb2.RouteRequest:
    packed = struct.pack(f"<{len(prompt)}I", *prompt)
    return routing_pb2.RouteRequest(model=MODEL, prompt=routing_pb2.Prompt(tokens_le32=packed))


async def first_of(
    schedulers: Sequence[Scheduler], ask: Callable[[Scheduler], Awaitable[Answer]]
) -> Answer:
    """What the first scheduler says that answers. Raises what the last one raised where none does."""
    for scheduler in schedulers[:-1]:
        try:
            return await ask(scheduler)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
    return await ask(schedulers[-1])


def _shown(replica: fleet_pb2.Replica) -> dict[str, Any]:
    """What a failing test shows of a replica."""
    return {
        "replica": replica.replica,
        "connected": replica.connected,
        "ranks": [
            (
                common_pb2.StreamState.Name(rank.state),
                rank.reason,
                rank.incarnation,
                rank.engine_seq if rank.HasField("engine_seq") else None,
                rank.credits,
                rank.dispatched_requests,
            )
            for rank in replica.ranks
        ],
        "totals": {name: total for name, total in replica.relay_totals.items() if total},
    }


def _quiet(engine: Engine, replica: fleet_pb2.Replica | None, states: Collection[int]) -> bool:
    if replica is None or not replica.connected or len(replica.ranks) != engine.ranks:
        return False
    return all(
        rank.state in states
        and (rank.engine_seq if rank.HasField("engine_seq") else None)
        == engine.account.published.get(rank.rank)
        and not rank.credits
        and not rank.dispatched_requests
        for rank in replica.ranks
    )


def _warm(answer: fleet_pb2.ListReplicasResponse, watched: Sequence[Engine]) -> bool:
    """The snapshots of the watched have ended: as many ranks are warm as there are on open streams."""
    known = [
        (each.connected, len(each.ranks))
        for each in answer.replicas
        if any(rank.state != common_pb2.STREAM_STATE_UNSPECIFIED for rank in each.ranks)
    ]
    total = sum(ranks for _, ranks in known)
    connected = sum(ranks for open_stream, ranks in known if open_stream)
    return bool(total) and round(answer.warm * total) == connected
