"""Fixtures of the tests that need a real engine: skipped unless SERVINGFLEET_ENGINE is set."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from .client import Account
from .environment import Environment, Say, prepare, prepare_sglang

SWITCH = "SERVINGFLEET_ENGINE"
HERE = Path(__file__).parent
ACCOUNT = pytest.StashKey[Account]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ACCOUNT] = Account()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(SWITCH, "") in ("", "0"):
        skip = pytest.mark.skip(
            reason=f"needs a real engine: set {SWITCH}=1 (installs vLLM, 6 GB; make test-engine)"
        )
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(skip)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    account = config.stash[ACCOUNT]
    if account.verdicts:
        terminalreporter.section("predicted against what the engine reported, requests")
        for row in account.rows():
            terminalreporter.write_line(row)


@pytest.fixture(scope="session")
def account(pytestconfig: pytest.Config) -> Account:
    return pytestconfig.stash[ACCOUNT]


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Say:
    """Writes a line on the terminal, whatever is captured."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    reporter = pytestconfig.pluginmanager.getplugin("terminalreporter")

    def write(line: str) -> None:
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            reporter.write_line(f"\n{line}")

    return write


@pytest.fixture(scope="session")
def environment(say: Say) -> Environment:
    """The engine's own environment; says on the terminal what it does."""
    return prepare(say)


@pytest.fixture(scope="session")
def sglang(say: Say, environment: Environment) -> Path:
    """The folder that SGLang lies in."""
    return prepare_sglang(say, environment)
