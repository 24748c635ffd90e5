"""The table of invariants is whole: every check is in it, and every word under which a failure is counted."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import servingfleet_core
import servingfleet_relay
from servingfleet_relay.conformance.fingerprint import ODDITIES
from servingfleet_relay.conformance.invariants import BY_REASON, OURS, TABLE
from servingfleet_relay.conformance.standing import PROBATIONARY

SOURCES = Path(servingfleet_relay.__file__).parent
MIRROR = Path(servingfleet_core.__file__).parent.parent / "src" / "mirror" / "placing.rs"
MAKERS = {"BadValue", "BadFrames", "Dropped", "Finding", "_changed", "Share"}


def reasons() -> Iterator[tuple[str, str]]:
    """Every reason that the relay writes out, with where."""
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            for first in _words(node.args[0]) if name in MAKERS else ():
                yield first, f"{path.name}:{node.lineno}"


def _words(node: ast.expr) -> Iterator[str]:
    """Literal words of a first argument, through a choice or a starred tuple."""
    match node:
        case ast.Constant(value=str(word)):
            yield word
        case ast.IfExp():
            yield from _words(node.body)
            yield from _words(node.orelse)
        case ast.Starred(value=ast.Tuple(elts=[first, *_])):
            yield from _words(first)


def test_there_are_thirty_five_and_each_says_what_to_do() -> None:
    assert [row.id for row in TABLE] == [f"C{number}" for number in range(1, 36)]
    for row in TABLE:
        assert row.checks
        assert f"7.2 {row.id}" in row.design
        assert row.limits or (row.reasons and row.actions and row.act), row.id


def test_no_word_stands_for_two_invariants() -> None:
    words = [word for row in TABLE for word in row.reasons]
    assert len(words) == len(set(words)) == len(BY_REASON)
    assert not OURS & set(words)


def test_every_reason_that_is_written_is_in_the_table() -> None:
    unknown = {(word, where) for word, where in reasons() if word not in {*BY_REASON, *OURS}}
    assert unknown == set()
    assert len({word for word, _ in reasons()}) > 50


def test_every_reason_in_the_table_is_written_somewhere() -> None:
    text = "\n".join(path.read_text() for path in SOURCES.rglob("*.py"))
    rust = MIRROR.read_text() if MIRROR.exists() else ""
    written = {word for word, _ in reasons()} | set(ODDITIES)
    for word in BY_REASON:
        elsewhere = text.count(f'"{word}"') > 1 or f'"{word}"' in rust
        assert word in written or elsewhere, word


def test_every_refusal_of_the_mirror_is_in_the_table() -> None:
    if not MIRROR.exists():
        return  # an installed core has no sources beside it
    lines = MIRROR.read_text().replace("\n", " ").split("rejected(")[1:]
    words = {line.split('"')[1] for line in lines if line.lstrip().startswith('"')}
    assert {"unit_size", "token_count", "self_parent"} <= words
    assert words <= set(BY_REASON)


def test_what_passes_probation_is_of_the_table() -> None:
    assert set(BY_REASON) >= PROBATIONARY
