from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_core.figures import SUM_NAMES, Sums
from servingfleet_core.reports import NotAddable, added, from_proto, reuse_report, to_proto
from servingfleet_protos.v1 import fleet_pb2

from .pairs import pairs, summed

ROW = {
    "prompt": 100,
    "best": 80,
    "lower": 60,
    "predicted": 80,
    "upper": 90,
    "expected": 75,
    "actual": 70,
}


def answer(
    sums: Sums, *, instance: str = "a", min_pairs: int = 1, **set_aside: int
) -> fleet_pb2.GetReuseResponse:
    return fleet_pb2.GetReuseResponse(
        reports=[reuse_report("model", "", sums, set_aside, min_pairs)],
        instance_id=instance,
        min_pairs=min_pairs,
        window_s=60.0,
    )


def test_sums_survive_the_wire() -> None:
    sums = Sums(**{name: number for number, name in enumerate(SUM_NAMES, 1)})
    wire = to_proto(sums).SerializeToString()
    assert from_proto(fleet_pb2.ReuseSums.FromString(wire)) == sums


@given(st.lists(st.tuples(st.integers(0, 3), pairs(), st.booleans()), max_size=40))
def test_pairs_split_over_schedulers_give_the_figures_of_one(
    rows: list[tuple[int, dict[str, int], bool]],
) -> None:
    def of(mine: list[tuple[int, dict[str, int], bool]]) -> Sums:
        sums = summed([row for _, row, _ in mine])
        sums.decisions = len(mine) + 1
        sums.joined = sum(own for _, _, own in mine)
        return sums

    whole = of(rows)
    whole.decisions += 3
    together = added(
        answer(of([row for row in rows if row[0] == number]), instance=str(number))
        for number in range(4)
    )
    assert list(together.reports) == list(answer(whole).reports)


def test_what_was_set_aside_adds_up_by_reason() -> None:
    answers = [answer(Sums(), late=2, failed=1), answer(Sums(), instance="b", late=3)]
    (report,) = added(answers).reports
    assert Counter(report.set_aside) == {"late": 5, "failed": 1}


def test_models_and_replicas_stay_apart() -> None:
    first, second = answer(summed([ROW])), answer(summed([ROW, ROW]), instance="b")
    second.reports[0].replica = "r1"
    found = {each.replica: each.sums.pairs for each in added([first, second]).reports}
    assert found == {"": 1, "r1": 2}


def test_a_scheduler_asked_under_two_addresses_counts_once() -> None:
    (report,) = added([answer(summed([ROW])), answer(summed([ROW]))]).reports
    assert report.sums.pairs == 1


def test_few_pairs_of_each_may_be_enough_together() -> None:
    apart = [answer(summed([ROW] * 12), instance=name, min_pairs=20) for name in "ab"]
    assert not any(each.reports[0].figures[0].HasField("value") for each in apart)
    (report,) = added(apart).reports
    assert report.figures[0].value == pytest.approx(0.7)


def test_sums_without_their_products_are_not_added() -> None:
    old = answer(summed([ROW]))
    del old.reports[0].sums.products["actual_prompt"]
    with pytest.raises(NotAddable, match="actual_prompt"):
        added([old])
