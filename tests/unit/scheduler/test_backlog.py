from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_scheduler.backlog import Dispatch, Load, backlog_seconds


def seconds(dispatches: list[Dispatch], load: Load | None, now: float) -> float:
    return backlog_seconds(dispatches, load, now, token_s=0.001, request_s=2.0)


def sent(at: float, work_s: float = 1.0, *, first_token: bool = False) -> Dispatch:
    return Dispatch(at, work_s, 1, first_token)


def test_an_idle_rank_has_no_queue() -> None:
    assert seconds([], None, 10.0) == 0.0


def test_without_a_report_the_queue_is_what_was_sent() -> None:
    assert seconds([sent(10.0), sent(10.0)], None, 10.0) == 2.0


def test_the_queue_drains_with_time() -> None:
    assert seconds([sent(10.0), sent(10.0)], None, 11.5) == 0.5


def test_an_idle_gap_is_not_saved_up() -> None:
    assert seconds([sent(0.0), sent(10.0)], None, 10.0) == 1.0


def test_a_request_after_its_first_token_waits_no_more() -> None:
    assert seconds([sent(10.0, first_token=True), sent(10.0)], None, 10.0) == 1.0


def test_a_dispatch_that_the_report_counts_is_not_counted_again() -> None:
    load = Load(read_at=10.0, waiting_requests=1)
    assert seconds([sent(9.0)], load, 10.0) == 1.0


def test_a_dispatch_after_the_reading_adds_to_the_report() -> None:
    load = Load(read_at=10.0, waiting_tokens=500)
    assert seconds([sent(9.0), sent(10.0)], load, 10.0) == pytest.approx(1.5)


def test_reported_requests_that_nobody_here_sent_cost_the_usual() -> None:
    load = Load(read_at=10.0, waiting_requests=3)
    assert seconds([sent(9.0)], load, 10.0) == 5.0


def test_an_engine_without_waiting_requests_has_begun_all_that_was_sent_before() -> None:
    load = Load(read_at=10.0, waiting_requests=0)
    assert seconds([sent(8.0), sent(9.0)], load, 10.0) == 0.0


def test_the_last_sent_are_those_that_wait() -> None:
    load = Load(read_at=10.0, waiting_requests=1)
    assert seconds([sent(8.0, 5.0), sent(9.0, 1.0)], load, 10.0) == 1.0


def test_a_report_without_a_queue_says_nothing() -> None:
    load = Load(read_at=10.0, running_requests=7)
    assert seconds([sent(10.0)], load, 10.0) == 1.0


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), max_size=20),
    st.one_of(
        st.none(),
        st.builds(
            Load,
            read_at=st.floats(0, 100),
            waiting_requests=st.none() | st.integers(0, 30),
            waiting_tokens=st.none() | st.integers(0, 10_000),
        ),
    ),
)
def test_one_more_dispatch_never_shortens_the_queue(
    work: list[tuple[float, float]], load: Load | None
) -> None:
    dispatches = [sent(at, work_s) for at, work_s in work]
    before = seconds(dispatches, load, 100.0)
    assert seconds([*dispatches, sent(100.0, 1.0)], load, 100.0) >= before
