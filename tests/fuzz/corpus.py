"""The kept inputs of each target: text files of one base64 line each, a comment before it where there is a reason."""

from __future__ import annotations

import base64
from pathlib import Path

FOLDER = Path(__file__).with_name("corpus")
MAX_LINE = 1024
MAX_FILE = 16 * 1024
"""A corpus is read by people in diffs, and replayed in every test run."""


def kept(target: str) -> list[bytes]:
    """The inputs of a target, in order."""
    path = FOLDER / f"{target}.txt"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [base64.b64decode(line, validate=True) for line in lines if line and line[0] != "#"]


def add(target: str, inputs: list[bytes], why: str) -> int:
    """Appends those that are not there yet; returns how many."""
    known = set(kept(target))
    fresh = [data for data in dict.fromkeys(inputs) if data not in known]
    if fresh:
        FOLDER.mkdir(exist_ok=True)
        with (FOLDER / f"{target}.txt").open("a") as file:
            file.write(f"# {why}\n")
            file.writelines(line(data) + "\n" for data in fresh)
    return len(fresh)


def line(data: bytes) -> str:
    """As it stands in the file."""
    return base64.b64encode(data).decode()
