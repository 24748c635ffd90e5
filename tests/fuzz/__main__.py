"""Fuzzes a target, replays an input, keeps one (docs/fuzzing.md)."""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
from pathlib import Path

from tests.fuzz import corpus
from tests.fuzz.running import fuzz, smallest
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command, what in (
        ("run", "fuzz for a while"),
        ("grow", "fuzz, then keep the shortest inputs that reach more"),
        ("replay", "run one input"),
        ("add", "keep one input"),
    ):
        each = commands.add_parser(command, help=what)
        each.add_argument("target", choices=sorted(TARGETS))
        if command in ("run", "grow"):
            each.add_argument("--seconds", type=int, default=60)
            each.add_argument("--seed", type=int, default=1)
        else:
            each.add_argument("line", help="base64")
    each.add_argument("--why", required=True, help="what it found, for the corpus")
    asked = parser.parse_args()
    match asked.command:
        case "add":
            print(corpus.add(asked.target, [base64.b64decode(asked.line)], asked.why), "added")
        case "replay":
            TARGETS[asked.target].run(base64.b64decode(asked.line))
        case _:
            return _fuzz(asked)
    return 0


def _fuzz(asked: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        outcome = fuzz(asked.target, folder, seconds=asked.seconds, seed=asked.seed)
        print(outcome.output)
        if outcome.failed or asked.command == "run":
            return int(outcome.failed)
        found = [path.read_bytes() for path in (folder / "found").iterdir()]
        print(corpus.add(asked.target, smallest(asked.target, found), "reach more"), "added")
        return 0


if __name__ == "__main__":
    sys.exit(main())
