"""Tests of `servingfleet_sim.replay.generator`."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from statistics import fmean, pvariance

import pytest

from servingfleet_sim.replay.ceilings import endless
from servingfleet_sim.replay.generator import Load, generate
from servingfleet_sim.replay.traces import Request
from tests.recordings import ROOT

LOAD = Load(conversations=400, turns=4.0)


def test_the_same_seed_makes_the_same_load_and_another_seed_another() -> None:
    def seen(seed: int) -> list[tuple[float, int, int, bytes]]:
        requests = generate(LOAD, seed).requests
        return [(r.at, r.prompt_tokens, r.output_tokens, r.blocks.packed()) for r in requests]

    assert seen(1) == seen(1)
    assert seen(1) != seen(2)


def test_each_turn_begins_with_all_that_was_said_before() -> None:
    trace = generate(LOAD, 1)
    by_session: dict[str, list[bytes]] = {}
    for each in trace.requests:
        hashes = each.blocks.packed()
        assert len(hashes) // 8 == each.prompt_tokens // trace.block_tokens
        by_session.setdefault(each.session, []).append(hashes)
    assert len(by_session) == 400
    for turns in by_session.values():
        assert all(later.startswith(earlier) for earlier, later in pairwise(turns))


def test_turns_that_do_not_wait_for_answers_leave_time_for_them() -> None:
    by_session: dict[str, list[Request]] = {}
    for each in generate(LOAD, 1).requests:
        by_session.setdefault(each.session, []).append(each)
    for turns in by_session.values():
        for before, after in pairwise(turns):
            assert after.at == pytest.approx(before.at + LOAD.answer_s + after.think_s)


def test_conversations_share_system_prompts_and_nothing_else() -> None:
    trace = generate(Load(conversations=100, turns=1.0, prompts=2, spread=0.0), 1)
    firsts = {each.blocks.packed()[:8] for each in trace.requests}
    assert len(firsts) == 2
    hits = endless(trace.requests)
    # 2,000 tokens are 31 full blocks; the first with each prompt finds none.
    assert sorted(hits) == [0, 0, *[31] * 98]


def test_lengths_turns_and_beginnings_are_as_wanted_on_average() -> None:
    load = replace(LOAD, conversations=3000, starts_per_s=2.0, burstiness=4.0, think_s=7.0)
    trace = generate(load, 3)
    assert len(trace.requests) / 3000 == pytest.approx(4.0, rel=0.05)
    assert fmean(each.output_tokens for each in trace.requests) == pytest.approx(250, rel=0.05)
    later = [each.think_s for each in trace.requests if each.think_s]
    assert fmean(later) == pytest.approx(7.0, rel=0.05)
    starts: dict[str, float] = {}
    for each in trace.requests:
        starts.setdefault(each.session, each.at)
    gaps = [b - a for a, b in pairwise(starts.values())]
    assert fmean(gaps) == pytest.approx(0.5, rel=0.1)
    assert pvariance(gaps) / fmean(gaps) ** 2 == pytest.approx(4.0, rel=0.2)


def test_the_documentation_names_every_key_and_its_default() -> None:
    text = (ROOT / "docs" / "replay.md").read_text()
    table = text[text.index("Made-up load") : text.index("## The fleet file")]
    for field in fields(Load):
        assert f"`{field.name}`" in table
        default = "none" if field.name == "target_s" else f"{field.default:g}"
        assert default in table


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (Load(conversations=0), "conversations is 0; expected at least 1"),
        (Load(turns=0.5), "turns is 0.5; expected at least 1"),
        (Load(starts_per_s=0.0), "starts_per_s is 0.0; expected above 0"),
        (Load(think_s=-1.0), "think_s is -1.0; expected 0 or more"),
    ],
)
def test_a_load_that_cannot_be_is_refused_by_name(load: Load, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        generate(load, 1)
