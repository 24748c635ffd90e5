"""A comparison of replays as one document whose keys stay: `servingfleet.replay/1`. Pure.

docs/replay.md describes it. Numbers that nothing speaks for are null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from .definitions import DEFINITIONS
from .digest import GRID, SECONDS_EDGES, Bin
from .losses import MEANING
from .repeats import Case, Comparison, Interval, comparisons

SCHEMA = "servingfleet.replay/1"


@dataclass(frozen=True)
class Comparing:
    """Everything that one command found."""

    command: str
    """That makes it again."""
    trace: Mapping[str, Any]
    """What was replayed: name, requests, prompt and output tokens, seconds."""
    fleet: Mapping[str, Any]
    """As the fleet file says."""
    options: Mapping[str, Mapping[str, Any]]
    """By case."""
    cases: tuple[Case, ...]
    """The first is what the others are compared with."""

    @property
    def baseline(self) -> Case:
        """What the others are compared with."""
        return self.cases[0]

    def against_baseline(self) -> dict[str, list[Comparison]]:
        """Every other case's figures against the baseline's."""
        return {each.name: comparisons(each, self.baseline) for each in self.cases[1:]}


def as_dict(found: Comparing) -> dict[str, Any]:
    """The document, ready for JSON."""
    document = {
        "schema": SCHEMA,
        "command": found.command,
        "trace": found.trace,
        "fleet": found.fleet,
        "definitions": {name: asdict(each) for name, each in DEFINITIONS.items()},
        "losses": MEANING,
        "baseline": found.baseline.name,
        "seeds": [run.seed for run in found.baseline.runs],
        "cases": [_case(each, found.options[each.name]) for each in found.cases],
        "comparisons": [
            _comparison(name, each)
            for name, of_case in found.against_baseline().items()
            for each in of_case
        ],
    }
    plain: dict[str, Any] = _plain(document)
    return plain


def _case(case: Case, options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": case.name,
        "options": options,
        "figures": _intervals(case.figures),
        "pools": {pool: _intervals(values) for pool, values in case.pools.items()},
        "losses": _intervals({str(loss): each for loss, each in case.losses.items()}),
        "ttft_quantiles": [
            {"of_100": of_100, "seconds": seconds}
            for of_100, seconds in zip(GRID, case.ttft_s, strict=True)
        ],
        "course": [asdict(moment) for moment in case.course],
        "expected_reuse": [_bin(each) for each in case.reuse_bins],
        "estimated_seconds": [
            {"below_s": edge, **_bin(each)}
            for edge, each in zip((*SECONDS_EDGES, math.inf), case.seconds_bins, strict=True)
        ],
        "runs": [
            {
                "seed": run.seed,
                "requests": run.requests,
                "agrees": run.agrees,
                "counters": run.counters,
                "wall_s": run.wall_s,
                "simulated_s": run.simulated_s,
            }
            for run in case.runs
        ],
    }


def _intervals(intervals: Mapping[str, Interval]) -> dict[str, Any]:
    return {name: asdict(each) for name, each in intervals.items()}


def _bin(found: Bin) -> dict[str, Any]:
    if not found.weight:
        return {"requests": found.requests, "said": None, "came": None}
    return {
        "requests": found.requests,
        "said": found.said / found.weight,
        "came": found.came / found.weight,
    }


def _comparison(name: str, found: Comparison) -> dict[str, Any]:
    return {"case": name, **asdict(found)}


def _plain(value: Any) -> Any:
    """Only what JSON has: nan and infinities as null, other names as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, str | int | float) or value is None:
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Sequence | set | frozenset):
        return [_plain(each) for each in value]
    return str(value)
