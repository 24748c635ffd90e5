"""SGLang replicas under the faults that vLLM's are put to: another cache, another wire, the same promise."""

from __future__ import annotations

import pytest

from tests.faults.conftest import Stopwatch
from tests.faults.engines import killed
from tests.faults.rig import HISTORY_LOST, LIVE, UNPROVEN, Rig
from tests.faults.test_batches import filled, finish, lose_batches, warmed_up

SGLANG = ("--engine", "sglang", "--block-size")


@pytest.mark.parametrize(("page", "host"), [(16, 0), (32, 0), (16, 120)])
async def test_dropped_batches_of_pages_are_fetched_again(
    page: int, host: int, rig: Rig, stopwatch: Stopwatch
) -> None:
    scheduler = await rig.fleet.scheduler()
    options = (*SGLANG, str(page), "--host-blocks", str(host))
    engine = await rig.engine("engine", scheduler, ranks=2, blocks=2560 // page, options=options)
    await warmed_up(rig, scheduler)
    await filled(rig, scheduler, engine)
    await lose_batches(rig, scheduler, engine, 4, replayable=True)
    with stopwatch.measure("dropped batches of SGLang replayed: live and exact"):
        await rig.settled(scheduler)
    await finish(rig, scheduler)


async def test_pages_that_no_replay_brings_back_are_credited_no_more_until_a_flush(
    rig: Rig, stopwatch: Stopwatch
) -> None:
    scheduler = await rig.fleet.scheduler()
    engine = await rig.engine("engine", scheduler, blocks=160, options=(*SGLANG, "16"))
    await warmed_up(rig, scheduler)
    await filled(rig, scheduler, engine)
    await lose_batches(rig, scheduler, engine, 6, replayable=False)
    await rig.settled(scheduler, states={HISTORY_LOST})
    await rig.no_wrong_credit(scheduler, exact=False)
    # It tells of its flush at once: nobody need ask anything.
    await engine.reset()
    with stopwatch.measure("flush after a lost history: live"):
        await rig.settled(scheduler)
    await rig.traffic(10, scheduler)
    await finish(rig, scheduler)


async def test_an_sglang_restarted_in_place_keeps_no_credit_of_its_first_life(
    rig: Rig, stopwatch: Stopwatch
) -> None:
    scheduler = await rig.fleet.scheduler()
    first = await rig.engine("first", scheduler, options=(*SGLANG, "16"))
    await rig.engine("other", scheduler)
    await rig.settled(scheduler)
    await rig.traffic(30, scheduler)
    await rig.recovered(scheduler)
    await killed(first.process)
    await scheduler.until(
        lambda seen: {rank.state for rank in seen["first"].ranks} == {UNPROVEN},
        "the engine's death",
    )
    with stopwatch.measure("SGLang restarted in place: live"):
        await first.start()
        await scheduler.until(
            lambda seen: {rank.state for rank in seen["first"].ranks} == {LIVE}, "the new life"
        )
    await rig.settled(scheduler)
    await rig.no_wrong_credit(scheduler)
    await rig.traffic(20, scheduler)
    await finish(rig, scheduler)
