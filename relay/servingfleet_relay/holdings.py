"""What one rank of the engine holds: its events put into the mirror, lane by lane, and what that says of the stream.

Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable

from servingfleet_core import Delta as CoreDelta
from servingfleet_core import Mirror, Rejected
from servingfleet_protos.v1.common_pb2 import STATE_CLASS_ATTENTION, TIER_GPU
from servingfleet_protos.v1.stream_pb2 import CreditOpened, RelayMessage, SnapshotBegin, SnapshotEnd

from .adapters.events import Doubt, Dropped, Removed, Stored
from .conformance.standing import Finding
from .dispatches import Dispatches
from .lanes import Lane, Lanes, Used
from .messages import Messages
from .namespaces import FirstBlocks
from .settings import PipelineSettings
from .unplaced import Unplaced

SHARED = "twice: requests that are kept apart (an extra_key) share hashes, and either may be meant"
COPY_LATE_BATCHES = 2

# What the mirror's refusals say about the stream; the others cost their event only.
_REFUSALS = {"hash_conflict": Doubt.QUARANTINED, "unit_size": Doubt.QUARANTINED}


class Holdings:
    """The mirror of one rank, with all that its events need to be placed in it."""

    def __init__(
        self, rank: int, settings: PipelineSettings, lanes: Lanes, messages: Messages
    ) -> None:
        self._rank = rank
        self._settings = settings
        self.lanes = lanes
        self._messages = messages
        self._pairs = False
        self.mirror = self._new_mirror()
        self._mirrored: set[int] = set()
        self._units: dict[int, Used] = {}
        self._partial: Finding | None = None
        self._firsts = FirstBlocks()
        self._unplaced = Unplaced(
            Dispatches(settings.model, settings.block_tokens), settings.orphan_ttl_s
        )
        self._keys_seen = False
        """Hashes of this stream cover more than tokens: where that isn't told, tokens place nothing."""
        self._guessed = False
        """Tokens alone have placed blocks."""
        self._gone: deque[set[bytes]] = deque([set()], maxlen=COPY_LATE_BATCHES)

    # Events.

    def batch(self) -> None:
        """Another batch begins."""
        self._gone.append(set())

    def lane_of(self, event: Stored) -> Lane | Dropped:
        """The lane of a store, declared if it is new, or why it has none."""
        self.lanes.separation(adapters=event.shape.tells_adapters, salts=event.shape.tells_salts)
        if "lookahead" in event.shape.oddities:
            self.lanes.set_lookahead()
        lane = self.lanes.of_store(event, self._units)
        if isinstance(lane, Dropped):
            return lane
        refusal = self._read_keys(event)
        if refusal is not None:
            return refusal
        if event.unit_tokens:
            self._use_unit(event, lane)
        if lane.number not in self._mirrored:
            self._add_lane(lane)
            self._mirrored.add(lane.number)
        return lane

    def store(
        self, event: Stored, lane: Lane, now: float, *, whole: bool, doubtful: bool
    ) -> list[Finding]:
        """`whole`: all that the engine stored before is known. `doubtful`: what is stored is an upper bound."""
        found = [self._partial] if self._partial else []
        self._partial = None
        if not self.lanes.placeable:
            return found + self._store_inferred(event, lane, now, whole=whole, doubtful=doubtful)
        if not event.hashes:
            return found  # every block of a window group was masked
        return found + self._put(event, lane, now, whole=whole, doubtful=doubtful)

    def remove(self, event: Removed, lane: Lane | None, *, whole: bool) -> list[Finding]:
        """Findings of removals that name what is not held only where `whole`."""
        found = []
        traits = self.lanes.engine.tiers[event.tier]
        if event.twice:
            found.append(Finding("shared_hashes", f"a block removed {SHARED}", Doubt.AMBIGUOUS))
        if lane is None or lane.number not in self._mirrored:
            return found  # stored before the relay joined, if ever
        if event.tier == TIER_GPU:
            self._gone[-1].update(self._split(event.hashes, event.width))
        self._firsts.removed(lane.number, event.hashes, event.width)
        before = self.mirror.removed_unknown
        self._messages.tell(self.mirror.removed(lane.number, event.hashes, event.width))
        unknown = self.mirror.removed_unknown - before
        if unknown and whole and event.tier_told:
            elsewhere = self._elsewhere(event, lane)
            # Chunks of a host tier share blocks: the second that goes names what is gone already.
            told = traits.multiset or traits.stray_removal
            if elsewhere or told:
                reason = "removed_elsewhere" if elsewhere else "removed_unknown"
                where = f"which {elsewhere} holds" if elsewhere else "which nothing holds"
                text = f"{lane.name}: {unknown} of the blocks of a removal, {where}"
                found.append(Finding(reason, text, traits.stray_removal, _scope(event.tier)))
        return found

    def clear(self, tiers: Iterable[int]) -> bool:
        """The engine emptied these tiers. True: nothing is held in others."""
        cleared = set(self.lanes.numbers(tiers)) & self._mirrored
        self.empty(cleared)
        others = self._mirrored - cleared
        if others:
            self._messages.tell(self.mirror.suspect(sorted(others)))
        return not others

    # What may be wrong with all of it.

    def empty(self, lanes: Iterable[int] | None = None) -> None:
        """Nothing is held in these lanes, or in any."""
        chosen = self._mirrored if lanes is None else set(lanes) & self._mirrored
        self._unplaced.clear()
        self._firsts.cleared(chosen)
        self._messages.tell(self.mirror.cleared(sorted(chosen)))

    def forget(self) -> None:
        """Nothing is known any more, not even places."""
        self.empty()
        self.mirror.reset()

    def withdraw(self, tier: int = 0) -> None:
        """What is held now, in a tier or in all, may be gone: nothing of it is expected."""
        lanes = set(self.lanes.numbers((tier,) if tier else None)) & self._mirrored
        expected = lanes & self.lanes.expected()
        self._messages.tell(self.mirror.suspect(sorted(lanes - expected)))
        if expected:
            self.empty(expected)

    def suspect(self, tier: int = 0) -> None:
        """What is held now, in a tier or in all, is an upper bound."""
        lanes = set(self.lanes.numbers((tier,) if tier else None)) & self._mirrored
        self._messages.tell(self.mirror.suspect(sorted(lanes)))

    def new_life(self) -> list[CoreDelta]:
        """Another engine process. Returns what schedulers are to be told of the old one's holdings."""
        self._firsts.cleared(self._mirrored)
        cleared = self.mirror.cleared(sorted(self._mirrored))
        self.mirror.reset()
        self.lanes.forget_keys(self._rank)
        self._unplaced.clear()
        self._units.clear()
        self._keys_seen = self._guessed = False
        return cleared

    def forget_keys(self) -> None:
        """What the stream said of its keys is not believed."""
        self.lanes.forget_keys(self._rank)

    # Prompts that were sent here.

    def dispatched(self, credit: CreditOpened, now: float, *, whole: bool, doubtful: bool) -> None:
        """A scheduler sent a prompt here."""
        if self.lanes.placeable:
            self._unplaced.forget_prompts()
            return
        for each in self._unplaced.dispatched(credit, now):
            told, masked = self._unplaced.infer(each.event, each.lane, self.mirror)
            if told.tokens:
                self._put(
                    *(told, each.lane, now),
                    whole=whole,
                    doubtful=doubtful,
                    masked=masked,
                    places_only=True,
                )
            if not self._placed(each.event):
                self._unplaced.again(each)

    def ended(self, decision: str, now: float) -> None:
        """A prompt that was sent is done with. Unknown ones are fine."""
        self._unplaced.ended(decision, now)

    @property
    def unplaced(self) -> bool:
        """Some blocks wait for the word of their dispatch."""
        return bool(self._unplaced)

    # Time, sizes, snapshots.

    def expire(self, now: float) -> tuple[int, list[Finding]]:
        """Blocks that waited too long for their place, and what that says."""
        found = self._unplaced.expire(now)
        expired = self.mirror.expire(now)
        if expired:
            text = f"{expired} blocks whose place was never told"
            found.append(Finding("orphan_expired", text, Doubt.INCOMPLETE))
        return expired, found

    def surely_held(self) -> tuple[int, int]:
        """Certain copies on the GPU: engine blocks of all layer groups, and tokens of the largest."""
        lanes = [
            (lane.unit_tokens, self.mirror.copies(lane.number)[0])
            for lane in self.lanes
            if lane.tier == TIER_GPU and lane.number in self._mirrored
        ]
        return sum(copies for _, copies in lanes), max((u * n for u, n in lanes), default=0)

    def snapshot(self, incarnation: int) -> Generator[list[RelayMessage], None, None]:
        """Everything held, shallow blocks first, each part read when it is asked for.

        The messages of a part belong before everything that changes after it was read.
        """
        mirror = self.mirror
        number = mirror.begin_snapshot()
        try:
            begin = SnapshotBegin(rank=self._rank, incarnation=incarnation)
            yield [RelayMessage(snapshot_begin=begin)]
            while part := mirror.next_snapshot(number, self._settings.delta_hashes):
                yield [message for delta in part for message in self._messages.of(delta)]
            yield [RelayMessage(snapshot_end=SnapshotEnd(rank=self._rank))]
        finally:
            mirror.end_snapshot(number)

    # Inside.

    def _use_unit(self, event: Stored, lane: Lane) -> None:
        used = self._units.get(lane.number)
        if used is not None and used.tokens < lane.unit_tokens:
            text = f"{lane.name}: blocks of {used.tokens} tokens were parts of one"
            self._partial = Finding("partial_block", text, Doubt.INCOMPLETE)
            used = None
        firm = not event.single or (used is not None and used.firm)
        self._units[lane.number] = Used(lane.unit_tokens, firm)

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
        traits = self.lanes.engine.tiers[lane.tier]
        self.mirror.add_lane(lane.number, multiset=traits.multiset)

    def _read_keys(self, event: Stored) -> Dropped | None:
        """Makes the mirror read the key form of a store, the first of this life of the engine."""
        pairs = event.shape.pairs
        if pairs is None:
            return None
        # Of a namespace that nobody knows, not even that its keys are keys is proven.
        refusal = None if event.opaque else self.lanes.of_keys(self._rank, pairs)
        if refusal is None and pairs != self._pairs:
            # It is empty: a store in the other form would have quarantined the stream.
            self._pairs = pairs
            self.mirror = self._new_mirror()
            for lane in self.lanes:
                if lane.number in self._mirrored:
                    self._add_lane(lane)
        return refusal

    def _put(
        self,
        event: Stored,
        lane: Lane,
        now: float,
        *,
        whole: bool,
        doubtful: bool,
        masked: int = 0,
        places_only: bool = False,
    ) -> list[Finding]:
        traits = self.lanes.engine.tiers[lane.tier]
        found: list[Finding] = []
        starts = traits.root_once and event.parent is None
        first = event.hashes[: event.width]
        again = starts and self._firsts.stored(lane.number, first)
        if again:
            found.append(
                Finding("shared_hashes", f"a first block stored {SHARED}", Doubt.AMBIGUOUS)
            )
        found += self._orders(event, lane, whole=whole)
        tokens, untold = event.tokens, not event.keys_told and bool(event.tokens)
        if untold and self._keys_seen:
            tokens = b""
        elif untold:
            self._guessed = True
        else:
            self._keys_seen = self._keys_seen or event.opaque or bool(event.cache_salt)
        doubtful = doubtful or event.doubtful or traits.append_only or self.lanes.hybrid
        try:
            deltas = self.mirror.stored(
                lane.number,
                event.hashes,
                event.width,
                event.parent,
                tokens,
                event.unit_tokens or lane.unit_tokens,
                now,
                adapter=event.adapter,
                cache_salt=event.cache_salt,
                opaque=event.opaque,
                doubtful=doubtful or again,
                masked=masked,
                untold=untold,
                whole=whole,
                computed=event.computed,
                places_only=places_only,
            )
        except Rejected as error:
            if starts and not again:
                self._firsts.removed(lane.number, first, event.width)  # it is not held after all
            reason, detail = error.args
            found.append(self._refused(reason, str(detail), event.tier))
        else:
            self._messages.tell(deltas)
        return found

    def _refused(self, reason: str, detail: str, tier: int) -> Finding:
        doubt = _REFUSALS.get(reason, Doubt.INCOMPLETE)
        if reason == "hash_conflict" and self._guessed:
            # A connector that tells no salt placed it as a plain prompt's: its places were wrong, not the stream.
            self._guessed, self._keys_seen = False, True
            self.forget()
            text = "a connector's blocks were placed without the keys that it does not tell"
            return Finding("keys_untold", text, Doubt.INCOMPLETE, resync=True)
        if reason == "hash_conflict":
            detail = f"{detail}: other token_ids, another parent_block_hash or other extra_keys"
        return Finding(reason, detail, doubt, _scope(tier))

    def _orders(self, event: Stored, lane: Lane, *, whole: bool) -> list[Finding]:
        """What the order of events shows: a block before the first that is gone, a copy made late."""
        engine = self.lanes.engine
        if lane.tier == TIER_GPU:
            parent = event.parent
            gone = (
                whole
                and parent is not None
                and lane.state_class == STATE_CLASS_ATTENTION
                and self.mirror.place(parent) is not None
                and not self.mirror.holds(lane.number, parent)
            )
            text = f"{lane.name}: a block whose parent_block_hash is known and not held"
            return [Finding("parent_gone", text, Doubt.INCOMPLETE)] if gone else []
        if engine.copies_first and event.tokens:
            named = self._split(event.hashes, event.width)
            if any(key in gone for key in named for gone in self._gone):
                text = f"{lane.name}: a block stored just after it was removed from the GPU"
                return [Finding("copy_late", text, Doubt.NONE)]
        return []

    def _store_inferred(
        self, event: Stored, lane: Lane, now: float, *, whole: bool, doubtful: bool
    ) -> list[Finding]:
        """A store of a window group, in a model without a full-attention group that would place its blocks."""
        told, masked = self._unplaced.infer(event, lane, self.mirror)
        if not event.hashes:
            return []
        found = self._put(told, lane, now, whole=whole, doubtful=doubtful, masked=masked)
        if not self._placed(event):
            found += self._unplaced.wait(event, lane, now)
        return found

    def _placed(self, event: Stored) -> bool:
        return all(self.mirror.place(key) for key in self._split(event.hashes, event.width))

    def _elsewhere(self, event: Removed, lane: Lane) -> str:
        """A lane of another tier that holds one of the blocks; "" if there is none."""
        keys = self._split(event.hashes, event.width)
        for other in self.lanes:
            elsewhere = other.group == lane.group and other.tier != lane.tier
            known = elsewhere and other.number in self._mirrored
            if known and any(self.mirror.holds(other.number, key) for key in keys):
                return other.name
        return ""

    @staticmethod
    def _split(hashes: bytes, width: int) -> list[bytes]:
        return [hashes[at : at + width] for at in range(0, len(hashes), width)]


def _scope(tier: int) -> int:
    """What is wrong with the GPU's blocks is wrong with the stream."""
    return 0 if tier == TIER_GPU else tier
