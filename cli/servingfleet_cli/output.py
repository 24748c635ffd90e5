"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich import box
from rich.console import Console
from rich.table import Table

F = TypeVar("F", bound=Callable[..., Any])


def format_option(function: F) -> F:
    """Adds `-o table|json` as the argument `output`."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="A table for people, or JSON for programs.",
    )(function)


def console() -> Console:
    """Where tables go. Wide where nobody looks at a terminal, so that nothing is cut in a pipe."""
    return Console(width=None if sys.stdout.isatty() else 160)


def print_json(value: Message | Any) -> None:
    """One JSON document on stdout; a protocol message by its field names, absent fields left out."""
    if isinstance(value, Message):
        value = MessageToDict(value, preserving_proto_field_name=True)
    click.echo(json.dumps(value, indent=2))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table; columns whose name starts with '>' are numbers, to the right."""
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        right = column.startswith(">")
        drawn.add_column(column.removeprefix(">"), justify="right" if right else "left")
    for row in rows:
        drawn.add_row(*("" if cell is None else str(cell) for cell in row))
    return drawn


def share(value: float) -> str:
    """A fraction, as a percentage."""
    return f"{100 * value:.1f}%"
