"""One data-parallel rank: its numbering, its standing, its holdings; events in, messages for schedulers out.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence

from servingfleet_protos.v1.common_pb2 import (
    STREAM_STATE_HISTORY_LOST,
    STREAM_STATE_LIVE,
    STREAM_STATE_QUARANTINED,
    STREAM_STATE_RESYNCING,
    STREAM_STATE_UNPROVEN,
    TIER_GPU,
)
from servingfleet_protos.v1.stream_pb2 import CreditEnded, CreditOpened, RankState, RelayMessage

from .adapters.events import (
    Adapter,
    Batch,
    Cleared,
    Doubt,
    Dropped,
    Event,
    Foreign,
    Removed,
    Stored,
)
from .conformance.canary import Canary
from .conformance.fingerprint import Fingerprint
from .conformance.standing import Condition, Failures, Finding, Standing
from .conformance.watches import (
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
from .frames import BadFrames, live_frame, reply_frame
from .holdings import UNPLACED, Holdings
from .lanes import Lane, Lanes
from .messages import Messages
from .sequence import Apply, Ignored, Lost, Restarted, Step
from .sequence import Sequence as Numbering
from .settings import PipelineSettings

MAX_REASON_BYTES = 512
EXPIRY_INTERVAL_S = 1.0
"""The mirror looks through all it knows to find orphans that waited too long."""
CYCLES_MOST = 3
"""Stores that are their own ancestors, or name a block twice, before the stream is one that does."""
_CYCLIC = frozenset({"duplicate_in_event", "self_parent"})


class Rank:
    """The part of the pipeline that belongs to one rank."""

    def __init__(
        self,
        rank: int,
        settings: PipelineSettings,
        lanes: Lanes,
        adapter: Adapter,
        totals: Counter[str],
    ) -> None:
        self.rank = rank
        self.numbering = Numbering(
            replay=settings.replay and not settings.pull,
            deadline_s=settings.replay_deadline_s,
            probe_s=settings.probe_s,
            max_held_batches=settings.max_held_batches,
            max_held_bytes=settings.max_held_bytes,
        )
        self.failures = Failures(totals)
        self._settings = settings
        self._adapter = adapter
        self._decode = self._reader()
        self._totals = totals
        self._messages = Messages(rank, settings.delta_hashes)
        self.holdings = Holdings(rank, settings, lanes, self._messages)
        self._version = settings.engine_version
        self._away = ""
        self._expired = 0.0
        self._resync = ""
        self._gaps = 0
        self.canary: Canary | None = None
        """Listens to what the engine makes of a prompt of ours."""
        self._begin_life({})
        self._messages.known(self.state())

    def _begin_life(self, before: dict[str, str]) -> None:
        """Nothing is held against a new engine process; `before` are the last one's traits."""
        self.fingerprint = Fingerprint(before)
        self.fingerprint.release(self._adapter.profile, self._version)
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
        if self._settings.extra_keys:
            text = "requests have keys that events don't tell"
            self.standing.note(Finding("extra_keys", text, Doubt.AMBIGUOUS))

    def state(self) -> RankState:
        """What schedulers are told of this rank."""
        state, reason = self.numbering.state
        doubt, why = self.standing.worst
        if self.holdings.unplaced and doubt is Doubt.NONE:
            doubt, why = Doubt.INCOMPLETE, UNPLACED
        limits = self._adapter.profile.never_run or self.holdings.lanes.bounded
        if limits and doubt is Doubt.NONE:
            doubt, why = Doubt.INCOMPLETE, limits
        if doubt is Doubt.QUARANTINED:
            state, reason = STREAM_STATE_QUARANTINED, why
        elif doubt is Doubt.UNTRUSTED and state != STREAM_STATE_UNPROVEN:
            state, reason = STREAM_STATE_UNPROVEN, why
        elif doubt in (Doubt.INCOMPLETE, Doubt.AMBIGUOUS) and state == STREAM_STATE_LIVE:
            state, reason = STREAM_STATE_HISTORY_LOST, why
        if self._away:
            state, reason = STREAM_STATE_UNPROVEN, self._away
        return RankState(
            rank=self.rank,
            incarnation=self.numbering.incarnation,
            state=state,  # type: ignore[arg-type]
            reason=_cut(reason),
            engine_seq=self.numbering.applied,
        )

    @property
    def condition(self) -> Condition:
        """What the stream as a whole is good for."""
        conditions = {
            STREAM_STATE_LIVE: Condition.LIVE,
            STREAM_STATE_RESYNCING: Condition.RESYNCING,
            STREAM_STATE_QUARANTINED: Condition.QUARANTINED,
        }
        return conditions.get(self.state().state, Condition.DEGRADED)

    # The engine as a whole.

    def adopt(self, lanes: Lanes, adapter: Adapter) -> None:
        """The engine is known now. Nothing was read before."""
        self.holdings.lanes, self._adapter = lanes, adapter
        self._decode = self._reader()

    def release(self, version: str) -> None:
        """The engine says which release it is."""
        self._version = version
        self.fingerprint.release(self._adapter.profile, version)

    def mistrust(self, reason: str) -> None:
        """Nothing that is held counts, whatever the stream says, until this is called with ""."""
        self._away = reason

    def suspect(self) -> None:
        """What is held now is an upper bound."""
        self.holdings.suspect()

    def note(self, finding: Finding) -> None:
        """Something is wrong with the stream, or with one of its tiers."""
        before = self._quarantined
        self.standing.note(finding)
        self._follow(finding, before)

    def usage(self, share: float, now: float) -> None:
        """The share of the GPU cache in use."""
        self._condition("removals_missing", self._turnover.usage(share, now))

    def progress(self, finished: int, computed: int, now: float) -> None:
        """The engine's totals: requests finished, prompt tokens that it computed anew."""
        unit = self.holdings.lanes.gpu_unit
        finding = self._silence.progress(finished, computed, unit, now)
        if finding is not None:
            self._condition("silent", finding)

    # Prompts that schedulers sent here.

    def dispatched(self, credit: CreditOpened, now: float) -> None:
        """A scheduler sent a prompt here."""
        self.holdings.dispatched(credit, now, whole=self._certain, doubtful=self.standing.ambiguous)

    def ended(self, credit: CreditEnded, now: float) -> None:
        """A prompt that was sent is done with. Unknown ones are fine."""
        self.holdings.ended(credit.decision_id, now)

    def outcome(self, predicted: int, reported: int) -> None:
        """What a scheduler predicted of a prompt that ran here, and what the engine reported. Tokens."""
        unit = self.holdings.lanes.gpu_unit
        # Where history is lost, more is reused than is known of: that too little was predicted proves nothing.
        telling = self.numbering.state[0] == STREAM_STATE_LIVE or predicted > reported
        if not unit or not telling:
            return
        finding = self._feedback.outcome(predicted, reported, unit)
        if finding is not None and finding.doubt is Doubt.QUARANTINED:
            self.note(finding)
        else:
            self._condition("feedback_off", finding, ends=self._feedback.agrees)
        if finding is None and self._feedback.agrees:
            self.standing.agreed()

    # Bytes.

    def live(self, frames: Sequence[bytes], now: float, wall: float | None = None) -> None:
        """Frames from the subscription. `wall`: seconds since 1970, None if it is not known."""
        try:
            frame = live_frame(frames)
        except BadFrames as error:
            # If it was a batch, its number is missing now and will be asked for.
            self._drop(Dropped(error.reason, str(error), Doubt.NONE))
            self._unreadable(str(error))
            return
        self.run(self.numbering.live(frame.seq, frame.payload, now), now, wall)

    def replayed(self, frames: Sequence[bytes], now: float) -> None:
        """Frames of one reply to the replay request."""
        try:
            frame = reply_frame(frames)
        except BadFrames as error:
            self._drop(Dropped(error.reason, str(error), Doubt.NONE))
            return
        self.run(self.numbering.replayed(frame.seq, frame.payload, now), now)

    def replay_failed(self, reason: str, now: float) -> None:
        """The last replay request will not be answered (any more)."""
        self.failures.count(Finding("replay_failed", reason, Doubt.NONE))
        self.run(self.numbering.replay_failed(reason, now), now)

    def run(self, steps: Sequence[Step], now: float, wall: float | None = None) -> None:
        """Carries out what the numbering decided."""
        for step in steps:
            match step:
                case Apply():
                    self._totals["batches"] += 1
                    self._apply(self._decode(step.payload), now, wall)
                case Ignored():
                    self._totals[f"batches_{step.reason}"] += 1
                case Lost():
                    self._totals["histories_lost"] += 1
                    reason = "entries_lost" if self._settings.pull else "history_lost"
                    self.failures.count(Finding(reason, step.reason, Doubt.NONE))
                    # First: an emptied rank that still counts as complete would promise that nothing can be reused.
                    self._announce(midway=True)
                    self.holdings.empty()
                case Restarted():
                    self._restart()
        if self.numbering.gaps > self._gaps:
            self._gaps = self.numbering.gaps
            text = f"{self.numbering.state[1] or 'batches are missing'}"
            self.failures.count(Finding("gap", text, Doubt.NONE))
        if self._resync:
            reason, self._resync = self._resync, ""
            self._totals["rebuilds"] += 1
            # What was lost is of no account: the numbering says whether all of it comes again.
            self.standing.cleared()
            self.run(self.numbering.rebuild(reason, now), now, wall)

    def tick(self, now: float) -> None:
        """Time passes."""
        if now - self._expired >= EXPIRY_INTERVAL_S:
            self._expired = now
            expired, found = self.holdings.expire(now)
            # Counted by blocks, and noted once.
            self._totals["drop_orphan_expired"] += max(0, expired - 1)
            self._note_all(found)
            if self._certain_but_for_orphans and self.holdings.lanes.placeable:
                self._maybe(self._orphans.seen(0, expired))
            self._weigh()
        self.run(self.numbering.tick(now), now)

    def snapshot(self) -> Generator[list[RelayMessage], None, None]:
        """Everything held, see `Holdings.snapshot`."""
        return self.holdings.snapshot(self.numbering.incarnation)

    def take(self) -> list[RelayMessage]:
        """What schedulers are to be told since the last call, in order, a changed state at the end."""
        self._announce()
        return self._messages.take()

    # Inside.

    def _reader(self) -> Callable[[bytes], Batch]:
        pulled = self._adapter.pulled
        if self._settings.pull and pulled is not None:
            return pulled(self._settings.engine_block_tokens)
        return self._adapter.decode

    def _restart(self) -> None:
        self._totals["engine_restarts"] += 1
        cleared = self.holdings.new_life()
        self._begin_life(self.fingerprint.describe())
        # The state carries the new incarnation, which clears the rank at its receivers.
        self._announce(midway=True)
        # Told as deltas too: older ones that still wait in an outbox may be sent after a snapshot has already named the
        # new incarnation.
        self._messages.tell(cleared)

    def _apply(self, batch: Batch, now: float, wall: float | None) -> None:
        self._silence.heard()
        self._end("silent")
        if not self._joined:
            self._joined = True
            if not self.numbering.whole:
                self.failures.count(Finding("late_join", self.numbering.state[1], Doubt.NONE))
        if batch.length:
            self._readability.readable()
            self._check_batch(batch, wall)
        elif batch.events and isinstance(batch.events[0], Dropped):
            self._unreadable(batch.events[0].detail)
        self.holdings.batch()
        if self.canary is not None:
            self.canary.observe(batch)
        # Lanes first: a scheduler must not read one group's blocks before it knows of the others.
        placed = [(event, self._place(event)) for event in batch.events]
        for event, lane in placed:
            if isinstance(event, Dropped):
                self._drop(event)
            elif isinstance(lane, Dropped):
                self._drop(lane)
            elif self._quarantined:
                self._totals["events_quarantined"] += 1
            elif isinstance(event, Foreign):
                self._foreign(event)
            elif isinstance(event, Cleared):
                self._clear()
            elif self.standing.quarantined(event.tier):
                self._totals["events_tier_quarantined"] += 1
            elif isinstance(event, Removed):
                self._remove(event, lane)
            elif lane is not None:
                self._store(event, lane, now)

    def _check_batch(self, batch: Batch, wall: float | None) -> None:
        finding = self.fingerprint.batch(batch.length)
        if finding is not None:
            self._odd(finding)
        if batch.time_s is not None:
            self._maybe(self._times.batch(batch.time_s, wall))
        if batch.rank is None and batch.length == 3 and self.rank:
            text = f"the socket of rank {self.rank} sends batches that name no rank"
            self._odd(Finding("rank_untold", text, Doubt.QUARANTINED))
        elif batch.rank is not None and batch.rank != self.rank:
            text = f"the socket of rank {self.rank} sends batches of rank {batch.rank}"
            self._odd(Finding("wrong_rank", text, Doubt.QUARANTINED))

    def _place(self, event: Event) -> Lane | Dropped | None:
        """The event's lane, declared if it is new, or why it can't have one."""
        if isinstance(event, Dropped):
            return None
        tier = event.tier if isinstance(event, Stored | Removed) else 0
        for finding in self.fingerprint.event(event.shape, 0 if tier == TIER_GPU else tier):
            self._odd(finding)
        if self._quarantined or isinstance(event, Cleared | Foreign):
            return None
        if self.standing.quarantined(event.tier):
            return None
        if isinstance(event, Removed):
            return self.holdings.lanes.of_removal(event.tier, event.group)
        return self.holdings.lane_of(event)

    def _store(self, event: Stored, lane: Lane, now: float) -> None:
        self._totals["events_stored"] += 1
        if self._adapter.profile.proves_roots and event.parent is None:
            self._prove(event)
        doubtful = self.standing.ambiguous or self.standing.degraded(event.tier)
        found = self.holdings.store(event, lane, now, whole=self._certain, doubtful=doubtful)
        if event.tier == TIER_GPU:
            self._turnover.stored(now)
        if not found:
            self.standing.stored()
        if self._certain_but_for_orphans and self.holdings.lanes.placeable:
            self._maybe(self._orphans.seen(len(event.hashes) // (event.width or 1), 0))
        for finding in found:
            if finding.reason in _CYCLIC:
                self._cycles += 1
                if self._cycles == CYCLES_MOST:
                    text = (
                        f"{CYCLES_MOST} stores that name a block twice, the last: {finding.detail}"
                    )
                    self._odd(Finding("cycles", text, Doubt.QUARANTINED))
        self._note_all(found)

    def _prove(self, event: Stored) -> None:
        """A first block of no known namespace is of another, once this life of the engine has shown one that is."""
        self._proven = self._proven or not event.opaque
        if event.opaque:
            text = "a first block whose hash is neither that of its token_ids nor that of its cache_salt and them"
            if not self._proven:
                text = f"{text}, and none yet that is: a newer release, or requests that are kept apart"
            doubt = Doubt.NONE if self._proven else Doubt.INCOMPLETE
            self._odd(Finding("namespace_unknown", text, doubt))

    def _remove(self, event: Removed, lane: Lane | None) -> None:
        self._totals["events_removed"] += 1
        certain = self._certain
        found = self.holdings.remove(event, lane, whole=certain)
        if event.tier == TIER_GPU:
            self._turnover.removed()
            self._end("removals_missing")
            traits = self._adapter.profile.tiers[TIER_GPU]
            if certain and traits.multiset:
                count = len(event.hashes) // event.width
                strays = sum(finding.reason == "removed_unknown" for finding in found)
                self._maybe(self._removals.seen(count, strays))
        self._note_all(found)

    def _foreign(self, event: Foreign) -> None:
        self._totals["drop_unknown_medium"] += 1
        before = self._quarantined
        finding = Finding("unknown_medium", event.detail, Doubt.INCOMPLETE)
        if not event.stored and not self.standing.known_medium(event.medium):
            # Nothing was ever stored there: it may be one of the tiers that we know, under another name.
            finding = Finding("unknown_medium", event.detail, Doubt.STALE)
        self.standing.medium(event.medium, finding, stored=event.stored)
        self._follow(finding, before)

    def _clear(self) -> None:
        self._totals["events_cleared"] += 1
        self._turnover.removed()
        if self.holdings.clear(self._adapter.profile.cleared_tiers):
            self.numbering.cleared()
            self.standing.cleared()

    def _weigh(self) -> None:
        """What is held against what fits."""
        blocks, tokens = self.holdings.lanes.gpu_capacity()
        held_blocks, held_tokens = self.holdings.surely_held()
        finding = self._turnover.held(held_blocks, blocks, "blocks")
        self._maybe(finding or self._turnover.held(held_tokens, tokens, "tokens"))

    @property
    def _quarantined(self) -> bool:
        return self.standing.worst[0] is Doubt.QUARANTINED

    @property
    def _certain(self) -> bool:
        """All that this life of the engine has published is known and was read."""
        return self.numbering.whole and self.standing.worst[0] is Doubt.NONE

    @property
    def _certain_but_for_orphans(self) -> bool:
        return self.numbering.whole and self.standing.worst[0] <= Doubt.INCOMPLETE

    def _unreadable(self, detail: str) -> None:
        self._maybe(self._readability.unreadable(detail))

    def _drop(self, event: Dropped) -> None:
        self._totals[f"drop_{event.reason}"] += 1
        self.note(Finding(event.reason, event.detail, event.doubt, event.tier))

    def _odd(self, finding: Finding) -> None:
        self._totals[f"odd_{finding.reason}"] += 1
        self.note(finding)

    def _maybe(self, finding: Finding | None) -> None:
        if finding is not None:
            self._odd(finding)

    def _note_all(self, found: Sequence[Finding]) -> None:
        for finding in found:
            if finding.reason in _DROPS:
                self._totals[f"drop_{finding.reason}"] += 1
                self.note(finding)
            else:
                self._odd(finding)

    def _condition(self, reason: str, finding: Finding | None, *, ends: bool = True) -> None:
        if finding is None:
            if ends:
                self._end(reason)
        elif self.standing.begin(finding):
            self._totals[f"odd_{reason}"] += 1
            if finding.doubt is Doubt.AMBIGUOUS:
                self.holdings.suspect()

    def _end(self, reason: str) -> None:
        self.standing.end(reason)

    def _follow(self, finding: Finding, was_quarantined: bool) -> None:
        """What a finding does to what is held."""
        self._want(finding)
        if finding.tier and finding.doubt:
            if self.standing.quarantined(finding.tier):
                self.holdings.empty(self.holdings.lanes.numbers((finding.tier,)))
            elif finding.doubt is Doubt.AMBIGUOUS:
                self.holdings.suspect(finding.tier)
            elif finding.doubt is Doubt.STALE:
                self.holdings.withdraw(finding.tier)
        elif finding.doubt is Doubt.STALE and not self._quarantined:
            self.holdings.withdraw()
        elif finding.doubt is Doubt.AMBIGUOUS and not self._quarantined:
            self.holdings.suspect()
        elif self._quarantined and not was_quarantined:
            self.holdings.forget()
            self.holdings.forget_keys()

    def _want(self, finding: Finding) -> None:
        if finding.resync:
            self._resync = self._resync or f"{finding.reason}: {finding.detail}"

    def _announce(self, *, midway: bool = False) -> None:
        state = self.state()
        if midway:
            # The numbering is ahead: what its last batches changed is told after this.
            state.ClearField("engine_seq")
        self._messages.announce(state)


_DROPS = frozenset(
    {
        *("no_hashes", "token_count", "unit_size", "self_parent", "duplicate_in_event"),
        *("hash_conflict", "mirror_full", "orphan_expired"),
    }
)
"""Reasons of the mirror, which cost an event."""


def _cut(text: str) -> str:
    """At most what a RankState may carry."""
    return text.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
