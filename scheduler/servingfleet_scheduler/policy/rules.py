"""What an engine's profile says about time: whether decodes slow a prompt down, and what hides a load."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Overlap(IntEnum):
    """What goes on while cached tokens are loaded."""

    NONE = 0
    """Nothing: the prompt is computed afterwards."""
    QUEUE = 1
    """The request waits for its turn; others are computed meanwhile."""
    COMPUTE = 2
    """The prompt is computed, layer by layer."""


class LoadRule(NamedTuple):
    """Of one tier."""

    overlap: Overlap = Overlap.NONE
    share: float = 0.0
    """Of the time of waiting, or of computing, that hides a load: 0 to 1."""
    always: bool = False
    """The engine loads what the tier holds also where computing it again would be faster."""


class Rules(NamedTuple):
    """Of one engine. The defaults are those of an engine that says nothing."""

    mixed_steps: bool = False
    """Running decodes take part in the steps that compute prompts."""
    loads: tuple[LoadRule, LoadRule, LoadRule] = (LoadRule(), LoadRule(), LoadRule())
    """Of host, disk and shared."""


UNKNOWN = Rules()
