"""Keys are gathered, spaced, worked on once at a time, and retried with a backoff of their own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from servingfleet_operator.errors import OperatorError, Unreachable
from servingfleet_operator.queue import QueueSettings, Schedule, WorkQueue

SETTINGS = QueueSettings(gather_s=0.1, spacing_s=0.5, jitter=0.0)


def schedule(settings: QueueSettings = SETTINGS) -> Schedule[str]:
    return Schedule(settings, random.Random(1))


def popped(waiting: Schedule[str], now: float) -> list[str]:
    found = []
    while (key := waiting.pop(now)) is not None:
        found.append(key)
    return found


def test_a_key_asked_for_often_is_worked_on_once() -> None:
    waiting = schedule()
    for moment in (0.0, 0.03, 0.06):
        waiting.add("a", moment)
    assert popped(waiting, 0.09) == []
    assert popped(waiting, 0.1) == ["a"]
    waiting.done("a", 0.2, None)
    assert popped(waiting, 100.0) == []
    assert len(waiting) == 0


def test_a_key_that_is_worked_on_is_not_given_out_again() -> None:
    waiting = schedule()
    waiting.add("a", 0.0)
    assert popped(waiting, 1.0) == ["a"]
    waiting.add("a", 1.0)
    assert popped(waiting, 50.0) == []


def test_what_happens_during_the_work_is_looked_at_afterwards() -> None:
    waiting = schedule()
    waiting.add("a", 0.0)
    assert popped(waiting, 1.0) == ["a"]
    waiting.add("a", 1.0)
    waiting.done("a", 3.0, None)
    assert popped(waiting, 3.4) == []
    assert popped(waiting, 3.5) == ["a"]


def test_the_next_work_on_a_key_keeps_its_distance() -> None:
    waiting = schedule()
    waiting.add("a", 0.0)
    assert popped(waiting, 1.0) == ["a"]
    waiting.add("a", 1.0)
    waiting.done("a", 1.0, None)
    assert popped(waiting, 1.49) == []
    assert popped(waiting, 1.5) == ["a"]


def test_it_keeps_its_distance_although_nobody_had_asked_when_it_ended() -> None:
    waiting = schedule()
    waiting.add("a", 0.0)
    assert popped(waiting, 1.0) == ["a"]
    waiting.done("a", 1.0, None)
    waiting.add("a", 1.1)
    assert popped(waiting, 1.49) == []
    assert popped(waiting, 1.5) == ["a"]


def test_a_wish_that_was_withdrawn_does_not_bring_a_later_one_forward() -> None:
    waiting = schedule()
    waiting.add("a", 0.0)
    waiting.forget("a")
    waiting.add("a", 0.0, 10.0)
    assert popped(waiting, 9.9) == []
    assert popped(waiting, 10.0) == ["a"]


def test_an_older_wish_does_not_start_a_key_that_is_worked_on() -> None:
    waiting = schedule()
    waiting.add("a", 0.0, 5.0)
    waiting.add("a", 0.0)
    assert popped(waiting, 0.1) == ["a"]
    waiting.add("a", 4.9)
    assert popped(waiting, 6.0) == []


def test_a_later_wish_does_not_put_off_an_earlier_one() -> None:
    waiting = schedule()
    waiting.add("a", 0.0)
    waiting.add("a", 0.0, 600.0)
    assert popped(waiting, 0.1) == ["a"]


def test_an_event_comes_before_the_regular_look() -> None:
    waiting = schedule()
    waiting.add("a", 0.0)
    assert popped(waiting, 1.0) == ["a"]
    waiting.done("a", 1.0, 600.0)
    waiting.add("a", 10.0)
    assert waiting.next_due() == 10.1
    assert popped(waiting, 10.1) == ["a"]
    waiting.done("a", 10.2, None)
    assert popped(waiting, 700.0) == [], "the regular look was replaced"


def test_each_failure_waits_twice_as_long_up_to_the_longest() -> None:
    waiting = schedule()
    now, waits = 0.0, []
    waiting.add("a", now)
    for _ in range(11):
        now += 1000.0
        assert popped(waiting, now) == ["a"]
        waits.append(waiting.failed("a", now))
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_keys_back_off_each_for_itself() -> None:
    waiting = schedule()
    waiting.add("a", 0.0)
    waiting.add("b", 0.0)
    assert sorted(popped(waiting, 1.0)) == ["a", "b"]
    waiting.failed("a", 1.0)
    waiting.failed("b", 1.0)
    assert sorted(popped(waiting, 2.0)) == ["a", "b"]
    assert waiting.failed("a", 2.0) == 2.0
    waiting.done("b", 2.0, 0.5)
    assert popped(waiting, 2.5) == ["b"]
    assert waiting.failed("b", 2.5) == 1.0, "its success was forgotten"


def test_an_event_is_tried_at_once_although_the_key_backs_off() -> None:
    waiting = schedule()
    waiting.add("a", 0.0)
    for moment in (1.0, 10.0, 20.0, 40.0, 80.0):
        assert popped(waiting, moment) == ["a"]
        waiting.failed("a", moment)
    waiting.add("a", 81.0)
    assert popped(waiting, 81.1) == ["a"]


def test_a_server_that_asks_for_patience_gets_it() -> None:
    waiting = schedule()
    waiting.add("a", 0.0)
    assert popped(waiting, 1.0) == ["a"]
    assert waiting.failed("a", 1.0, retry_s=30.0) == 30.0
    assert popped(waiting, 30.9) == []


def test_a_key_that_nobody_needs_is_forgotten_even_while_it_is_worked_on() -> None:
    waiting = schedule()
    waiting.add("a", 0.0)
    waiting.add("b", 0.0)
    waiting.forget("b")
    assert popped(waiting, 1.0) == ["a"]
    waiting.add("a", 1.0)
    waiting.forget("a")
    waiting.done("a", 1.0, None)
    assert popped(waiting, 100.0) == []


async def settle(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - ends within a turn of the loop
            await asyncio.sleep(0)


async def running(work: Callable[[str], Awaitable[float | None]]) -> WorkQueue[str]:
    quick = QueueSettings(gather_s=0.0, spacing_s=0.0, first_backoff_s=0.001, workers=2, jitter=0)
    return WorkQueue(work, quick, random.Random(1))


async def test_a_failure_of_one_key_is_tried_again_and_hinders_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str] = []

    async def work(key: str) -> float | None:
        seen.append(key)
        if key == "bad" and seen.count("bad") < 3:
            raise Unreachable("the API server is away")
        return None

    queue = await running(work)
    runner = asyncio.create_task(queue.run())
    queue.add("bad")
    queue.add("good")
    await settle(lambda: seen.count("bad") == 3 and "good" in seen)
    runner.cancel()
    await asyncio.wait([runner])
    assert "the API server is away" in str(caplog.records[0].__dict__["error"])


async def test_a_defect_is_logged_with_its_traceback_and_the_work_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str] = []

    async def work(key: str) -> float | None:
        seen.append(key)
        if key == "bad":
            raise ZeroDivisionError
        return None

    queue = await running(work)
    runner = asyncio.create_task(queue.run())
    queue.add("bad")
    await settle(lambda: "bad" in seen)
    queue.add("good")
    await settle(lambda: "good" in seen)
    runner.cancel()
    await asyncio.wait([runner])
    defects = [record for record in caplog.records if record.exc_info]
    assert defects
    assert "defect" in defects[0].message


async def test_no_more_than_so_many_keys_are_worked_on_at_once() -> None:
    going: set[str] = set()
    most = 0
    release = asyncio.Event()

    async def work(key: str) -> float | None:
        nonlocal most
        going.add(key)
        most = max(most, len(going))
        await release.wait()
        going.discard(key)
        return None

    queue = await running(work)
    runner = asyncio.create_task(queue.run())
    for number in range(6):
        queue.add(str(number))
    await settle(lambda: len(going) == 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert most == 2
    release.set()
    await settle(lambda: len(queue) == 0)
    runner.cancel()
    await asyncio.wait([runner])
    assert most == 2


async def test_what_the_work_returns_is_when_it_is_looked_at_again() -> None:
    seen: list[float] = []
    loop = asyncio.get_running_loop()

    async def work(_: str) -> float | None:
        seen.append(loop.time())
        return 0.05 if len(seen) == 1 else None

    queue = await running(work)
    runner = asyncio.create_task(queue.run())
    queue.add("a")
    await settle(lambda: len(seen) == 2 and len(queue) == 0)
    runner.cancel()
    await asyncio.wait([runner])
    assert seen[1] - seen[0] >= 0.05


def test_every_expected_error_is_an_operator_error() -> None:
    assert issubclass(Unreachable, OperatorError)
