"""Runs a target under the fuzzer in a process of its own, and picks what is worth keeping of what it found."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz import corpus
from tests.fuzz.child import reproducer
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS

INPUT_DEADLINE_S = 5
MEMORY_LIMIT_MB = 1024
START_AND_END_S = 60
"""Beyond its time to fuzz: imports, replay of the corpus, on a busy machine."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    failed: bool
    output: str
    """The end of what it printed, and what reproduces the failure."""


def available() -> bool:
    """Whether the fuzzer is installed; it has no wheels for some machines."""
    return importlib.util.find_spec("atheris") is not None


def fuzz(name: str, folder: Path, *, seconds: int, seed: int = 1) -> Outcome:
    """Fuzzes from the seeds and the corpus; new inputs that reach more are left in `folder`."""
    found = folder / "found"
    found.mkdir()
    for number, data in enumerate([*seeds(name), *corpus.kept(name)]):
        (found / f"{number:04}").write_bytes(data)
    arguments = [
        *(sys.executable, "-m", "tests.fuzz.child", name, str(found)),
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-timeout={INPUT_DEADLINE_S}",
        f"-rss_limit_mb={MEMORY_LIMIT_MB}",
        f"-artifact_prefix={folder}/",
        "-print_final_stats=1",
    ]
    ended = subprocess.run(
        arguments,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": _path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=seconds + START_AND_END_S,
        check=False,
    )
    output = ended.stdout.decode(errors="replace")[-6000:]
    # A stuck or swollen process is killed before it can print its input.
    for kind in ("timeout-*", "oom-*", "crash-*"):
        for path in folder.glob(kind):
            output += reproducer(name, path.read_bytes())
    return Outcome(ended.returncode != 0, output)


def smallest(name: str, inputs: Iterable[bytes]) -> list[bytes]:
    """Of these inputs, shortest first, those that reach a line that nothing kept or shorter reaches."""
    run = TARGETS[name].run
    reached: set[tuple[str, int, int]] = set()
    for data in [*seeds(name), *corpus.kept(name)]:
        reached |= _lines(run, data)
    chosen = []
    for data in sorted(set(inputs), key=lambda data: (len(data), data)):
        fresh = _lines(run, data) - reached
        if fresh and len(corpus.line(data)) <= corpus.MAX_LINE:
            reached |= fresh
            chosen.append(data)
    return chosen


def _lines(run: Any, data: bytes) -> set[tuple[str, int, int]]:
    """Jumps between lines of our packages."""
    seen: set[tuple[str, int, int]] = set()
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        file = frame.f_code.co_filename
        if "servingfleet_" not in file or "_pb2" in file:
            return None
        if event == "line":
            seen.add((file, last.get(frame, 0), frame.f_lineno))
            last[frame] = frame.f_lineno
        elif event == "return":
            last.pop(frame, None)
        return trace

    sys.settrace(trace)
    try:
        run(data)
    finally:
        sys.settrace(None)
    return seen


def _path() -> str:
    return os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
