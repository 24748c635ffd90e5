"""Links to schedulers, against real gRPC servers on loopback."""

from __future__ import annotations

import asyncio
import time

from tests.unit.relay.intake import PATIENCE_S, Scheduler, impatient, linked, proven, publish


async def test_a_scheduler_hears_hello_snapshot_and_live_deltas() -> None:
    scheduler = Scheduler()
    port = await scheduler.start()
    pipeline = proven()
    publish(pipeline, 0)
    async with linked(pipeline, impatient([f"127.0.0.1:{port}"])):
        hello = await scheduler.until("hello")
        assert (hello.hello.replica, hello.hello.resume_instance) == ("r", "")
        await scheduler.until("snapshot_begin")
        await scheduler.until("snapshot_end")
        publish(pipeline, 1)
        assert len((await scheduler.until("delta")).delta.hashes) == 8
        assert (await scheduler.until("rank_state")).rank_state.engine_seq == 1
    await scheduler.stop()


async def test_a_scheduler_that_is_away_holds_up_no_other_and_is_resumed_when_it_is_back() -> None:
    away, other = Scheduler("away", resumed=True), Scheduler("other")
    away_port, other_port = await away.start(), await other.start()
    pipeline = proven()
    async with linked(pipeline, impatient([f"127.0.0.1:{away_port}", f"127.0.0.1:{other_port}"])):
        await away.until("snapshot_end")
        await other.until("snapshot_end")
        await away.stop()
        publish(pipeline, 0)
        await other.until("delta")
        back = Scheduler("away", resumed=True)
        await back.start(away_port)
        assert (await back.until("hello")).hello.resume_instance == "away"
        assert len((await back.until("delta")).delta.hashes) == 8
        await back.stop()
    await other.stop()


async def test_a_scheduler_of_another_life_gets_a_new_session() -> None:
    first = Scheduler("first")
    port = await first.start()
    pipeline = proven()
    publish(pipeline, 0)
    async with linked(pipeline, impatient([f"127.0.0.1:{port}"])):
        await first.until("snapshot_end")
        await first.stop()
        second = Scheduler("second")
        await second.start(port)
        assert (await second.until("hello")).hello.resume_instance == "first"
        begin = await second.until("snapshot_begin")
        assert begin.seq > 0
        assert len((await second.until("delta")).delta.hashes) == 8
        await second.stop()


async def test_a_name_that_does_not_resolve_is_tried_again_and_holds_up_no_other() -> None:
    scheduler = Scheduler()
    port = await scheduler.start()
    pipeline = proven()
    async with linked(pipeline, impatient(["no-such-host.invalid:1", f"127.0.0.1:{port}"])):
        await scheduler.until("snapshot_end")
    await scheduler.stop()


async def test_a_scheduler_sees_the_end_of_a_relay_that_ends_and_all_that_it_wrote_before() -> None:
    scheduler = Scheduler()
    port = await scheduler.start()
    pipeline = proven()
    async with linked(pipeline, impatient([f"127.0.0.1:{port}"])):
        await scheduler.until("snapshot_end")
        publish(pipeline, 0)
        await scheduler.until("delta")
    async with asyncio.timeout(PATIENCE_S):
        await scheduler.ended.wait()
    await scheduler.stop()


async def test_a_scheduler_that_does_not_answer_does_not_hold_up_the_end() -> None:
    taken: list[asyncio.StreamWriter] = []
    dialled = asyncio.Event()

    def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(writer)
        dialled.set()

    silent = await asyncio.start_server(take, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with linked(proven(), impatient([f"127.0.0.1:{port}"])):
        async with asyncio.timeout(PATIENCE_S):
            await dialled.wait()
        began = time.monotonic()
    assert time.monotonic() - began < 1.0
    silent.close()
    for writer in taken:
        writer.close()
