"""The simulation sees defects: each put in on purpose, each found among a few schedules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from servingfleet_protos.v1.stream_pb2 import Delta
from servingfleet_relay.batches import Lost, Restarted
from servingfleet_relay.outbox import Outbox
from servingfleet_relay.sequence import Sequence as Numbering
from servingfleet_scheduler.credits import Credits
from servingfleet_scheduler.fleet import Fleet
from servingfleet_scheduler.replicas import Rank, Replica
from servingfleet_scheduler.slots import SnapshotSlots
from servingfleet_sim.simulation.shrinking import run, shrink

Patch = pytest.MonkeyPatch


def drops_are_ignored(patch: Patch) -> None:
    apply = Fleet.apply

    def defect(self: Fleet, replica: Replica, delta: Delta, now: float) -> str | None:
        return None if delta.op == Delta.OP_DROP else apply(self, replica, delta, now)

    patch.setattr(Fleet, "apply", defect)


def clears_are_ignored(patch: Patch) -> None:
    apply = Fleet.apply

    def defect(self: Fleet, replica: Replica, delta: Delta, now: float) -> str | None:
        return None if delta.op == Delta.OP_CLEAR else apply(self, replica, delta, now)

    patch.setattr(Fleet, "apply", defect)


def what_is_incomplete_counts_as_complete(patch: Patch) -> None:
    publish = Fleet._publish

    def defect(self: Fleet, replica: Replica, rank: Rank) -> None:
        publish(self, replica, rank)
        if replica.connected:
            index = self._indexes[replica.model]
            index.set_rank(replica.number, rank.number, trusted=True, complete=True)

    patch.setattr(Fleet, "_publish", defect)


def a_closed_stream_counts_on(patch: Patch) -> None:
    patch.setattr(Fleet, "detach", lambda self, replica, now: None)


def gaps_are_passed_over(patch: Patch) -> None:
    jump = Numbering._jump
    patch.setattr(
        Numbering,
        "_jump",
        lambda *args: [step for step in jump(*args) if not isinstance(step, Lost)],
    )


def restarts_are_passed_over(patch: Patch) -> None:
    restart = Numbering._restart

    def defect(self: Numbering, reason: str) -> list[object]:
        steps = restart(self, reason)
        self.incarnation -= 1
        return [step for step in steps if not isinstance(step, Restarted)]

    patch.setattr(Numbering, "_restart", defect)


def credits_never_expire(patch: Patch) -> None:
    patch.setattr(Credits, "expire", lambda self, now: 0)


def slots_are_not_counted(patch: Patch) -> None:
    init = SnapshotSlots.__init__

    def defect(self: SnapshotSlots[object], slots: int, **more: float) -> None:
        init(self, slots + 2, **more)

    patch.setattr(SnapshotSlots, "__init__", defect)


def a_full_outbox_forgets_its_newest(patch: Patch) -> None:
    append = Outbox._append

    def defect(self: Outbox, body: object) -> None:
        if len(self._waiting) < 6:
            append(self, body)  # type: ignore[arg-type]

    patch.setattr(Outbox, "_append", defect)


@pytest.mark.parametrize(
    ("defect", "invariants"),
    [
        (drops_are_ignored, {"no wrong credit survives", "lower bound", "all told, all known"}),
        (clears_are_ignored, {"no wrong credit survives", "lower bound", "all told, all known"}),
        (what_is_incomplete_counts_as_complete, {"upper bound", "upper bound at execution"}),
        (a_closed_stream_counts_on, {"nothing counts without a stream", "every link comes back"}),
        (gaps_are_passed_over, {"batches applied in order"}),
        (restarts_are_passed_over, {"no wrong credit survives", "lower bound"}),
        (credits_never_expire, {"credits end"}),
        (slots_are_not_counted, {"snapshot slots"}),
        (a_full_outbox_forgets_its_newest, {"no wrong credit survives", "nothing is missing"}),
    ],
)
def test_a_defect_is_found(
    defect: Callable[[Patch], None], invariants: set[str], monkeypatch: Patch
) -> None:
    defect(monkeypatch)
    tally = run(range(5_000, 5_200))
    assert tally.failures, f"{tally.schedules} schedules and no failure"
    assert tally.failures[0].violation.invariant in invariants


def test_a_failing_script_is_cut_down_and_says_what_happened(monkeypatch: Patch) -> None:
    drops_are_ignored(monkeypatch)
    (failure,) = run(range(5_000, 5_200)).failures
    smallest = shrink(failure, max_runs=150)
    assert len(smallest.script.steps) < min(10, len(failure.script.steps))
    assert smallest.violation.invariant == failure.violation.invariant
    told = str(smallest)
    assert str(smallest.script.steps[0]) in told
    assert "publishes" in told
