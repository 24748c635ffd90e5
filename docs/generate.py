"""Writes the pages of docs/ that are tables of the code: `python docs/generate.py`; with --check only compares."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from parameters import parameters

from servingfleet_relay.adapters.claims import Claim, Feature, Grade
from servingfleet_relay.adapters.events import EngineProfile
from servingfleet_relay.adapters.registry import ADAPTERS, REFUSED
from servingfleet_relay.conformance.invariants import TABLE, Action, Scope

DOCS = Path(__file__).parent
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
HEAD = "<!-- Written by docs/generate.py. -->\n\n"


def main() -> int:
    """Returns the exit status."""
    pages = {
        DOCS / "engines.md": engines(),
        DOCS / "invariants.md": invariants(),
        DOCS / "parameters.md": HEAD + parameters(),
    }
    if "--check" in sys.argv[1:]:
        stale = [path.name for path, text in pages.items() if _read(path) != text]
        for name in stale:
            print(f"docs/{name} is not what the code says: run python docs/generate.py")
        return int(bool(stale))
    for path, text in pages.items():
        path.write_text(text)
    return 0


def engines() -> str:
    """What is known of each engine, release and feature."""
    parts = [HEAD + ENGINES_INTRO]
    for name, adapter in ADAPTERS.items():
        parts.append(_engine(NAMES[name], adapter.profile))
    rows = [f"| `{name}` | {why} |" for name, why in REFUSED.items()]
    parts.append(
        "\n".join(
            ["## Feeds that are refused by name", "", "| feed | why |", "| --- | --- |", *rows]
        )
    )
    return "\n\n".join(parts) + "\n"


def invariants() -> str:
    """What must hold of a stream, and what follows when it does not."""
    rows = ["| | must hold | scope | when it fails | counted as | what to do | limits |"]
    rows.append("| --- " * 7 + "|")
    for row in TABLE:
        actions = ", then ".join(row.actions)
        reasons = " ".join(f"`{reason}`" for reason in sorted(row.reasons))
        cells = (row.id, row.checks, row.scope, actions, reasons, row.act, row.limits)
        rows.append("| " + " | ".join(cells) + " |")
    actions_of = "\n".join(f"| {action} | {_said(Action, action)} |" for action in Action)
    scopes = "\n".join(f"| {scope} | {_said(Scope, scope)} |" for scope in Scope)
    return (
        HEAD + INVARIANTS_INTRO.format(actions=actions_of, scopes=scopes) + "\n".join(rows) + "\n"
    )


def _engine(name: str, profile: EngineProfile) -> str:
    columns: list[tuple[tuple[int, ...], list[str]]] = []
    notes: list[str] = []
    rows = {feature: [c for c in profile.claims if c.feature is feature] for feature in Feature}
    rows = {feature: claims for feature, claims in rows.items() if claims}
    for since in _releases(profile):
        cells = [_cell(claims, since, profile, notes) for claims in rows.values()]
        if not columns or columns[-1][1] != cells:
            columns.append((since, cells))
    lines = [f"## {name}", "", _origin(name, profile), ""]
    lines.append("| feature | " + " | ".join(_span(since) for since, _ in columns) + " |")
    lines.append("| --- " * (len(columns) + 1) + "|")
    for at, feature in enumerate(rows):
        lines.append(f"| {feature} | " + " | ".join(cells[at] for _, cells in columns) + " |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, start=1))]
    return "\n".join(lines)


def _releases(profile: EngineProfile) -> Iterator[tuple[int, ...]]:
    """First releases of the columns: wherever the wire or a claim changes."""
    starts = {generation.since for generation in profile.generations}
    starts |= {claim.since for claim in profile.claims if claim.since}
    if profile.recorded:
        starts.add(profile.recorded)
    yield from sorted(starts) or [()]


def _cell(
    claims: list[Claim], since: tuple[int, ...], profile: EngineProfile, notes: list[str]
) -> str:
    holding = [claim for claim in claims if claim.since <= since]
    if not holding:
        return ""
    claim = max(holding, key=lambda each: each.since)
    grade = str(claim.grade)
    if claim.grade is Grade.EXACT and since != profile.recorded:
        grade += "*"
    if not claim.note:
        return grade
    if claim.note not in notes:
        notes.append(claim.note)
    return f"{grade} ({notes.index(claim.note) + 1})"


def _span(since: tuple[int, ...]) -> str:
    return f"{_dotted(since)} on" if since else "all"


def _origin(name: str, profile: EngineProfile) -> str:
    page = f"[{name}'s page](engines/{profile.engine}.md)"
    if profile.never_run:
        return f"Never run: {profile.never_run}. Never exact. {page}."
    return f"Recorded: {_dotted(profile.recorded)}. {_replayed(profile)}{page}."


def _replayed(profile: EngineProfile) -> str:
    replayed = profile.replayed
    if replayed is None:
        return ""
    others = "; ".join(f"{count}: {cause}" for cause, count in replayed.others)
    return (
        f"Of {replayed.requests} recorded requests {replayed.exact} are predicted to the token, and none outside its "
        f"bounds without a cause. The others: {others}. "
    )


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _said(kind: type[Action | Scope], member: Action | Scope) -> str:
    """The docstring under a member of an enumeration."""
    source = Path(sys.modules[kind.__module__].__file__ or "").read_text()
    found = re.search(rf'    {member.name} = "[^"]*"\n    """(.*?)"""', source, re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


ENGINES_INTRO = """# Engines, releases, features

| grade | meaning |
| --- | --- |
| exact | predicted, lower and upper bound are what the engine reports, but for the exceptions that its page names. A recording of the engine, or a test on its constructed bytes, holds it to that |
| exact* | likewise, of a release whose bytes were constructed from its source and that was not run |
| bounded | what the engine reports lies between the bounds; what is predicted may be less, or is no promise |
| refused | not indexed, and told: the replica, or what uses the feature, is routed by load |

Each column begins with a release and holds until the next. A field, medium or event that is newer than this table is noticed and
told ([invariants.md](invariants.md)); it never gives credit."""

INVARIANTS_INTRO = """# What must hold of an engine's stream

The relay checks this all the time. A failure is counted (`servingfleet_relay_invariant_failures_total`, and by its reason), named
in the state of its rank, and has these consequences; `servingfleet check-stream` reports them for a recording or a live engine.

| action | what follows |
| --- | --- |
{actions}

| scope | what a failure is held against |
| --- | --- |
{scopes}

"""


if __name__ == "__main__":
    sys.exit(main())
