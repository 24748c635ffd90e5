"""Runs settings side by side over the same seeds, each run in a process of its own where there are several."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized

from .digest import Digest, digest
from .driver import simulate
from .fleet import FleetSpec
from .options import Options
from .repeats import Case, case
from .traces import Request

LOOK_S = 0.2


@dataclass(frozen=True)
class Setting:
    """What one case differs in from the others."""

    name: str
    options: Options
    rate: float = 1.0
    """Arrivals come so many times as fast as in the trace."""
    target_s: float | None = None
    """Time to first token that every request asks for; None: as the trace says."""

    def requests(self, trace: Sequence[Request]) -> Sequence[Request]:
        """The trace's, as they come in this case."""
        if self.rate == 1.0 and self.target_s is None:
            return trace
        return [
            replace(
                each,
                at=each.at / self.rate,
                target_s=each.target_s if self.target_s is None else self.target_s,
            )
            for each in trace
        ]


@dataclass
class _Shared:
    """What a worker process was given once, for all its runs."""

    trace: Sequence[Request]
    fleet: FleetSpec
    ended: Synchronized[int]


_shared: _Shared
"""Of a worker: there is no other way to hand it something at its start."""


def run_cases(
    trace: Sequence[Request],
    fleet: FleetSpec,
    settings: Sequence[Setting],
    seeds: Sequence[int],
    jobs: int,
    progress: Callable[[int], None],
) -> list[Case]:
    """Every setting with every seed; `progress` hears how many requests have ended in all runs together."""
    tasks = [(setting, seed) for seed in seeds for setting in settings]
    if min(jobs, len(tasks)) == 1:
        found = _alone(trace, fleet, tasks, progress)
    else:
        found = _side_by_side(trace, fleet, tasks, jobs, progress)
    return [
        case(setting.name, found[number :: len(settings)])
        for number, setting in enumerate(settings)
    ]


def _alone(
    trace: Sequence[Request],
    fleet: FleetSpec,
    tasks: Sequence[tuple[Setting, int]],
    progress: Callable[[int], None],
) -> list[Digest]:
    found = []
    for number, (setting, seed) in enumerate(tasks):
        before = number * len(trace)
        found.append(_digest(trace, fleet, setting, seed, lambda n, b=before: progress(b + n)))  # type: ignore[misc]
    return found


def _side_by_side(
    trace: Sequence[Request],
    fleet: FleetSpec,
    tasks: Sequence[tuple[Setting, int]],
    jobs: int,
    progress: Callable[[int], None],
) -> list[Digest]:
    # Not forked: this process has threads.
    context = multiprocessing.get_context("spawn")
    ended = context.Value("q", 0)
    workers = min(jobs, len(tasks))
    with ProcessPoolExecutor(workers, context, _start, (_Shared(trace, fleet, ended),)) as pool:
        futures: list[Future[Digest]] = [pool.submit(_work, *task) for task in tasks]
        try:
            pending = set(futures)
            while pending:
                done, pending = wait(pending, timeout=LOOK_S, return_when=FIRST_EXCEPTION)
                progress(ended.value)
                for each in done:
                    each.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [each.result() for each in futures]


def _start(shared: _Shared) -> None:
    global _shared
    _shared = shared
    # Ctrl-C reaches all processes of a terminal: one traceback is enough.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _work(setting: Setting, seed: int) -> Digest:
    told = 0

    def progress(ended: int) -> None:
        nonlocal told
        with _shared.ended.get_lock():
            _shared.ended.value += ended - told
        told = ended

    return _digest(_shared.trace, _shared.fleet, setting, seed, progress)


def _digest(
    trace: Sequence[Request],
    fleet: FleetSpec,
    setting: Setting,
    seed: int,
    progress: Callable[[int], None],
) -> Digest:
    return digest(simulate(setting.requests(trace), fleet, setting.options, seed, progress))
