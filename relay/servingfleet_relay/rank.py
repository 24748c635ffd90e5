"""One data-parallel rank: its numbering, its standing, its holdings; events in, messages for schedulers out.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from servingfleet_protos.v1.common_pb2 import (
    STREAM_STATE_HISTORY_LOST,
    STREAM_STATE_LIVE,
    STREAM_STATE_QUARANTINED,
    STREAM_STATE_RESYNCING,
    STREAM_STATE_UNPROVEN,
    TIER_SHARED,
)
from servingfleet_protos.v1.stream_pb2 import (
    CreditEnded,
    CreditOpened,
    Outcome,
    RankState,
    RelayMessage,
)

from .adapters.events import (
    Adapter,
    Batch,
    Cleared,
    Doubt,
    Dropped,
    Event,
    Foreign,
    Reach,
    Removed,
    Stored,
)
from .batches import Apply, Ignored, Lost, Restarted, Step
from .conformance.lag import Lag
from .conformance.monitor import Monitor
from .conformance.standing import Condition, Finding
from .frames import BadFrames, live_frame, reply_frame
from .holdings import Holdings
from .lanes import Lane, Lanes
from .messages import Messages
from .sequence import Sequence as Numbering
from .settings import PipelineSettings
from .unplaced import UNPLACED

MAX_REASON_BYTES = 512
EXPIRY_INTERVAL_S = 1.0
"""The mirror looks through all it knows to find orphans that waited too long."""


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
        self._settings = settings
        self._adapter = adapter
        self._decode = self._reader()
        self._totals = totals
        self._messages = Messages(rank, settings.delta_hashes)
        self.holdings = Holdings(rank, settings, lanes, self._messages)
        self._lag = Lag()
        self._away = ""
        self._expired = 0.0
        self._resync = ""
        self.monitor = Monitor(
            rank,
            adapter.profile,
            settings.engine_version,
            totals,
            self._follow,
            extra_keys=settings.extra_keys,
        )
        self._messages.known(self.state())

    def state(self) -> RankState:
        """What schedulers are told of this rank."""
        state, reason = self.numbering.state
        doubt, why = self.monitor.standing.worst
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
        self.monitor.adopt(adapter.profile)

    def mistrust(self, reason: str) -> None:
        """Nothing that is held counts, whatever the stream says, until this is called with ""."""
        self._away = reason

    def suspect(self) -> None:
        """What is held now is an upper bound."""
        self.holdings.suspect()

    def progress(self, finished: int, computed: int, now: float) -> None:
        """The engine's totals: requests finished, prompt tokens that it computed anew."""
        self.monitor.progress(finished, computed, self.holdings.lanes.gpu_unit, now)

    # Prompts that schedulers sent here.

    def dispatched(self, credit: CreditOpened, now: float) -> None:
        """A scheduler sent a prompt here."""
        self.holdings.dispatched(
            credit, now, whole=self._certain, doubtful=self.monitor.standing.ambiguous
        )

    def ended(self, credit: CreditEnded, now: float) -> None:
        """A prompt that was sent is done with. Unknown ones are fine."""
        self.holdings.ended(credit.decision_id, now)

    def outcome(self, outcome: Outcome, now: float) -> None:
        """What a scheduler predicted of a prompt that ran here, and what the engine reported."""
        if not self._lag.rested(outcome, self.numbering.incarnation, now):
            self._totals["outcomes_lagging"] += 1
            return
        predicted, reported = outcome.predicted, outcome.reported
        unit = self.holdings.lanes.gpu_unit
        # Where history is lost, more is reused than is known of: that too little was predicted proves nothing.
        telling = self.numbering.state[0] == STREAM_STATE_LIVE or predicted > reported
        if unit and telling:
            self.monitor.outcome(predicted, reported, unit)

    # Bytes.

    def live(self, frames: Sequence[bytes], now: float, wall: float | None = None) -> None:
        """Frames from the subscription. `wall`: seconds since 1970, None if it is not known."""
        try:
            frame = live_frame(frames)
        except BadFrames as error:
            # If it was a batch, its number is missing now and will be asked for.
            self.monitor.drop(Dropped(error.reason, str(error), Doubt.NONE))
            self.monitor.unreadable(str(error))
            return
        self.run(self.numbering.live(frame.seq, frame.payload, now), now, wall)

    def replayed(self, frames: Sequence[bytes], now: float) -> None:
        """Frames of one reply to the replay request."""
        try:
            frame = reply_frame(frames)
        except BadFrames as error:
            self.monitor.drop(Dropped(error.reason, str(error), Doubt.NONE))
            return
        self.run(self.numbering.replayed(frame.seq, frame.payload, now), now)

    def replay_failed(self, reason: str, now: float) -> None:
        """The last replay request will not be answered (any more)."""
        self.monitor.count("replay_failed", reason)
        self.run(self.numbering.replay_failed(reason, now), now)

    def run(self, steps: Sequence[Step], now: float, wall: float | None = None) -> None:
        """Carries out what the numbering decided."""
        for step in steps:
            match step:
                case Apply():
                    self._totals["batches"] += 1
                    self._lag.applied(self.numbering.incarnation, step.seq, now)
                    self._apply(self._decode(step.payload), now, wall)
                case Ignored():
                    self._totals[f"batches_{step.reason}"] += 1
                case Lost():
                    self._totals["histories_lost"] += 1
                    pull = self._settings.pull
                    self.monitor.count("entries_lost" if pull else "history_lost", step.reason)
                    # First: an emptied rank that still counts as complete would promise that nothing can be reused.
                    self._announce(midway=True)
                    self.holdings.empty()
                case Restarted():
                    self._restart()
        self.monitor.gaps(self.numbering.gaps, self.numbering.state[1])
        if self._resync:
            reason, self._resync = self._resync, ""
            self._totals["rebuilds"] += 1
            # What was lost is of no account: the numbering says whether all of it comes again.
            self.monitor.standing.cleared()
            self.run(self.numbering.rebuild(reason, now), now, wall)

    def tick(self, now: float) -> None:
        """Time passes."""
        if now - self._expired >= EXPIRY_INTERVAL_S:
            self._expired = now
            expired, found = self.holdings.expire(now)
            self.monitor.expired(expired, found, orphans=self._orphans)
            blocks, tokens = self.holdings.lanes.gpu_capacity()
            held_blocks, held_tokens = self.holdings.surely_held()
            self.monitor.held((held_blocks, blocks), (held_tokens, tokens))
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
        self.monitor.begin_life(self.monitor.fingerprint.describe())
        # The state carries the new incarnation, which clears the rank at its receivers.
        self._announce(midway=True)
        # Told as deltas too: older ones that still wait in an outbox may be sent after a snapshot has already named the
        # new incarnation.
        self._messages.tell(cleared)

    def _apply(self, batch: Batch, now: float, wall: float | None) -> None:
        late = "" if self.numbering.whole else self.numbering.state[1]
        self.monitor.batch(batch, wall, late=late)
        self.holdings.batch()
        events = [self._located(event) for event in batch.events]
        # Lanes first: a scheduler must not read one group's blocks before it knows of the others.
        placed = [(event, self._place(event)) for event in events]
        for event, lane in placed:
            if isinstance(event, Dropped):
                self.monitor.drop(event)
            elif isinstance(lane, Dropped):
                self.monitor.drop(lane)
            elif self.monitor.quarantined:
                self._totals["events_quarantined"] += 1
            elif isinstance(event, Foreign):
                self.monitor.foreign(event)
            elif isinstance(event, Cleared):
                self._clear()
            elif self.monitor.standing.quarantined(event.tier):
                self._totals["events_tier_quarantined"] += 1
            elif isinstance(event, Removed):
                self._remove(event, lane)
            elif lane is not None:
                self._store(event, lane, now)

    def _located(self, event: Event) -> Event:
        """The event, with what lies in a store that others share told as that."""
        if not isinstance(event, Stored | Removed) or event.reach is Reach.OWN:
            return event
        if self._settings.shared_store:
            return replace(event, tier=TIER_SHARED)
        if event.reach is Reach.SHAREABLE:
            return event
        doubt = Doubt.INCOMPLETE if isinstance(event, Stored) else Doubt.NONE
        detail = f"{event.shape.tag}: locality REMOTE, and no --shared-store is named"
        return Dropped("remote_medium", detail, doubt, event.tier)

    def _place(self, event: Event) -> Lane | Dropped | None:
        """The event's lane, declared if it is new, or why it can't have one."""
        if isinstance(event, Dropped):
            return None
        self.monitor.form(event)
        if self.monitor.quarantined or isinstance(event, Cleared | Foreign):
            return None
        if self.monitor.standing.quarantined(event.tier):
            return None
        if isinstance(event, Removed):
            return self.holdings.lanes.of_removal(event.tier, event.group)
        return self.holdings.lane_of(event)

    def _store(self, event: Stored, lane: Lane, now: float) -> None:
        self._totals["events_stored"] += 1
        if self._adapter.profile.proves_roots and event.parent is None:
            self.monitor.root(event)
        standing = self.monitor.standing
        doubtful = standing.ambiguous or standing.degraded(event.tier)
        found = self.holdings.store(event, lane, now, whole=self._certain, doubtful=doubtful)
        self.monitor.stored(event, found, now, orphans=self._orphans)

    def _remove(self, event: Removed, lane: Lane | None) -> None:
        self._totals["events_removed"] += 1
        certain = self._certain
        found = self.holdings.remove(event, lane, whole=certain)
        self.monitor.removed(event, found, certain=certain)

    def _clear(self) -> None:
        self._totals["events_cleared"] += 1
        whole = self.holdings.clear(self._adapter.profile.cleared_tiers)
        self.monitor.cleared(whole=whole)
        if whole:
            self.numbering.cleared()

    @property
    def _certain(self) -> bool:
        """All that this life of the engine has published is known and was read."""
        return self.numbering.whole and self.monitor.standing.worst[0] is Doubt.NONE

    @property
    def _orphans(self) -> bool:
        """Blocks that wait for their place say something of the stream."""
        known = self.numbering.whole and self.monitor.standing.worst[0] <= Doubt.INCOMPLETE
        return known and self.holdings.lanes.placeable

    def _follow(self, finding: Finding, was_quarantined: bool) -> None:
        """What a finding does to what is held."""
        if finding.resync:
            self._resync = self._resync or f"{finding.reason}: {finding.detail}"
        quarantined = self.monitor.quarantined
        if finding.tier and finding.doubt:
            if self.monitor.standing.quarantined(finding.tier):
                self.holdings.empty(self.holdings.lanes.numbers((finding.tier,)))
            elif finding.doubt is Doubt.AMBIGUOUS:
                self.holdings.suspect(finding.tier)
            elif finding.doubt is Doubt.STALE:
                self.holdings.withdraw(finding.tier)
        elif finding.doubt is Doubt.STALE and not quarantined:
            self.holdings.withdraw()
        elif finding.doubt is Doubt.AMBIGUOUS and not quarantined:
            self.holdings.suspect()
        elif quarantined and not was_quarantined:
            self.holdings.forget()
            self.holdings.forget_keys()

    def _announce(self, *, midway: bool = False) -> None:
        state = self.state()
        if midway:
            # The numbering is ahead: what its last batches changed is told after this.
            state.ClearField("engine_seq")
        self._messages.announce(state)


def _cut(text: str) -> str:
    """At most what a RankState may carry."""
    return text.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
