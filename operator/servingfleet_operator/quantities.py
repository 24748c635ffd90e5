"""Kubernetes' ways to write numbers: quantities ("256Mi") and durations ("1h30m"). Pure.

Both stay the text that was written, so that they go back into manifests unchanged.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Self

QUANTITY_PATTERN = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]+)?$"
DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"

_UNITS = {
    **{unit: Decimal(1000) ** -power for power, unit in enumerate("mun", 1)},
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}
_UNIT = re.compile("[A-Za-z]*$")
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_SECONDS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}


class Quantity(str):
    """An amount that is not negative."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """Raises ValueError for what is no quantity."""
        if not re.fullmatch(QUANTITY_PATTERN, text):
            raise ValueError(f"{text!r} is no quantity; expected a number such as 500m or 2Gi")
        return super().__new__(cls, text)

    @property
    def number(self) -> Decimal:
        """What it amounts to."""
        digits, unit = _UNIT.sub("", self), _UNIT.findall(self)[0]
        return Decimal(digits) * _UNITS.get(unit, 1)


class Duration(str):
    """A span of time."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """Raises ValueError for what is no duration."""
        if not re.fullmatch(DURATION_PATTERN, text):
            raise ValueError(f"{text!r} is no duration; expected one such as 90s or 1h30m")
        return super().__new__(cls, text)

    @property
    def seconds(self) -> float:
        """The span in seconds."""
        return float(sum(Decimal(number) * _SECONDS[unit] for number, unit in _PART.findall(self)))
