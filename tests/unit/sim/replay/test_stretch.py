"""Tests of `servingfleet_sim.replay.stretch`: the closed form against the emulator's own steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from servingfleet_sim.emulator.sequence import Sequence
from servingfleet_sim.emulator.speed import GPUS, INSTANT, Speed
from servingfleet_sim.emulator.steps import Work
from servingfleet_sim.replay.stretch import Stretch

SPEEDS = st.sampled_from([*GPUS.values(), Speed(0.001, 0.03, 1e-4, 1e-5, 1e-7)])
CONTEXTS = st.lists(st.integers(1, 5000), min_size=1, max_size=5)


def step_by_step(speed: Speed, contexts: list[int], steps: int) -> list[float]:
    """Seconds until each step has ended, by the emulator."""
    ended, at = [], 0.0
    for step in range(steps):
        at += speed.step(
            Work(cast(Sequence, SimpleNamespace(prompt_tokens=0)), 1, context + step)
            for context in contexts
        )
        ended.append(at)
    return ended


@given(SPEEDS, CONTEXTS, st.integers(1, 60))
# Reading the weights takes longer for 40 steps, computing for the others.
@example(Speed(0.001, 0.03, 1e-4, 1e-5, 1e-7), [2950], 60)
def test_takes_as_long_as_the_emulators_steps_one_by_one(
    speed: Speed, contexts: list[int], steps: int
) -> None:
    stretch = Stretch(speed, len(contexts), sum(contexts), steps)
    for number, seconds in enumerate(step_by_step(speed, contexts, steps), 1):
        assert stretch.after(number) == pytest.approx(seconds, rel=1e-9, abs=1e-12)


@given(SPEEDS.filter(lambda speed: speed != INSTANT), CONTEXTS, st.integers(1, 60), st.floats(0, 1))
def test_a_request_that_comes_between_waits_for_the_step_under_way(
    speed: Speed, contexts: list[int], steps: int, share: float
) -> None:
    stretch = Stretch(speed, len(contexts), sum(contexts), steps)
    seconds = share * stretch.seconds
    done = stretch.steps_by(seconds)
    assert 1 <= done <= steps
    assert stretch.after(done) >= seconds * (1 - 1e-12)
    assert done == 1 or stretch.after(done - 1) < seconds
    assert stretch.cut(done).seconds == stretch.after(done)
