"""`make bench`: measures the hot paths beside peers and limits, in one run. `--help` says how.

Nothing here asserts a time: a busy machine makes a figure worse, never a build red.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

import index
import ingest
import relay_memory
import report
import route
from figures import Row

HERE = Path(__file__).parent
OUT = HERE / "out"
DOCUMENT = HERE.parent / "docs" / "performance.md"
PARTS = ("index", "route", "ingest", "relay")


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/run.py", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a taste in 20 s: small and noisy")
    parser.add_argument("--only", choices=PARTS, action="append", help="parts to run; all if none")
    parser.add_argument(
        "--write-docs", action="store_true", help="put the tables into docs/performance.md"
    )
    arguments = parser.parse_args()
    parts = arguments.only or PARTS
    if arguments.write_docs and (arguments.quick or len(set(parts)) < len(PARTS)):
        parser.error("--write-docs needs a full run of all parts")
    if "index" in parts and shutil.which("cargo") is None:
        parser.error("cargo is not on the PATH: install Rust (https://rustup.rs), or use --only")
    OUT.mkdir(exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 180)
    machine = _machine()
    console.print(machine)
    matrix, rows = _measure(parts, arguments.quick, console)
    report.show(console, matrix, rows)
    report.missed(console, [*_index_rows(matrix), *rows])
    console.print("rows: bench/out/*.json")
    if arguments.write_docs:
        report.write(DOCUMENT, matrix, rows, machine)
        console.print(f"tables: docs/{DOCUMENT.name}")
    return 0


def _measure(parts: Sequence[str], quick: bool, console: Console) -> tuple[index.Matrix, list[Row]]:
    matrix: index.Matrix = {}
    rows: list[Row] = []
    for part in PARTS:
        if part not in parts:
            continue
        console.print(f"== {part}")
        found = []
        if part == "index":
            lines = index.measured(quick)
            matrix, found = index.matrix(lines), index.hashing_rows(lines)
        elif part == "route":
            found = route.in_process_rows(quick) + asyncio.run(route.rows(quick))
        elif part == "ingest":
            found = asyncio.run(ingest.rows(quick))
        else:
            found = relay_memory.rows()
        rows += found
        # Written at once: what a later part breaks does not take with it.
        everything = [*_index_rows(matrix), *found] if part == "index" else found
        dump = json.dumps([asdict(row) for row in everything], indent=1)
        (OUT / f"{part}.json").write_text(dump + "\n")
    return matrix, rows


def _index_rows(matrix: index.Matrix) -> list[Row]:
    return [row for cells in matrix.values() for cell in cells.values() for row in cell.against]


def _machine() -> str:
    """Where this ran, in words: figures of two machines are not to be compared."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = (line for line in cpuinfo.read_text().splitlines() if line.startswith("model name"))
        model = next(names, model).partition(":")[2].strip() or model
    words = [f"{os.cpu_count()} cores of {model}", f"load average {os.getloadavg()[0]:.1f}"]
    words.append(f"Python {platform.python_version()}")
    if shutil.which("rustc"):
        version = subprocess.run(["rustc", "--version"], check=True, capture_output=True, text=True)
        words.append(" ".join(version.stdout.split()[:2]))
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
