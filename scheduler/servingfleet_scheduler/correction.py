"""How much of what is predicted turns out to be there, learned from outcomes: a factor for each (replica, rank).

Pure. Some predictions are upper bounds: an engine that evicts its recurrent state without a word, or keys that it mixes
where nobody can see it. Two factors are learned, of what confirmed blocks promise (`lower`) and of what is promised beyond
(`predicted` less `lower`): an engine that is wrong in the one may be right in the other. Neither goes beyond 1: that an
engine reused more than predicted once says nothing of the next prompt. One whose predictions are right keeps exactly 1.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class CorrectionSettings:
    """How fast trust is lost and comes back."""

    half_life_s: float = 600.0
    """Evidence counts half after this: a factor whose outcomes stop is back within 10% of 1 in an hour, and what it kept
    away is tried again."""
    prior_tokens: float = 8192.0
    """A factor of 1 is believed as if so many tokens had proven it: a handful of prompts."""
    least_pairs: float = 5.0
    """Fewer outcomes, each by its age, change nothing."""
    least_short: float = 0.1
    """Where a smaller share of outcomes fell short nothing is changed: losses now and then are no rule, and a factor
    would make all other predictions wrong (on an overloaded Mooncake trace, by more than they were)."""
    floor: float = 0.1
    """No factor is smaller: some hope stays, so that the target is tried again."""
    max_keys: int = 8192
    """(replica, rank) pairs; beyond it the one not heard of for the longest time is forgotten."""


DEFAULTS = CorrectionSettings()


class Factors(NamedTuple):
    """What a token is worth that `lower` promises, and one that only `predicted` does."""

    sure: float = 1.0
    unsure: float = 1.0


NONE = Factors()


@dataclass(slots=True)
class _Evidence:
    """Sums, each worth its age; tokens but for `pairs` and those of them that fell `short`."""

    at: float
    pairs: float = 0.0
    short: float = 0.0
    sure: float = 0.0
    sure_found: float = 0.0
    unsure: float = 0.0
    unsure_found: float = 0.0


class Corrections:
    """The factors of every target."""

    def __init__(self, settings: CorrectionSettings = DEFAULTS) -> None:
        self._settings = settings
        self._known: OrderedDict[tuple[str, int], _Evidence] = OrderedDict()

    def learn(
        self, target: tuple[str, int], *, lower: int, predicted: int, actual: int, now: float
    ) -> None:
        """One outcome: `lower` and `predicted` tokens were promised, `actual` were reused."""
        known = self._known.get(target)
        if known is None:
            known = self._known[target] = _Evidence(now)
        self._known.move_to_end(target)
        while len(self._known) > self._settings.max_keys:
            self._known.popitem(last=False)
        kept = self._kept(known, now)
        found = min(actual, predicted)
        known.at = max(known.at, now)
        known.pairs = kept * known.pairs + 1
        known.short = kept * known.short + (found < predicted)
        known.sure = kept * known.sure + lower
        known.sure_found = kept * known.sure_found + min(found, lower)
        known.unsure = kept * known.unsure + (predicted - lower)
        known.unsure_found = kept * known.unsure_found + max(0, found - lower)

    def factors(self, target: tuple[str, int], now: float) -> Factors:
        """The factors of a target now."""
        known = self._known.get(target)
        if known is None:
            return NONE
        if known.short <= self._settings.least_short * known.pairs:
            return NONE
        kept = self._kept(known, now)
        if kept * known.pairs < self._settings.least_pairs:
            return NONE
        return Factors(
            self._factor(kept, known.sure_found, known.sure),
            self._factor(kept, known.unsure_found, known.unsure),
        )

    def __len__(self) -> int:
        return len(self._known)

    def _kept(self, known: _Evidence, now: float) -> float:
        return float(0.5 ** (max(0.0, now - known.at) / self._settings.half_life_s))

    def _factor(self, kept: float, found: float, promised: float) -> float:
        prior = self._settings.prior_tokens
        factor = (kept * found + prior) / (kept * promised + prior)
        return max(self._settings.floor, factor)
