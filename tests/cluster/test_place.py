"""Who may use a cluster of our own, and who clears it away: no cluster needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import own, place
from tests.cluster.place import InUse

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal
from tests.cluster import place
from tests.cluster.daemons import Daemons
with place.private("cp") as made:
    Daemons(made.folder).start("sleeper", ["sleep", "600"])
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_named_cluster_is_found_again_as_it_was() -> None:
    assert place.named("cp", "dev") == place.named("cp", "dev")
    assert place.named("cp", "dev").ports != place.named("cp", "other").ports


def test_a_cluster_in_use_is_not_to_be_had() -> None:
    made = place.named("cp", "dev")
    with (
        place.held(made),
        pytest.raises(InUse, match="SERVINGFLEET_CLUSTER_NAME"),
        place.held(made),
    ):
        pass
    with place.held(made):
        pass


def test_what_a_killed_run_left_is_ended_and_what_others_use_is_not() -> None:
    said: list[str] = []
    kept = place.named("cp", "dev")
    with place.private("cp") as used:
        ran = subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, check=False)
        assert ran.returncode == -signal.SIGKILL
        [left] = [each for each in place.known() if each not in (used, kept)]
        own.sweep(said.append)
        assert place.known() == sorted([used, kept], key=lambda each: each.folder)
    assert left.name in said[0]
    assert not [pid for pid in os.listdir("/proc") if _names(pid, str(left.folder))]


def _names(pid: str, folder: str) -> bool:
    try:
        links = os.listdir(f"/proc/{pid}/fd") if pid.isdigit() else []
        return any(os.readlink(f"/proc/{pid}/fd/{link}").startswith(folder) for link in links)
    except OSError:
        return False
