"""The made-up workload: seeded, multi-turn, with shared beginnings."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from servingfleet_sim.workload import Session, Shape, sessions

SHAPE = Shape(seconds=100.0, system_tokens=(50, 90), user_tokens=(5, 20))


def test_the_same_seed_gives_the_same_conversations_and_another_others() -> None:
    first = list(sessions(SHAPE, 1))
    assert first == list(sessions(SHAPE, 1))
    assert first != list(sessions(SHAPE, 2))


def test_a_longer_run_begins_as_a_shorter_one() -> None:
    short = list(sessions(SHAPE, 1))
    long = list(sessions(replace(SHAPE, seconds=200.0), 1))
    for before, after in zip(short, long, strict=False):
        assert after.system == before.system
        assert after.turns[: len(before.turns)] == before.turns


def test_conversations_share_the_system_prompt_and_nothing_behind_it() -> None:
    by_system: dict[int, list[Session]] = {}
    for session in sessions(SHAPE, 1):
        by_system.setdefault(session.system, []).append(session)
    assert len(by_system) > 1
    starts = {system: group[0].turns[0].tokens[:50] for system, group in by_system.items()}
    assert len(set(starts.values())) == len(starts)
    for system, group in by_system.items():
        assert {session.turns[0].tokens[:50] for session in group} == {starts[system]}
        assert len({session.turns[0].tokens for session in group}) == len(group)


def test_turns_rise_in_time_and_none_is_due_after_the_end() -> None:
    for session in sessions(SHAPE, 3):
        times = [turn.at_s for turn in session.turns]
        assert times[0] >= 0
        assert times[-1] < SHAPE.seconds
        assert all(later - before >= 0.2 * SHAPE.think_s for before, later in pairwise(times))


def test_only_the_first_turn_holds_the_system_prompt() -> None:
    for session in sessions(SHAPE, 4):
        assert 55 <= len(session.turns[0].tokens) <= 110
        assert all(5 <= len(turn.tokens) <= 20 for turn in session.turns[1:])


def test_means_are_those_of_the_shape() -> None:
    shape = replace(SHAPE, seconds=2000.0)
    played = list(sessions(shape, 5))
    # Those that began early are not cut short by the end.
    early = [session for session in played if session.turns[0].at_s < 1800]
    assert abs(fmean(len(session.turns) for session in early) - shape.turns) < 0.3
    assert abs(len(played) / shape.seconds - shape.sessions_per_s) < 0.15
    gaps = [later.at_s - before.at_s for s in early for before, later in pairwise(s.turns)]
    assert abs(fmean(gaps) - shape.think_s) < 0.2


def test_models_have_their_shares_and_say_nothing_else() -> None:
    shape = replace(SHAPE, seconds=1000.0, models=(("a", 0.75), ("b", 0.25)))
    played = list(sessions(shape, 5))
    counts = Counter(session.model for session in played)
    assert abs(counts["b"] / len(played) - 0.25) < 0.05
    alone = sessions(replace(shape, models=SHAPE.models), 5)
    assert [session.turns for session in played] == [session.turns for session in alone]
    again = list(sessions(replace(shape, seconds=100.0), 5))
    assert [each.model for each in again] == [each.model for each in played[: len(again)]]


def test_the_first_system_prompt_is_the_most_popular() -> None:
    counts = Counter(session.system for session in sessions(replace(SHAPE, seconds=2000.0), 6))
    assert counts.most_common(1)[0][0] == 0
    assert counts[0] > 5 * counts[SHAPE.system_prompts - 1] > 0
