from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from servingfleet_scheduler.ledger import OTHER, Ledger, by_model
from servingfleet_scheduler.policy.candidate import Reuse

REUSE = Reuse(100, 40, 60, 80, 60)


def make(*, started: float = 0.0, max_keys: int = 100) -> Ledger:
    return Ledger(started=started, window_s=600.0, bucket_s=60.0, max_keys=max_keys)


def join(ledger: Ledger, at: float, *, replica: str = "a", actual: int = 60) -> None:
    ledger.decided("m", replica, at)
    ledger.joined("m", replica, at, REUSE, best=60, actual=actual)


def test_a_window_holds_what_was_decided_in_it() -> None:
    ledger = make()
    join(ledger, 10.0)
    join(ledger, 400.0)
    rows, _ = ledger.rows(590.0, 200.0)
    assert rows["m", "a"].sums.pairs == 1
    rows, _ = ledger.rows(590.0)
    assert rows["m", "a"].sums.pairs == 2


def test_what_lies_before_the_window_is_forgotten() -> None:
    ledger = make()
    join(ledger, 10.0)
    assert ledger.rows(1000.0)[0] == {}


def test_an_outcome_is_booked_at_the_time_of_its_decision() -> None:
    ledger = make()
    ledger.decided("m", "a", 10.0)
    ledger.joined("m", "a", 10.0, REUSE, best=60, actual=60)
    assert ledger.rows(650.0, 30.0)[0] == {}


def test_the_span_is_no_longer_than_the_ledger_has_run() -> None:
    assert make(started=1000.0).rows(1010.0)[1] == 10.0


def test_the_span_is_that_of_whole_buckets() -> None:
    ledger = make()
    assert ledger.rows(610.0, 100.0)[1] == 610.0 - 480.0


def test_a_decision_moves_to_where_it_ran() -> None:
    ledger = make()
    ledger.decided("m", "a", 10.0)
    ledger.moved("m", "a", "b", 10.0)
    rows, _ = ledger.rows(20.0)
    assert (rows["m", "a"].sums.decisions, rows["m", "b"].sums.decisions) == (0, 1)


def test_another_schedulers_decision_is_no_join_of_ours() -> None:
    ledger = make()
    ledger.joined("m", "a", 10.0, REUSE, best=60, actual=60, own=False)
    sums = ledger.rows(20.0)[0]["m", "a"].sums
    assert (sums.pairs, sums.joined, sums.decisions) == (1, 0, 0)


def test_replicas_beyond_the_bound_are_counted_together() -> None:
    ledger = make(max_keys=2)
    for name in "abcd":
        join(ledger, 10.0, replica=name)
    rows, _ = ledger.rows(20.0)
    assert set(rows) == {("m", "a"), ("m", "b"), ("m", OTHER)}
    assert by_model(rows)["m"].sums.pairs == 4


@given(
    st.lists(
        st.tuples(st.floats(0, 3000), st.sampled_from("abc"), st.integers(0, 100)), max_size=60
    ),
    st.floats(60, 600),
)
def test_a_window_equals_a_recount(events: list[tuple[float, str, int]], window: float) -> None:
    ledger = make()
    for at, replica, actual in sorted(events):
        join(ledger, at, replica=replica, actual=actual)
        ledger.expire(at)
    rows, _ = ledger.rows(3000.0, window)
    first = (3000.0 - window) // 60.0
    for replica in "abc":
        expected = [
            actual for at, name, actual in events if name == replica and at // 60.0 >= first
        ]
        row = rows.get(("m", replica))
        assert (row.sums.actual if row else 0) == sum(expected)
        assert (row.sums.pairs if row else 0) == len(expected)


@given(st.lists(st.floats(0, 1e6), max_size=200))
def test_memory_does_not_grow_with_time(times: list[float]) -> None:
    ledger = make()
    for at in sorted(times):
        join(ledger, at)
        ledger.expire(at)
    assert len(ledger._buckets) <= 600 / 60 + 1
