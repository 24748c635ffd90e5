"""A row of the report, and the small statistics behind it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

AT_LEAST_AS_FAST = 1.0
HALF_THE_MEMORY = 2.0


@dataclass(frozen=True, slots=True)
class Row:
    """One figure beside a peer's, or beside a limit that nobody can pass."""

    name: str
    ours: float
    peer: float | None
    """None: nothing to compare with."""
    ratio: float | None
    """Above 1: ours is better."""
    target: float | None
    """Least ratio aimed at. None: none is."""
    unit: str

    @property
    def missed(self) -> bool:
        return self.ratio is not None and self.target is not None and self.ratio < self.target


def less_is_better(
    name: str, ours: float, peer: float, unit: str, target: float | None = None
) -> Row:
    """A row of times or sizes."""
    return Row(name, ours, peer, peer / ours, target, unit)


def more_is_better(
    name: str, ours: float, peer: float, unit: str, target: float | None = None
) -> Row:
    """A row of speeds."""
    return Row(name, ours, peer, ours / peer, target, unit)


def p50(values: Sequence[float]) -> float:
    """The median. Raises StatisticsError for fewer than two values."""
    return quantiles(values, n=20)[9]


def p95(values: Sequence[float]) -> float:
    """The 95th percentile. Raises StatisticsError for fewer than two values."""
    return quantiles(values, n=20)[18]
