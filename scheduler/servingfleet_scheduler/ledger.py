"""Predicted against reported reuse, over a sliding window: sums by model and replica, in buckets of time.

Pure. A pair is booked at the time of its *decision*, so that pairs and decisions of a window speak of the same
requests. Memory is bounded: a bucket holds only sums, and beyond `max_keys` replicas are counted together.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from servingfleet_core.figures import Sums

from .policy.candidate import Reuse

OTHER = "(other)"
"""Replica under which those beyond the bound are counted."""

Key = tuple[str, str]


@dataclass(slots=True)
class Row:
    """One model's, or one replica's, share of a window."""

    sums: Sums = field(default_factory=Sums)
    set_aside: Counter[str] = field(default_factory=Counter)


class Ledger:
    """Decisions, outcomes and what was set aside. Times are seconds, not before `started`."""

    def __init__(self, *, started: float, window_s: float, bucket_s: float, max_keys: int) -> None:
        self._started = started
        self._window_s = window_s
        self._bucket_s = bucket_s
        self._max_keys = max_keys
        self._buckets: OrderedDict[int, dict[Key, Row]] = OrderedDict()
        self.totals: dict[str, Row] = {}
        """By model, since the start: what counters export."""

    def decided(self, model: str, replica: str, at: float) -> None:
        """A request was routed."""
        self._row(model, replica, at).sums.decisions += 1
        self._total(model).sums.decisions += 1

    def moved(self, model: str, chosen: str, ran: str, at: float) -> None:
        """A decision belongs to the replica where its request really ran."""
        if chosen != ran:
            self._row(model, chosen, at).sums.decisions -= 1
            self._row(model, ran, at).sums.decisions += 1

    def rejected(self, model: str, at: float) -> None:
        """A request was turned away early."""
        self._row(model, "", at).sums.rejected += 1
        self._total(model).sums.rejected += 1

    def joined(
        self,
        model: str,
        replica: str,
        at: float,
        reuse: Reuse,
        *,
        best: int,
        actual: int,
        own: bool = True,
    ) -> None:
        """A pair: predicted `reuse` and `actual` tokens. `own`: its decision was counted by this scheduler."""
        for sums in (self._row(model, replica, at).sums, self._total(model).sums):
            sums.joined += own
            sums.add_pair(
                prompt=reuse.prompt_tokens,
                best=best,
                predicted=reuse.predicted,
                lower=reuse.lower,
                upper=reuse.upper,
                expected=round(reuse.expected),
                actual=actual,
            )

    def set_aside(self, reason: str, at: float, model: str = "", replica: str = "") -> None:
        """Something that is in no figure. Without a model where the id does not tell."""
        self._row(model, replica, at).set_aside[reason] += 1
        self._total(model).set_aside[reason] += 1

    def rows(self, now: float, window_s: float = 0.0) -> tuple[dict[Key, Row], float]:
        """Sums by (model, replica) of the last `window_s` seconds (0: all that is kept), and the seconds spanned.

        Whole buckets: the span is up to one bucket longer than asked for.
        """
        self.expire(now)
        window = min(window_s or self._window_s, self._window_s)
        first = self._bucket(now - window)
        merged: dict[Key, Row] = {}
        for number, bucket in self._buckets.items():
            if number < first:
                continue
            for key, row in bucket.items():
                into = merged.setdefault(key, Row())
                into.sums.add(row.sums)
                into.set_aside.update(row.set_aside)
        begin = max(self._started, first * self._bucket_s)
        return merged, max(0.0, now - begin)

    def expire(self, now: float) -> None:
        """Forgets what lies before the window."""
        first = self._bucket(now - self._window_s)
        for number in [number for number in self._buckets if number < first]:
            del self._buckets[number]

    def _bucket(self, at: float) -> int:
        return int(at // self._bucket_s)

    def _total(self, model: str) -> Row:
        if model not in self.totals and len(self.totals) >= self._max_keys:
            model = OTHER
        return self.totals.setdefault(model, Row())

    def _row(self, model: str, replica: str, at: float) -> Row:
        bucket = self._buckets.setdefault(self._bucket(at), {})
        key = (model, replica)
        if key not in bucket and len(bucket) >= self._max_keys:
            key = (model, OTHER)
            if key not in bucket and len(bucket) >= 2 * self._max_keys:
                key = (OTHER, OTHER)
        return bucket.setdefault(key, Row())


def by_model(rows: dict[Key, Row]) -> dict[str, Row]:
    """The rows of each model, added up."""
    models: dict[str, Row] = {}
    for (model, _), row in rows.items():
        into = models.setdefault(model, Row())
        into.sums.add(row.sums)
        into.set_aside.update(row.set_aside)
    return models
