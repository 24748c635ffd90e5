"""Thousands of short schedules of a whole fleet, each its seed's alone: `docs/simulation.md`."""

from __future__ import annotations

import os

import pytest

from servingfleet_sim.simulation.script import Kind, draw
from servingfleet_sim.simulation.shrinking import run, shrink
from servingfleet_sim.simulation.world import World

SCHEDULES = int(os.environ.get("SERVINGFLEET_SIMULATED_SCHEDULES", "2000"))
FIRST = int(os.environ.get("SERVINGFLEET_SIMULATED_FIRST_SEED", "0"))


def test_whatever_happens_the_index_comes_to_equal_the_engines_caches() -> None:
    tally = run(range(FIRST, FIRST + SCHEDULES))
    if tally.failures:
        pytest.fail(str(shrink(tally.failures[0])), pytrace=False)
    if SCHEDULES < 500:
        return
    # That nothing failed says something only if things happened.
    assert all(tally.counts[kind] for kind in Kind)
    assert tally.states.keys() == {"live", "history_lost"}
    assert tally.states["live"] > tally.states["history_lost"]
    assert tally.counts["predictions held to the truth"] > tally.counts["predictions"] / 3
    assert tally.counts["tokens predicted"] > tally.counts["predictions"]
    assert tally.counts["tokens reused"] > tally.counts["requests executed"]


def test_a_seed_does_the_same_each_time() -> None:
    for seed in range(8):
        traces = []
        for _ in range(2):
            world = World(draw(seed), trace=True)
            world.run()
            traces.append(world.report.trace)
        assert traces[0] == traces[1]
