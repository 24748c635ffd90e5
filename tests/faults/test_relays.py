"""Relays that die, and replicas that are deleted."""

from __future__ import annotations

import pytest

from servingfleet_protos.v1 import routing_pb2
from tests.faults.conftest import Stopwatch
from tests.faults.engines import killed, stopped
from tests.faults.rig import HISTORY_LOST, UNPROVEN, Rig, Sent, request
from tests.faults.test_engines import nothing_is_promised
from tests.integration.fleet import PATIENCE_S, Scheduler


async def test_a_relay_killed_and_restarted_learns_what_it_missed(
    rig: Rig, stopwatch: Stopwatch
) -> None:
    scheduler = await rig.fleet.scheduler()
    first, other = [await rig.engine(name, scheduler, ranks=2) for name in ("first", "other")]
    await rig.settled(scheduler)
    await rig.traffic(20, scheduler)
    await rig.settled(scheduler)

    with stopwatch.measure("relay killed: its replica's holdings count no more"):
        await killed(first.relay)
        await scheduler.until(lambda seen: not seen["first"].connected, "the relay's end")
    await nothing_is_promised(rig, scheduler, first)
    for number in range(12):
        # Not a word of these reaches the scheduler but the reports.
        await rig.send(scheduler, rig.prompts.next(), to=("first", number % 2))
    await rig.traffic(5, scheduler)
    await nothing_is_promised(rig, scheduler, first)

    with stopwatch.measure("relay restarted, clients all the while: live, warm, quiet"):
        async with rig.busy(scheduler):
            await first.start_relay()
            await scheduler.until(lambda seen: seen["first"].connected, "the relay")
        await rig.settled(scheduler, first)
    await rig.recovered(scheduler, first, other)
    await rig.ledger_is_the_recount(scheduler)
    rig.every_answer_is_reported_once()


async def test_a_relay_that_finds_the_replay_ring_rolled_promises_only_what_it_saw(
    rig: Rig, stopwatch: Stopwatch
) -> None:
    scheduler = await rig.fleet.scheduler()
    engine = await rig.engine("engine", scheduler, options=("--buffer-steps", "4"))
    await rig.settled(scheduler)
    await rig.traffic(15, scheduler)
    await killed(engine.relay)
    await rig.traffic(10, scheduler)
    with stopwatch.measure("relay restarted, ring rolled: history lost"):
        await engine.start_relay()
        await rig.settled(scheduler, states={HISTORY_LOST})
    await rig.no_wrong_credit(scheduler, exact=False)
    for sent in await rig.traffic(10, scheduler):
        said = sent.prediction
        assert said.lower <= said.predicted <= sent.cached <= said.upper
        await rig.settled(scheduler, states={HISTORY_LOST})
    await rig.no_wrong_credit(scheduler, exact=False)
    await engine.reset()
    await rig.traffic(10, scheduler)
    await rig.recovered(scheduler)
    await rig.ledger_is_the_recount(scheduler)
    rig.every_answer_is_reported_once()


@pytest.mark.parametrize("reads", [True, False], ids=["read by the relay", "lost with the relay"])
async def test_of_a_deleted_replica_nothing_comes_back(
    reads: bool, rig: Rig, stopwatch: Stopwatch
) -> None:
    scheduler = await rig.fleet.scheduler("--replica-ttl-s", "1")
    gone = await rig.engine("gone", scheduler)
    stays = await rig.engine("stays", scheduler)
    await rig.settled(scheduler)
    await rig.traffic(20, scheduler)
    await rig.settled(scheduler)

    async with stopped(gone.relay):
        for _ in range(8):
            await rig.send(scheduler, rig.prompts.next(), to=("gone", 0))
        late = await answered(rig, scheduler, "gone")
        lost = await rig.route(scheduler, only("gone", rig.prompts.next()))
        await killed(gone.process)
        if not reads:
            await killed(gone.relay)
    if reads:
        await scheduler.until(lambda seen: seen["gone"].ranks[0].state == UNPROVEN, "the death")
        await nothing_is_promised(rig, scheduler, gone)
        await killed(gone.relay)
    with stopwatch.measure("replica deleted: forgotten (its time to live is 1 s)"):
        await scheduler.until(lambda seen: "gone" not in seen, "the replica's end")
    for prompt in rig.prompts.probes():
        answer = await scheduler.router.Explain(request(prompt), timeout=PATIENCE_S)
        assert {each.target.replica for each in answer.candidates} == {"stays"}
    # What was answered before still counts, what was not does not; neither brings the replica back.
    await rig.report(scheduler, late)
    await rig.report_failed(scheduler, "lost", lost)
    await rig.traffic(10, scheduler)
    assert set(await scheduler.replicas()) == {"stays"}
    await rig.recovered(scheduler, stays)

    await gone.start()
    await gone.start_relay()
    await rig.settled(scheduler)
    await rig.no_wrong_credit(scheduler)
    await rig.traffic(10, scheduler)
    await rig.recovered(scheduler)
    await rig.ledger_is_the_recount(scheduler)
    rig.every_answer_is_reported_once()


async def answered(rig: Rig, scheduler: Scheduler, replica: str) -> Sent:
    """A request that its engine has answered, and that is not reported yet."""
    prompt = rig.prompts.next()
    answer: routing_pb2.RouteResponse = await rig.route(scheduler, only(replica, prompt))
    request_id = "r-late"
    _, cached = await rig.engines[replica].complete(
        prompt, request_id=request_id, headers=dict(answer.headers), tokens=20
    )
    return Sent(request_id, replica, answer.target.rank, answer.prediction, cached, answer)


def only(replica: str, prompt: tuple[int, ...]) -> routing_pb2.RouteRequest:
    wanted = request(prompt)
    wanted.only.add(replica=replica)
    return wanted
