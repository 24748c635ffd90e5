"""All that is checked of one rank's stream while it runs: findings in, counted and held against the stream, effects out.

Pure. What a finding does to what is held is its owner's business, see `follow`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from servingfleet_protos.v1.common_pb2 import TIER_GPU

from ..adapters.events import (
    Batch,
    Cleared,
    Doubt,
    Dropped,
    EngineProfile,
    Foreign,
    Removed,
    Stored,
)
from .canary import Canary
from .fingerprint import Fingerprint
from .standing import Failures, Finding, Standing
from .watches import (
    ORPHANS_LEAST,
    ORPHANS_SHARE,
    REMOVALS_LEAST,
    REMOVALS_SHARE,
    BatchTimes,
    Feedback,
    Readability,
    Share,
    Silence,
    Turnover,
)

CYCLES_MOST = 3
"""Stores that are their own ancestors, or name a block twice, before the stream is one that does."""
_CYCLIC = frozenset({"duplicate_in_event", "self_parent"})
_DROPS = frozenset(
    {
        *("no_hashes", "token_count", "unit_size", "self_parent", "duplicate_in_event"),
        *("hash_conflict", "mirror_full", "orphan_expired"),
    }
)
"""Reasons for which the mirror does without an event."""


class Monitor:
    """The checks of one rank, over all lives of its engine."""

    def __init__(
        self,
        rank: int,
        profile: EngineProfile,
        version: str,
        totals: Counter[str],
        follow: Callable[[Finding, bool], None],
        *,
        extra_keys: bool,
    ) -> None:
        """`follow`: called with each finding that is held against the stream, and whether the stream was quarantined
        before. `extra_keys`: requests carry keys that events don't tell."""
        self.failures = Failures(totals)
        self.canary: Canary | None = None
        """Listens to what the engine makes of a prompt of ours."""
        self._rank = rank
        self._profile = profile
        self._version = version
        self._totals = totals
        self._follow = follow
        self._extra_keys = extra_keys
        self._gaps = 0
        self.begin_life({})

    def begin_life(self, before: Mapping[str, str]) -> None:
        """Nothing is held against a new engine process; `before` are the last one's traits."""
        self.fingerprint = Fingerprint(before)
        self.fingerprint.release(self._profile, self._version)
        self.standing = Standing(self.failures)
        self._readability = Readability()
        self._times = BatchTimes()
        self._turnover = Turnover()
        self._silence = Silence()
        self._feedback = Feedback()
        self._orphans = Share(
            "orphans_many",
            "blocks were of a place that was never told",
            ORPHANS_SHARE,
            ORPHANS_LEAST,
            Doubt.QUARANTINED,
        )
        self._removals = Share(
            "removals_unknown",
            "removals named a block that was not held",
            REMOVALS_SHARE,
            REMOVALS_LEAST,
            Doubt.AMBIGUOUS,
        )
        self._cycles = 0
        self._joined = False
        self._proven = False
        if self._extra_keys:
            text = "requests have keys that events don't tell"
            self.standing.note(Finding("extra_keys", text, Doubt.AMBIGUOUS))

    @property
    def quarantined(self) -> bool:
        """Nothing is to be indexed in this life of the engine."""
        return self.standing.worst[0] is Doubt.QUARANTINED

    def adopt(self, profile: EngineProfile) -> None:
        """The engine is known now. Nothing was read before."""
        self._profile = profile

    def release(self, version: str) -> None:
        """The engine says which release it is."""
        self._version = version
        self.fingerprint.release(self._profile, version)

    # Findings.

    def note(self, finding: Finding) -> None:
        """Something is wrong with the stream, or with one of its tiers."""
        before = self.quarantined
        self.standing.note(finding)
        self._follow(finding, before)

    def drop(self, event: Dropped) -> None:
        """What could not be used."""
        self._totals[f"drop_{event.reason}"] += 1
        self.note(Finding(event.reason, event.detail, event.doubt, event.tier))

    def odd(self, finding: Finding | None) -> None:
        """Something is wrong with more than one event. None: nothing is."""
        if finding is not None:
            self._totals[f"odd_{finding.reason}"] += 1
            self.note(finding)

    def found(self, findings: Sequence[Finding]) -> None:
        """What putting an event into the mirror has shown."""
        for finding in findings:
            if finding.reason in _DROPS:
                self._totals[f"drop_{finding.reason}"] += 1
                self.note(finding)
            else:
                self.odd(finding)

    def count(self, reason: str, detail: str) -> None:
        """A turn of the numbering: it keeps its own account of what is lost."""
        self.failures.count(Finding(reason, detail, Doubt.NONE))

    # The stream.

    def unreadable(self, detail: str) -> None:
        """A message that can't be read at all."""
        self.odd(self._readability.unreadable(detail))

    def gaps(self, gaps: int, reason: str) -> None:
        """Gaps in the numbers since the start."""
        if gaps > self._gaps:
            self._gaps = gaps
            self.count("gap", reason or "batches are missing")

    def batch(self, batch: Batch, wall: float | None, *, late: str) -> None:
        """The next batch. `late`: why not all before it is known, "" if it is."""
        self._silence.heard()
        self._end("silent")
        if not self._joined:
            self._joined = True
            if late:
                self.count("late_join", late)
        if batch.length:
            self._readability.readable()
            self._check(batch, wall)
        elif batch.events and isinstance(batch.events[0], Dropped):
            self.unreadable(batch.events[0].detail)
        if self.canary is not None:
            self.canary.observe(batch)

    def form(self, event: Stored | Removed | Foreign | Cleared) -> None:
        """How an event was written."""
        tier = event.tier if isinstance(event, Stored | Removed) else 0
        for finding in self.fingerprint.event(event.shape, 0 if tier == TIER_GPU else tier):
            self.odd(finding)

    def root(self, event: Stored) -> None:
        """A store from a prompt's start, of an engine whose hashes prove their namespace."""
        self._proven = self._proven or not event.opaque
        if event.opaque:
            text = "a first block whose hash is neither that of its token_ids nor that of its cache_salt and them"
            if not self._proven:
                text = f"{text}, and none yet that is: a newer release, or requests that are kept apart"
            # Of no known namespace; of another, once this life of the engine has shown one that is known.
            doubt = Doubt.NONE if self._proven else Doubt.INCOMPLETE
            self.odd(Finding("namespace_unknown", text, doubt))

    def stored(
        self, event: Stored, findings: Sequence[Finding], now: float, *, orphans: bool
    ) -> None:
        """A store, with what it has shown. `orphans`: blocks that wait for their place say something of the stream."""
        if event.tier == TIER_GPU:
            self._turnover.stored(now)
        if not findings:
            self.standing.stored()
        if orphans:
            self.odd(self._orphans.seen(event.count, 0))
        for finding in findings:
            self._cycles += finding.reason in _CYCLIC
            if finding.reason in _CYCLIC and self._cycles == CYCLES_MOST:
                text = f"{CYCLES_MOST} stores that name a block twice, the last: {finding.detail}"
                self.odd(Finding("cycles", text, Doubt.QUARANTINED))
        self.found(findings)

    def removed(self, event: Removed, findings: Sequence[Finding], *, certain: bool) -> None:
        """A removal, with what it has shown. `certain`: all that was held is known."""
        if event.tier == TIER_GPU:
            self._turnover.removed()
            self._end("removals_missing")
            if certain and self._profile.tiers[TIER_GPU].multiset:
                strays = sum(finding.reason == "removed_unknown" for finding in findings)
                self.odd(self._removals.seen(len(event.hashes) // event.width, strays))
        self.found(findings)

    def foreign(self, event: Foreign) -> None:
        """An event of a medium that nobody knows."""
        self._totals["drop_unknown_medium"] += 1
        before = self.quarantined
        known = event.stored or self.standing.known_medium(event.medium)
        # Where nothing was ever stored there, it may be one of the tiers that we know, under another name.
        doubt = Doubt.INCOMPLETE if known else Doubt.STALE
        finding = Finding("unknown_medium", event.detail, doubt)
        self.standing.medium(event.medium, finding, stored=event.stored)
        self._follow(finding, before)

    def cleared(self, *, whole: bool) -> None:
        """The engine emptied its cache. `whole`: on all tiers."""
        self._turnover.removed()
        if whole:
            self.standing.cleared()

    def expired(self, blocks: int, findings: Sequence[Finding], *, orphans: bool) -> None:
        """Blocks waited too long for their place. `orphans`: see `stored`."""
        # Counted by blocks, and noted once.
        self._totals["drop_orphan_expired"] += max(0, blocks - 1)
        self.found(findings)
        if orphans:
            self.odd(self._orphans.seen(0, blocks))

    # The engine's own figures, and what became of prompts.

    def held(self, blocks: tuple[int, int], tokens: tuple[int, int]) -> None:
        """What is surely held on the GPU, and what fits: in blocks, and in tokens."""
        finding = self._turnover.held(*blocks, "blocks")
        self.odd(finding or self._turnover.held(*tokens, "tokens"))

    def usage(self, share: float, now: float) -> None:
        """The share of the GPU cache in use."""
        self._condition("removals_missing", self._turnover.usage(share, now), ends=False)

    def progress(self, finished: int, computed: int, unit: int, now: float) -> None:
        """The engine's totals: requests finished, prompt tokens computed anew; and the tokens of its block."""
        finding = self._silence.progress(finished, computed, unit, now)
        self._condition("silent", finding, ends=False)

    def outcome(self, predicted: int, reported: int, unit: int) -> None:
        """What a scheduler predicted of a prompt that ran here, and what the engine reported. Tokens."""
        finding = self._feedback.outcome(predicted, reported, unit)
        if finding is not None and finding.doubt is Doubt.QUARANTINED:
            self.odd(finding)
            return
        self._condition("feedback_off", finding, ends=self._feedback.agrees)
        if finding is None and self._feedback.agrees:
            self.standing.agreed()

    # Inside.

    def _check(self, batch: Batch, wall: float | None) -> None:
        self.odd(self.fingerprint.batch(batch.length))
        if batch.time_s is not None:
            self.odd(self._times.batch(batch.time_s, wall))
        rank = self._rank
        if batch.rank is None and batch.length == 3 and rank:
            text = f"the socket of rank {rank} sends batches that name no rank"
            self.odd(Finding("rank_untold", text, Doubt.QUARANTINED))
        elif batch.rank is not None and batch.rank != rank:
            text = f"the socket of rank {rank} sends batches of rank {batch.rank}"
            self.odd(Finding("wrong_rank", text, Doubt.QUARANTINED))

    def _condition(self, reason: str, finding: Finding | None, *, ends: bool) -> None:
        if finding is None:
            if ends:
                self._end(reason)
            return
        before = self.quarantined
        if self.standing.begin(finding):
            self._totals[f"odd_{reason}"] += 1
            self._follow(finding, before)

    def _end(self, reason: str) -> None:
        self.standing.end(reason)
