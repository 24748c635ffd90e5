"""The mirror against a naive model, and what it tells the schedulers against what it holds."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from servingfleet_core import Delta, Index, Mirror, Profile, Rejected
from tests.property.naive_mirror import Media, NaiveMirror, Refused, Store

BLOCK = 4
MODEL = "m"
MAX_ORPHANS = 6
TTL_S = 5.0
LANES = {0: True, 1: True, 2: False, 3: False}  # number: multiset
HOLD, DROP, CLEAR = 1, 2, 3

Fork = tuple[int, int]


def tokens_of(fork: Fork, length: int) -> list[int]:
    leaves, branch = fork
    return [at if at < leaves else 100 * branch + at for at in range(length)]


def media_of(fork: Fork) -> Media:
    """Items of a prompt by absolute index; branch 2 has some."""
    return ((5, b"cat"), (6, b""), (17, b"dog")) if fork[1] == 2 else ()


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def unpacked(hashes: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(hashes) // 8}Q", hashes))


class Replay:
    """A receiver of deltas: a scheduler's index, seen from one rank."""

    def __init__(self) -> None:
        self.index = Index(BLOCK)
        self.replica = self.index.add_replica(
            Profile([(lane, 1, 1, lane, 0, BLOCK, False) for lane in LANES], [])
        )
        self.index.set_rank(self.replica, 0, trusted=True, complete=True)

    def apply(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            place = (self.replica, 0, delta.lane)
            if delta.op == HOLD:
                self.index.hold(*place, delta.confidence, delta.parent, delta.hashes)
            elif delta.op == DROP:
                self.index.drop(*place, delta.hashes)
            else:
                assert delta.hashes == b""
                self.index.clear(*place)

    def holdings(self, lane: int, confidence: int) -> bytes:
        return self.index.holdings(self.replica, 0, lane, confidence)


FORKS = st.sampled_from([(100, 1), (3, 1), (8, 1), (8, 2), (4, 2)])
UNITS = st.sampled_from([BLOCK, BLOCK, BLOCK, 2, 2, 1, 2 * BLOCK, 3 * BLOCK])
LANE = st.sampled_from([0, 0, 1, 2, 3])
NAMESPACES = st.sampled_from([("", ""), ("", ""), ("", ""), ("lora", ""), ("", "salt")])


class MirrorMachine(RuleBasedStateMachine):
    max_units = 4_000_000

    @initialize(pairs=st.booleans(), width=st.sampled_from([8, 32]))
    def start(self, pairs: bool, width: int) -> None:
        self.pairs, self.width = pairs, width
        self.now = 0.0
        self.mirror = Mirror(
            MODEL,
            BLOCK,
            max_units=self.max_units,
            max_orphans=MAX_ORPHANS,
            orphan_ttl_s=TTL_S,
            pairs=pairs,
        )
        self.model = NaiveMirror(MODEL, BLOCK, pairs, MAX_ORPHANS, TTL_S)
        for lane, multiset in LANES.items():
            self.mirror.add_lane(lane, multiset=multiset)
            self.model.lanes[lane] = multiset
        self.named: list[tuple[int, bytes]] = []
        self.live = Replay()
        self.late: dict[int, Replay] = {}

    def key(self, fork: Fork, end: int, namespace: tuple[str, str], variant: int) -> bytes:
        """What the engine calls the prefix that ends at a token."""
        seen = (tokens_of(fork, end + self.pairs), namespace, variant)
        seen_media = [item for item in media_of(fork) if item[0] < end]
        return blake2b(f"{seen}{seen_media}".encode(), digest_size=self.width).digest()

    def publish(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            assert delta.op in (HOLD, DROP, CLEAR)
            assert delta.confidence in (1, 2)
            assert bool(delta.hashes) == (delta.op != CLEAR)
        for replay in [self.live, *self.late.values()]:
            replay.apply(deltas)

    def send(self, store: Store) -> None:
        try:
            deltas = self.mirror.stored(
                store.lane,
                b"".join(store.keys),
                self.width,
                store.parent,
                store.tokens,
                store.unit,
                self.now,
                adapter=store.adapter,
                cache_salt=store.cache_salt,
                media=store.media,
                opaque=store.opaque,
                whole=store.whole,
                untold=store.untold,
                computed=store.computed,
            )
        except Rejected as rejected:
            self.check_rejection(store, *rejected.args)
        else:
            self.store_in_model(store)
            self.publish(deltas)
            self.named += [(store.lane, key) for key in store.keys]

    def store_in_model(self, store: Store) -> None:
        self.model.stored(store, self.now)

    def check_rejection(self, store: Store, reason: str, detail: str) -> None:
        assert detail
        with pytest.raises(Refused, match=reason):
            self.model.stored(store, self.now)

    @rule(
        lane=LANE,
        fork=FORKS,
        first=st.integers(0, 4) | st.just(0),
        count=st.integers(1, 6),
        unit=UNITS,
        namespace=NAMESPACES,
        variant=st.sampled_from([0, 0, 0, 1]),
        opaque=st.sampled_from([False] * 9 + [True]),
        whole=st.booleans(),
        untold=st.sampled_from([False] * 4 + [True]),
        computed=st.booleans(),
    )
    def store(
        self,
        lane: int,
        fork: Fork,
        first: int,
        count: int,
        unit: int,
        namespace: tuple[str, str],
        variant: int,
        opaque: bool,
        whole: bool = False,
        untold: bool = False,
        computed: bool = False,
    ) -> None:
        begin, end = first * unit, (first + count) * unit
        keys = [self.key(fork, at + unit, namespace, variant) for at in range(begin, end, unit)]
        adapter, cache_salt = namespace
        self.send(
            Store(
                lane,
                tuple(keys),
                self.key(fork, begin, namespace, variant) if begin else None,
                pack_tokens(tokens_of(fork, end + self.pairs)[begin:]),
                unit,
                tuple((at - begin, key) for at, key in media_of(fork) if begin <= at < end),
                adapter,
                cache_salt,
                opaque,
                whole,
                untold,
                computed,
            )
        )

    @rule(lane=LANE, fork=FORKS, first=st.sampled_from([0, 0, 1, 2]), unit=UNITS)
    def store_plain(self, lane: int, fork: Fork, first: int, unit: int) -> None:
        count = max(1, 3 * BLOCK // unit)
        self.store(lane, fork, first, count, unit, ("", ""), 0, False)

    @rule(lane=LANE, fork=FORKS, unit=UNITS)
    def store_tail_first(self, lane: int, fork: Fork, unit: int) -> None:
        for first in (2, 1, 0):
            self.store(lane, fork, first, 1, unit, ("", ""), 0, False)

    @rule(
        lane=LANE,
        parent=st.tuples(FORKS, st.integers(0, 20)),
        ends=st.lists(st.tuples(FORKS, st.integers(1, 20)), max_size=3),
        unit=UNITS | st.sampled_from([0, 3]),
        extra=st.sampled_from([0, 0, 0, 1]),
        fork=FORKS,
    )
    def store_nonsense(
        self,
        lane: int,
        parent: tuple[Fork, int],
        ends: list[tuple[Fork, int]],
        unit: int,
        extra: int,
        fork: Fork,
    ) -> None:
        keys = tuple(self.key(of, end, ("", ""), 0) for of, end in ends)
        tokens = pack_tokens(tokens_of(fork, max(1, len(keys) * unit + self.pairs + extra)))
        of, end = parent
        self.send(Store(lane, keys, self.key(of, end, ("", ""), 0) if end else None, tokens, unit))

    @rule(
        lane=LANE,
        fork=FORKS,
        ends=st.lists(st.integers(1, 20), min_size=1, max_size=5),
        unit=UNITS | st.just(0),
        opaque=st.sampled_from([False] * 9 + [True]),
    )
    def store_placeholder(
        self, lane: int, fork: Fork, ends: list[int], unit: int, opaque: bool
    ) -> None:
        keys = tuple(self.key(fork, end, ("", ""), 0) for end in ends)
        self.send(Store(lane, keys, None, b"", unit, opaque=opaque))

    @rule(
        lane=LANE,
        fork=FORKS,
        ends=st.lists(st.integers(1, 20), max_size=6)
        | st.sampled_from([[4, 8, 12], [12, 8, 4], [4], [8], [1, 2, 3, 4]]),
        namespace=NAMESPACES,
        variant=st.sampled_from([0, 0, 0, 1]),
    )
    def remove(
        self, lane: int, fork: Fork, ends: list[int], namespace: tuple[str, str], variant: int
    ) -> None:
        self.take(lane, [self.key(fork, end, namespace, variant) for end in ends])

    @precondition(lambda self: self.named)
    @rule(newest=st.integers(0, 30), count=st.integers(1, 5), tail_first=st.booleans())
    def remove_named(self, newest: int, count: int, tail_first: bool) -> None:
        """Blocks that were stored in one lane, counted back from the newest."""
        last = len(self.named) - newest % len(self.named)
        lane, _ = self.named[last - 1]
        keys = [key for of, key in self.named[max(0, last - count) : last] if of == lane]
        self.take(lane, keys[::-1] if tail_first else keys)

    @precondition(lambda self: self.named)
    @rule(lane=LANE, newest=st.integers(0, 30), count=st.integers(1, 5), unit=UNITS)
    def store_named(self, lane: int, newest: int, count: int, unit: int) -> None:
        """A placeholder of blocks that were named before, perhaps in another lane."""
        last = len(self.named) - newest % len(self.named)
        keys = dict.fromkeys(key for _, key in self.named[max(0, last - count) : last])
        self.send(Store(lane, tuple(keys), None, b"", unit))

    def take(self, lane: int, keys: list[bytes]) -> None:
        deltas = self.mirror.removed(lane, b"".join(keys), self.width)
        self.model.removed(lane, keys)
        self.publish(deltas)

    @rule(lanes=st.sampled_from([[], [], [], [0], [1], [0, 2], [2, 3]]))
    def clear(self, lanes: list[int]) -> None:
        deltas = self.mirror.cleared(lanes)
        assert [(delta.op, delta.lane) for delta in deltas] == [(CLEAR, lane) for lane in lanes]
        self.model.cleared(lanes)
        self.publish(deltas)

    @rule(lanes=st.sampled_from([[], [], [0], [1], [0, 2], [2, 3]]))
    def suspect(self, lanes: list[int]) -> None:
        deltas = self.mirror.suspect(lanes)
        assert all((delta.op, delta.confidence) == (HOLD, 2) for delta in deltas)
        self.model.suspect(lanes)
        self.publish(deltas)

    @rule(seconds=st.sampled_from([1.0, 3.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        assert self.mirror.expire(self.now) == self.model.expire(self.now)

    @rule(sure=st.sampled_from([False] * 4 + [True]))
    def reset(self, sure: bool) -> None:
        if sure:
            self.mirror.reset()
            self.model.reset()
            for replay in [self.live, *self.late.values()]:
                replay.index.clear(replay.replica, 0)

    @precondition(lambda self: len(self.late) < 3)
    @rule()
    def begin_snapshot(self) -> None:
        snapshot = self.mirror.begin_snapshot()
        assert snapshot not in self.late
        self.late[snapshot] = Replay()

    @precondition(lambda self: self.late)
    @rule(which=st.integers(0, 2), max_hashes=st.sampled_from([1, 3, 100]))
    def next_snapshot(self, which: int, max_hashes: int) -> None:
        snapshot = sorted(self.late)[which % len(self.late)]
        part = self.mirror.next_snapshot(snapshot, max_hashes)
        assert sum(len(delta.hashes) // 8 for delta in part) <= max_hashes
        if part:
            self.late[snapshot].apply(part)
            return
        self.check_replay(self.late.pop(snapshot))
        with pytest.raises(KeyError):
            self.mirror.next_snapshot(snapshot, max_hashes)

    @precondition(lambda self: self.late)
    @rule()
    def end_snapshot(self) -> None:
        snapshot = min(self.late)
        self.mirror.end_snapshot(snapshot)
        self.mirror.end_snapshot(snapshot)
        del self.late[snapshot]

    def check_replay(self, replay: Replay) -> None:
        for lane in LANES:
            for confidence in (1, 2):
                held = self.mirror.holdings(lane, confidence)
                assert unpacked(replay.holdings(lane, confidence)) == unpacked(held)

    @invariant()
    def what_was_told_is_what_is_held(self) -> None:
        self.check_replay(self.live)

    @invariant()
    def it_agrees_with_the_model(self) -> None:
        for lane in LANES:
            for confidence in (1, 2):
                held = self.mirror.holdings(lane, confidence)
                assert unpacked(held) == self.model.holdings(lane, confidence)
        for lane in LANES:
            copies = [(key, each) for (of, key), each in self.model.copies.items() if of == lane]
            assert self.mirror.copies(lane) == (
                sum(each.confirmed for _, each in copies),
                sum(each.upper for _, each in copies),
            )
            in_lane = {key for key, _ in copies}
            known = {key for _, key in self.named[-8:]}
            assert {key for key in known if self.mirror.holds(lane, key)} == in_lane & known
        assert self.mirror.orphans == len(self.model.waiting)
        assert self.mirror.removed_unknown == self.model.removed_unknown
        counts = self.mirror.counts()
        places = [type(place).__name__ for place in self.model.places.values()]
        assert counts["units_placed"] == places.count("Place")
        assert counts["opaque_units"] == places.count("Opaque")
        assert counts["orphans"] == len(self.model.waiting)
        assert counts["units_held"] == len({key for _, key in self.model.copies})
        assert counts["ambiguous_copies"] == sum(
            copies.upper for copies in self.model.copies.values()
        )
        for total in ("removed_unknown", "orphans_expired", "orphans_dropped"):
            assert counts[total] == getattr(self.model, total)

    def teardown(self) -> None:
        if not hasattr(self, "mirror"):
            return
        for snapshot, replay in self.late.items():
            while part := self.mirror.next_snapshot(snapshot, 2):
                replay.apply(part)
            self.check_replay(replay)


class SmallMirrorMachine(MirrorMachine):
    """No room for what it is told: it may forget or reject, and still tells no lies."""

    max_units = 12

    def store_in_model(self, store: Store) -> None:
        pass

    def check_rejection(self, store: Store, reason: str, detail: str) -> None:
        assert reason

    @rule()
    def expire(self) -> None:
        self.mirror.expire(self.now)

    @invariant()
    def it_agrees_with_the_model(self) -> None:
        counts = self.mirror.counts()
        known = counts["units_placed"] + counts["opaque_units"] + counts["orphans"]
        assert known <= self.max_units
        assert counts["orphans"] <= MAX_ORPHANS


STEPS = settings(
    max_examples=250,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
MirrorMachine.TestCase.settings = STEPS
SmallMirrorMachine.TestCase.settings = STEPS
TestMirror = MirrorMachine.TestCase
TestSmallMirror = SmallMirrorMachine.TestCase
