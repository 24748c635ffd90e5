"""A branch of the machine's cgroups, of either version."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
EMPTY_PATIENCE_S = 10.0
POLL_S = 0.05


@dataclass(frozen=True)
class Cgroups:
    """The branch `name`, under the root of each hierarchy."""

    name: str

    def make(self) -> None:
        """The kubelet wants its root to be there. It makes what lies below."""
        for hierarchy in _hierarchies():
            branch = hierarchy / self.name
            branch.mkdir(exist_ok=True)
            # Version 1 gives a new cpuset nothing, and nothing can run in it.
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (branch / file).exists() and not (branch / file).read_text().strip():
                    (branch / file).write_text((hierarchy / file).read_text())

    def remove(self) -> None:
        """Kills what runs in it, and removes it. Raises OSError where processes stay."""
        deadline = time.monotonic() + EMPTY_PATIENCE_S
        while pids := set(self._pids()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        for hierarchy in _hierarchies():
            for folder, _, _ in os.walk(hierarchy / self.name, topdown=False):
                os.rmdir(folder)

    def _pids(self) -> Iterator[int]:
        for hierarchy in _hierarchies():
            for file in (hierarchy / self.name).rglob("cgroup.procs"):
                with contextlib.suppress(OSError):
                    yield from map(int, file.read_text().split())


def _hierarchies() -> list[Path]:
    """One with version 2; one for each controller, and that of version 2, with version 1."""
    if (ROOT / "cgroup.controllers").exists():
        return [ROOT]
    return [folder for folder in sorted(ROOT.iterdir()) if (folder / "cgroup.procs").exists()]
