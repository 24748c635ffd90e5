"""The processes of a cluster of our own: started apart from us, and found again by a later command.

Only processes recorded here are ever signalled, and only while pid, start time and boot are those of the record: a pid
that the kernel has given to somebody else in the meantime is left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STOP_PATIENCE_S = 10.0
POLL_S = 0.05


class DaemonFailed(RuntimeError):
    """A process ended, or did not come up: the text holds the end of its log."""


@dataclass(frozen=True)
class Daemons:
    """The processes recorded in one folder: `pids/NAME.json`, `logs/NAME.log`."""

    folder: Path

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts it, unless it runs. `environment` is added to ours."""
        if self.running(name):
            return
        log = self.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        # Not subprocess: it would have us keep an object for each child, and complain of those that outlive us.
        settings = {**os.environ, **(environment or {})}
        # A session of its own: neither Ctrl-C nor the end of our terminal reaches it.
        pid = os.posix_spawnp(
            command[0],
            list(command),
            settings,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        record = {
            "pid": pid,
            "started": _started(pid),
            "boot": _boot(),
            "command": list(command),
            "environment": dict(environment or {}),
        }
        file = self._record(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record))

    def restart(self, name: str) -> None:
        """Starts it again as it was started last."""
        record = json.loads(self._record(name).read_text())
        self.start(name, record["command"], record["environment"])

    def running(self, name: str) -> bool:
        return self._pid(name) is not None

    def stop(self, name: str) -> None:
        """Asks it to end, kills it if it does not, and waits. Nothing if it does not run."""
        pid = self._pid(name)
        if pid is None:
            return
        os.kill(pid, signal.SIGCONT)  # a frozen process would never see the request
        os.kill(pid, signal.SIGTERM)
        if not self._gone(name, STOP_PATIENCE_S):
            self.kill(name)

    def kill(self, name: str) -> None:
        """Ends it without a word, and waits."""
        self._signal(name, signal.SIGKILL)
        self._gone(name, STOP_PATIENCE_S)

    def freeze(self, name: str) -> None:
        """Its connections stay open, and nobody answers."""
        self._signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._signal(name, signal.SIGCONT)

    def names(self) -> list[str]:
        """All that were started, in order of their first start."""
        files = (self.folder / "pids").glob("*.json")
        return [file.stem for file in sorted(files, key=lambda file: file.stat().st_ctime_ns)]

    def check(self, name: str) -> None:
        """Raises DaemonFailed if it does not run."""
        if not self.running(name):
            raise DaemonFailed(f"{name} has ended. The end of {self.log(name)}:\n{self.tail(name)}")

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def tail(self, name: str, lines: int = 15) -> str:
        """The end of its log."""
        log = self.log(name)
        text = log.read_text(errors="replace") if log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def _record(self, name: str) -> Path:
        return self.folder / "pids" / f"{name}.json"

    def _pid(self, name: str) -> int | None:
        """None where it does not run, or its pid is somebody else's now."""
        try:
            record = json.loads(self._record(name).read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        pid = int(record["pid"])
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # reaps it, if it has ended and this process started it
        same = record["boot"] == _boot() and record["started"] == _started(pid)
        return pid if same and record["started"] is not None else None

    def _signal(self, name: str, number: signal.Signals) -> None:
        pid = self._pid(name)
        if pid is None:
            raise DaemonFailed(f"{name} does not run, so it can't get {number.name}")
        os.kill(pid, number)

    def _gone(self, name: str, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while self.running(name):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _started(pid: int) -> str | None:
    """Start time in ticks since boot; None where no such process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything, so count from its end.
    state, *rest = stat.rpartition(")")[2].split()
    # While another thread is still ending, the ports of a killed process are still taken.
    return None if state in "ZX" and len(threads) < 2 else rest[18]
