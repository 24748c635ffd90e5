"""Runs schedules by their seeds, and cuts a failing one down to what it takes to fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from .clock import Restless
from .script import Script, Step, draw
from .violations import Violation
from .world import World

MAX_RUNS = 400
"""Of a failing script's smaller versions."""


@dataclass(frozen=True)
class Failure:
    """A script that breaks an invariant."""

    script: Script
    violation: Violation
    runs: int = 0
    """Runs that it took to cut it down."""

    def __str__(self) -> str:
        world = World(self.script, trace=True)
        with suppress(Violation, Restless):
            world.run()
        happened = "\n".join(f"  {line}" for line in world.report.trace)
        return (
            f"{self.violation}\n\nThe smallest script found ({self.runs} runs), seed "
            f"{self.script.seed}:\n\n{self.script}\n\nWhat happened:\n\n{happened}"
        )


@dataclass
class Tally:
    """What many schedules came to."""

    schedules: int = 0
    states: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


def failure_of(script: Script) -> Failure | None:
    """None: every invariant held."""
    try:
        World(script).run()
    except Violation as violation:
        return Failure(script, violation)
    except Restless as restless:
        return Failure(script, Violation("comes to rest", str(restless)))
    return None


def run(seeds: Iterable[int], *, max_failures: int = 1) -> Tally:
    """Runs the script of each seed, until so many have failed."""
    tally = Tally()
    for seed in seeds:
        script = draw(seed)
        world = World(script)
        tally.schedules += 1
        try:
            report = world.run()
        except (Violation, Restless):
            failure = failure_of(script)
            assert failure is not None, f"seed {seed} failed once and not twice"
            tally.failures.append(failure)
            if len(tally.failures) >= max_failures:
                break
        else:
            tally.states.update(report.states)
            tally.counts.update(report.counts)
    return tally


def shrink(failure: Failure, max_runs: int = MAX_RUNS) -> Failure:
    """The smallest script found that breaks the same invariant: fewer steps, then tamer ones, fewer engines."""
    best = failure
    runs = 0

    def better(candidate: Script) -> bool:
        nonlocal best, runs
        if runs >= max_runs:
            return False
        runs += 1
        found = failure_of(candidate)
        if found is None or found.violation.invariant != failure.violation.invariant:
            return False
        best = found
        return True

    _fewer_kinds(lambda: best.script, better)
    before = None
    while before != best.script and runs < max_runs:
        before = best.script
        _fewer_steps(lambda: best.script, better)
        for candidate in _tamer(best.script):
            better(candidate)
    return replace(best, runs=runs)


def _fewer_kinds(script: Callable[[], Script], better: Callable[[Script], bool]) -> None:
    for kind in sorted({step.kind for step in script().steps}):
        now = script()
        better(replace(now, steps=tuple(step for step in now.steps if step.kind != kind)))


def _fewer_steps(script: Callable[[], Script], better: Callable[[Script], bool]) -> None:
    count = max(1, len(script().steps) // 2)
    while count:
        start = 0
        while start < len(script().steps):
            if not better(script().without(start, start + count)):
                start += count
        count //= 2


def _tamer(script: Script) -> Iterator[Script]:
    used = max((step.engine for step in script.steps), default=0)
    if used + 1 < len(script.engines):
        yield replace(script, engines=script.engines[: used + 1])
    for number, step in enumerate(script.steps):
        for tame in (replace(step, outputs=1), replace(step, flag=False), replace(step, amount=1)):
            if tame != step:
                steps: tuple[Step, ...] = (
                    *script.steps[:number],
                    tame,
                    *script.steps[number + 1 :],
                )
                yield replace(script, steps=steps)
