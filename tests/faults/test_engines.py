"""Engines that die, start again in place, or empty their caches."""

from __future__ import annotations

import asyncio

from tests.faults.conftest import Stopwatch
from tests.faults.engines import MODEL, Engine, Gone, killed, reached, stopped
from tests.faults.rig import LIVE, UNPROVEN, Rig, request
from tests.integration.fleet import PATIENCE_S, Scheduler


async def test_an_engine_killed_and_restarted_in_place_keeps_no_credit_of_its_first_life(
    rig: Rig, stopwatch: Stopwatch
) -> None:
    scheduler = await rig.fleet.scheduler()
    first, _ = [await rig.engine(name, scheduler, ranks=2) for name in ("first", "other")]
    await rig.settled(scheduler)
    await rig.traffic(30, scheduler)
    await rig.recovered(scheduler)

    asked = asyncio.create_task(held_request(rig, scheduler, first))
    await reached(lambda: dispatched(scheduler, first), "the request to be on its way")
    with stopwatch.measure("engine killed: its holdings count no more"):
        await killed(first.process)
        await scheduler.until(
            lambda seen: {rank.state for rank in seen["first"].ranks} == {UNPROVEN},
            "the engine's death",
        )
    await asked
    await nothing_is_promised(rig, scheduler, first)

    async with rig.busy(scheduler):
        with stopwatch.measure("engine restarted in place, clients all the while: live"):
            await first.start()
            await scheduler.until(
                lambda seen: {rank.state for rank in seen["first"].ranks} == {LIVE}, "the new life"
            )
    await rig.settled(scheduler)
    seen = await scheduler.replicas()
    assert [rank.incarnation for rank in seen["first"].ranks] == [2, 2]
    assert first.account.lives == 2
    await rig.no_wrong_credit(scheduler)
    await rig.traffic(20, scheduler)
    await rig.recovered(scheduler)
    await rig.ledger_is_the_recount(scheduler)
    rig.every_answer_is_reported_once()
    assert rig.failed


async def test_an_engine_that_overtakes_its_first_life_unseen_is_found_out(
    rig: Rig, stopwatch: Stopwatch
) -> None:
    scheduler = await rig.fleet.scheduler()
    engine = await rig.engine("engine", scheduler)
    await rig.settled(scheduler)
    await rig.traffic(12, scheduler)
    await rig.settled(scheduler)
    before = engine.account.published[0]
    async with stopped(engine.relay):
        await killed(engine.process)
        await engine.start()
        # Beyond the last number of the first life: the numbers alone would show a gap.
        while engine.account.refresh().published.get(0, -1) <= before + 3:
            await rig.send(scheduler, rig.prompts.next())
    with stopwatch.measure("relay back after the engine overtook its first life"):
        await rig.settled(scheduler)
    (rank,) = (await scheduler.replicas())["engine"].ranks
    assert rank.incarnation == 2
    await rig.recovered(scheduler)
    await rig.ledger_is_the_recount(scheduler)
    rig.every_answer_is_reported_once()


async def test_an_idle_engines_reset_is_believed_from_its_next_batch_on(
    rig: Rig, stopwatch: Stopwatch
) -> None:
    scheduler = await rig.fleet.scheduler()
    engine = await rig.engine("engine", scheduler, ranks=2)
    await rig.settled(scheduler)
    await rig.traffic(20, scheduler)
    await rig.recovered(scheduler)
    prompts = {rank: longest_held(rig, engine, rank) for rank in range(2)}

    await engine.reset()
    for rank, prompt in prompts.items():
        # Nothing has told the relay: the first request of each rank pays, and its batch tells.
        await rig.settled(scheduler)
        sent = await rig.send(scheduler, prompt, to=("engine", rank))
        assert sent.prediction.predicted > 0
        assert sent.cached == 0
        with stopwatch.measure(f"reset announced by rank {rank}'s next batch: live and exact"):
            await rig.settled(scheduler)
    await rig.recovered(scheduler)
    await rig.ledger_is_the_recount(scheduler)
    rig.every_answer_is_reported_once()


async def held_request(rig: Rig, scheduler: Scheduler, engine: Engine) -> None:
    """A request that its engine has begun and will not end."""
    for rank in range(engine.ranks):
        await engine.faults(rank=rank, stall_s=PATIENCE_S)
    prompt = rig.prompts.next()
    wanted = request(prompt)
    wanted.only.add(replica=engine.name)
    answer = await rig.route(scheduler, wanted)
    headers = dict(answer.headers)
    try:
        await engine.complete(prompt, request_id="held", headers=headers, tokens=1)
    except Gone:
        await rig.report_failed(scheduler, "held", answer)
    else:
        raise AssertionError("the engine answered")


async def dispatched(scheduler: Scheduler, engine: Engine) -> bool:
    seen = await scheduler.replicas(MODEL)
    return any(rank.credits for rank in seen[engine.name].ranks)


async def nothing_is_promised(rig: Rig, scheduler: Scheduler, engine: Engine) -> None:
    """Of an engine that is not there, nothing is predicted."""
    for prompt in rig.prompts.probes():
        answer = await scheduler.router.Explain(request(prompt), timeout=PATIENCE_S)
        said = [c.prediction for c in answer.candidates if c.target.replica == engine.name]
        assert len(said) == engine.ranks
        assert {(each.lower, each.predicted) for each in said} == {(0, 0)}


def longest_held(rig: Rig, engine: Engine, rank: int) -> tuple[int, ...]:
    return max(rig.prompts.sent, key=lambda prompt: engine.account.reusable(rank, prompt))
