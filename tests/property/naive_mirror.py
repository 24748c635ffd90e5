"""The mirror as dictionaries, recomputed whole at every question: slow, and plainly right.

Only the canonical hash itself is the core's, which has tests of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from servingfleet_core import block_hashes, namespace_root

CONFIRMED, UPPER = 1, 2

Media = tuple[tuple[int, bytes], ...]


class Refused(Exception):
    """The event is rejected for `args[0]`."""


@dataclass(frozen=True)
class Place:
    """Where a unit ends, and the units from the root to it: (engine hash, first token, end)."""

    root: int
    hashes: tuple[int, ...]
    tail: bytes
    tail_media: Media
    path: tuple[tuple[bytes, int, int], ...]

    @property
    def end(self) -> int:
        return self.path[-1][2] if self.path else 0


@dataclass(frozen=True)
class Opaque:
    pass


@dataclass
class Copies:
    confirmed: int = 0
    upper: int = 0
    unit: int | None = None
    """Tokens that the lane's unit covers, where they are not those of the first placement."""

    @property
    def level(self) -> int:
        return 2 if self.confirmed else 1 if self.upper else 0


@dataclass(frozen=True)
class Waiting:
    parent: bytes
    unit: int
    tokens: bytes
    media: Media


@dataclass(frozen=True)
class Store:
    lane: int
    keys: tuple[bytes, ...]
    parent: bytes | None
    tokens: bytes
    unit: int
    media: Media = ()
    adapter: str = ""
    cache_salt: str = ""
    opaque: bool = False
    whole: bool = False
    untold: bool = False
    computed: bool = False


class NaiveMirror:
    def __init__(
        self, model: str, block: int, pairs: bool, max_orphans: int, orphan_ttl_s: float
    ) -> None:
        self.name, self.block, self.pairs = model, block, pairs
        self.max_orphans, self.orphan_ttl_s = max_orphans, orphan_ttl_s
        self.lanes: dict[int, bool] = {}
        self.places: dict[bytes, Place | Opaque] = {}
        self.waiting: dict[bytes, Waiting | None] = {}  # oldest first
        self.since: dict[bytes, float] = {}
        self.copies: dict[tuple[int, bytes], Copies] = {}
        self.removed_unknown = self.orphans_expired = self.orphans_dropped = 0

    def stored(self, store: Store, now: float) -> None:
        self._check(store)
        repeat = self._repeats(store)
        if store.untold and any(key in self.places or key in self.waiting for key in store.keys):
            # What is known keeps its place: the event only names it.
            store = replace(store, tokens=b"")
        first, plan = self._plan(store)
        for key, place in plan.items():
            self._check_place(key, place, store.unit)
        if store.tokens and not store.opaque:
            for at, key in enumerate(store.keys[:first]):
                known = self.waiting.get(key)
                if known is not None and known != self._waiting(store, at):
                    raise Refused("hash_conflict")
        for at, key in enumerate(store.keys):
            unit: int | None = None
            if key in plan:
                place = plan[key]
                if key not in self.places:
                    self._forget_orphan(key)
                    self.places[key] = place
                elif isinstance(place, Place) and place is not self.places[key]:
                    unit = self._unit_of(key, store.unit)
                elif isinstance(place, Place) and not store.tokens:
                    unit = self._chunk(place, store.unit)
            elif key not in self.places:
                waiting = self._waiting(store, at) if store.tokens else None
                waiting = self.waiting.pop(key, None) or waiting
                self.waiting[key] = waiting
                self.since[key] = now
            self._add_copy(store, key, unit, repeat)
        self._drain()
        while len(self.waiting) > self.max_orphans:
            self._drop_orphan(next(iter(self.waiting)))
            self.orphans_dropped += 1

    def removed(self, lane: int, keys: Sequence[bytes]) -> None:
        for key in keys:
            copies = self.copies.get((lane, key))
            if copies is None:
                self.removed_unknown += 1
                continue
            if copies.confirmed:
                copies.confirmed -= 1
            else:
                copies.upper -= 1
            if not copies.level:
                del self.copies[lane, key]

    def cleared(self, lanes: Sequence[int]) -> None:
        for lane, key in list(self.copies):
            if lane in lanes:
                del self.copies[lane, key]

    def suspect(self, lanes: Sequence[int]) -> None:
        for (lane, _), copies in self.copies.items():
            if lane in lanes:
                copies.upper += copies.confirmed
                copies.confirmed = 0

    def reset(self) -> None:
        for known in (self.places, self.waiting, self.since, self.copies):
            known.clear()

    def expire(self, now: float) -> int:
        old = [key for key, since in self.since.items() if now - since > self.orphan_ttl_s]
        for key in old:
            self._drop_orphan(key)
        self.orphans_expired += len(old)
        return len(old)

    def holdings(self, lane: int, confidence: int) -> list[int]:
        levels: dict[int, int] = {}
        for (of, key), copies in self.copies.items():
            place = self.places.get(key)
            if of != lane or not isinstance(place, Place):
                continue
            _, start, end = place.path[-1]
            first = start if copies.unit is None else end - copies.unit
            for block in range(first // self.block, end // self.block):
                level = self._level(lane, place, block) if copies.unit is None else copies.level
                value = place.hashes[block]
                levels[value] = max(levels.get(value, 0), level)
        wanted = {CONFIRMED: 2, UPPER: 1}[confidence]
        return sorted(value for value, level in levels.items() if level == wanted)

    def _level(self, lane: int, place: Place, block: int) -> int:
        """The least sure of the units that overlap the block."""
        begin, end = block * self.block, (block + 1) * self.block
        units = [key for key, first, last in place.path if first < end and begin < last]
        return min(self.copies.get((lane, key), Copies()).level for key in units)

    def _check(self, store: Store) -> None:
        if not store.keys:
            raise Refused("no_hashes")
        if store.tokens:
            unit = store.unit
            if unit == 0 or (unit % self.block and self.block % unit):
                raise Refused("unit_size")
            if len(store.tokens) // 4 != len(store.keys) * unit + self.pairs:
                raise Refused("token_count")
        if store.parent in store.keys:
            raise Refused("self_parent")
        if len(set(store.keys)) < len(store.keys):
            raise Refused("duplicate_in_event")

    def _plan(self, store: Store) -> tuple[int, dict[bytes, Place | Opaque]]:
        """Places of the keys from the first on that has one; those before wait."""
        if store.opaque:
            opaque = {key: Opaque() for key in store.keys}
            if not store.tokens:  # names known blocks, and unknown ones that stay unknown
                return 0, {key: self.places.get(key, place) for key, place in opaque.items()}
            return 0, dict(opaque)
        if not store.tokens:
            known = {key: self.places[key] for key in store.keys if key in self.places}
            return len(store.keys), known
        if store.parent is None:
            root = namespace_root(self.name, store.adapter, store.cache_salt, self.pairs)
            place: Place | Opaque | None = Place(root, (), b"", (), ())
        else:
            place = self.places.get(store.parent)
        plan: dict[bytes, Place | Opaque] = {}
        first = len(store.keys)
        for at, key in enumerate(store.keys):
            if place is None:
                place = self.places.get(key)
                if place is not None:
                    plan[key] = place
                    first = at
                continue
            first = min(first, at)
            waiting = self._waiting(store, at)
            place = self._after(place, key, waiting.unit, waiting.tokens, waiting.media)
            plan[key] = place
        return first, plan

    def _after(
        self, place: Place | Opaque, key: bytes, unit: int, tokens: bytes, media: Media
    ) -> Place | Opaque:
        if isinstance(place, Opaque):
            return place
        ahead = len(place.tail) // 4
        joined = place.tail + tokens
        items = place.tail_media + tuple((at + ahead, item) for at, item in media)
        chain = place.hashes[-1] if place.hashes else place.root
        packed = block_hashes(chain, joined, self.block, items, self.pairs)
        new = [int.from_bytes(packed[at : at + 8], "little") for at in range(0, len(packed), 8)]
        boundary = len(new) * self.block
        return Place(
            place.root,
            place.hashes + tuple(new),
            joined[boundary * 4 : (ahead + unit) * 4],
            tuple((at - boundary, item) for at, item in items if boundary <= at < ahead + unit),
            (*place.path, (key, place.end, place.end + unit)),
        )

    def _check_place(self, key: bytes, place: Place | Opaque, unit: int) -> None:
        known = self.places.get(key)
        if known is None or known is place:
            return
        if isinstance(known, Opaque) or isinstance(place, Opaque):
            if known != place:
                raise Refused("hash_conflict")
            return
        same = (known.root, known.hashes, known.tail, known.tail_media) == (
            place.root,
            place.hashes,
            place.tail,
            place.tail_media,
        )
        _, start, end = known.path[-1]
        whole = start % self.block == 0 == (end - start) % self.block
        whole = whole and place.path[-1][1] % self.block == 0 == unit % self.block
        if not same or (end - start != unit and not whole):
            raise Refused("hash_conflict")

    def _unit_of(self, key: bytes, unit: int) -> int | None:
        place = self.places[key]
        assert isinstance(place, Place)
        _, start, end = place.path[-1]
        return None if end - start == unit else unit

    def _waiting(self, store: Store, at: int) -> Waiting:
        begin, end = at * store.unit, (at + 1) * store.unit
        parent = store.keys[at - 1] if at else store.parent
        return Waiting(
            parent or b"",
            store.unit,
            store.tokens[begin * 4 : (end + self.pairs) * 4],
            tuple((index - begin, key) for index, key in store.media if begin <= index < end),
        )

    def _chunk(self, place: Place, unit: int) -> int | None:
        """The larger unit that a placeholder means, if the block ends one."""
        _, start, end = place.path[-1]
        whole = start % self.block == end % self.block == unit % self.block == 0
        return unit if unit > end - start and whole and end % unit == 0 else None

    def _repeats(self, store: Store) -> bool:
        held = [(store.lane, key) in self.copies for key in store.keys]
        rooted = store.parent is None and bool(store.tokens)
        return rooted and not store.computed and (not store.whole or all(held))

    def _add_copy(self, store: Store, key: bytes, unit: int | None, repeat: bool) -> None:
        known = self.copies.setdefault((store.lane, key), Copies(unit=unit))
        if not self.lanes[store.lane]:
            known.confirmed, known.upper = 1, 0
        elif repeat and known.confirmed:
            known.upper += 1
        else:
            known.confirmed += 1

    def _drain(self) -> None:
        for key, waiting in list(self.waiting.items()):
            if waiting is not None and waiting.parent in self.places:
                place = self.places[waiting.parent]
                self.places[key] = self._after(
                    place, key, waiting.unit, waiting.tokens, waiting.media
                )
                self._forget_orphan(key)
                return self._drain()

    def _forget_orphan(self, key: bytes) -> None:
        self.waiting.pop(key, None)
        self.since.pop(key, None)

    def _drop_orphan(self, key: bytes) -> None:
        self._forget_orphan(key)
        for lane, held in list(self.copies):
            if held == key:
                del self.copies[lane, held]
