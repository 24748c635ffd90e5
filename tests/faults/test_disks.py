"""Logs that nobody can write: the disk is full."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from servingfleet_protos.v1 import routing_pb2
from servingfleet_sim.wire import free_ports
from tests.faults.conftest import Stopwatch
from tests.faults.engines import killed, reached
from tests.faults.rig import Rig, request
from tests.integration.fleet import PATIENCE_S, Scheduler

FULL = Path("/dev/full")

pytestmark = pytest.mark.skipif(not FULL.is_char_device(), reason="needs a device that is full")


async def test_every_process_goes_on_serving_when_its_log_is_full(
    rig: Rig, stopwatch: Stopwatch
) -> None:
    scheduler = await silent_scheduler(rig)
    first, other = [
        await rig.engine(name, scheduler, log=FULL, relay_log=FULL) for name in ("first", "other")
    ]
    await rig.settled(scheduler)
    await rig.traffic(20, scheduler)
    await rig.recovered(scheduler)
    # Where most is logged: connections that end and come back.
    with stopwatch.measure("engine and relay killed and restarted, all logs full: live and exact"):
        await killed(first.process)
        await killed(other.relay)
        await first.start(log=FULL)
        await other.start_relay()
        await rig.settled(scheduler)
    await rig.traffic(10, scheduler)
    await rig.recovered(scheduler)
    await rig.ledger_is_the_recount(scheduler)
    rig.every_answer_is_reported_once()
    processes = [scheduler.process, first.process, first.relay, other.process, other.relay]
    assert [each.child.returncode for each in processes if each is not None] == [None] * 5


async def test_an_engine_whose_account_can_not_be_written_goes_on_serving(rig: Rig) -> None:
    scheduler = await rig.fleet.scheduler()
    engine = await rig.engine("engine", scheduler, options=("--log", str(FULL)))
    assert engine.process is not None
    await scheduler.until(lambda seen: "engine" in seen and seen["engine"].connected, "the relay")
    prompt = rig.prompts.next()
    reports = []
    for number in range(2):
        answer = await scheduler.router.Route(request(prompt), timeout=PATIENCE_S)
        _, cached = await engine.complete(
            prompt, request_id=f"r-{number}", headers=dict(answer.headers), tokens=1
        )
        reports.append((answer.prediction.predicted, cached))
        await scheduler.router.Report(
            routing_pb2.ReportRequest(
                decision_id=answer.decision_id, prompt_tokens=len(prompt), cached_tokens=cached
            ),
            timeout=PATIENCE_S,
        )
        await scheduler.until(
            lambda seen: seen["engine"].ranks[0].HasField("engine_seq"), "the first batch"
        )
    whole = (len(prompt) - 1) // 16 * 16
    assert reports == [(0, 0), (whole, whole)]
    assert [line["event"] for line in engine.process.lines()].count("truth lost") == 1


async def silent_scheduler(rig: Rig) -> Scheduler:
    """A scheduler that can't even say where it listens."""
    target = f"127.0.0.1:{free_ports(1)}"
    process = await rig.fleet.process(
        "servingfleet_scheduler", "--listen", target, "--http-port", "0", log=FULL
    )
    scheduler = await rig.fleet.asked(process, target)
    await reached(lambda: answers(scheduler), "the scheduler to answer")
    return scheduler


async def answers(scheduler: Scheduler) -> bool:
    try:
        await scheduler.replicas()
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    return True
