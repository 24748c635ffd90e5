from __future__ import annotations

import random
from typing import Any

import pytest

from servingfleet_scheduler.admission import admit
from servingfleet_scheduler.errors import DeadlineUnreachable
from servingfleet_scheduler.policy.candidate import Candidate, Estimate, Reuse
from servingfleet_scheduler.policy.estimate import estimate


def make(
    replica: str = "a", *, predicted: int = 0, upper: int = 0, queue_s: float = 0.0, **fields: Any
) -> Estimate:
    held = Reuse(
        20_000, predicted, predicted, max(upper, predicted), predicted, (predicted, 0, 0, 0)
    )
    said = {"certain": True} | fields
    return estimate(Candidate(replica, 0, held, queue_s, **said))


def admitted(*estimates: Estimate, deadline_s: float | None) -> list[str]:
    found = admit(estimates, deadline_s, random.Random(1))
    return [each.candidate.replica for each in found]


def refusal(*estimates: Estimate, deadline_s: float, seed: int = 1) -> DeadlineUnreachable:
    with pytest.raises(DeadlineUnreachable) as error:
        admit(estimates, deadline_s, random.Random(seed))
    return error.value


def test_without_a_deadline_all_are_admitted() -> None:
    assert admitted(make(queue_s=1e6), deadline_s=None) == ["a"]


def test_only_those_in_time_are_admitted_in_the_order_given() -> None:
    late, good, better = make("late", queue_s=9.0), make("good", queue_s=0.5), make("better")
    assert admitted(late, good, better, deadline_s=3.0) == ["good", "better"]


def test_a_deadline_that_none_can_meet_is_refused_with_the_estimate() -> None:
    error = refusal(make("a", queue_s=9.0), make("b", queue_s=4.0), deadline_s=3.0)
    assert error.metadata["replica"] == "b"
    assert float(error.metadata["estimate_s"]) == pytest.approx(5.38, abs=0.01)
    assert error.metadata["queue_s"] == "4.000"


def test_the_retry_delay_is_what_the_queue_needs_give_or_take_a_fifth() -> None:
    delays = [
        refusal(make(queue_s=10.0), deadline_s=3.0, seed=seed).retry_s or 0.0 for seed in range(99)
    ]
    needed = 10.0 + 1.38 - 3.0
    assert 0.79 * needed <= min(delays) < max(delays) <= 1.21 * needed
    assert len(set(delays)) > 50


def test_the_retry_delay_stays_within_bounds() -> None:
    assert refusal(make(queue_s=1.7), deadline_s=3.0).retry_s == 1.0
    assert refusal(make(queue_s=1e6), deadline_s=3.0).retry_s == 30.0


def test_a_prompt_too_long_even_for_an_idle_engine_is_told_so() -> None:
    error = refusal(make(), deadline_s=0.5)
    assert float(error.metadata["idle_estimate_s"]) > 0.5


def test_missing_knowledge_of_a_cache_is_no_reason_to_refuse() -> None:
    unsure = make(predicted=0, upper=19_984, certain=False)
    assert admitted(unsure, deadline_s=0.5) == ["a"]


def test_a_stream_that_broke_off_is_no_reason_to_refuse() -> None:
    away = make(upper=19_984, certain=False, unproven=True)
    assert admitted(away, deadline_s=0.5) == ["a"]
