"""Schedulers that die, start again, or stand still."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from servingfleet_protos.v1 import fleet_pb2, routing_pb2
from servingfleet_scheduler.settings import SchedulerSettings
from tests.faults.conftest import Stopwatch
from tests.faults.engines import MODEL, Engine, killed, stopped
from tests.faults.network import cable_to
from tests.faults.rig import Rig, request
from tests.faults.test_relays import answered
from tests.integration.fleet import PATIENCE_S, Scheduler

STALL_S = 10.0


@pytest.fixture
def key(tmp_path: Path) -> tuple[str, str]:
    """The options that let schedulers join one another's decisions."""
    path = tmp_path / "key"
    path.write_text("one key for all schedulers of a fleet")
    return ("--token-key-file", str(path))


async def test_a_scheduler_killed_and_restarted_routes_at_once_and_is_warm_again_by_snapshots(
    rig: Rig, key: tuple[str, str], stopwatch: Stopwatch
) -> None:
    first = await rig.fleet.scheduler(*key)
    for name in ("a", "b", "c"):
        await rig.engine(name, first, ranks=2 if name == "a" else 1, blocks=4000)
    await rig.settled(first)
    await rig.traffic(30, first)
    await rig.settled(first)
    held = {name: blocks(each) for name, each in (await first.replicas()).items()}
    open_decision = await answered(rig, first, "b")
    await rig.ledger_is_the_recount(first)

    await killed(first.process)
    static = [
        f"model={MODEL},replica={each.name},endpoint={each.endpoint},ranks={each.ranks}"
        for each in rig.engines.values()
    ]
    options = [part for each in static for part in ("--static-replica", each)]
    with stopwatch.measure("scheduler restarted: warm again, all of it"):
        with stopwatch.measure("scheduler restarted: listens"):
            again = await rig.fleet.scheduler(
                *key, *options, "--snapshot-slots", "1", listen=first.target
            )
        watching = asyncio.create_task(warming(again, held))
        with stopwatch.measure("scheduler restarted, after that: first request answered"):
            sent = await rig.send(again, rig.prompts.next())
        order = await watching
    assert sent.response.basis != routing_pb2.BASIS_UNSPECIFIED
    assert sorted(order) == ["a", "b", "c"]
    stopwatch.note(f"scheduler restarted: warm in the order {', '.join(order)}, one at a time")

    # Its owner is gone: the id alone says what was decided.
    answer = await rig.report(again, open_decision)
    assert answer.disposition == routing_pb2.ReportResponse.DISPOSITION_ORPHAN_JOIN
    await rig.recovered(again)
    await rig.traffic(10, again)
    await rig.settled(again)
    final = await rig.route(again, request(rig.prompts.sent[-1]))
    assert final.basis == routing_pb2.BASIS_INDEX
    await rig.report_unsent(again, final)
    await rig.ledger_is_the_recount(again)
    rig.every_answer_is_reported_once()


async def test_requests_go_on_when_one_of_two_schedulers_dies(
    rig: Rig, key: tuple[str, str], stopwatch: Stopwatch
) -> None:
    dies, lives = [await rig.fleet.scheduler(*key) for _ in range(2)]
    for name in ("a", "b"):
        await rig.engine(name, dies, lives, ranks=2)
    for scheduler in (dies, lives):
        await rig.settled(scheduler)
    await rig.traffic(30, dies, lives)
    for scheduler in (dies, lives):
        await rig.settled(scheduler)
        await rig.no_wrong_credit(scheduler)
        await rig.ledger_is_the_recount(scheduler)

    open_decision = await answered(rig, dies, "a")
    await credit_is_known(lives, "a")
    async with rig.busy(dies, lives, clients=4):
        await rig.traffic(5, dies, lives)
        with stopwatch.measure("one of two schedulers killed: next request answered by the other"):
            await killed(dies.process)
            await rig.send(dies, rig.prompts.next(), lives)
        await rig.traffic(5, lives)
    answer = await rig.report(lives, open_decision)
    assert answer.disposition == routing_pb2.ReportResponse.DISPOSITION_ORPHAN_JOIN
    await rig.traffic(15, lives)
    # What it dispatched in its last moments, and nobody got an answer for, ends by time.
    await rig.recovered(lives, patience_s=SchedulerSettings().credit_ttl_s + PATIENCE_S)
    await rig.ledger_is_the_recount(lives)

    with stopwatch.measure("the killed one of two restarted: warm"):
        again = await rig.fleet.scheduler(*key, listen=dies.target)
        await rig.settled(again)
    await rig.traffic(10, again, lives)
    for scheduler in (again, lives):
        await rig.recovered(scheduler)
        await rig.ledger_is_the_recount(scheduler)
    rig.every_answer_is_reported_once()


async def test_a_scheduler_that_stands_still_for_ten_seconds_catches_up(
    rig: Rig, key: tuple[str, str], stopwatch: Stopwatch
) -> None:
    stalls, other = [await rig.fleet.scheduler(*key) for _ in range(2)]
    engines = [await rig.engine(name, stalls, other) for name in ("a", "b")]
    for scheduler in (stalls, other):
        await rig.settled(scheduler)
    await rig.traffic(10, stalls, other)
    before = [connections(engine) for engine in engines]
    clock = asyncio.get_running_loop().time
    async with stopped(stalls.process):
        end = clock() + STALL_S
        waiting = asyncio.create_task(rig.send(stalls, rig.prompts.next()))
        while clock() < end:
            await rig.traffic(1, other)
            # A client's pause between two requests, nothing that is waited for.
            await asyncio.sleep(0.05)
        assert not waiting.done()
    with stopwatch.measure("scheduler goes on after a stall of 10 s: exact"):
        await waiting
        await rig.settled(stalls)
    after = [connections(engine) for engine in engines]
    assert after == before, "a stream was given up for a stall that it outlives"
    for scheduler in (stalls, other):
        await rig.recovered(scheduler)
        await rig.ledger_is_the_recount(scheduler)
    rig.every_answer_is_reported_once()


async def test_a_connection_cut_again_and_again_loses_nothing(
    rig: Rig, stopwatch: Stopwatch
) -> None:
    scheduler = await rig.fleet.scheduler()
    async with cable_to(scheduler.target) as cable:
        engine = await rig.engine("a", cable.address, ranks=2)
        await rig.settled(scheduler)
        async with rig.busy(scheduler):
            for number in range(1, 6):
                await cable.connected(number)
                await rig.traffic(3, scheduler)
                assert cable.cut() == 1
            await cable.connected(6)
        with stopwatch.measure("connection of relay and scheduler cut: resumed, exact"):
            await rig.settled(scheduler)
        assert engine.account.lives == 1
        await rig.recovered(scheduler)
        await rig.ledger_is_the_recount(scheduler)
        rig.every_answer_is_reported_once()


async def test_an_outcome_told_to_another_scheduler_ends_the_credit_where_it_was_opened(
    rig: Rig, key: tuple[str, str]
) -> None:
    # As a client does whose own scheduler stalls when it wants to report.
    asked, told = [await rig.fleet.scheduler(*key) for _ in range(2)]
    await rig.engine("a", asked, told)
    for scheduler in (asked, told):
        await rig.settled(scheduler)
    await rig.traffic(5, asked, told)
    finished = await answered(rig, asked, "a")
    never_sent = rig.prompts.next()
    failed = await rig.route(asked, request(never_sent))
    await credit_is_known(told, "a")
    await rig.report(told, finished)
    await rig.report_failed(told, "never sent", failed)
    for scheduler in (asked, told):
        await rig.settled(scheduler)
        await rig.no_wrong_credit(scheduler, also=[never_sent])
        await rig.ledger_is_the_recount(scheduler)


async def credit_is_known(scheduler: Scheduler, replica: str) -> None:
    """Waits until the scheduler knows of a request that another one dispatched."""
    await scheduler.until(
        lambda seen: any(rank.credits for rank in seen[replica].ranks), "the other's credit"
    )


def connections(engine: Engine) -> int:
    """Streams that the engine's relay has opened so far."""
    assert engine.relay is not None
    return sum(line["event"] == "scheduler connected" for line in engine.relay.lines())


def blocks(replica: fleet_pb2.Replica) -> int:
    return sum(lane.blocks for rank in replica.ranks for lane in rank.lanes)


async def warming(scheduler: Scheduler, held: dict[str, int]) -> list[str]:
    """The replicas in the order in which the scheduler has them whole again; one snapshot at a time.

    `held`: blocks of each replica before; what is added meanwhile only makes it more.
    """
    port = (await scheduler.process.event("listening"))["http_port"]
    order: list[str] = []
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http, asyncio.timeout(PATIENCE_S):
        while True:
            ready = (await http.get(f"http://127.0.0.1:{port}/readyz")).json()
            assert ready["snapshots_running"] <= 1
            seen = await scheduler.replicas()
            order += [n for n, each in seen.items() if n not in order and blocks(each) >= held[n]]
            if len(order) == len(held):
                return order
            await asyncio.sleep(0.002)
