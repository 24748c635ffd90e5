from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servingfleet_scheduler.labels import Group, Sent
from servingfleet_scheduler.learning import Factor, Observation, Pace, Pool, observation
from servingfleet_scheduler.policy.estimate import prefill_seconds
from servingfleet_scheduler.policy.rules import LoadRule, Overlap, Rules
from servingfleet_scheduler.policy.speeds import DEFAULTS, Speeds

from .engines import Engine, load, told

TRUTH = replace(DEFAULTS, step_s=0.02, token_s=1e-4, attention_s=3e-9)


def wrong(factor: float) -> Speeds:
    return replace(
        TRUTH,
        step_s=TRUTH.step_s * factor,
        token_s=TRUTH.token_s * factor,
        attention_s=TRUTH.attention_s * factor,
    )


def error(speeds: Speeds, truth: Speeds = TRUTH) -> float:
    """Median relative error of a prompt's seconds."""
    errors = []
    for each in load(random.Random(99), 200, truth, 0.5):
        sizes = each.tokens - each.reused, each.reused
        expected = prefill_seconds(truth, *sizes)
        errors.append(abs(prefill_seconds(speeds, *sizes) - expected) / expected)
    return median(errors)


def learn(
    pace: Pace,
    *,
    seed: int = 1,
    count: int = 400,
    share: float = 0.7,
    until: int | None = None,
    outlier_share: float = 0.0,
    factor: Callable[[float], float] = lambda now: 1.0,
) -> Pace:
    """After `until` outcomes, or all of them."""
    rng = random.Random(seed)
    prompts = load(rng, count, TRUTH, share)
    engine = Engine(TRUTH, rng, noise=0.1, outlier_share=outlier_share, factor=factor)
    for _ in told(pace, prompts, engine.serve(prompts)):
        if pace.learned == until:
            break
    return pace


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("share", [0.5, 0.8])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_speeds_are_found_from_priors_that_are_wrong_by_two(
    factor: float, share: float, seed: int
) -> None:
    pace = Pace(Pool(wrong(factor)))
    assert error(pace.speeds) > 0.45
    assert error(learn(pace, seed=seed, share=share, until=20).speeds) < 0.21
    pace = learn(Pace(Pool(wrong(factor))), seed=seed, share=share)
    assert pace.learned > 100
    assert error(pace.speeds) < 0.1


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_steps_that_hang_for_five_seconds_hardly_change_what_is_known(seed: int) -> None:
    pace = learn(Pace(Pool(wrong(2.0))), seed=seed, share=0.5, outlier_share=0.02)
    assert error(pace.speeds) < 0.12


def test_an_engine_that_slows_down_is_followed() -> None:
    pace = Pace(Pool(TRUTH))
    learn(pace, count=1000, share=0.4, factor=lambda now: 1.6 if now > 250.0 else 1.0)
    slowed = replace(
        TRUTH,
        step_s=TRUTH.step_s * 1.6,
        token_s=TRUTH.token_s * 1.6,
        attention_s=TRUTH.attention_s * 1.6,
    )
    assert pace.pool.drifts
    assert error(pace.speeds, slowed) < 0.1


def test_a_rank_that_is_slower_than_its_pool_is_known_as_such() -> None:
    pool = Pool(TRUTH)
    plain, slow = Pace(pool), Pace(pool)
    for seed in range(1, 5):
        learn(plain, seed=seed, count=100, share=0.5)
        learn(slow, seed=seed + 10, count=100, share=0.4, factor=lambda now: 1.3)
    assert slow.factor.value / plain.factor.value == pytest.approx(1.3, abs=0.08)


def test_what_is_known_is_surer_than_what_is_not() -> None:
    pace = Pace(Pool(TRUTH))
    before = pace.pool.speeds.covariance
    learn(pace)
    after = pace.pool.speeds.covariance
    assert before is not None
    assert after is not None
    sizes = (1.0, 4000.0, 8e6)
    assert after.variance(*sizes) < 0.1 * before.variance(*sizes)


def test_without_long_contexts_attention_keeps_its_ratio_to_tokens() -> None:
    pool, factor = Pool(wrong(2.0)), Factor()
    for number in range(200):
        tokens = 200.0 + 5.0 * (number % 40)
        pairs = tokens * tokens / 2
        seconds = TRUTH.step_s + TRUTH.token_s * tokens + TRUTH.attention_s * pairs
        pool.learn(Observation(1.0, tokens, pairs, (0.0, 0.0, 0.0), 0.0, 0.0, seconds), factor)
    ratio = pool.speeds.attention_s / pool.speeds.token_s
    assert ratio == pytest.approx(TRUTH.attention_s / TRUTH.token_s, rel=0.25)


def test_the_bandwidth_of_a_tier_is_learned_from_what_was_loaded() -> None:
    pool, factor = Pool(TRUTH), Factor()
    slow = 4 * TRUTH.host.token_s
    for number in range(300):
        tokens = 500.0 + 100.0 * (number % 10)
        held = 2000.0 + 1000.0 * (number % 7)
        pairs = tokens * (held + tokens / 2)
        seconds = TRUTH.step_s + TRUTH.token_s * tokens + TRUTH.attention_s * pairs
        seconds += TRUTH.host.fixed_s + slow * held
        pool.learn(
            Observation(1.0, tokens, pairs, (held, 0.0, 0.0), TRUTH.host.fixed_s, 0.0, seconds),
            factor,
        )
    assert pool.speeds.host.token_s * factor.value == pytest.approx(slow, rel=0.2)


def test_tiers_may_be_learned_and_yet_cost_nothing() -> None:
    pool = Pool(TRUTH, price_tiers=False)
    assert pool.speeds.host.seconds(10_000) == 0.0
    assert pool.known.host == TRUTH.host


def test_longer_prompts_that_came_sooner_teach_no_negative_speed() -> None:
    pool, factor = Pool(TRUTH), Factor()
    for number in range(500):
        tokens = 100.0 + 3000.0 * (number % 2)
        seconds = 0.5 - 0.15 * (number % 2)
        pool.learn(
            Observation(1.0, tokens, tokens**2 / 2, (0.0, 0.0, 0.0), 0.0, 0.0, seconds), factor
        )
    assert pool.speeds.token_s > 0
    assert pool.speeds.attention_s > 0


# What a group of prompts is to the model


def group(*members: Sent, start: float = 1.0, seconds: float = 0.5) -> Group:
    return Group(start, seconds, members)


def sent(prompt: int, cached: int, *tiers: int, at: float = 1.0, **fields: Any) -> Sent:
    gpu, host, disk, shared, *_ = (*tiers, 0, 0, 0, 0)
    found = Sent(at, prompt, (gpu, host, disk, shared), **fields)
    found.cached = cached
    return found


def test_prompts_of_a_group_share_its_steps() -> None:
    seen = observation(group(sent(5000, 1000, 1000), sent(6000, 0)), TRUTH)
    assert seen.steps == 2
    assert seen.tokens == 10_000
    assert seen.pairs == 4000 * (1000 + 2000) + 6000 * 3000


def test_what_was_reused_counts_as_reported_not_as_predicted() -> None:
    seen = observation(group(sent(5000, 3000, 2000, 2000)), TRUTH)
    assert seen.tokens == 2000
    assert seen.loads == (1000, 0, 0)
    assert seen.known_s == TRUTH.host.fixed_s


def test_a_load_that_the_wait_has_hidden_says_nothing() -> None:
    rule = LoadRule(Overlap.QUEUE, 0.5)
    rules = Rules(loads=(rule, rule, rule))
    assert observation(group(sent(5000, 4000, 0, 4000)), TRUTH, rules).loads == (4000, 0, 0)
    assert observation(group(sent(5000, 4000, 0, 4000, at=0.0)), TRUTH, rules).loads == (0, 0, 0)


@pytest.mark.parametrize("overlap", list(Overlap))
def test_a_tier_of_which_nothing_came_takes_no_time(overlap: Overlap) -> None:
    rule = LoadRule(overlap, 0.5)
    seen = observation(group(sent(5000, 4000, 4000)), TRUTH, Rules(loads=(rule, rule, rule)))
    assert (seen.loads, seen.known_s) == ((0, 0, 0), 0)


def test_a_load_that_computing_hides_is_seen_by_what_is_left_of_it() -> None:
    rule = LoadRule(Overlap.COMPUTE, 0.5)
    seen = observation(group(sent(9000, 8000, 0, 8000)), TRUTH, Rules(loads=(rule, rule, rule)))
    hidden = TRUTH.host.seconds(8000) - TRUTH.host.fixed_s
    assert hidden < 0.5 * 1000 * TRUTH.token_s
    assert seen.known_s == pytest.approx(TRUTH.host.fixed_s - hidden)


def test_running_decodes_take_part_where_steps_are_mixed() -> None:
    member = sent(4096, 0, decodes=4096, kv_usage=0.5)
    assert observation(group(member), TRUTH).tokens == 4096
    mixed = observation(group(member), TRUTH, Rules(mixed_steps=True))
    assert mixed.tokens == 2 * 4096
    assert mixed.drag == 0.25


# What holds whatever the labels are

_OBSERVATIONS = st.builds(
    Observation,
    steps=st.integers(1, 10),
    tokens=st.floats(1.0, 1e5),
    pairs=st.floats(0.0, 1e10),
    loads=st.tuples(*[st.floats(0.0, 1e6)] * 3),
    known_s=st.floats(-10.0, 10.0),
    drag=st.floats(0.0, 1.0),
    seconds=st.floats(1e-6, 1e6),
)


@settings(max_examples=50)
@given(st.lists(_OBSERVATIONS, max_size=60), st.integers(1, 100_000))
def test_the_cost_stays_monotone_whatever_was_learned(seen: list[Observation], prompt: int) -> None:
    pool, factor = Pool(DEFAULTS), Factor()
    for each in seen:
        pool.learn(each, factor)
    speeds = pool.speeds
    assert min(speeds.step_s, speeds.token_s, speeds.attention_s, speeds.drag_share) > 0
    assert speeds.host.token_s <= min(speeds.disk.token_s, speeds.shared.token_s)
    assert prefill_seconds(speeds, prompt, 0) < prefill_seconds(speeds, prompt + 1, 0)
    assert prefill_seconds(speeds, prompt, 1) < prefill_seconds(speeds, prompt + 1, 0)
    assert speeds.covariance is not None
    assert speeds.covariance.variance(1.0, float(prompt), float(prompt) ** 2 / 2) >= -1e-9
    assert factor.value > 0
    assert factor.sd > 0
