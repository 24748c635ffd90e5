from __future__ import annotations

import pytest

from servingfleet_scheduler.labels import MAX_OPEN, PATIENCE_S, STARTING_LABELS, Labels, Sent

STEP_S = 0.01


def warm() -> Labels:
    """Past an engine's start."""
    labels = Labels()
    for number in range(STARTING_LABELS):
        run(labels, f"start {number}", -10.0 + number, -9.9 + number)
        labels.take(STEP_S)
    return labels


def send(labels: Labels, name: str, at: float, prompt: int = 1000) -> None:
    labels.sent(name, Sent(at, prompt, (0, 0, 0, 0)))


def run(labels: Labels, name: str, at: float, first: float, cached: int | None = 0) -> None:
    send(labels, name, at)
    labels.first_token(name, first)
    labels.ended(name, first + 1.0, cached)


def taken(labels: Labels) -> list[tuple[float, int]]:
    """Seconds and members of each group, rounded."""
    return [(round(each.seconds, 6), len(each.members)) for each in labels.take(STEP_S)]


def test_a_request_alone_took_from_its_dispatch_to_its_first_token() -> None:
    labels = warm()
    run(labels, "a", 1.0, 1.2)
    assert taken(labels) == [(0.2, 1)]


def test_a_request_that_waited_took_from_the_first_token_before_its_own() -> None:
    labels = warm()
    send(labels, "a", 1.0)
    send(labels, "b", 1.05)
    labels.first_token("a", 1.2)
    labels.first_token("b", 1.5)
    labels.ended("a", 2.0, 0)
    labels.ended("b", 2.0, 0)
    assert taken(labels) == [(0.2, 1), (0.3, 1)]


def test_first_tokens_of_one_step_are_one_observation() -> None:
    labels = warm()
    send(labels, "a", 1.0)
    send(labels, "b", 1.05)
    labels.first_token("a", 1.300)
    labels.first_token("b", 1.304)
    labels.ended("a", 2.0, 0)
    labels.ended("b", 2.0, 0)
    assert taken(labels) == [(0.304, 2)]


def test_a_group_waits_for_those_that_may_belong_to_it() -> None:
    labels = warm()
    send(labels, "a", 1.0)
    send(labels, "b", 1.05)
    labels.first_token("a", 1.2)
    labels.ended("a", 1.3, 0)
    assert taken(labels) == []
    labels.first_token("b", 1.203)
    labels.ended("b", 1.4, 0)
    assert taken(labels) == [(0.203, 2)]


def test_a_group_waits_for_the_counts_of_its_members() -> None:
    labels = warm()
    send(labels, "a", 1.0)
    labels.first_token("a", 1.2)
    assert taken(labels) == []
    labels.ended("a", 9.0, 0)
    assert taken(labels) == [(0.2, 1)]


def test_first_tokens_may_be_told_in_any_order() -> None:
    labels = warm()
    for name, at in (("a", 1.0), ("b", 1.05), ("c", 1.1)):
        send(labels, name, at)
    for name, first in (("c", 1.6), ("a", 1.2), ("b", 1.3)):
        labels.first_token(name, first)
        labels.ended(name, 2.0, 0)
    assert taken(labels) == [(0.2, 1), (0.1, 1), (0.3, 1)]


def test_a_request_that_failed_spoils_what_ran_beside_it_only() -> None:
    labels = warm()
    send(labels, "fails", 1.0)
    send(labels, "a", 1.1)
    labels.lost("fails", 1.2)
    labels.first_token("a", 1.5)
    labels.ended("a", 2.0, 0)
    run(labels, "b", 3.0, 3.2)
    assert taken(labels) == [(0.2, 1)]


def test_a_request_that_ended_without_counts_is_no_label_but_an_end_of_the_one_before() -> None:
    labels = warm()
    run(labels, "a", 1.0, 1.2, cached=None)
    run(labels, "b", 1.1, 1.5)
    assert taken(labels) == [(0.3, 1)]


def test_a_request_without_first_token_is_no_label() -> None:
    labels = warm()
    send(labels, "a", 1.0)
    labels.ended("a", 2.0, 0)
    assert taken(labels) == []


def test_a_first_token_that_memory_held_up_is_no_label() -> None:
    labels = warm()
    send(labels, "a", 1.0)
    labels.first_token("a", 4.0, clear=False)
    labels.ended("a", 5.0, 0)
    run(labels, "b", 3.0, 4.2)
    assert taken(labels) == [(0.2, 1)]


def test_the_first_requests_of_an_engine_are_no_labels() -> None:
    labels = Labels()
    for number in range(STARTING_LABELS + 1):
        run(labels, str(number), float(number), number + 0.5)
    assert taken(labels) == [(0.5, 1)]


def test_a_new_life_of_the_engine_begins_anew() -> None:
    labels = warm()
    send(labels, "old", 1.0)
    labels.restarted(2)
    run(labels, "new", 2.0, 2.1)
    assert taken(labels) == []
    labels.first_token("old", 3.0)
    run(labels, "starting", 4.0, 4.1)
    run(labels, "starting, too", 5.0, 5.1)
    run(labels, "started", 6.0, 6.1)
    assert taken(labels) == [(0.1, 1)]


def test_what_nobody_tells_of_is_forgotten_at_last() -> None:
    labels = warm()
    for number in range(3 * MAX_OPEN):
        send(labels, f"silent {number}", 1.0)
    for number in range(MAX_OPEN):
        labels.first_token(f"silent {3 * MAX_OPEN - 1 - number}", 2.0 + number)
    for number in range(MAX_OPEN):
        run(labels, f"told {number}", 10_000.0 + number, 10_000.5 + number)
    assert len(taken(labels)) == MAX_OPEN
    assert not labels.take(STEP_S)


def test_what_others_send_is_computed_too() -> None:
    labels = warm()
    labels.peer_sent("peer", 1.0, 3000, 1000, 0)
    send(labels, "a", 1.0)
    assert taken(labels) == []
    labels.peer_first("peer", 1.5)
    labels.first_token("a", 1.7)
    labels.ended("a", 2.0, 0)
    # The peer's alone is no label, and the own one's time begins with its end.
    assert taken(labels) == [(0.2, 1)]


def test_others_prompts_of_the_same_step_count_as_predicted() -> None:
    labels = warm()
    labels.peer_sent("peer", 1.0, 3000, 1000, 0)
    send(labels, "a", 1.0)
    labels.first_token("a", 1.7)
    labels.peer_first("peer", 1.704)
    labels.ended("a", 2.0, 0)
    (group,) = labels.take(STEP_S)
    assert round(group.seconds, 6) == 0.7
    assert sorted((each.prompt, each.cached) for each in group.members) == [(1000, 0), (3000, 1000)]


def test_others_first_tokens_are_bounded_where_nothing_is_sent_from_here() -> None:
    labels = warm()
    for number in range(5 * MAX_OPEN):
        labels.peer_sent(str(number), float(number), 100, 0, 0)
        labels.peer_first(str(number), number + 0.5)
    assert len(labels._firsts) <= 2 * MAX_OPEN
    assert not labels._begun
    assert not labels._waiting


@pytest.mark.parametrize("own", [True, False])
def test_a_request_of_which_nobody_tells_costs_one_observation_and_no_more(own: bool) -> None:
    labels = warm()
    labels.sent("forgotten", Sent(1.0, 1000, (0, 0, 0, 0), own=own))
    run(labels, "slower for it", 1.1, 1.9)
    found: list[tuple[float, int]] = []
    for second in range(2, 300):
        assert not found or second > PATIENCE_S
        run(labels, str(second), float(second), second + 0.2)
        found += taken(labels)
    assert found == [(0.2, 1)] * 298


def test_a_long_queue_is_no_reason_to_give_up() -> None:
    labels = warm()
    for second in range(300):
        send(labels, str(second), float(second))
    for second in range(300):
        labels.first_token(str(second), 1000.0 + second)
        labels.ended(str(second), 2000.0, 0)
    assert len(taken(labels)) == 300


@pytest.mark.parametrize("aborted", [True, False], ids=["aborted at once", "told at its end only"])
def test_what_is_unclear_spoils_only_what_ran_beside_it(aborted: bool) -> None:
    labels = warm()
    for second in range(20):
        send(labels, str(second), float(second))
        labels.first_token(str(second), second + 0.2)
    send(labels, "unclear", 10.5)
    if aborted:
        labels.lost("unclear", 10.6)
    else:
        labels.ended("unclear", 30.0, 0)
    for second in range(20):
        labels.ended(str(second), 40.0, 0)
    # The next first token may have waited for it.
    assert taken(labels) == [(0.2, 1)] * (20 if aborted else 19)


def test_what_is_unclear_is_remembered_within_bounds() -> None:
    labels = warm()
    send(labels, "first", 0.0)
    for second in range(10 * MAX_OPEN):
        labels.unclear(float(second), second + 0.5)
    labels.first_token("first", 0.2)
    labels.ended("first", 1.0, 0)
    assert taken(labels) == []
    assert len(labels._unclear) <= MAX_OPEN
