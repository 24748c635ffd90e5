"""Processes apart from us are found again, and nobody else's are touched: no cluster needed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import until
from tests.cluster.daemons import DaemonFailed, Daemons


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    made = Daemons(tmp_path)
    yield made
    for name in made.names():
        if made.running(name):
            made.kill(name)


def pid(daemons: Daemons, name: str) -> int:
    return int(json.loads((daemons.folder / "pids" / f"{name}.json").read_text())["pid"])


def test_another_command_finds_what_was_started(daemons: Daemons) -> None:
    daemons.start("sleeper", ["sleep", "600"])
    again = Daemons(daemons.folder)
    assert again.running("sleeper")
    again.stop("sleeper")
    assert not daemons.running("sleeper")


def test_a_frozen_process_can_be_stopped(daemons: Daemons) -> None:
    daemons.start("sleeper", ["sleep", "600"])
    daemons.freeze("sleeper")
    daemons.stop("sleeper")
    assert not daemons.running("sleeper")


def test_a_process_that_ignores_the_request_is_killed(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cluster.daemons.STOP_PATIENCE_S", 0.2)
    daemons.start("stubborn", ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"])
    until(lambda: "ready" in daemons.tail("stubborn"), "its first line")
    daemons.stop("stubborn")
    assert not daemons.running("stubborn")


def test_a_pid_that_belongs_to_another_process_by_now_is_left_alone(daemons: Daemons) -> None:
    daemons.start("sleeper", ["sleep", "600"])
    number = pid(daemons, "sleeper")
    record = daemons.folder / "pids" / "sleeper.json"
    original = record.read_text()
    record.write_text(json.dumps({**json.loads(original), "started": "1"}))
    assert not daemons.running("sleeper")
    daemons.stop("sleeper")
    with pytest.raises(DaemonFailed):
        daemons.kill("sleeper")
    os.kill(number, 0)  # still there
    record.write_text(original)


def test_the_end_of_a_process_is_told_with_the_end_of_its_log(daemons: Daemons) -> None:
    daemons.start("brief", ["sh", "-c", "echo no such disk >&2; exit 3"])
    until(lambda: not daemons.running("brief"), "its end")
    with pytest.raises(DaemonFailed, match="no such disk"):
        daemons.check("brief")


def test_a_process_is_started_again_as_it_was(daemons: Daemons) -> None:
    daemons.start("teller", ["sh", "-c", "echo told $WORD; sleep 600"], {"WORD": "twice"})
    until(lambda: "told twice" in daemons.tail("teller"), "its line")
    daemons.kill("teller")
    daemons.restart("teller")
    until(lambda: daemons.tail("teller").count("told twice") == 2, "two lines")


def test_a_terminal_s_interrupt_does_not_reach_it(daemons: Daemons) -> None:
    daemons.start("sleeper", ["sleep", "600"])
    assert os.getpgid(pid(daemons, "sleeper")) != os.getpgid(0)
