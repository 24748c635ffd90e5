"""Keeps one relay process running: PID 1 of the sidecar (`servingfleet-relay --supervise`).

Kubernetes takes a pod whose sidecar ends out of its Services, the engine with it. So this process does not end before
it is told to, whatever its worker does: it starts the worker within a memory limit, kills one that hangs, and starts
the next. Small on purpose: one thread, a few modules of the standard library, nothing that the worker's start may break.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from . import logs

log = logging.getLogger("servingfleet_relay")

MIB = 1024 * 1024
LEAST_MEMORY_MIB = 96
"""An idle worker takes 30 MiB, and up to 1 MiB for each of its threads, of which gRPC starts 25 on a large machine."""
BAD_OPTIONS = 2
"""Exit status of a worker that can't work with what it was told."""
NOT_STARTED = 127

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_THREAD_STACK_BYTES = 1 * MIB
"""The usual 8 MiB of each thread would count against the memory limit as if they were used."""
_PR_SET_PDEATHSIG = 1
_TRUE = ("1", "true", "t", "yes", "y", "on")
"""What click takes for a flag that is set."""


@dataclass(frozen=True)
class Patience:
    """How long the supervisor waits for what."""

    hang_s: float = 60.0
    """A worker that is silent for so long hangs. Starting takes 5 s of them where the CPU is limited to a tenth."""
    dump_s: float = 2.0
    """For a hung worker to write where it hangs."""
    stop_s: float = 1.5
    """For a worker to end its streams in order. The engine may have used up nearly all of the pod's grace period."""
    turn_s: float = 5.0
    """Longest sleep between two looks at the worker."""
    first_s: float = 0.5
    most_s: float = 30.0
    """Restarts wait between these, doubled each time, with jitter: a fleet must not return at once."""
    refused_s: float = 60.0
    """Between starts with options that the worker refuses: only an address or a file may have changed since."""
    steady_s: float = 60.0
    """A worker that lived so long had started well: its end is the first of a new row."""


def restart_delay_s(status: int, failures: int, jitter: float, patience: Patience) -> float:
    """Seconds until the next start, after a worker's exit status (negative: the signal that killed it).

    `failures`: workers before this one that did not live long. `jitter`: random, 0 to 1; halves the delay at most.
    """
    if status == BAD_OPTIONS:
        delay = patience.refused_s
    else:
        delay = min(patience.most_s, patience.first_s * 2.0 ** min(failures, 30))
    return delay * (0.5 + jitter / 2)


def option(name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """The last value that the command line or else the environment gives to an option. "": none.

    The worker reads all options, and refuses what is wrong with them; the supervisor only looks for its own.
    """
    found = environment.get("SERVINGFLEET_RELAY_" + name.upper().replace("-", "_"), "")
    flag = f"--{name}"
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        if argument == flag:
            found = following
        elif argument.startswith(f"{flag}="):
            found = argument.removeprefix(f"{flag}=")
    return found


def wanted(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a supervisor is asked for, and not just help."""
    told = environment.get("SERVINGFLEET_RELAY_SUPERVISE", "").strip().lower() in _TRUE
    return (told or "--supervise" in arguments) and "--help" not in arguments


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Supervises until a signal. Returns the exit status: 0, but on a system that it can't work on."""
    level = option("log-level", arguments, environment).lower()
    logs.configure(level if level in logs.LEVELS else "info")
    if sys.platform != "linux":
        log.error("supervisor can't run", extra={"error": "--supervise needs Linux"})
        return BAD_OPTIONS
    memory = option("worker-memory-mib", arguments, environment)
    memory_mib = int(memory) if memory.isascii() and memory.isdecimal() else 0
    command = [sys.executable, "-P", "-m", "servingfleet_relay.command"]
    return Supervisor(
        # A limit that no worker can start in would hide from everyone that the worker refuses it.
        lambda beats: [*command, "--heartbeat-fd", str(beats), *arguments],
        memory_mib if memory_mib >= LEAST_MEMORY_MIB else 0,
    ).run()


class Supervisor:
    """One worker after the other."""

    def __init__(
        self,
        command: Callable[[int], list[str]],
        memory_mib: int = 0,
        patience: Patience = Patience(),
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = lambda: os.urandom(1)[0] / 255,
    ) -> None:
        """`command`: the worker's command line, given the descriptor on which it shows that it is alive.

        `memory_mib`: data of the worker at most (RLIMIT_DATA); 0: no limit.
        """
        self._command = command
        self._memory_mib = memory_mib
        self._patience = patience
        self._clock = clock
        self._jitter = jitter
        self._worker = 0
        """Its process id. 0: none runs."""
        self._beats = -1
        self._started = self._heard = 0.0
        self._due: float | None = None
        """When the worker is killed, if it has been asked to end; or when the next is started."""
        self._stopping = False
        self._failures = 0

    def run(self) -> int:
        """Supervises until SIGTERM or SIGINT, and until the worker has ended then. Returns 0."""
        # Blocked signals wait for sigtimedwait, and reach a PID 1 although it has no handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._due = self._clock()
        while self._worker or not self._stopping:
            slept_from = self._clock()
            wait_s = self._patience.turn_s if self._due is None else self._due - slept_from
            heard = signal.sigtimedwait(_SIGNALS, min(max(wait_s, 0.0), self._patience.turn_s))
            now = self._clock()
            if now - slept_from > 2 * self._patience.turn_s:
                # The whole container was frozen: so was the worker.
                self._heard = now
            if heard is not None and heard.si_signo != signal.SIGCHLD:
                self._stop(signal.Signals(heard.si_signo).name, now)
            self._reap(now)
            self._listen(now)
            self._act(now)
        log.info("supervisor ended")
        return 0

    def _act(self, now: float) -> None:
        due = self._due is not None and now >= self._due
        if not self._worker:
            if due and not self._stopping:
                self._start(now)
        elif due:
            self._kill(signal.SIGKILL)
        elif self._due is None and now - self._heard >= self._patience.hang_s:
            silent_s = round(now - self._heard, 1)
            log.error("worker hangs", extra={"pid": self._worker, "silent_s": silent_s})
            # The worker's fault handler writes where each thread stands.
            self._kill(signal.SIGABRT)
            self._due = now + self._patience.dump_s

    def _start(self, now: float) -> None:
        self._due = None
        self._started = self._heard = now
        beats = worker = -1
        try:
            self._beats, beats = os.pipe()
            os.set_blocking(self._beats, False)
            parent = os.getpid()
            worker = os.fork()
        except OSError as error:
            # No process or descriptor to be had: the container's limits, or a moment.
            log.error("worker not started", extra={"error": str(error)})
            self._ended(NOT_STARTED, {}, now)
            return
        finally:
            if worker and beats >= 0:
                os.close(beats)
        if not worker:
            self._become_worker(parent, beats)
        self._worker = worker
        fields = {"pid": worker, "memory_mib": self._memory_mib or None}
        log.info("worker started", extra=fields)

    def _become_worker(self, parent: int, beats: int) -> NoReturn:
        try:
            _die_with(parent)
            if self._memory_mib:
                limit = self._memory_mib * MIB
                # Not the address space, most of which is never used: gRPC and malloc reserve hundreds of MiB.
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
                # Read by libc as the program starts; the worker gives its first thread the usual stack again.
                _, hard = resource.getrlimit(resource.RLIMIT_STACK)
                resource.setrlimit(resource.RLIMIT_STACK, (_THREAD_STACK_BYTES, hard))
            # A core of the worker would hold its token.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.set_inheritable(beats, True)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            command = self._command(beats)
            os.execv(command[0], command)
        except (OSError, ValueError) as error:
            log.error("worker not started", extra={"error": str(error)})
        finally:
            os._exit(NOT_STARTED)

    def _stop(self, why: str, now: float) -> None:
        if self._stopping:
            return
        self._stopping = True
        log.info("supervisor stops", extra={"signal": why})
        self._due = now + self._patience.stop_s
        self._kill(signal.SIGTERM)

    def _kill(self, number: signal.Signals) -> None:
        if self._worker:
            # It is not reaped yet: the id is still its own.
            os.kill(self._worker, number)

    def _reap(self, now: float) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self._worker:
                # What the kernel counted in pages: next to the limit it tells whether memory was the reason.
                peak_mib = usage.ru_maxrss // 1024
                fields = {"pid": pid, "peak_mib": peak_mib, "memory_mib": self._memory_mib or None}
                self._ended(os.waitstatus_to_exitcode(status), fields, now)
            # Others are orphans of the worker, which a PID 1 inherits.

    def _ended(self, status: int, fields: Mapping[str, object], now: float) -> None:
        self._worker = 0
        if self._beats >= 0:
            os.close(self._beats)
        self._beats = -1
        if self._stopping:
            return
        lived_s = now - self._started
        if lived_s >= self._patience.steady_s:
            self._failures = 0
        delay_s = restart_delay_s(status, self._failures, self._jitter(), self._patience)
        self._failures += 1
        self._due = now + delay_s
        told = {
            **fields,
            "status": status,
            "lived_s": round(lived_s, 1),
            "restart_in_s": round(delay_s, 1),
        }
        if status == BAD_OPTIONS:
            told["do"] = "correct what the line before names, then start the pod again"
            log.error("worker refuses its options", extra=told)
        else:
            log.warning("worker ended", extra=told)

    def _listen(self, now: float) -> None:
        if self._beats < 0:
            return
        with contextlib.suppress(BlockingIOError):
            if os.read(self._beats, 4096):
                self._heard = now


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends in whatever way: an orphan would go on speaking."""
    import ctypes  # here, so that only the short-lived image before the worker's holds it

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(NOT_STARTED)
