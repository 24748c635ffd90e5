"""The index against a naive model, under any order of holds, drops, clears, credits and losses."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from servingfleet_core import Index, Match
from servingfleet_core import Profile as CoreProfile
from tests.property.naive_index import (
    ATTENTION,
    RECURRENT,
    WINDOW,
    Answer,
    Lane,
    NaiveIndex,
    Profile,
    Rule,
)

BLOCK = 4
RANKS = st.sampled_from([0, 0, 0, 1])
LANES = st.sampled_from([0, 0, 1, 2, 3])
CONFIDENCES = st.sampled_from([1, 1, 1, 2])


@cache
def block_hash(branch: int, at: int) -> int:
    return int.from_bytes(blake2b(f"{branch}/{at}".encode(), digest_size=8).digest(), "little")


def prompt(fork: tuple[int, int], length: int) -> list[int]:
    """Hashes of a prompt that leaves the main stem at block `fork[0]` for branch `fork[1]`."""
    leaves, branch = fork
    return [block_hash(0 if at < leaves else leaves * 10 + branch, at) for at in range(length)]


def packed(hashes: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


FORKS = st.sampled_from([(1000, 1), (3, 1), (6, 1), (6, 2), (0, 1), (63, 1), (64, 1), (64, 2)])
LENGTHS = st.sampled_from([4, 5, 6, 8, 9, 10, 62, 64, 65, 129, 150]) | st.integers(0, 10)
SPANS = st.just((0.0, 1.0)) | st.tuples(st.sampled_from([0.0, 0.3, 0.5]), st.floats(0, 1))
PROMPTS = st.builds(prompt, FORKS, LENGTHS)
SCATTERED = st.lists(
    st.builds(lambda fork, at: prompt(fork, at + 1)[at], FORKS, st.integers(0, 9)), max_size=12
)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    lanes: list[Lane] = []
    for group in range(draw(st.integers(0, 3))):
        state_class = draw(st.sampled_from([ATTENTION, ATTENTION, WINDOW, RECURRENT]))
        window = draw(st.integers(1, 20)) if state_class == WINDOW else 0
        for tier in sorted(draw(st.sets(st.sampled_from([1, 1, 2, 3, 4]), min_size=1, max_size=3))):
            unit = draw(st.sampled_from([BLOCK, BLOCK, BLOCK, 1, 2, 2 * BLOCK, 3 * BLOCK]))
            store = draw(st.sampled_from(["", "s", "t"])) if tier == 4 else ""
            lanes.append(
                Lane(
                    *(len(lanes), tier, state_class, group, window, unit, draw(st.booleans())),
                    store,
                )
            )
    rules = [
        Rule(tier, draw(st.booleans()), draw(st.sampled_from([0, 0, 1])), draw(st.booleans()))
        for tier in sorted(draw(st.sets(st.integers(1, 4))))
    ]
    return Profile(tuple(lanes), tuple(rules))


PLAIN = Profile((Lane(0, 1, ATTENTION, 0, 0, BLOCK, False),))
TWO_TIERS = Profile(
    (Lane(0, 1, ATTENTION, 0, 0, BLOCK, False), Lane(1, 2, ATTENTION, 0, 0, 2 * BLOCK, True)),
    (Rule(2, whole_prompt=True),),
)
ATTACHED = Profile(
    (
        Lane(0, 1, ATTENTION, 0, 0, BLOCK, False),
        Lane(1, 4, ATTENTION, 0, 0, BLOCK, True, "s"),
    ),
)
PROFILES = st.sampled_from([PLAIN, TWO_TIERS, ATTACHED]) | profiles()


def core_profile(profile: Profile) -> CoreProfile:
    return CoreProfile(
        [lane.packed() for lane in profile.lanes],
        [rule.packed() for rule in profile.rules],
        stores={lane.number: lane.store for lane in profile.lanes if lane.store},
    )


def answer(match: Match) -> Answer:
    return Answer(
        match.replica,
        match.rank,
        match.lower,
        match.predicted,
        match.upper,
        match.tiers,
        match.credited,
    )


def compare(matches: Sequence[Match], expected: Sequence[Answer]) -> None:
    """The same answers, in the same order; ranks that can reuse nothing may be left out."""
    found = [answer(match) for match in matches]
    keys = {(each.replica, each.rank) for each in found}
    for each in expected:
        assert (each.replica, each.rank) in keys or each.upper == each.predicted == 0, each
    assert found == [each for each in expected if (each.replica, each.rank) in keys]


class IndexMachine(RuleBasedStateMachine):
    replicas = Bundle("replicas")

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(BLOCK)
        self.model = NaiveIndex(BLOCK)
        self.now = 1000.0

    def knows(self, replica: int, rank: int, lane: int | None = None) -> bool:
        lanes = self.model.profiles[replica].lanes
        declared = lane is None or any(known.number == lane for known in lanes)
        return (replica, rank) in self.model.ranks and declared

    @initialize(target=replicas, profiles=st.tuples(PROFILES, PROFILES))
    def start(self, profiles: tuple[Profile, Profile]) -> MultipleResults[int]:
        return multiple(*[self.new_replica(profile) for profile in profiles])

    @rule(target=replicas, profile=PROFILES)
    def add_replica(self, profile: Profile) -> int:
        return self.new_replica(profile)

    def new_replica(self, profile: Profile) -> int:
        replica = self.index.add_replica(core_profile(profile))
        assert replica not in self.model.profiles
        self.model.set_profile(replica, profile)
        self.index.set_rank(replica, 0, trusted=True, complete=True)
        self.model.set_rank(replica, 0, True, True)
        return replica

    @rule(seconds=st.integers(0, 100))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(replica=replicas, rank=RANKS, hashes=PROMPTS, ahead=st.sampled_from([0, 0, 50]))
    def touch(self, replica: int, rank: int, hashes: list[int], ahead: int) -> None:
        at = self.now + ahead
        if not self.knows(replica, rank):
            with pytest.raises(KeyError):
                self.index.touch(replica, rank, packed(hashes), at)
            return
        self.index.touch(replica, rank, packed(hashes), at)
        self.model.touch(replica, rank, hashes, at)
        self.match(hashes, 1, False)

    @rule(replica=replicas, profile=PROFILES)
    def set_profile(self, replica: int, profile: Profile) -> None:
        self.index.set_profile(replica, core_profile(profile))
        self.model.set_profile(replica, profile)

    @rule(replica=consumes(replicas))
    def remove_replica(self, replica: int) -> None:
        self.index.remove_replica(replica)
        self.model.remove_replica(replica)
        with pytest.raises(KeyError):
            self.index.remove_replica(replica)

    @rule(replica=replicas, rank=RANKS, trusted=st.booleans(), complete=st.booleans())
    def set_rank(self, replica: int, rank: int, trusted: bool, complete: bool) -> None:
        self.index.set_rank(replica, rank, trusted=trusted, complete=complete)
        self.model.set_rank(replica, rank, trusted, complete)

    @rule(
        replica=replicas,
        rank=RANKS,
        lane=LANES,
        confidence=CONFIDENCES,
        hashes=PROMPTS,
        span=SPANS,
        hint=st.sampled_from(["right", "right", "none", "wrong"]),
    )
    def hold(
        self,
        replica: int,
        rank: int,
        lane: int,
        confidence: int,
        hashes: list[int],
        span: tuple[float, float],
        hint: str,
    ) -> None:
        first, last = sorted(round(share * len(hashes)) for share in span)
        parents = {"right": hashes[first - 1] if first else 0, "none": 0, "wrong": 12345}
        self.hold_these(replica, rank, lane, confidence, parents[hint], hashes[first:last])
        self.match(hashes, 1, False)

    @rule(
        replica=replicas,
        rank=RANKS,
        lane=LANES,
        confidence=CONFIDENCES,
        parent=st.just(0) | SCATTERED.map(lambda hashes: hashes[0] if hashes else 0),
        hashes=SCATTERED,
        timed=st.sampled_from([True, True, True, False]),
    )
    def hold_these(
        self,
        replica: int,
        rank: int,
        lane: int,
        confidence: int,
        parent: int,
        hashes: list[int],
        timed: bool = True,
    ) -> None:
        now = self.now if timed else None
        args = (replica, rank, lane, confidence)
        if not self.knows(replica, rank, lane):
            with pytest.raises(KeyError):
                self.index.hold(*args, parent, packed(hashes))
            return
        new = self.index.hold(*args, parent, packed(hashes), now)
        assert new == self.model.hold(*args, hashes, now)

    @rule(replica=replicas, rank=RANKS, lane=LANES, hashes=SCATTERED | PROMPTS)
    def drop(self, replica: int, rank: int, lane: int, hashes: list[int]) -> None:
        if not self.knows(replica, rank, lane):
            with pytest.raises(KeyError):
                self.index.drop(replica, rank, lane, packed(hashes))
            return
        dropped = self.index.drop(replica, rank, lane, packed(hashes), self.now)
        assert dropped == self.model.drop(replica, rank, lane, hashes, self.now)
        self.evictions(replica, rank)
        self.match(prompt((6, 1), 10), 0, False)

    @rule(confidence=CONFIDENCES, hashes=PROMPTS, span=SPANS)
    def hold_everywhere(
        self, confidence: int, hashes: list[int], span: tuple[float, float]
    ) -> None:
        """All ranks hold the same blocks in all lanes."""
        first, last = sorted(round(share * len(hashes)) for share in span)
        for replica, rank in self.model.ranks:
            for lane in self.model.profiles[replica].lanes:
                self.hold_these(replica, rank, lane.number, confidence, 0, hashes[first:last])

    @rule(replica=replicas, rank=RANKS, lane=LANES, hashes=PROMPTS, span=SPANS)
    def evict(
        self, replica: int, rank: int, lane: int, hashes: list[int], span: tuple[float, float]
    ) -> None:
        """Engines drop prompts from their end."""
        first, last = sorted(round(share * len(hashes)) for share in span)
        self.drop(replica, rank, lane, hashes[first:last][::-1])
        self.match(hashes, 1, False)

    @rule(replica=replicas, rank=RANKS, lane=LANES | st.none())
    def clear(self, replica: int, rank: int, lane: int | None) -> None:
        if not self.knows(replica, rank, lane):
            with pytest.raises(KeyError):
                self.index.clear(replica, rank, lane)
            return
        assert self.index.clear(replica, rank, lane) == self.model.clear(replica, rank, lane)

    @rule(
        decision=st.sampled_from("abcd"),
        replica=replicas,
        rank=RANKS,
        hashes=PROMPTS,
        more=st.integers(0, 5),
    )
    def open_credit(
        self, decision: str, replica: int, rank: int, hashes: list[int], more: int
    ) -> None:
        tokens = len(hashes) * BLOCK + more
        args = (decision, replica, rank)
        if not self.knows(replica, rank):
            with pytest.raises(KeyError):
                self.index.open_credit(*args, packed(hashes), tokens)
            return
        opened = self.index.open_credit(*args, packed(hashes), tokens, self.now)
        assert opened == self.model.open_credit(*args, hashes, tokens, self.now)
        self.match(hashes, more, False)

    @rule(decision=st.sampled_from("abcd"))
    def close_credit(self, decision: str) -> None:
        assert self.index.close_credit(decision) == self.model.close_credit(decision)

    @rule(replica=replicas, rank=RANKS)
    def close_credits(self, replica: int, rank: int) -> None:
        if self.knows(replica, rank):
            closed = self.index.close_credits(replica, rank)
            assert closed == self.model.close_credits(replica, rank)

    @rule(hashes=PROMPTS, at=st.integers(0, 149))
    def match_what_is_no_block(self, hashes: list[int], at: int) -> None:
        self.match([*hashes[:at], 0, *hashes[at + 1 :]], 1, False)

    @rule(hashes=PROMPTS, more=st.integers(0, BLOCK))
    def match_one(self, hashes: list[int], more: int) -> None:
        self.match(hashes, more, False)

    @rule(
        hashes=PROMPTS,
        more=st.integers(0, 2 * BLOCK),
        no_reuse=st.sampled_from([False] * 9 + [True]),
    )
    def match(self, hashes: list[int], more: int, no_reuse: bool) -> None:
        tokens = len(hashes) * BLOCK + more
        matches = self.index.match(packed(hashes), tokens, no_reuse=no_reuse, now=self.now)
        compare(matches, self.model.match(hashes, tokens, no_reuse))
        for match in matches:
            assert match.lower <= match.predicted <= match.upper <= tokens
            self.tail(match, hashes)

    def tail(self, match: Match, hashes: list[int]) -> None:
        """Times are kept by stretch of a prompt: a block is taken to be used no earlier than it was, and no later than
        anything there. Of credits the latest counts, also when it has ended and an earlier one goes on."""
        if not match.predicted:
            assert (match.tail_tier, match.idle_s) == (0, None)
            return
        last = (
            hashes[(match.predicted - 1) // BLOCK] if match.predicted <= len(hashes) * BLOCK else 0
        )
        tier, used, newest = self.model.tail(match.replica, match.rank, last)
        assert match.tail_tier == tier
        known = [time for time in used if time is not None]
        if tier and len(known) == len(used):
            assert match.idle_s is not None
            assert match.idle_s <= self.now - min(known) + 1e-6
        if match.idle_s is not None:
            assert newest is not None
            assert match.idle_s >= self.now - newest - 1e-6

    def evictions(self, replica: int, rank: int) -> None:
        """What another lane still holds has only moved."""
        seen = {tier: count for tier, count, _ in self.index.turnover(replica, rank)}
        evicted = self.model.ranks[replica, rank].evicted
        assert set(seen) <= set(evicted)
        for tier, ages in evicted.items():
            known = [age for age in ages if age is not None]
            assert bool(known) <= (0 < seen.get(tier, 0) <= len(ages))

    @rule()
    def holdings(self) -> None:
        for (replica, rank), known in self.model.ranks.items():
            held = {lane: len(hashes) for lane, hashes in known.held.items() if hashes}
            assert self.index.held(replica, rank) == sorted(held.items())
            for lane in self.model.profiles[replica].lanes:
                for confidence in (1, 2):
                    place = (replica, rank, lane.number, confidence)
                    assert self.index.holdings(*place) == packed(self.model.holdings(*place))

    @invariant()
    def counts(self) -> None:
        counts = self.index.counts()
        assert counts["entries"] == self.model.entries()
        assert counts["blocks"] == self.model.blocks()
        assert counts["credits"] == len(self.model.credits)
        assert counts["runs"] <= counts["blocks"]
        assert counts["evicted"] == 0
        for replica, rank in self.model.ranks:
            credits = [
                credit
                for credit in self.model.credits.values()
                if (credit.replica, credit.rank) == (replica, rank)
            ]
            assert self.index.credits(replica, rank) == len(credits)


@st.composite
def holdings(draw: st.DrawFn) -> tuple[Profile, dict[int, dict[int, int]], list[int], int]:
    """A profile, what each of its lanes holds of a prompt, credited lengths, tokens of the prompt."""
    profile = draw(profiles())
    blocks = draw(st.integers(0, 14))
    held = {}
    for lane in profile.lanes:
        missing = draw(st.sets(st.integers(0, 13), max_size=draw(st.sampled_from([0, 1, 3, 8]))))
        upper = draw(st.sets(st.integers(0, 13), max_size=draw(st.sampled_from([0, 1, 3]))))
        first, last = draw(st.tuples(st.sampled_from([0, 0, 0, 3, 6]), st.integers(4, 14)))
        held[lane.number] = {
            at: 2 if at in upper else 1 for at in range(first, last) if at not in missing
        }
    credits = draw(st.lists(st.integers(0, 14), max_size=2))
    return profile, held, credits, blocks * BLOCK + draw(st.integers(0, BLOCK))


@settings(max_examples=1500, deadline=None)
@given(case=holdings(), trusted=st.sampled_from([True] * 5 + [False]), complete=st.booleans())
def test_what_can_be_resumed_is_what_the_definition_says(
    case: tuple[Profile, dict[int, dict[int, int]], list[int], int], trusted: bool, complete: bool
) -> None:
    profile, held, credits, tokens = case
    stem = prompt((1000, 1), 14)
    index, model = Index(BLOCK), NaiveIndex(BLOCK)
    replica = index.add_replica(core_profile(profile))
    index.set_rank(replica, 0, trusted=trusted, complete=complete)
    model.set_profile(replica, profile)
    model.set_rank(replica, 0, trusted, complete)
    for lane, blocks in held.items():
        for at, confidence in blocks.items():
            index.hold(replica, 0, lane, confidence, stem[at - 1] if at else 0, packed([stem[at]]))
            model.hold(replica, 0, lane, confidence, [stem[at]])
    for number, length in enumerate(credits):
        args = (f"{number}", replica, 0)
        index.open_credit(*args, packed(stem[:length]), length * BLOCK)
        model.open_credit(*args, stem[:length], length * BLOCK)
    hashes = stem[: tokens // BLOCK]
    compare(index.match(packed(hashes), tokens), model.match(hashes, tokens, False))


IndexMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestIndex = IndexMachine.TestCase
