"""What is held against a stream and against each of its tiers, and until when.

Pure. A failure that changed the stream's meaning lasts for this life of the engine; one that lost something lasts until
the cache is cleared; a condition lasts until it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ..adapters.events import Doubt
from .invariants import BY_REASON

MEDIA_NAMED = 8
"""Unknown media told apart; an engine may make up ever new ones."""
PROBATION_EVENTS = 1000
"""Stores without a failure after which a form that nobody knows is believed to mean what it did."""
PROBATIONARY = frozenset({"unknown_field", "form_of_release"})


class Condition(StrEnum):
    """What a stream or a tier is good for."""

    LIVE = "live"
    DEGRADED = "degraded"
    """An upper bound: not all that is held, or not all that is held is certain."""
    RESYNCING = "resyncing"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Finding:
    """An invariant that does not hold. `reason` is a bounded word for counters."""

    reason: str
    detail: str
    """For people: what was seen and what was expected. Never tokens or salts."""
    doubt: Doubt
    tier: int = 0
    """The only tier that it says anything about. 0: the stream as a whole."""
    resync: bool = False
    """The engine's history may put it right."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How often an invariant failed, and how the first time looked."""

    invariant: str
    """"": it is no failure of the engine's."""
    reason: str
    count: int
    detail: str


def told(finding: Finding) -> str:
    """A finding for people, with what they can do."""
    row = BY_REASON.get(finding.reason)
    text = f"{finding.reason}: {finding.detail}"
    return f"{text} ({row.id}: {row.act})" if row and row.act else text


class Failures:
    """Counts of failures of one rank since the start, over all lives of its engine."""

    def __init__(self, totals: Counter[str]) -> None:
        """`totals` counts failures by invariant, as "invariant_c11"."""
        self._totals = totals
        self._by_reason: dict[str, Failure] = {}

    def count(self, finding: Finding) -> None:
        """One more."""
        reason = finding.reason
        row = BY_REASON.get(reason)
        if row is not None:
            self._totals[f"invariant_{row.id.lower()}"] += 1
        known = self._by_reason.get(reason)
        name = row.id if row else ""
        self._by_reason[reason] = (
            Failure(name, reason, known.count + 1, known.detail)
            if known
            else Failure(name, reason, 1, finding.detail)
        )

    @property
    def all(self) -> tuple[Failure, ...]:
        """By reason."""
        return tuple(self._by_reason[reason] for reason in sorted(self._by_reason))


class Standing:
    """What is held against one rank's stream in this life of the engine."""

    def __init__(self, failures: Failures) -> None:
        self.ambiguous = False
        """What is stored is an upper bound: hashes stand for blocks of several namespaces, or removals are missing."""
        self._ambiguous = False
        self._failures = failures
        self._passing = ""
        self._lasting: tuple[Doubt, str] = (Doubt.NONE, "")
        self._probation: tuple[Doubt, str] = (Doubt.NONE, "")
        self._clean = 0
        self._conditions: dict[str, Finding] = {}
        self._tiers: dict[int, tuple[Condition, str]] = {}
        self._media: dict[str, str] = {}
        self._worst: tuple[Doubt, str] = (Doubt.NONE, "")

    def note(self, finding: Finding) -> None:
        """A failure. The first text of the gravest stays."""
        self._failures.count(finding)
        self._hold(finding)
        self._weigh()

    def _hold(self, finding: Finding) -> None:
        reason, doubt = finding.reason, finding.doubt
        text = told(finding)
        if reason in PROBATIONARY and doubt is Doubt.UNTRUSTED:
            if self._probation[0] is Doubt.NONE:
                self._probation = doubt, text
            return
        if doubt:
            self._clean = 0
        if finding.tier and doubt > Doubt.INCOMPLETE:
            self._tier(finding, text)
        self._ambiguous = self._ambiguous or (doubt is Doubt.AMBIGUOUS and not finding.tier)
        if doubt in (Doubt.INCOMPLETE, Doubt.STALE) or (finding.tier and doubt):
            self._passing = self._passing or text
        elif doubt > self._lasting[0]:
            self._lasting = doubt, text

    def medium(self, name: str, finding: Finding, *, stored: bool) -> None:
        """A failure of a medium that nobody knows."""
        self.note(finding)
        if stored and len(self._media) < MEDIA_NAMED:
            self._media.setdefault(name, told(finding))
            self._weigh()

    def known_medium(self, name: str) -> bool:
        """Whether something was stored to a medium that nobody knows."""
        return name in self._media

    def begin(self, finding: Finding) -> bool:
        """A condition holds from now on. False: it did already."""
        if finding.reason in self._conditions:
            return False
        self._failures.count(finding)
        self._conditions[finding.reason] = finding
        self._weigh()
        return True

    def end(self, reason: str) -> bool:
        """A condition holds no longer. False: it did not."""
        ended = self._conditions.pop(reason, None) is not None
        if ended:
            self._weigh()
        return ended

    def stored(self) -> None:
        """A store was read without a failure."""
        if self._probation[0] is Doubt.UNTRUSTED:
            self._clean += 1
            if self._clean >= PROBATION_EVENTS:
                self._probation = Doubt.INCOMPLETE, self._probation[1]
                self._weigh()

    def agreed(self) -> None:
        """Outcomes agreed with what was predicted: a new form that was believed is trusted."""
        if self._probation[0] is Doubt.INCOMPLETE:
            self._probation = Doubt.NONE, ""
            self._weigh()

    def cleared(self) -> None:
        """The engine holds nothing: what was lost is of no account any more."""
        self._passing = ""
        self._weigh()

    @property
    def worst(self) -> tuple[Doubt, str]:
        """The gravest doubt with its reason; NONE with "" if there is none. Never STALE: that is told once."""
        return self._worst

    def _weigh(self) -> None:
        held = [self._lasting, self._probation]
        held += [(finding.doubt, told(finding)) for finding in self._conditions.values()]
        texts = [*(text for _, text in self._tiers.values()), *self._media.values()]
        held += [(Doubt.INCOMPLETE, text) for text in (self._passing, *texts) if text]
        self._worst = max(held, key=lambda each: each[0])
        conditions = self._conditions.values()
        passing = any(finding.doubt is Doubt.AMBIGUOUS for finding in conditions)
        self.ambiguous = self._ambiguous or passing

    def quarantined(self, tier: int) -> bool:
        """Whether nothing of a tier is to be indexed."""
        return self._tiers.get(tier, (Condition.LIVE, ""))[0] is Condition.QUARANTINED

    def degraded(self, tier: int) -> bool:
        """Whether what is stored in a tier is an upper bound."""
        return self._tiers.get(tier, (Condition.LIVE, ""))[0] is Condition.DEGRADED

    @property
    def tiers(self) -> Mapping[int, tuple[Condition, str]]:
        """Tiers that are not as the stream is, with the reason."""
        return dict(self._tiers)

    @property
    def media(self) -> Mapping[str, str]:
        """Media that nobody knows, each with what was seen. All are quarantined."""
        return dict(self._media)

    def _tier(self, finding: Finding, text: str) -> None:
        grave = finding.doubt >= Doubt.UNTRUSTED
        if finding.doubt is Doubt.STALE:
            return  # told once: what is held there becomes an upper bound
        condition = Condition.QUARANTINED if grave else Condition.DEGRADED
        if not self.quarantined(finding.tier):
            self._tiers[finding.tier] = condition, text
