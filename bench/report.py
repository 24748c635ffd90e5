"""Tables of the figures: for a terminal, and for docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from figures import Row
from index import COLUMNS, PEERS, Cell, Matrix

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
UNITS = ("us", "us", "us", "M entries/s", "M entries/s", "bytes/entry")


def show(console: Console, matrix: Matrix, rows: Sequence[Row]) -> None:
    """Prints everything, what misses its target in red."""
    if matrix:
        table = Table(title="Index: ours (ratio to " + ", ".join(PEERS.values()) + ")")
        table.add_column("workload", no_wrap=True)
        for column, unit in zip(COLUMNS, UNITS, strict=True):
            table.add_column(f"{column}\n{unit}", justify="right", no_wrap=True)
        for shape, cells in matrix.items():
            table.add_row(shape.name, *(_cell(cells[column], markup=True) for column in COLUMNS))
        console.print(table)
    if rows:
        table = Table(title="Ratio above 1: we are better")
        for column in ("figure", "ours", "peer", "unit", "ratio", "target"):
            table.add_column(column, justify="left" if column in ("figure", "unit") else "right")
        for row in rows:
            style = "red" if row.missed else ""
            table.add_row(*_fields(row), style=style)
        console.print(table)


def missed(console: Console, rows: Sequence[Row]) -> None:
    """Says how many targets are missed."""
    aimed = [row for row in rows if row.target is not None]
    short = [row for row in aimed if row.missed]
    console.print(f"{len(aimed) - len(short)} of {len(aimed)} targets reached, {len(short)} missed")


def write(document: Path, matrix: Matrix, rows: Sequence[Row], machine: str) -> None:
    """Rewrites what lies between the markers. Raises ValueError if they are not there."""
    text = document.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document.name} has no {BEGIN} with {END} after it")
    document.write_text(f"{before}{begin}\n{_markdown(matrix, rows, machine)}\n{end}{after}")


def _markdown(matrix: Matrix, rows: Sequence[Row], machine: str) -> str:
    head = [f"{column}, {unit}" for column, unit in zip(COLUMNS, UNITS, strict=True)]
    peers = ", ".join(f"`{peer}`" for peer in PEERS.values())
    lines = [
        machine,
        "",
        f"**Index**: ours (ratio to {peers}); a ratio below its target is in bold.",
        "",
        "| workload | " + " | ".join(head) + " |",
        "| --- |" + " --: |" * len(head),
    ]
    for shape, cells in matrix.items():
        values = (_cell(cells[column], markup=False) for column in COLUMNS)
        lines.append(f"| {shape.name} | " + " | ".join(values) + " |")
    lines += [
        "",
        "**Everything else**",
        "",
        "| figure | ours | peer | unit | ratio | target |",
        "| --- | --: | --: | --- | --: | --: |",
    ]
    lines += ["| " + " | ".join(_fields(row)) + " |" for row in rows]
    return "\n".join(lines)


def _cell(cell: Cell, *, markup: bool) -> str:
    ratios = []
    for row in cell.against:
        ratio = _number(row.ratio)
        if row.missed:
            ratio = f"[red]{ratio}[/red]" if markup else f"**{ratio}**"
        ratios.append(ratio)
    return f"{_number(cell.ours)} ({', '.join(ratios)})"


def _fields(row: Row) -> tuple[str, str, str, str, str, str]:
    return (
        row.name,
        _number(row.ours),
        _number(row.peer),
        row.unit,
        _number(row.ratio),
        _number(row.target),
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
