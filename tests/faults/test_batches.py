"""Event batches that never arrive: dropped, rolled out of the replay ring, too many for a slow relay."""

from __future__ import annotations

import random

import pytest

from tests.faults.conftest import Stopwatch
from tests.faults.engines import Engine, stopped
from tests.faults.prompts import BLOCK
from tests.faults.rig import HISTORY_LOST, Rig
from tests.integration.fleet import Scheduler

SMALL = 160
"""Blocks of a cache that evicts all the time: a batch that is lost then also takes removals with it."""


async def test_dropped_batches_are_fetched_again(rig: Rig, stopwatch: Stopwatch) -> None:
    scheduler = await rig.fleet.scheduler()
    engine = await rig.engine("engine", scheduler, ranks=2, blocks=SMALL)
    await warmed_up(rig, scheduler)
    await filled(rig, scheduler, engine)
    await lose_batches(rig, scheduler, engine, 4, replayable=True)
    with stopwatch.measure("dropped batches replayed: live and exact"):
        await rig.settled(scheduler)
    assert [rank.incarnation for rank in (await scheduler.replicas())["engine"].ranks] == [1, 1]
    await finish(rig, scheduler)


@pytest.mark.parametrize(
    ("ring", "replayable"),
    [
        pytest.param(10_000, False, id="dropped also from the replay"),
        pytest.param(3, True, id="rolled out of the replay ring"),
    ],
)
async def test_what_no_replay_brings_back_is_credited_no_more_until_a_reset(
    ring: int, replayable: bool, rig: Rig, stopwatch: Stopwatch
) -> None:
    scheduler = await rig.fleet.scheduler()
    options = ("--buffer-steps", str(ring))
    engine = await rig.engine("engine", scheduler, blocks=SMALL, options=options)
    await warmed_up(rig, scheduler)
    await filled(rig, scheduler, engine)
    await lose_batches(rig, scheduler, engine, 6, replayable=replayable)
    with stopwatch.measure("history lost: nothing wrong is credited"):
        await rig.settled(scheduler, states={HISTORY_LOST})
    await rig.no_wrong_credit(scheduler, exact=False)
    for sent in await rig.traffic(10, scheduler):
        said = sent.prediction
        assert said.lower <= said.predicted <= sent.cached <= said.upper
        await rig.settled(scheduler, states={HISTORY_LOST})
        await rig.no_wrong_credit(scheduler, exact=False)

    # Only an empty cache makes the history whole again.
    await engine.reset()
    with stopwatch.measure("reset and one request after a lost history: live and exact"):
        await rig.traffic(1, scheduler)
        await rig.settled(scheduler)
    await rig.traffic(10, scheduler)
    await finish(rig, scheduler)


async def test_a_relay_too_slow_for_its_engine_catches_up_from_the_replay(
    rig: Rig, stopwatch: Stopwatch
) -> None:
    scheduler = await rig.fleet.scheduler()
    # One prompt to a step, and so to a batch.
    options = ("--max-num-seqs", "1")
    engine = await rig.engine("engine", scheduler, blocks=600, options=options)
    await warmed_up(rig, scheduler)
    assert engine.relay is not None
    rng = random.Random(8)
    async with stopped(engine.relay):
        # Long ones to fill the connection, then more than the engine keeps for a subscriber (1000).
        await engine.flood([tokens(rng, 400 * BLOCK) for _ in range(60)])
        for _ in range(10):
            await engine.flood([tokens(rng, BLOCK) for _ in range(200)])
    with stopwatch.measure("slow relay back after 2000 batches: live and exact"):
        # That the last batches are missing shows with the next one, not before.
        await rig.traffic(1, scheduler)
        await rig.settled(scheduler)
    wanted = [line["seq"] for line in engine.relay.lines() if line.get("event") == "replay wanted"]
    assert len(wanted) > 1, "the engine dropped nothing: the flood was too small for this machine"
    await finish(rig, scheduler)


async def warmed_up(rig: Rig, scheduler: Scheduler) -> None:
    await rig.settled(scheduler)
    await rig.traffic(25, scheduler)
    await rig.settled(scheduler)
    assert await rig.no_wrong_credit(scheduler) > 0


async def filled(rig: Rig, scheduler: Scheduler, engine: Engine) -> None:
    """From here on every new block takes the place of another."""
    for rank in range(engine.ranks):
        while not engine.account.refresh().removals[rank]:
            await rig.send(scheduler, rig.prompts.next(), to=(engine.name, rank))
    await rig.settled(scheduler)


async def lose_batches(
    rig: Rig, scheduler: Scheduler, engine: Engine, count: int, *, replayable: bool
) -> None:
    """Keeps that many batches of each rank off the wire, and ends with one that arrives."""
    removals = engine.account.refresh().removals.copy()
    first = dict(engine.account.published)
    for rank in range(engine.ranks):
        await engine.faults(rank=rank, drop_batches=count, drop_from_replay=not replayable)
    for rank in range(engine.ranks):
        while engine.account.refresh().published[rank] <= first[rank] + count:
            await rig.send(scheduler, rig.prompts.next(), to=(engine.name, rank))
        assert engine.account.removals[rank] > removals[rank], "nothing was evicted meanwhile"


async def finish(rig: Rig, scheduler: Scheduler) -> None:
    await rig.recovered(scheduler)
    await rig.ledger_is_the_recount(scheduler)
    rig.every_answer_is_reported_once()


def tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(8, 32_000) for _ in range(count))
