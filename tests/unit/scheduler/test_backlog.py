from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_scheduler.backlog import ERROR_SHARE, Ahead, Backlog, Dispatch, Echo, Load
from servingfleet_scheduler.policy.estimate import prefill_seconds
from servingfleet_scheduler.policy.speeds import Speeds

from .engines import Engine, Prompt

SPEEDS = Speeds(step_s=0.1, token_s=0.001, attention_s=0.0, step_tokens=1000, request_tokens=1900)
"""One step takes 1,000 tokens in 1.1 s; a request of which nothing is known, 2.1 s."""
STALE_S = 10.0


class Queue:
    """A backlog, and prompts of so many tokens that are sent there at once or one by one."""

    def __init__(self) -> None:
        self.backlog = Backlog()
        self.sent = 0

    def send(self, at: float, *sizes: int) -> Queue:
        for tokens in sizes:
            self.sent += 1
            steps = max(1, math.ceil(tokens / SPEEDS.step_tokens))
            work_s = SPEEDS.step_s * steps + SPEEDS.token_s * tokens
            self.backlog.sent(f"d{self.sent}", Dispatch(at, work_s, tokens=tokens), SPEEDS)
        return self

    def told(self, **load: float | None) -> Queue:
        self.backlog.report(Load(**load), SPEEDS)  # type: ignore[arg-type]
        return self

    def started(self, decision_id: str, now: float) -> Queue:
        self.backlog.started(decision_id, SPEEDS, now)
        return self

    def ahead(self, now: float) -> Ahead:
        return self.backlog.ahead(now, stale_s=STALE_S)

    def seconds(self, now: float) -> float:
        return self.ahead(now).seconds


# What was sent


def test_an_idle_rank_has_no_queue() -> None:
    assert Queue().ahead(10.0) == Ahead(0.0, 0.0, 0.0)


def test_without_a_report_the_queue_is_what_was_sent_and_drains_with_time() -> None:
    queue = Queue().send(10.0, 1000, 1000)
    assert queue.seconds(10.0) == pytest.approx(2.2)
    assert queue.seconds(11.0) == pytest.approx(1.2)
    assert queue.seconds(13.0) == 0.0


def test_an_idle_gap_is_not_saved_up() -> None:
    assert Queue().send(0.0, 1000).send(10.0, 1000).seconds(10.0) == pytest.approx(1.1)


def test_a_step_is_paid_once_for_all_prompts_that_fit_into_it() -> None:
    # Ten of 100 tokens are one step, not ten.
    assert Queue().send(0.0, *[100] * 10).seconds(0.0) == pytest.approx(0.1 + 1.0)
    assert Queue().send(0.0, *[100] * 11).seconds(0.0) == pytest.approx(0.2 + 1.1)


def test_a_prompt_does_not_join_a_step_that_has_begun() -> None:
    queue = Queue().send(0.0, 500).send(0.3, 300)
    assert queue.seconds(0.3) == pytest.approx(0.3 + 0.4)


def test_a_long_prompt_takes_several_steps() -> None:
    assert Queue().send(0.0, 2500).seconds(0.0) == pytest.approx(0.3 + 2.5)


def test_the_same_dispatch_told_twice_counts_once() -> None:
    queue = Queue().send(0.0, 1000)
    queue.backlog.sent("d1", Dispatch(0.0, 1.1, tokens=1000), SPEEDS)
    assert queue.seconds(0.0) == pytest.approx(1.1)


# What becomes of it


def test_after_a_first_token_the_queue_is_what_comes_behind_it() -> None:
    queue = Queue().send(0.0, 1000, 1000, 1000)
    # The engine is slower than was thought: what comes behind is waited for in full all the same.
    assert queue.started("d1", 3.0).seconds(3.0) == pytest.approx(2.2)


def test_a_first_token_says_that_those_before_wait_no_more() -> None:
    queue = Queue().send(0.0, 1000, 1000, 1000).started("d2", 0.5)
    assert queue.seconds(0.5) == pytest.approx(1.1)
    assert len(queue.backlog) == 1


def test_a_prompt_that_is_withdrawn_takes_its_work_with_it() -> None:
    queue = Queue().send(0.0, 1000, 1000, 1000)
    assert queue.backlog.withdrawn("d2", 0.0)
    assert queue.seconds(0.0) == pytest.approx(2.2)
    assert not queue.backlog.withdrawn("d2", 0.0)


def test_of_a_prompt_withdrawn_while_it_is_computed_only_the_rest_goes() -> None:
    queue = Queue().send(0.0, 1000, 1000)
    queue.backlog.withdrawn("d1", 0.6)
    assert queue.seconds(0.6) == pytest.approx(1.1)


def test_a_prompt_served_without_word_of_its_first_token_leaves_only_what_came_later() -> None:
    queue = Queue().send(0.0, 5000).send(0.5, 1000)
    queue.backlog.served("d1", SPEEDS, 2.0)
    assert queue.seconds(2.0) == pytest.approx(1.1)
    # That time has passed says nothing of those that were sent later.
    queue.backlog.served("d1", SPEEDS, 2.5)
    assert queue.seconds(2.5) == pytest.approx(0.6)


def test_prompts_that_nobody_speaks_of_again_are_forgotten() -> None:
    queue = Queue()
    for second in range(500):
        queue.send(float(second), 10)
    assert len(queue.backlog) <= 65


# What the engine says


def test_a_dispatch_that_the_report_counts_is_not_counted_again() -> None:
    queue = Queue().send(9.0, 1000).told(read_at=10.0, running_requests=3, waiting_requests=1)
    assert queue.seconds(10.0) == pytest.approx(1.1)


def test_a_dispatch_after_the_reading_adds_to_the_report() -> None:
    queue = Queue().send(9.0, 1000).send(9.97, 1000)
    queue.told(read_at=10.0, waiting_requests=1)
    assert queue.seconds(10.0) == pytest.approx(2.2)


def test_the_jitter_of_the_report_decides_what_is_after_it() -> None:
    queue = Queue().send(9.5, 1000)
    queue.backlog.report(Load(10.0, waiting_requests=1), SPEEDS, jitter_s=0.6)
    # Not yet in the report: one more than it says.
    assert queue.seconds(10.0) == pytest.approx(2.1 + 1.1)


def test_tokens_that_wait_are_priced_by_step_and_by_token() -> None:
    queue = Queue().told(read_at=10.0, waiting_requests=3, waiting_tokens=1500)
    assert queue.seconds(10.0) == pytest.approx(0.2 + 1.5)
    assert queue.seconds(10.5) == pytest.approx(1.2)


def test_tokens_that_wait_pay_for_attention_within_each_prompt() -> None:
    backlog = Backlog()
    speeds = Speeds(step_s=0.0, token_s=0.0, attention_s=1e-6)
    backlog.report(Load(0.0, waiting_requests=2, waiting_tokens=2000), speeds)
    assert backlog.ahead(0.0, stale_s=STALE_S).seconds == pytest.approx(2 * 1000 * 500 * 1e-6)


def test_the_engine_knows_better_than_the_ledger_how_many_tokens_wait() -> None:
    # Half of what was sent turned out to be cached.
    queue = Queue().send(9.0, 1000).told(read_at=10.0, waiting_requests=1, waiting_tokens=500)
    assert queue.seconds(10.0) == pytest.approx(0.6)
    more = Queue().send(9.0, 1000).told(read_at=10.0, waiting_requests=3, waiting_tokens=3000)
    assert more.seconds(10.0) == pytest.approx(3.3)


def test_requests_that_nobody_here_sent_cost_what_known_ones_do_or_the_usual() -> None:
    assert Queue().told(read_at=10.0, waiting_requests=3).seconds(10.0) == pytest.approx(6.3)
    queue = Queue().send(9.0, 400).told(read_at=10.0, waiting_requests=3)
    assert queue.seconds(10.0) == pytest.approx(3 * 0.5)


def test_those_that_wait_are_the_last_sent() -> None:
    queue = Queue().send(0.0, 5000, 1000).told(read_at=20.0, waiting_requests=1)
    assert queue.seconds(20.0) == pytest.approx(1.1)


def test_the_prompt_in_service_counts_what_is_left_of_it() -> None:
    queue = Queue().send(9.0, 2000, 1000).told(read_at=10.0, waiting_requests=1)
    assert queue.seconds(10.0) == pytest.approx((2.2 - 1.0) + 1.1)


def test_where_nothing_waits_at_most_a_step_is_computed() -> None:
    # It took all of them on already: it is faster than was thought.
    queue = Queue().send(9.9, *[1000] * 10).told(read_at=10.0, waiting_requests=0)
    assert queue.seconds(10.0) == pytest.approx(1.1)


def test_an_idle_engine_has_begun_and_ended_all_that_was_sent_before() -> None:
    queue = Queue().send(9.0, 5000).send(9.99, 1000)
    queue.told(read_at=10.0, running_requests=0, waiting_requests=0)
    assert queue.seconds(10.0) == pytest.approx(1.1)


def test_what_began_after_the_reading_is_not_taken_for_somebody_elses() -> None:
    queue = Queue().send(8.0, 1000, 1000, 1000).started("d1", 10.5)
    # When it was read, the first was computed and two waited; the first token came before the report did.
    queue.told(read_at=10.0, running_requests=1, waiting_requests=2)
    assert queue.seconds(11.0) == pytest.approx(2.2 - 0.5)
    tokens = Queue().send(8.0, 1000, 1000, 1000).started("d2", 10.5)
    tokens.told(read_at=10.0, waiting_requests=2, waiting_tokens=2000)
    assert tokens.seconds(11.0) == pytest.approx(1.1 - 0.5)


def test_a_report_that_is_no_newer_than_the_last_says_nothing() -> None:
    queue = Queue().told(read_at=10.0, waiting_requests=0).send(10.5, 1000)
    queue.told(read_at=10.0, waiting_requests=9).told(read_at=9.0, running_requests=0)
    assert queue.seconds(10.5) == pytest.approx(1.1)


def test_a_report_without_a_queue_says_nothing() -> None:
    queue = Queue().send(10.0, 1000).told(read_at=10.5, running_requests=7)
    assert queue.seconds(10.5) == pytest.approx(0.6)


# How sure that is


def test_prompts_err_each_by_itself() -> None:
    one, four = Queue().send(0.0, 1000), Queue().send(0.0, *[1000] * 4)
    assert one.ahead(0.0).noise_s == pytest.approx(ERROR_SHARE * 1.1)
    assert four.ahead(0.0).noise_s == pytest.approx(ERROR_SHARE * 2 * 1.1)


def test_the_older_the_report_the_wider_until_only_the_ledger_counts() -> None:
    queue = Queue().told(read_at=0.0, running_requests=1, waiting_requests=50).send(0.1, 90_000)
    fresh, older = queue.ahead(0.2), queue.ahead(9.0)
    assert fresh.sd_s / fresh.noise_s < older.sd_s / older.noise_s < 2.0
    assert queue.seconds(9.0) > 99.0
    stale = queue.ahead(10.5)
    # What others sent is known from the report alone: what remains of it counts no more.
    assert stale.seconds == pytest.approx(99.0)
    assert stale.sd_s == pytest.approx(2.0 * stale.noise_s)


def test_an_echo_is_smoothed_and_its_spread_is_known() -> None:
    echo = Echo()
    for _ in range(50):
        echo.heard(0.2)
    assert echo.smoothed_s == pytest.approx(0.2)
    assert echo.deviation_s == pytest.approx(0.0, abs=1e-3)
    echo.heard(0.6)
    assert 0.2 < echo.smoothed_s < 0.3 < echo.smoothed_s + echo.deviation_s


# Whatever happens

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 5000)),
        st.tuples(st.sampled_from(["started", "served", "withdrawn"]), st.integers(1, 20)),
        st.tuples(st.just("wait"), st.floats(0, 5)),
        st.tuples(
            st.just("told"),
            st.fixed_dictionaries(
                {
                    "running_requests": st.none() | st.integers(0, 3),
                    "waiting_requests": st.none() | st.integers(0, 30),
                    "waiting_tokens": st.none() | st.integers(0, 20_000),
                }
            ),
        ),
    ),
    max_size=30,
)


@given(STEPS)
def test_one_more_dispatch_adds_between_its_tokens_and_its_work_alone(
    steps: list[tuple[str, Any]],
) -> None:
    queue, now = Queue(), 0.0
    for kind, value in steps:
        if kind == "send":
            queue.send(now, value)
        elif kind == "wait":
            now += value
        elif kind == "told":
            queue.told(read_at=now, **value)
        elif kind == "withdrawn":
            queue.backlog.withdrawn(f"d{value}", now)
        else:
            getattr(queue.backlog, kind)(f"d{value}", SPEEDS, now)
        ahead = queue.ahead(now)
        assert ahead.seconds >= 0.0
        assert 0.0 <= ahead.noise_s <= ahead.sd_s <= 2.0 * ahead.noise_s + 1e-9
    before = queue.seconds(now)
    added = queue.send(now, 700).seconds(now) - before
    assert 0.7 - 1e-6 <= added <= 0.8 + 1e-6


# Against an engine that computes in steps


@pytest.mark.parametrize("told", [True, False], ids=["first tokens told", "nothing told"])
@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("tokens", [300, 2000])
def test_what_is_ahead_is_what_prompts_then_wait_for(
    tokens: int, share: float, *, told: bool
) -> None:
    rng, speeds, backlog = random.Random(3), Speeds(), Backlog()
    sizes = [
        min(30_000, max(20, int(rng.lognormvariate(math.log(tokens), 1.0)))) for _ in range(3000)
    ]
    # Seconds of a prompt, on average, where all steps are full.
    seconds = sum(
        prefill_seconds(speeds, size, 0) - speeds.step_s * (speeds.steps(size) - size / 8192)
        for size in sizes
    ) / len(sizes)
    now, prompts = 0.0, []
    for size in sizes:
        now += rng.expovariate(share / seconds)
        prompts.append(Prompt(now, size, 0))
    served = Engine(speeds, rng).serve(prompts)
    numbers = {prompt: number for number, prompt in enumerate(prompts)}
    events = sorted(
        [(prompt.at, 1, number) for number, prompt in enumerate(prompts)]
        + [(each.first, 0, numbers[each.prompt]) for each in served if told]
    )
    expected = 0.0
    for at, arrives, number in events:
        if not arrives:
            backlog.started(str(number), speeds, at)
            continue
        work_s = prefill_seconds(speeds, sizes[number], 0)
        expected += backlog.ahead(at, stale_s=STALE_S).seconds + work_s
        backlog.sent(str(number), Dispatch(at, work_s, tokens=sizes[number]), speeds)
    actual = sum(each.first - each.prompt.at for each in served)
    # Short prompts wait for those that come after them and share their step: nobody knows of these yet.
    assert 0.8 * actual < expected < 1.05 * actual
