"""Where prompt tokens went: reused, or lost for one of six reasons, in rows that add up. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType

from .results import Ceilings, Outcome


class Loss(StrEnum):
    """The rows of the waterfall, from what was reused to what nobody could."""

    REUSED = "reused"
    ERROR = "error"
    PLACEMENT = "placement"
    UNKNOWN = "unknown"
    EVICTION = "eviction"
    CAPACITY = "capacity"
    NEVER_SEEN = "never seen"


MEANING: Mapping[Loss, str] = MappingProxyType(
    {
        Loss.REUSED: "as the engines report it",
        Loss.ERROR: "credited to the chosen rank, and not there",
        Loss.PLACEMENT: "held by a rank that was known to hold it: time went before reuse",
        Loss.UNKNOWN: "held by a rank that the index did not know to hold it",
        Loss.EVICTION: "held nowhere when routed (evicted, or not computed yet), though all memory could hold it",
        Loss.CAPACITY: "more than all memory can hold, with foresight (Belady)",
        Loss.NEVER_SEEN: "in no earlier prompt: nothing to gain",
    }
)


def waterfall(outcomes: Iterable[Outcome], ceilings: Ceilings) -> dict[Loss, int]:
    """Prompt tokens of the finished requests by row; the rows add up to all of them.

    Each request's steps are prompt >= seen >= best held anywhere >= best known of >= predicted >= reused. A step beyond
    its neighbour is cut to it: reuse of what came between routing and execution is nobody's loss. Belady's ceiling is
    known of the whole trace only: its share of the prompts stands for these requests'. Where it was not worked out,
    nothing is called capacity.
    """
    rows = dict.fromkeys(Loss, 0)
    seen_in_all = held_in_all = prompt_in_all = 0
    for each in outcomes:
        if each.fate != "finished":
            continue
        seen = min(each.prompt, max(each.seen, each.actual))
        held = min(seen, max(each.best_actual, each.actual))
        predicted = min(held, max(each.predicted, each.actual))
        known = min(held, max(each.best_predicted, predicted))
        rows[Loss.REUSED] += each.actual
        rows[Loss.ERROR] += predicted - each.actual
        rows[Loss.PLACEMENT] += known - predicted
        rows[Loss.UNKNOWN] += held - known
        rows[Loss.NEVER_SEEN] += each.prompt - seen
        seen_in_all += seen
        held_in_all += held
        prompt_in_all += each.prompt
    foresight = seen_in_all
    if ceilings.u2 is not None and ceilings.prompt:
        share = ceilings.u2 / ceilings.prompt
        foresight = min(seen_in_all, max(held_in_all, round(prompt_in_all * share)))
    rows[Loss.EVICTION] = foresight - held_in_all
    rows[Loss.CAPACITY] = seen_in_all - foresight
    return rows
