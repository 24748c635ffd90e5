from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from servingfleet_scheduler.slots import SnapshotSlots

SLOTS = 2


def make(slots: int = 1) -> SnapshotSlots[str]:
    return SnapshotSlots(slots, silence_s=10.0, limit_s=100.0)


def granted(slots: SnapshotSlots[str], now: float = 0.0) -> list[str]:
    return [grant.who for grant in slots.grants(now)]


def test_slots_are_granted_first_come_first_served() -> None:
    slots = make()
    for who in ("a", "b", "c"):
        slots.request(who, [0])
    order = granted(slots)
    for who in ("a", "b"):
        slots.done(who, 0)
        order += granted(slots)
    assert order == ["a", "b", "c"]


def test_a_slot_is_free_only_when_every_rank_has_ended() -> None:
    slots = make()
    slots.request("a", [0, 1])
    slots.request("b", [0])
    granted(slots)
    slots.done("a", 0)
    assert granted(slots) == []
    slots.done("a", 1)
    assert granted(slots) == ["b"]


def test_a_closed_stream_frees_its_slot() -> None:
    slots = make()
    slots.request("a", [0])
    slots.request("b", [0])
    granted(slots)
    slots.release("a")
    assert granted(slots) == ["b"]


def test_a_silent_stream_loses_its_slot_and_queues_behind_the_others() -> None:
    slots = make()
    slots.request("a", [0])
    slots.request("b", [0])
    granted(slots)
    assert granted(slots, 10.0) == []
    assert granted(slots, 10.1) == ["b"]
    slots.done("b", 0)
    assert granted(slots, 10.2) == ["a"]


def test_a_stream_that_is_heard_keeps_its_slot() -> None:
    slots = make()
    slots.request("a", [0])
    slots.request("b", [0])
    granted(slots)
    slots.heard("a", 9.0)
    assert granted(slots, 18.0) == []


def test_no_snapshot_holds_a_slot_for_ever() -> None:
    slots = make()
    slots.request("a", [0])
    slots.request("b", [0])
    granted(slots)
    for second in range(101):
        slots.heard("a", float(second))
    assert granted(slots, 100.5) == ["b"]


def test_a_rank_asked_for_again_is_granted_again_after_its_snapshot() -> None:
    slots = make(2)
    slots.request("a", [0])
    granted(slots)
    slots.request("a", [0], again=True)
    assert granted(slots) == []
    slots.done("a", 0)
    assert granted(slots) == ["a"]


def test_a_rank_under_way_is_not_granted_twice() -> None:
    slots = make()
    slots.request("a", [0])
    granted(slots)
    slots.request("a", [0])
    slots.done("a", 0)
    assert granted(slots) == []


class SlotMachine(RuleBasedStateMachine):
    """Streams that ask, answer, fall silent and vanish, in any order."""

    streams = st.integers(0, 5)
    ranks = st.integers(0, 2)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.slots: SnapshotSlots[int] = SnapshotSlots(SLOTS, silence_s=5.0, limit_s=20.0)
        self.running: dict[int, set[int]] = {}

    def _grant(self) -> None:
        for who in list(self.running):
            if not any(self.slots.granted(who, rank) for rank in self.running[who]):
                del self.running[who]
        timeouts = self.slots.timeouts
        grants = self.slots.grants(self.now)
        if self.slots.timeouts > timeouts:
            self.running = {
                who: ranks
                for who, ranks in self.running.items()
                if any(self.slots.granted(who, rank) for rank in ranks)
            }
        for grant in grants:
            self.running[grant.who] = set(grant.ranks)

    @rule(who=streams, rank=ranks, again=st.booleans())
    def ask(self, who: int, rank: int, again: bool) -> None:
        self.slots.request(who, [rank], again=again)
        self._grant()

    @rule(who=streams, rank=ranks)
    def end(self, who: int, rank: int) -> None:
        self.slots.done(who, rank)
        self._grant()

    @rule(who=streams)
    def vanish(self, who: int) -> None:
        self.slots.release(who)
        self._grant()

    @rule(who=streams, seconds=st.floats(0, 8))
    def wait(self, who: int, seconds: float) -> None:
        self.now += seconds
        self.slots.heard(who, self.now)
        self._grant()

    @invariant()
    def never_more_snapshots_than_slots(self) -> None:
        assert len(self.running) <= SLOTS
        assert self.slots.in_use <= SLOTS

    @invariant()
    def no_slot_is_idle_while_others_wait(self) -> None:
        # A stream that runs already waits for itself.
        others = self.slots.waiting - len(self.running)
        assert self.slots.in_use == SLOTS or others <= 0


SlotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestSlots = SlotMachine.TestCase
