"""What only a run of events, or the engine's counters, can show."""

from __future__ import annotations

import math

import pytest

from servingfleet_relay.adapters.events import Doubt
from servingfleet_relay.conformance.watches import (
    CYCLES,
    OUTCOMES_LEAST,
    REMOVAL_SILENCE_S,
    SILENCE_REQUESTS,
    SILENCE_S,
    UNREADABLE_IN_ROW,
    WINDOW,
    BatchTimes,
    Feedback,
    Readability,
    Share,
    Silence,
    Turnover,
)

UNIT = 16


def test_only_messages_in_a_row_that_can_not_be_read_stop_the_stream() -> None:
    watch = Readability()
    for _ in range(2):
        assert [watch.unreadable("x") for _ in range(UNREADABLE_IN_ROW - 1)] == [None, None]
        watch.readable()
    found = [watch.unreadable("x") for _ in range(UNREADABLE_IN_ROW + 1)]
    assert [each is not None for each in found] == [False, False, True, False]
    assert found[2] is not None
    assert found[2].doubt is Doubt.QUARANTINED


@pytest.mark.parametrize(
    ("times", "wall", "reasons"),
    [
        ([1e9, 1e9 + 3600, 1e9 + 3597], None, []),
        ([1e9, 1e9 - 6], None, ["time_back"]),
        ([math.nan, math.inf], None, ["time_far", "time_far"]),
        ([1e9], 1e9 + 3700, ["time_far"]),
        ([1e9], 1e9 + 3500, []),
        ([1e12], None, ["time_unit"]),
    ],
)
def test_a_batchs_time_is_told_where_it_can_not_be(
    times: list[float], wall: float | None, reasons: list[str]
) -> None:
    watch = BatchTimes()
    found = [each for each in (watch.batch(time, wall) for time in times) if each]
    assert [each.reason for each in found] == reasons
    grave = [each.doubt for each in found if each.doubt]
    assert grave == ([Doubt.QUARANTINED] if reasons == ["time_unit"] else [])


def share() -> Share:
    return Share("orphans_many", "blocks", 0.01, 10, Doubt.QUARANTINED)


def test_too_many_failures_ask_for_the_history_first_and_then_count() -> None:
    watch = share()
    first = watch.seen(WINDOW, 11)
    assert first is not None
    assert (first.resync, first.doubt) == (True, Doubt.INCOMPLETE)
    second = watch.seen(WINDOW, 11)
    assert second is not None
    assert (second.resync, second.doubt) == (False, Doubt.QUARANTINED)


@pytest.mark.parametrize(("count", "failed"), [(WINDOW - 1, 500), (WINDOW, 9), (WINDOW * 10, 100)])
def test_few_failures_are_none(count: int, failed: int) -> None:
    assert share().seen(count, failed) is None


def test_each_window_begins_anew() -> None:
    watch = share()
    assert watch.seen(WINDOW, 6) is None
    assert watch.seen(WINDOW, 6) is None


def test_more_than_fits_means_that_removals_are_missing() -> None:
    watch = Turnover()
    assert watch.held(1050, 1000, "blocks") is None
    assert watch.held(10**6, 0, "blocks") is None, "the engine does not say what fits"
    first = watch.held(1051, 1000, "blocks")
    assert first is not None
    assert (first.reason, first.resync) == ("over_capacity", True)
    second = watch.held(1051, 1000, "blocks")
    assert second is not None
    assert second.doubt is Doubt.AMBIGUOUS


def turned_over(watch: Turnover, begin: float, end: float) -> list[object]:
    """The cache fills up and empties between these times, and stores are announced."""
    found: list[object] = []
    step = (end - begin) / CYCLES
    for cycle in range(CYCLES):
        watch.stored(begin + cycle * step)
        found.append(watch.usage(0.95, begin + cycle * step))
        found.append(watch.usage(0.3, begin + (cycle + 1) * step))
    return [each for each in found if each is not None]


def test_a_cache_that_turns_over_for_an_hour_without_a_removal_is_an_upper_bound() -> None:
    assert len(turned_over(Turnover(), 0.0, REMOVAL_SILENCE_S)) == 1
    assert turned_over(Turnover(), 0.0, REMOVAL_SILENCE_S - 1) == []


def test_a_removal_ends_the_suspicion() -> None:
    watch = Turnover()
    watch.stored(0.0)
    watch.removed()
    assert turned_over(watch, 1800.0, REMOVAL_SILENCE_S) == []


def silent(watch: Silence, requests: int, tokens: int, unit: int, seconds: float) -> bool:
    assert watch.progress(0, 0, unit, 0.0) is None
    found = watch.progress(requests, tokens, unit, seconds)
    return found is not None and found.doubt is Doubt.UNTRUSTED


def test_an_engine_that_computes_and_announces_nothing_is_not_believed() -> None:
    assert silent(Silence(), SILENCE_REQUESTS, SILENCE_REQUESTS * 40, UNIT, SILENCE_S)


@pytest.mark.parametrize(
    ("requests", "tokens", "seconds"),
    [
        (SILENCE_REQUESTS - 1, 10_000, SILENCE_S),
        (SILENCE_REQUESTS, SILENCE_REQUESTS * 31, SILENCE_S),
        (SILENCE_REQUESTS, 10_000, SILENCE_S - 1),
    ],
)
def test_an_engine_with_nothing_to_announce_may_be_silent(
    requests: int, tokens: int, seconds: float
) -> None:
    assert not silent(Silence(), requests, tokens, UNIT, seconds)


def test_an_event_and_a_restarted_counter_begin_the_silence_anew() -> None:
    watch = Silence()
    watch.progress(0, 0, UNIT, 0.0)
    watch.heard()
    assert watch.progress(100, 10_000, UNIT, SILENCE_S) is None
    assert watch.progress(5, 500, UNIT, SILENCE_S + 1) is None
    assert watch.progress(100, 10_000, UNIT, SILENCE_S + 2) is None


def outcomes(watch: Feedback, predicted: int, reported: int, count: int) -> list[str]:
    found = (watch.outcome(predicted, reported, UNIT) for _ in range(count))
    return [each.reason for each in found if each is not None]


def test_predictions_that_come_true_are_agreement() -> None:
    watch = Feedback()
    assert outcomes(watch, 160, 144, 40) == []
    assert watch.agrees


def test_predictions_that_are_off_open_what_is_possible() -> None:
    assert set(outcomes(Feedback(), 0, 480, OUTCOMES_LEAST)) == {"feedback_off"}
    assert set(outcomes(Feedback(), 480, 240, OUTCOMES_LEAST)) == {"feedback_off"}


def test_predictions_of_what_is_computed_whole_stop_the_stream() -> None:
    found = outcomes(Feedback(), 480, 0, OUTCOMES_LEAST)
    assert set(found) == {"feedback_wrong"}


def test_a_few_outcomes_and_cold_prompts_say_nothing() -> None:
    assert outcomes(Feedback(), 480, 0, OUTCOMES_LEAST - 1) == []
    assert outcomes(Feedback(), 0, 0, 100) == []
