"""docs/troubleshooting.md knows every condition and every reason that a fleet's status can show, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import servingfleet_operator
from servingfleet_operator import conditions, injection, reconcile, replicas, rollout
from servingfleet_operator.conditions import CONDITIONS

PACKAGE = Path(servingfleet_operator.__file__).parent
PAGE = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text()

REASON_IS_ARGUMENT = {"_yes": 0, "_no": 0, "_unknown": 0, "Trouble": 0, "Finding": 0, "found": 0}
"""Of calls that make a verdict, a trouble or a finding."""


def literals() -> Iterator[str]:
    """Reasons written where they are given."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            name = (
                function.attr
                if isinstance(function, ast.Attribute)
                else getattr(function, "id", "")
            )
            place = REASON_IS_ARGUMENT.get(name)
            if place is None or len(node.args) <= place:
                continue
            reason = node.args[place]
            if isinstance(reason, ast.Constant) and isinstance(reason.value, str):
                yield reason.value


def tabled() -> Iterator[str]:
    """Reasons kept in tables."""
    yield from rollout._ADVICE
    yield from conditions._MISSING.values()
    yield from (reason for reason, _ in conditions._BROKEN.values())
    yield from (reason for reason, _ in conditions._SET_ASIDE.values())
    yield conditions._NEVER_REPORTED[0]
    yield from reconcile._REASONS.values()


def section(title: str) -> str:
    """What stands under that heading."""
    [text] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


def documented(title: str) -> set[str]:
    """What stands in the first column of that section's tables."""
    cells = re.findall(r"^\| ([^|]*) \|", section(title), re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_every_condition_has_its_section() -> None:
    assert re.findall(r"^### (\w+)", section("Conditions"), re.MULTILINE) == list(CONDITIONS)


def test_every_reason_is_explained_and_none_that_is_not_given() -> None:
    given = {*literals(), *tabled()}
    assert len(given) > 50, "the reasons are no longer found where they were"
    assert documented("Conditions") == given


def test_every_state_of_a_replica_is_explained() -> None:
    assert documented("Replicas") == {str(each) for each in replicas.State}


def test_every_reason_to_leave_a_pod_alone_is_explained() -> None:
    assert documented("Pods without a relay") == {str(each) for each in injection.Reason}
