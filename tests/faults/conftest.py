"""Fixtures of the fault tests, and their table of recovery times."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.rig import Rig
from tests.integration.fleet import fleet_in

Times = list[tuple[str, str, float | None]]
TIMES = pytest.StashKey[Times]()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Starts what a test breaks, and ends it."""
    async with fleet_in(tmp_path) as fleet:
        yield Rig(fleet)


class Stopwatch:
    """Recovery times of one test. Shown at the end, asserted nowhere: they depend on the machine."""

    def __init__(self, test: str, times: Times) -> None:
        self._test = test
        self._times = times

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """How long the block takes, if it ends well."""
        begun = time.perf_counter()
        yield
        self._times.append((self._test, what, time.perf_counter() - begun))

    def note(self, what: str) -> None:
        """Something else to be shown there."""
        self._times.append((self._test, what, None))


@pytest.fixture
def stopwatch(request: pytest.FixtureRequest) -> Stopwatch:
    return Stopwatch(request.node.name, request.config.stash.setdefault(TIMES, []))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    times = config.stash.get(TIMES, [])
    if times:
        terminalreporter.section("recovery times")
    for test, what, seconds in times:
        shown = " " * 10 if seconds is None else f"{seconds:8.2f} s"
        terminalreporter.write_line(f"{shown}  {what}  ({test})")
