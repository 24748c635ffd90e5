from __future__ import annotations

import math
import random
from typing import Any

import pytest

from servingfleet_scheduler.admission import NO_CLASS, RETRY_MOST_S, Admission, Limit
from servingfleet_scheduler.errors import (
    DeadlineUnreachable,
    NotAdmitted,
    QueueFull,
    TargetUnreachable,
)
from servingfleet_scheduler.policy.candidate import Candidate, Estimate, Reuse
from servingfleet_scheduler.policy.estimate import estimate
from servingfleet_scheduler.policy.speeds import Speeds
from servingfleet_scheduler.settings import AdmissionSettings, AdmissionTarget

MODEL = "model-a"
SPEEDS = Speeds(step_s=0.0, token_s=1e-4, attention_s=0.0, noise_share=0.0)
"""A prompt of 10,000 tokens takes a second, for sure."""


def make(
    replica: str = "a", *, predicted: int = 0, upper: int = 0, queue_s: float = 0.0, **fields: Any
) -> Estimate:
    held = Reuse(10_000, predicted, predicted, max(upper, predicted), predicted)
    said: dict[str, Any] = {"certain": True, "speeds": SPEEDS} | fields
    return estimate(Candidate(replica, 0, held, queue_s, **said))


def admission(
    *targets: AdmissionTarget, seed: int = 1, z: float = 1.0, reopen_share: float = 0.9
) -> Admission:
    return Admission(AdmissionSettings(targets, z, reopen_share), random.Random(seed))


def deadline(seconds: float) -> Limit:
    return Limit(NO_CLASS, seconds, math.inf, own=True)


def admitted(*estimates: Estimate, limit: Limit | None) -> list[str]:
    return [each.candidate.replica for each in admission().admit(MODEL, estimates, limit, now=0.0)]


def refusal(
    *estimates: Estimate, limit: Limit, to: Admission | None = None, now: float = 0.0
) -> NotAdmitted:
    with pytest.raises(NotAdmitted) as error:
        (to or admission()).admit(MODEL, estimates, limit, now)
    return error.value


# Who is admitted


def test_without_a_limit_all_are_admitted() -> None:
    assert admitted(make(queue_s=1e6), limit=None) == ["a"]


def test_only_those_in_time_are_admitted_in_the_order_given() -> None:
    late, good, better = make("late", queue_s=9.0), make("good", queue_s=0.5), make("better")
    assert admitted(late, good, better, limit=deadline(3.0)) == ["good", "better"]


def test_what_is_known_to_vary_must_fit_too() -> None:
    assert admitted(make(queue_s=1.0, queue_noise_s=0.4), limit=deadline(2.5)) == ["a"]
    refusal(make(queue_s=1.0, queue_noise_s=0.6), limit=deadline(2.5))
    assert admission(z=0.0).admit(
        MODEL, [make(queue_s=1.0, queue_noise_s=0.6)], deadline(2.5), now=0.0
    )


def test_the_noise_of_the_prompts_own_work_counts() -> None:
    noisy = Speeds(step_s=0.0, token_s=1e-4, attention_s=0.0, noise_share=0.2)
    refusal(make(speeds=noisy), limit=deadline(1.1))
    assert admitted(make(speeds=noisy), limit=deadline(1.3)) == ["a"]


# Never for lack of our own data


def test_missing_knowledge_of_a_cache_is_no_reason_to_refuse() -> None:
    assert admitted(make(upper=9_984, certain=False), limit=deadline(0.1)) == ["a"]


def test_a_stream_that_broke_off_is_no_reason_to_refuse() -> None:
    away = make(upper=9_984, certain=False, unproven=True)
    assert admitted(away, limit=deadline(0.1)) == ["a"]


def test_old_metrics_are_no_reason_to_refuse() -> None:
    stale = make(queue_s=1.0, queue_noise_s=0.1, queue_sd_s=50.0)
    assert admitted(stale, limit=deadline(2.2)) == ["a"]


def test_a_speed_that_nobody_has_measured_is_no_reason_to_refuse() -> None:
    unmeasured = make(scale_sd=10.0)
    assert unmeasured.sd_s > 5.0
    assert admitted(unmeasured, limit=deadline(1.1)) == ["a"]


def test_the_price_of_an_uncertain_reuse_is_no_reason_to_refuse() -> None:
    held = Reuse(10_000, 0, 10_000, 10_000, 10_000.0)
    careful = estimate(Candidate("a", 0, held, 0.0, certain=True, speeds=SPEEDS, quantile=0.0))
    assert careful.seconds > 0.9
    assert admitted(careful, limit=deadline(0.5)) == ["a"]


# What a refusal says


def test_a_refusal_tells_the_estimate_and_what_would_have_been_needed() -> None:
    error = refusal(make("a", queue_s=9.0), make("b", queue_s=4.0), limit=deadline(3.0))
    assert isinstance(error, DeadlineUnreachable)
    said = error.metadata
    assert (said["replica"], said["estimate_s"], said["queue_s"]) == ("b", "5.000", "4.000")
    assert (said["deadline_s"], said["over_s"], said["shed_queue_s"]) == ("3.000", "2.000", "2.000")
    # No cache could save two seconds: the whole prompt takes one.
    assert "missing_reuse_tokens" not in said
    near = refusal(make(queue_s=2.25), limit=deadline(3.0)).metadata
    assert (near["over_s"], near["missing_reuse_tokens"]) == ("0.250", "2500")
    long = refusal(make(queue_s=0.1), limit=deadline(0.5)).metadata
    # Without any queue it would be late, too.
    assert "shed_queue_s" not in long


def test_a_prompt_too_long_even_for_an_idle_engine_is_told_so() -> None:
    error = refusal(make(), limit=deadline(0.5))
    assert error.metadata["idle_estimate_s"] == "1.000"
    assert 0.8 * RETRY_MOST_S <= (error.retry_s or 0.0) <= RETRY_MOST_S


def test_the_retry_delay_is_what_the_queue_needs_give_or_take_a_fifth() -> None:
    delays = [
        refusal(make(queue_s=10.0), limit=deadline(3.0), to=admission(seed=seed)).retry_s or 0.0
        for seed in range(99)
    ]
    # To drain: 8 s. Its own slot: the second that it takes.
    assert 0.79 * 9.0 <= min(delays) < max(delays) <= 1.21 * 9.0
    assert len(set(delays)) > 50


def test_each_refused_client_gets_its_own_slot() -> None:
    gate = admission()
    waits = [
        refusal(
            make("a", queue_s=5.0), make("b", queue_s=5.0), limit=deadline(3.0), to=gate
        ).retry_s
        for _ in range(10)
    ]
    steps = [3.0 + 0.5 * number for number in range(1, 11)]
    assert all(
        0.79 * step <= (wait or 0.0) <= 1.21 * step for step, wait in zip(steps, waits, strict=True)
    )


def test_slots_that_have_passed_are_free_again() -> None:
    gate = admission()
    for _ in range(10):
        refusal(make(queue_s=3.0), limit=deadline(3.0), to=gate)
    later = refusal(make(queue_s=3.0), limit=deadline(3.0), to=gate, now=60.0)
    assert (later.retry_s or 0.0) <= 1.21 * 2.0


def test_the_retry_delay_stays_within_bounds() -> None:
    soon = Speeds(step_s=0.0, token_s=1e-6, attention_s=0.0, noise_share=0.0)
    assert refusal(make(queue_s=3.1, speeds=soon), limit=deadline(3.0)).retry_s == 1.0
    assert refusal(make(queue_s=1e6), limit=deadline(3.0)).retry_s <= 30.0  # type: ignore[operator]
    gate = admission()
    for _ in range(1000):
        refusal(make(queue_s=3.1), limit=deadline(3.0), to=gate)
    assert refusal(make(queue_s=3.1), limit=deadline(3.0), to=gate).retry_s <= 30.0  # type: ignore[operator]


# Classes

CLASSES = (
    AdmissionTarget(-10, 60.0, queue_s=1.0),
    AdmissionTarget(0, 5.0),
    AdmissionTarget(10, 2.0),
)


@pytest.mark.parametrize(
    ("priority", "deadline_s", "expected"),
    [
        (-11, None, None),
        (-11, 1.0, Limit("", 1.0, math.inf, own=True)),
        (-10, None, Limit("-10", 60.0, 1.0, own=False)),
        (9, None, Limit("0", 5.0, math.inf, own=False)),
        (9, 3.0, Limit("0", 3.0, math.inf, own=True)),
        (9, 9.0, Limit("0", 5.0, math.inf, own=False)),
        (99, None, Limit("10", 2.0, math.inf, own=False)),
    ],
)
def test_a_request_is_of_the_highest_class_that_its_priority_reaches(
    priority: int, deadline_s: float | None, expected: Limit | None
) -> None:
    assert admission(*CLASSES).limit(priority, deadline_s) == expected


def test_without_targets_only_a_deadline_limits() -> None:
    assert admission().limit(0, None) is None
    assert admission().limit(0, 2.0) == deadline(2.0)


def test_a_class_target_that_none_can_meet_is_refused_by_its_name() -> None:
    gate = admission(*CLASSES)
    error = refusal(make(queue_s=4.5), limit=gate.limit(0, None), to=gate)  # type: ignore[arg-type]
    assert isinstance(error, TargetUnreachable)
    assert (error.metadata["class"], error.metadata["limit_s"]) == ("0", "5.000")
    assert "deadline_s" not in error.metadata
    assert gate.rejections == {(MODEL, "0", "TARGET_UNREACHABLE"): 1}


def test_less_important_requests_are_refused_first_where_work_waits() -> None:
    gate = admission(*CLASSES)
    busy = [make(queue_s=1.5)]
    assert gate.admit(MODEL, busy, gate.limit(0, None), now=0.0)
    error = refusal(*busy, limit=gate.limit(-10, None), to=gate)  # type: ignore[arg-type]
    assert isinstance(error, QueueFull)
    assert (error.metadata["limit_queue_s"], error.metadata["over_s"]) == ("1.000", "0.500")
    idler = make("b", queue_s=0.5)
    assert gate.admit(MODEL, [*busy, idler], gate.limit(-10, None), now=60.0) == [idler]


# Hysteresis


def test_a_class_that_refused_opens_again_a_little_later_than_it_closed() -> None:
    gate = admission()
    limit = deadline(3.0)
    assert gate.admit(MODEL, [make(queue_s=1.9)], limit, now=0.0)
    refusal(make(queue_s=2.1), limit=limit, to=gate)
    refusal(make(queue_s=1.9), limit=limit, to=gate, now=1.0)
    assert gate.admit(MODEL, [make(queue_s=1.6)], limit, now=2.0)
    assert gate.admit(MODEL, [make(queue_s=1.9)], limit, now=2.0)


def test_one_class_does_not_close_another_nor_one_model_another() -> None:
    gate = admission(*CLASSES)
    first, second = gate.limit(0, None), gate.limit(10, None)
    assert first is not None
    assert second is not None
    refusal(make(queue_s=4.1), limit=first, to=gate)
    assert gate.admit(MODEL, [make(queue_s=0.9)], second, now=0.0)
    assert gate.admit("model-b", [make(queue_s=3.9)], first, now=0.0)


def test_a_closed_class_does_not_refuse_what_an_idle_engine_can_do() -> None:
    gate = admission()
    refusal(make(queue_s=9.0), limit=deadline(3.0), to=gate)
    assert gate.admit(MODEL, [make()], deadline(1.05), now=1.0)


def test_what_no_idle_engine_can_do_closes_nothing_to_others() -> None:
    gate = admission()
    refusal(make(queue_s=1.9), limit=deadline(0.5), to=gate)
    assert gate.admit(MODEL, [make(queue_s=1.9)], deadline(3.0), now=1.0)


def test_a_class_is_not_kept_closed_by_those_whom_only_that_refuses() -> None:
    gate = admission()
    limit = deadline(3.0)
    refusal(make(queue_s=2.1), limit=limit, to=gate)
    for second in range(1, 30):
        refusal(make(queue_s=1.9), limit=limit, to=gate, now=float(second))
    assert gate.admit(MODEL, [make(queue_s=1.9)], limit, now=30.0)


def test_what_would_be_refused_is_told_and_changes_nothing() -> None:
    gate = admission(*CLASSES)
    near = make(queue_s=3.9, queue_noise_s=0.05)
    limit = gate.limit(0, None)
    assert gate.refused(MODEL, near, limit, 0.0) == ""
    late = gate.refused(MODEL, make(queue_s=4.1), limit, 0.0)
    assert late == "5.100 s, ±0.000 s, is beyond the class's target, 5.000 s"
    assert "more than the class's 1.000 s" in gate.refused(
        MODEL, make(queue_s=1.5), gate.limit(-10, None), 0.0
    )
    assert gate.refused(MODEL, near, limit, 0.0) == ""
    assert gate.rejections == {}
