"""Index and hashing: builds and runs the Rust binary, and reads what it prints."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import AT_LEAST_AS_FAST, HALF_THE_MEMORY, Row, less_is_better, more_is_better

HERE = Path(__file__).parent
PEERS = {
    "radix": "RadixTree",
    "concurrent": "ConcurrentRadixTreeCompressed",
}
COLUMNS = ("match none", "match half", "match full", "store", "remove", "memory")
STEP_BLOCKS = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """The workload of a line of the index table."""

    workers: int
    holders: int
    blocks: int
    """Of each prompt."""
    event_blocks: int

    @property
    def name(self) -> str:
        events = "" if self.event_blocks == STEP_BLOCKS else f", {self.event_blocks} an event"
        return f"{self.workers} workers, {self.holders} holding, {self.blocks} blocks{events}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of a shape: ours, and the row against each peer."""

    ours: float
    unit: str
    against: tuple[Row, ...]


Matrix = dict[Shape, dict[str, Cell]]


def measured(quick: bool) -> list[dict[str, Any]]:
    """What the binary measured, an object a line. Raises CalledProcessError."""
    manifest = HERE / "Cargo.toml"
    subprocess.run(
        ["cargo", "build", "--release", "--locked", "--manifest-path", manifest], check=True
    )
    binary = HERE / "target" / "release" / "servingfleet-bench"
    run = subprocess.run(
        [binary, *(["--quick"] if quick else [])], check=True, stdout=subprocess.PIPE, text=True
    )
    return [json.loads(line) for line in run.stdout.splitlines()]


def matrix(lines: Sequence[dict[str, Any]]) -> Matrix:
    """The index's figures by shape and column."""
    found: Matrix = {}
    for line in lines:
        if line["what"] == "hash":
            continue
        shape = Shape(line["workers"], line["holders"], line["blocks"], line["event_blocks"])
        column = f"{line['what']} {line['hit']}".strip()
        found.setdefault(shape, {})[column] = _cell(shape, column, line)
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(shape: Shape) -> tuple[bool, int, int, int]:
    return shape.event_blocks != STEP_BLOCKS, shape.workers, shape.holders, shape.blocks


def _cell(shape: Shape, column: str, line: dict[str, Any]) -> Cell:
    unit = line["unit"]
    better = more_is_better if column in ("store", "remove") else less_is_better
    target = HALF_THE_MEMORY if column == "memory" else AT_LEAST_AS_FAST
    rows = [
        better(f"{column}: {shape.name} / {peer}", line["ours"], line[key], unit, target)
        for key, peer in PEERS.items()
    ]
    return Cell(line["ours"], unit, tuple(rows))


def hashing_rows(lines: Sequence[dict[str, Any]]) -> list[Row]:
    """Hashing beside the peer's, and beside the hash function itself."""
    rows = []
    for line in lines:
        if line["what"] != "hash":
            continue
        name, unit, ours = f"hash {line['tokens']:,} tokens", line["unit"], line["ours"]
        rows += [
            more_is_better(
                f"{name} / dynamo-kv-router, block and sequence hashes",
                ours,
                line["peer"],
                unit,
                AT_LEAST_AS_FAST,
            ),
            more_is_better(f"{name} / raw xxh3, block after block", ours, line["linked"], unit),
            more_is_better(f"{name} / raw xxh3, all bytes at once", ours, line["whole"], unit),
        ]
    return rows
