"""What only a run of events, or the engine's own counters, can show.

Pure: whoever has the figures calls in, with the time. Each watch keeps a handful of numbers. What begins at one bound
ends at another, so that nothing flutters.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from ..adapters.events import Doubt
from .standing import Finding

UNREADABLE_IN_ROW = 3
BATCH_BACK_S = 5.0
CLOCKS_APART_S = 3600.0
MILLISECONDS = 1e11
"""A time beyond it is the year 5138, or in milliseconds."""

WINDOW = 1000
ORPHANS_SHARE = 0.01
ORPHANS_LEAST = 10
REMOVALS_SHARE = 0.001
REMOVALS_LEAST = 3

CAPACITY_SLACK = 1.05
REMOVAL_SILENCE_S = 3600.0
CYCLE_HIGH, CYCLE_LOW = 0.9, 0.6
CYCLES = 3

SILENCE_S = 30.0
SILENCE_REQUESTS = 8
"""Finished without a block announced, each with two blocks' worth of computed prompt."""

OUTCOMES = 32
OUTCOMES_LEAST = 16
WRONG_SHARE = 0.9


class Readability:
    """C1, C2: messages that can't be read at all."""

    def __init__(self) -> None:
        self._in_row = 0

    def readable(self) -> None:
        """A message was read."""
        self._in_row = 0

    def unreadable(self, detail: str) -> Finding | None:
        """A message was not."""
        self._in_row += 1
        if self._in_row != UNREADABLE_IN_ROW:
            return None
        text = f"{UNREADABLE_IN_ROW} messages in a row that can't be read, the last: {detail}"
        return Finding("unreadable", text, Doubt.QUARANTINED)


class BatchTimes:
    """C9: the engine's clock as its batches show it."""

    def __init__(self) -> None:
        self._last = -math.inf

    def batch(self, time_s: float, wall: float | None) -> Finding | None:
        """A batch's own time. `wall`: ours now, None if it is not known or the batch is a replayed one."""
        if not math.isfinite(time_s):
            return Finding("time_far", "the batch's time is no number", Doubt.NONE)
        if time_s >= MILLISECONDS:
            text = f"the batch's time is {time_s:.0f}; expected seconds since 1970"
            return Finding("time_unit", text, Doubt.QUARANTINED)
        back = self._last - time_s
        self._last = max(self._last, time_s)
        if back > BATCH_BACK_S:
            return Finding(
                "time_back", f"the batch's time is {back:.0f} s before the last", Doubt.NONE
            )
        if wall is not None and abs(time_s - wall) > CLOCKS_APART_S:
            apart = abs(time_s - wall)
            return Finding(
                "time_far", f"the batch's time is {apart:.0f} s from our clock", Doubt.NONE
            )
        return None


class Share:
    """C14, C18: how many of many failed. The first window with too many asks for the history, the next is held against
    the stream."""

    def __init__(self, reason: str, what: str, share: float, least: int, lasting: Doubt) -> None:
        """`least`: fewer failures are none. `lasting`: what it means when the history did not put it right."""
        self._reason, self._what, self._share, self._least = reason, what, share, least
        self._lasting = lasting
        self._all = 0
        self._failed = 0
        self._asked = False

    def seen(self, count: int, failed: int) -> Finding | None:
        """`failed` among `count`."""
        self._all += count
        self._failed += failed
        if self._all < WINDOW:
            return None
        total, bad = self._all, self._failed
        self._all = self._failed = 0
        if bad < self._least or bad <= self._share * total:
            return None
        asked, self._asked = self._asked, True
        text = f"{bad} of {total} {self._what}; expected {self._share:.1%} at most"
        if asked:
            return Finding(self._reason, f"{text}, after its history was read again", self._lasting)
        return Finding(self._reason, text, Doubt.INCOMPLETE, resync=True)


class Turnover:
    """C20, C21: what is held against what the engine can hold, and removals against its use."""

    def __init__(self) -> None:
        self._asked = False
        self._since: float | None = None
        self._stores = 0
        self._high = False
        self._cycles = 0

    def held(self, copies: int, capacity: int, unit: str) -> Finding | None:
        """Copies that are surely on the GPU, and how many fit."""
        if not capacity or copies <= capacity * CAPACITY_SLACK:
            return None
        asked, self._asked = self._asked, True
        text = f"{copies} {unit} held; the engine has {capacity}: removals are missing"
        if asked:
            text = f"{text}, after its history was read again"
            return Finding("over_capacity", text, Doubt.AMBIGUOUS)
        return Finding("over_capacity", text, Doubt.INCOMPLETE, resync=True)

    def stored(self, now: float) -> None:
        """Blocks were stored on the GPU."""
        self._since = now if self._since is None else self._since
        self._stores += 1

    def removed(self) -> None:
        """A block was removed from the GPU, or all were."""
        self._since, self._stores, self._cycles = None, 0, 0

    def usage(self, share: float, now: float) -> Finding | None:
        """The share of the GPU cache in use. The condition ends with the next removal."""
        if share >= CYCLE_HIGH:
            self._high = True
        elif share < CYCLE_LOW and self._high:
            self._high = False
            self._cycles += 1
        silent = now - self._since if self._since is not None else 0.0
        if silent < REMOVAL_SILENCE_S or self._cycles < CYCLES or self._stores < self._cycles:
            return None
        text = (
            f"no removal for {silent:.0f} s, in which the cache was full {self._cycles} times "
            f"and {self._stores} stores were announced"
        )
        return Finding("removals_missing", text, Doubt.AMBIGUOUS)


class Silence:
    """C34: the engine finishes requests, computes prompts, and announces nothing."""

    def __init__(self) -> None:
        self._since: tuple[float, int, int] | None = None

    def heard(self) -> None:
        """A batch was applied."""
        self._since = None

    def progress(self, finished: int, computed: int, unit: int, now: float) -> Finding | None:
        """The engine's totals: requests finished, prompt tokens computed anew; and its block, 0 if it is not known.

        Prompts shorter than two blocks may rightly leave none.
        """
        if self._since is None or finished < self._since[1] or computed < self._since[2]:
            self._since = (now, finished, computed)
            return None
        began, finished_then, computed_then = self._since
        requests, tokens = finished - finished_then, computed - computed_then
        if now - began < SILENCE_S or requests < SILENCE_REQUESTS:
            return None
        if tokens < 2 * max(unit, 1) * requests:
            return None
        block = f"its block is {unit} tokens" if unit else "its block is not known"
        text = (
            f"{requests} requests finished and {tokens} prompt tokens computed in {now - began:.0f} s, "
            f"without one event; {block}"
        )
        return Finding("silent", text, Doubt.UNTRUSTED)


class Feedback:
    """C31: what schedulers predicted against what the engine reported."""

    def __init__(self) -> None:
        self._errors: deque[tuple[int, int]] = deque(maxlen=OUTCOMES)

    def outcome(self, predicted: int, reported: int, unit: int) -> Finding | None:
        """Tokens, and the engine's unit. None: they agree, or it is too early to tell."""
        if predicted or reported:
            self._errors.append((predicted, reported))
        if len(self._errors) < OUTCOMES_LEAST:
            return None
        credits = [(p - r) / p for p, r in self._errors if p >= 2 * unit]
        if len(credits) >= OUTCOMES_LEAST and median(credits) >= WRONG_SHARE:
            text = f"of {len(credits)} prompts that were predicted to be reused, most were computed whole"
            return Finding("feedback_wrong", text, Doubt.QUARANTINED)
        error = median(abs(p - r) for p, r in self._errors)
        if error > unit:
            text = f"half of {len(self._errors)} predictions are off by {error:.0f} tokens or more"
            return Finding("feedback_off", text, Doubt.INCOMPLETE)
        return None

    @property
    def agrees(self) -> bool:
        """A whole window of outcomes was looked at."""
        return len(self._errors) == OUTCOMES
