"""The supervisor of the relay: it outlives whatever its worker does to itself."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from servingfleet_sim.processes import Process
from tests.integration.fleet import Fleet

PATIENCE_S = 30.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the supervisor needs Linux")

SUPERVISOR = """
import ctypes, os, sys
from servingfleet_relay import logs
from servingfleet_relay.supervisor import Patience, Supervisor
ctypes.CDLL(None).prctl(36, 1)  # orphans come to it, as to a PID 1
logs.configure("info")
os.environ["SUPERVISOR"] = str(os.getpid())
worker, memory_mib, hang_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
patience = Patience(hang_s=hang_s, dump_s=0.5, stop_s=0.5, turn_s=0.2, first_s=0.05, most_s=0.2)
command = lambda beats: [sys.executable, "-c", worker, str(beats)]
sys.exit(Supervisor(command, memory_mib, patience).run())
"""

BEAT = """
import faulthandler, os, signal, sys, time
faulthandler.enable()
def beat(): os.write(int(sys.argv[1]), b".")
def live():
    while True:
        beat()
        time.sleep(0.05)
"""
ENDS = "raise SystemExit(0)"
FAILS = "raise SystemExit(1)"
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
IS_HUNGRY = BEAT + "held = []\nwhile True: held.append(bytearray(2**20)); beat()"
REFUSES = "raise SystemExit(2)"
LIVES = BEAT + "live()"
IS_DEAF = (
    BEAT
    + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(2, b"deaf\\n")
signal.pause()
"""
)
HANGS = BEAT + "def turn_in_circles():\n    while True: pass\nbeat()\nturn_in_circles()"
LEAVES_AN_ORPHAN = (
    BEAT
    + """
if not os.fork():
    if os.fork():
        os._exit(0)
    while os.getppid() != int(os.environ["SUPERVISOR"]):
        time.sleep(0.01)
    os.write(2, b"orphan\\n")
    os._exit(0)
os.wait()
live()
"""
)


class Supervised(Process):
    """A supervisor and what it logs."""

    async def until(
        self, reached: Callable[[list[dict[str, Any]]], bool], what: str
    ) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not reached(self.lines()):
                    assert self.child.returncode is None, self.log.read_text()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"never saw {what}:\n{self.log.read_text()}") from None
        return self.lines()

    async def events(self, name: str, count: int) -> list[dict[str, Any]]:
        """Waits for so many lines of an event."""
        lines = await self.until(lambda lines: len(named(lines, name)) >= count, f"{count} {name}")
        return named(lines, name)

    async def worker(self) -> int:
        """The process id of the newest worker."""
        return int((await self.events("worker started", 1))[-1]["pid"])


def named(lines: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("event") == event]


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def children(pid: int) -> list[str]:
    """State letter of each child of a process."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = status.read_text().rpartition(") ")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid:
            found.append(state)
    return found


def maps(pid: int) -> str:
    """Every file that a process has in its memory."""
    return Path(f"/proc/{pid}/maps").read_text()


class Start:
    """Starts supervisors of made-up workers, and ends them."""

    def __init__(self, logs: Path, stack: AsyncExitStack) -> None:
        self._log = logs / "supervisor.log"
        self._stack = stack

    async def __call__(
        self, worker: str, *, memory_mib: int = 0, hang_s: float = 30.0
    ) -> Supervised:
        with self._log.open("wb") as sink:
            arguments = ["-c", SUPERVISOR, worker, str(memory_mib), str(hang_s)]
            child = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, stdout=sink, stderr=sink
            )
        supervised = Supervised(child, "supervisor", self._log)
        self._stack.push_async_callback(supervised.stop)
        return supervised


@pytest.fixture
async def supervise(tmp_path: Path) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:
        yield Start(tmp_path, stack)


@pytest.mark.parametrize(
    ("worker", "status"),
    [(ENDS, 0), (FAILS, 1), (DIES, -9), (IS_HUNGRY, 1)],
    ids=["ends", "fails", "dies", "is hungry"],
)
async def test_a_worker_is_started_again_whatever_it_ended_of(
    supervise: Start, worker: str, status: int
) -> None:
    supervised = await supervise(worker, memory_mib=96)
    ended = await supervised.events("worker ended", 3)
    assert {line["status"] for line in ended} == {status}
    assert len({line["pid"] for line in ended}) >= 3
    if worker is IS_HUNGRY:
        assert all(64 < line["peak_mib"] <= line["memory_mib"] + 32 for line in ended)
    assert await supervised.stop() == 0


async def test_a_worker_that_refuses_its_options_is_tried_again_rarely(supervise: Start) -> None:
    supervised = await supervise(REFUSES)
    (refusal,) = await supervised.events("worker refuses its options", 1)
    assert refusal["restart_in_s"] >= 30.0
    assert "correct" in refusal["do"]
    assert await supervised.stop() == 0


async def test_a_worker_that_hangs_says_where_and_is_replaced(supervise: Start) -> None:
    supervised = await supervise(HANGS, hang_s=0.5)
    (first, *_) = await supervised.events("worker hangs", 1)
    assert first["silent_s"] >= 0.5
    assert (await supervised.events("worker ended", 1))[0]["status"] == -signal.SIGABRT
    await supervised.events("worker started", 2)
    assert "in turn_in_circles" in supervised.log.read_text()


async def test_a_worker_that_is_stopped_dead_is_replaced(supervise: Start) -> None:
    supervised = await supervise(LIVES, hang_s=2.0)
    worker = await supervised.worker()
    os.kill(worker, signal.SIGSTOP)
    assert (await supervised.events("worker ended", 1))[0]["status"] == -signal.SIGKILL
    await supervised.events("worker started", 2)


async def test_a_worker_that_does_not_end_is_killed_in_time(supervise: Start) -> None:
    supervised = await supervise(IS_DEAF)
    worker = await supervised.worker()
    await supervised.until(lambda lines: {"text": "deaf"} in lines, "a deaf worker")
    began = time.monotonic()
    assert await supervised.stop() == 0
    assert time.monotonic() - began < 2.0
    assert not alive(worker)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_worker_and_then_the_supervisor(
    supervise: Start, number: signal.Signals
) -> None:
    supervised = await supervise(LIVES)
    worker = await supervised.worker()
    supervised.child.send_signal(number)
    async with asyncio.timeout(PATIENCE_S):
        assert await supervised.child.wait() == 0
    assert not alive(worker)
    assert named(supervised.lines(), "supervisor stops")[0]["signal"] == number.name


async def test_no_worker_outlives_its_supervisor(supervise: Start) -> None:
    supervised = await supervise(IS_DEAF)
    worker = await supervised.worker()
    await supervised.until(lambda lines: {"text": "deaf"} in lines, "a deaf worker")
    supervised.child.kill()
    await supervised.child.wait()
    async with asyncio.timeout(PATIENCE_S):
        while alive(worker):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)


async def test_orphans_of_a_worker_are_reaped(supervise: Start) -> None:
    supervised = await supervise(LEAVES_AN_ORPHAN)
    await supervised.until(lambda lines: {"text": "orphan"} in lines, "the orphan's last word")
    async with asyncio.timeout(PATIENCE_S):
        while len(children(supervised.child.pid)) != 1:  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.02)


async def test_a_supervised_relay_comes_back_and_ends_within_two_seconds(fleet: Fleet) -> None:
    scheduler = await fleet.scheduler()
    relay = await fleet.process(
        "servingfleet_relay",
        *("--supervise", "--worker-memory-mib", "208", "--engine", "vllm"),
        *("--replica", "r", "--model", "m", "--scheduler", scheduler.target),
        *("--engine-events", "tcp://127.0.0.1:9"),  # where nobody is
    )
    supervised = Supervised(relay.child, relay.name, relay.log)
    await supervised.events("scheduler connected", 1)
    os.kill(await supervised.worker(), signal.SIGSEGV)
    await supervised.events("scheduler connected", 2)
    await scheduler.until(lambda replicas: replicas["r"].connected, "the replica back")

    loaded = maps(relay.child.pid)
    assert "cygrpc" not in loaded
    assert "_native" not in loaded
    began = time.monotonic()
    assert await relay.stop() == 0
    assert time.monotonic() - began < 2.0
    await scheduler.until(lambda replicas: not replicas["r"].connected, "the replica gone")


async def test_a_supervised_relay_with_bad_options_waits_and_says_what_is_wrong(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVINGFLEET_RELAY_SUPERVISE", "true")
    monkeypatch.setenv("SERVINGFLEET_RELAY_WORKER_MEMORY_MIB", "20")
    relay = await fleet.process("servingfleet_relay")
    supervised = Supervised(relay.child, relay.name, relay.log)
    await supervised.events("worker refuses its options", 1)
    assert "--replica" in relay.log.read_text()
    assert await relay.stop() == 0
