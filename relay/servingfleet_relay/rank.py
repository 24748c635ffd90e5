"""One data-parallel rank: its numbering, its doubts, its mirror; events in, messages for schedulers out.

Pure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

from servingfleet_core import Delta as CoreDelta
from servingfleet_core import Mirror, Rejected
from servingfleet_protos.v1.common_pb2 import (
    STREAM_STATE_HISTORY_LOST,
    STREAM_STATE_LIVE,
    STREAM_STATE_QUARANTINED,
    STREAM_STATE_UNPROVEN,
)
from servingfleet_protos.v1.stream_pb2 import (
    CreditOpened,
    Delta,
    RankState,
    RelayMessage,
    SnapshotBegin,
    SnapshotEnd,
)

from .adapters.events import Adapter, Batch, Cleared, Doubt, Dropped, Event, Removed, Stored
from .conformance import Doubts, Fingerprint
from .dispatches import Dispatches
from .frames import BadFrames, live_frame, reply_frame
from .lanes import Lane, Lanes
from .namespaces import FirstBlocks
from .sequence import Apply, Ignored, Lost, Restarted, Step
from .sequence import Sequence as Numbering
from .settings import PipelineSettings

MAX_REASON_BYTES = 512
EXPIRY_INTERVAL_S = 1.0
"""The mirror looks through all it knows to find orphans that waited too long."""

MAX_UNPLACED = 1024
UNPLACED = "no full-attention group, and no prompt that was sent here tells where a block belongs"

SHARED = "twice: requests that are kept apart (an extra_key) share hashes, and either may be meant"

# What the mirror's refusals say about the stream; the others cost their event only.
_REFUSALS = {"hash_conflict": Doubt.QUARANTINED, "unit_size": Doubt.QUARANTINED}


@dataclass(frozen=True, slots=True)
class _Unplaced:
    event: Stored
    lane: Lane
    until: float


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
            replay=settings.replay,
            deadline_s=settings.replay_deadline_s,
            probe_s=settings.probe_s,
            max_held_batches=settings.max_held_batches,
            max_held_bytes=settings.max_held_bytes,
        )
        self.fingerprint = Fingerprint()
        self._settings = settings
        self._pairs = False
        self.mirror = self._new_mirror()
        self._lanes = lanes
        self._adapter = adapter
        self._totals = totals
        self._doubts = self._new_doubts()
        self._units: dict[int, int] = {}
        self._mirrored: set[int] = set()
        self._firsts = FirstBlocks()
        self._dispatches = Dispatches(settings.model, settings.block_tokens)
        self._unplaced: deque[_Unplaced] = deque()
        """Stores that may have overtaken the word of their dispatch."""
        self._away = ""
        self._proven = False
        self._messages: deque[RelayMessage] = deque()
        self._expired = 0.0
        self._announced = self.state()

    def state(self) -> RankState:
        """What schedulers are told of this rank."""
        state, reason = self.numbering.state
        doubt, why = self._doubts.worst
        if self._unplaced and doubt is Doubt.NONE:
            doubt, why = Doubt.INCOMPLETE, UNPLACED
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

    def adopt(self, lanes: Lanes, adapter: Adapter) -> None:
        """The engine is known now. Nothing was read before."""
        self._lanes, self._adapter = lanes, adapter

    def dispatched(self, credit: CreditOpened, now: float) -> None:
        """A scheduler sent a prompt here."""
        if self._lanes.placeable:
            self._dispatches.clear()
        else:
            self._dispatches.opened(
                credit.decision_id, credit.hashes, credit.prompt_tokens, credit.expires_s, now
            )
            self._place_late(now)

    def ended(self, decision: str, now: float) -> None:
        """A prompt that was sent is done with. Unknown ones are fine."""
        self._dispatches.ended(decision, now)

    def mistrust(self, reason: str) -> None:
        """Nothing that is held counts, whatever the stream says, until this is called with ""."""
        self._away = reason

    def suspect(self) -> None:
        """What is held now is an upper bound."""
        self._tell(self.mirror.suspect(sorted(self._mirrored)))

    def take(self) -> list[RelayMessage]:
        """What schedulers are to be told since the last call, in order, a changed state at the end."""
        self._announce()
        taken = list(self._messages)
        self._messages.clear()
        return taken

    def live(self, frames: Sequence[bytes], now: float) -> None:
        """Frames from the subscription."""
        try:
            frame = live_frame(frames)
        except BadFrames as error:
            # If it was a batch, its number is missing now and will be asked for.
            self._totals[f"drop_{error.reason}"] += 1
            return
        self.run(self.numbering.live(frame.seq, frame.payload, now), now)

    def replayed(self, frames: Sequence[bytes], now: float) -> None:
        """Frames of one reply to the replay request."""
        try:
            frame = reply_frame(frames)
        except BadFrames as error:
            self._totals[f"drop_{error.reason}"] += 1
            return
        self.run(self.numbering.replayed(frame.seq, frame.payload, now), now)

    def run(self, steps: Sequence[Step], now: float) -> None:
        """Carries out what the numbering decided."""
        for step in steps:
            match step:
                case Apply():
                    self._totals["batches"] += 1
                    self._apply(self._adapter.decode(step.payload), now)
                case Ignored():
                    self._totals[f"batches_{step.reason}"] += 1
                case Lost():
                    self._totals["histories_lost"] += 1
                    # First: an emptied rank that still counts as complete would promise that nothing can be reused.
                    self._announce()
                    self._empty(self._mirrored)
                case Restarted():
                    self._totals["engine_restarts"] += 1
                    self._firsts.cleared(self._mirrored)
                    cleared = self.mirror.cleared(sorted(self._mirrored))
                    self.mirror.reset()
                    self._lanes.forget_keys(self.rank)
                    self.fingerprint = Fingerprint()
                    self._doubts = self._new_doubts()
                    self._unplaced.clear()
                    self._proven = False
                    self._units.clear()
                    # The state carries the new incarnation, which clears the rank at its receivers.
                    self._announce()
                    # Told as deltas too: older ones that still wait in an outbox may be sent after a snapshot has
                    # already named the new incarnation.
                    self._tell(cleared)

    def tick(self, now: float) -> None:
        """Time passes."""
        if now - self._expired >= EXPIRY_INTERVAL_S:
            self._expired = now
            self._expire(now)
        self.run(self.numbering.tick(now), now)

    def _expire(self, now: float) -> None:
        self._dispatches.expire(now)
        while self._unplaced and self._unplaced[0].until < now:
            self._give_up_place()
        expired = self.mirror.expire(now)
        if expired:
            self._totals["drop_orphan_expired"] += expired
            self._doubts.note("orphans", "blocks whose place was never told", Doubt.INCOMPLETE)

    def snapshot(self) -> Generator[list[RelayMessage], None, None]:
        """Everything held, shallow blocks first, each part read when it is asked for.

        The messages of a part belong before everything that changes after it was read.
        """
        mirror = self.mirror
        number = mirror.begin_snapshot()
        try:
            begin = SnapshotBegin(rank=self.rank, incarnation=self.numbering.incarnation)
            yield [RelayMessage(snapshot_begin=begin)]
            while part := mirror.next_snapshot(number, self._settings.delta_hashes):
                yield [message for delta in part for message in self._messages_of(delta)]
            yield [RelayMessage(snapshot_end=SnapshotEnd(rank=self.rank))]
        finally:
            mirror.end_snapshot(number)

    def _apply(self, batch: Batch, now: float) -> None:
        if batch.length:
            self._check_batch(batch)
        # Lanes first: a scheduler must not read one group's blocks before it knows of the others.
        placed = [(event, self._place(event)) for event in batch.events]
        for event, lane in placed:
            if isinstance(event, Dropped):
                self._drop(event)
            elif isinstance(lane, Dropped):
                self._drop(lane)
            elif self._quarantined:
                self._totals["events_quarantined"] += 1
            elif isinstance(event, Cleared):
                self._clear()
            elif isinstance(event, Removed):
                self._remove(event, lane)
            elif lane is not None:
                self._store(event, lane, now)

    @property
    def _quarantined(self) -> bool:
        return self._doubts.worst[0] is Doubt.QUARANTINED

    def _check_batch(self, batch: Batch) -> None:
        finding = self.fingerprint.batch(batch.length)
        if finding is not None:
            self._doubt(finding.reason, finding.detail, finding.doubt)
        if batch.rank is not None and batch.rank != self.rank:
            self._doubt(
                "wrong_rank",
                f"the socket of rank {self.rank} sends batches of rank {batch.rank}: "
                "correct the relay's ports or ranks",
                Doubt.QUARANTINED,
            )

    def _place(self, event: Event) -> Lane | Dropped | None:
        """The event's lane, declared if it is new, or why it can't have one."""
        if isinstance(event, Dropped):
            return None
        finding = self.fingerprint.event(event.shape)
        if finding is not None:
            self._doubt(finding.reason, finding.detail, finding.doubt)
        if self._quarantined or isinstance(event, Cleared):
            return None
        if isinstance(event, Removed):
            return self._lanes.of_removal(event.tier, event.group)
        self._lanes.separation(adapters=event.shape.tells_adapters, salts=event.shape.tells_salts)
        lane = self._lanes.of_store(event, self._units)
        if isinstance(lane, Dropped):
            return lane
        refusal = self._read_keys(event)
        if refusal is not None:
            return refusal
        if event.unit_tokens:
            self._units[lane.number] = lane.unit_tokens
        if lane.number not in self._mirrored:
            self._add_lane(lane)
            self._mirrored.add(lane.number)
        return lane

    def _read_keys(self, event: Stored) -> Dropped | None:
        """Makes the mirror read the key form of a store, the first of this life of the engine."""
        pairs = event.shape.pairs
        if pairs is None:
            return None
        refusal = self._lanes.of_keys(self.rank, pairs)
        if refusal is None and pairs != self._pairs:
            # It is empty: a store in the other form would have quarantined the stream.
            self._pairs = pairs
            self.mirror = self._new_mirror()
            for lane in self._lanes:
                if lane.number in self._mirrored:
                    self._add_lane(lane)
        return refusal

    def _prove(self, event: Stored) -> None:
        """A first block of no known namespace is of another, once this life of the engine has shown one that is."""
        self._proven = self._proven or not event.opaque
        if not self._proven:
            self._doubt(
                "namespace_unknown",
                "no first block yet whose hash is that of its tokens: a newer release, or requests that are kept apart",
                Doubt.INCOMPLETE,
            )

    def _new_doubts(self) -> Doubts:
        doubts = Doubts()
        if self._settings.extra_keys:
            doubts.note("extra_keys", "requests have keys that events don't tell", Doubt.AMBIGUOUS)
        return doubts

    def _new_mirror(self) -> Mirror:
        settings = self._settings
        return Mirror(
            settings.model,
            settings.block_tokens,
            max_units=settings.max_units,
            max_orphans=settings.max_orphans,
            orphan_ttl_s=settings.orphan_ttl_s,
            pairs=self._pairs,
        )

    def _add_lane(self, lane: Lane) -> None:
        traits = self._lanes.engine.tiers[lane.tier]
        self.mirror.add_lane(lane.number, multiset=traits.multiset)

    def _store(self, event: Stored, lane: Lane, now: float) -> None:
        self._totals["events_stored"] += 1
        if not self._lanes.placeable:
            self._store_inferred(event, lane, now)
        elif event.hashes:  # else every block of a window group was masked
            self._put(event, lane, now)

    def _put(
        self, event: Stored, lane: Lane, now: float, *, masked: int = 0, places_only: bool = False
    ) -> None:
        traits = self._lanes.engine.tiers[lane.tier]
        starts = traits.root_once and event.parent is None
        first = event.hashes[: event.width]
        again = starts and self._firsts.stored(lane.number, first)
        if again:
            self._doubt("shared_hashes", f"a first block stored {SHARED}", Doubt.AMBIGUOUS)
        if self._lanes.engine.proves_roots and event.parent is None:
            self._prove(event)
        doubtful = (
            event.doubtful or traits.append_only or self._lanes.hybrid or self._doubts.ambiguous
        )
        try:
            deltas = self.mirror.stored(
                lane.number,
                event.hashes,
                event.width,
                event.parent,
                event.tokens,
                event.unit_tokens or lane.unit_tokens,
                now,
                adapter=event.adapter,
                cache_salt=event.cache_salt,
                opaque=event.opaque,
                doubtful=doubtful,
                masked=masked,
                whole=self.numbering.whole and self._doubts.worst[0] is Doubt.NONE,
                places_only=places_only,
            )
        except Rejected as error:
            if starts and not again:
                self._firsts.removed(lane.number, first, event.width)  # it is not held after all
            reason, detail = error.args
            self._drop(Dropped(reason, str(detail), _REFUSALS.get(reason, Doubt.INCOMPLETE)))
        else:
            self._tell(deltas)

    def _store_inferred(self, event: Stored, lane: Lane, now: float) -> None:
        """A store of a window group, in a model without a full-attention group that would place its blocks."""
        told, masked = self._dispatches.infer(event, lane.window_tokens, self.mirror)
        if not event.hashes:
            return
        self._put(told, lane, now, masked=masked)
        if not self._placed(event):
            if len(self._unplaced) == MAX_UNPLACED:
                self._give_up_place()
            until = now + self._settings.orphan_ttl_s
            self._unplaced.append(_Unplaced(event, lane, until))

    def _place_late(self, now: float) -> None:
        waiting, self._unplaced = self._unplaced, deque()
        for unplaced in waiting:
            told, masked = self._dispatches.infer(
                unplaced.event, unplaced.lane.window_tokens, self.mirror
            )
            if told.tokens:
                self._put(told, unplaced.lane, now, masked=masked, places_only=True)
            if not self._placed(unplaced.event):
                self._unplaced.append(unplaced)

    def _placed(self, event: Stored) -> bool:
        keys = range(0, len(event.hashes), event.width)
        return all(self.mirror.place(event.hashes[at : at + event.width]) for at in keys)

    def _give_up_place(self) -> None:
        self._unplaced.popleft()
        self._doubt("unplaced", UNPLACED, Doubt.INCOMPLETE)

    def _remove(self, event: Removed, lane: Lane | None) -> None:
        self._totals["events_removed"] += 1
        if event.twice:
            self._doubt("shared_hashes", f"a block removed {SHARED}", Doubt.AMBIGUOUS)
        if lane is None or lane.number not in self._mirrored or not event.hashes:
            return  # stored before the relay joined, if ever
        self._firsts.removed(lane.number, event.hashes, event.width)
        self._tell(self.mirror.removed(lane.number, event.hashes, event.width))

    def _clear(self) -> None:
        self._totals["events_cleared"] += 1
        engine = self._lanes.engine
        cleared = set(self._lanes.numbers(engine.cleared_tiers)) & self._mirrored
        self._empty(cleared)
        others = self._mirrored - cleared
        if others:
            self._tell(self.mirror.suspect(sorted(others)))
        else:
            self.numbering.cleared()
            self._doubts.cleared()

    def _drop(self, event: Dropped) -> None:
        self._totals[f"drop_{event.reason}"] += 1
        self._note(event.reason, event.detail, event.doubt)

    def _doubt(self, reason: str, detail: str, doubt: Doubt) -> None:
        self._totals[f"odd_{reason}"] += 1
        self._note(reason, detail, doubt)

    def _note(self, reason: str, detail: str, doubt: Doubt) -> None:
        was_quarantined = self._quarantined
        self._doubts.note(reason, detail, doubt)
        if doubt in (Doubt.STALE, Doubt.AMBIGUOUS) and not self._quarantined:
            self.suspect()
        elif self._quarantined and not was_quarantined:
            self._empty(self._mirrored)
            self.mirror.reset()

    def _empty(self, lanes: Iterable[int]) -> None:
        self._unplaced.clear()
        self._firsts.cleared(lanes)
        self._tell(self.mirror.cleared(sorted(lanes)))

    def _announce(self) -> None:
        """A changed state is told in its place among the deltas; that batches were applied is not."""
        state = self.state()
        told = self._announced
        if (state.state, state.reason, state.incarnation) != (
            told.state,
            told.reason,
            told.incarnation,
        ):
            self._announced = state
            self._messages.append(RelayMessage(rank_state=state))

    def _tell(self, deltas: Sequence[CoreDelta]) -> None:
        for delta in deltas:
            if not self._joined(delta):
                self._messages.extend(self._messages_of(delta))

    def _joined(self, delta: CoreDelta) -> bool:
        """Adds drops to the drops before them: vLLM removes each block by an event of its own."""
        if delta.op != Delta.OP_DROP or not self._messages:
            return False
        last = self._messages[-1].delta
        size = len(last.hashes) + len(delta.hashes)
        if (last.op, last.lane) != (delta.op, delta.lane) or size > 8 * self._settings.delta_hashes:
            return False
        last.hashes += delta.hashes
        return True

    def _messages_of(self, delta: CoreDelta) -> Generator[RelayMessage, None, None]:
        """A delta of the mirror, cut to the size of messages; each part names the block before it."""
        step = self._settings.delta_hashes * 8
        parent = delta.parent
        for start in range(0, len(delta.hashes), step) or (0,):
            part = delta.hashes[start : start + step]
            yield RelayMessage(
                delta=Delta(
                    rank=self.rank,
                    lane=delta.lane,
                    op=delta.op,  # type: ignore[arg-type]
                    confidence=delta.confidence,  # type: ignore[arg-type]
                    parent=parent,
                    hashes=part,
                )
            )
            parent = int.from_bytes(part[-8:], "little")


def _cut(text: str) -> str:
    """At most what a RankState may carry."""
    return text.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
