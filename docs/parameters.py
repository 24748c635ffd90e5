"""The numbers of routing as a page, read from the code that uses them: name, default, unit, and the reason beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "scheduler" / "servingfleet_scheduler"

SECTIONS = {
    "Speeds, until outcomes tell better": ("policy/speeds.py", ("Speeds",)),
    "Choosing": ("policy/cost.py", ()),
    "What others wait": ("policy/others.py", ()),
    "Traffic": ("traffic.py", ()),
    "Work ahead": ("backlog.py", ()),
    "Room in the cache": ("room.py", ()),
    "Labels": ("labels.py", ()),
    "Which outcomes teach": ("learner.py", ()),
    "Learning": ("learning.py", ()),
    "Eviction": ("eviction.py", ()),
    "What to expect of predictions": ("expectation.py", ()),
    "Correction of predictions": ("correction.py", ("CorrectionSettings",)),
    "Admission": ("admission.py", ()),
    "Settings of admission": ("settings.py", ("AdmissionSettings",)),
    "Circuit breaker": ("breaker.py", ("BreakerSettings",)),
    "`prefix-overlap`": ("policy/prefix_overlap.py", ()),
    "`approximate`": ("memory.py", ()),
}
"""File, and the classes whose fields are settings; module constants are always shown."""

UNITS = {
    "_S": "s",
    "SHARE": "share",
    "TOKENS": "tokens",
    "_SD": "sd",
    "_BLOCKS": "blocks",
    "_LABELS": "outcomes",
    "TOKEN": "bytes",
}

INTRO = """# Numbers of routing

Every number that a decision rests on, as the code has it, with the reason beside it. None is a weight without a unit. A unit
of "share" is a fraction, "sd" counts standard deviations. What an operator sets is in
[scheduler.md](scheduler.md); what it is worth is measured in [routing.md](routing.md).
"""


class Parameter(NamedTuple):
    """One row."""

    name: str
    value: str
    unit: str
    reason: str


def parameters() -> str:
    """The page, without its head."""
    parts = [INTRO]
    for title, (file, classes) in SECTIONS.items():
        tree = ast.parse((SOURCE / file).read_text())
        found = list(_found(tree.body, constants=True))
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                found += _found(node.body, constants=False)
        rows = "\n".join(
            f"| `{each.name}` | {each.value} | {each.unit} | {each.reason} |" for each in found
        )
        where = f"scheduler/servingfleet_scheduler/{file}"
        parts.append(
            f"## {title}\n\n`{where}`\n\n| number | default | unit | why |\n| --- | --: | --- | --- |\n{rows}\n"
        )
    return "\n".join(parts)


def _found(body: list[ast.stmt], *, constants: bool) -> Iterator[Parameter]:
    """Numbers that are assigned, with the words below. Raises ValueError for one without."""
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        for name, value in _assigned(node, constants=constants):
            reason = _words(after)
            if not reason:
                raise ValueError(f"{name} has no words below it; expected its meaning and reason")
            yield Parameter(name, value, _unit(name), reason)


def _words(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split()).replace("|", "\\|")
    return ""


def _assigned(node: ast.stmt, *, constants: bool) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.AnnAssign) and not constants and node.value is not None:
        if isinstance(node.target, ast.Name) and _is_number(node.value):
            yield node.target.id, ast.unparse(node.value)
    elif isinstance(node, ast.Assign) and constants:
        target = node.targets[0]
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        values = node.value.elts if isinstance(target, ast.Tuple) else [node.value]  # type: ignore[attr-defined]
        for name, value in zip(names, values, strict=True):
            if isinstance(name, ast.Name) and name.id[0].isupper() and _is_number(value):
                yield name.id, ast.unparse(value)


def _is_number(value: ast.expr) -> bool:
    """Made of numbers alone: also `64 * 1024`, `math.log(10.0)`, `TierSpeed(fixed_s=0.003, ...)` and tuples."""
    calls = [ast.unparse(each.func) for each in ast.walk(value) if isinstance(each, ast.Call)]
    if set(calls) - {"math.log", "TierSpeed"}:
        return False
    leaves = [each for each in ast.walk(value) if isinstance(each, ast.Constant)]
    return bool(leaves) and all(
        isinstance(each.value, int | float) and not isinstance(each.value, bool) for each in leaves
    )


def _unit(name: str) -> str:
    known = (unit for end, unit in UNITS.items() if name.upper().endswith(end))
    return next(known, "number")
