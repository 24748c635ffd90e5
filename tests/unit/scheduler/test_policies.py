from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_scheduler.policy import POLICIES, make_policy
from servingfleet_scheduler.policy.candidate import Candidate, Estimate, Reuse
from servingfleet_scheduler.policy.estimate import estimate, work_seconds
from servingfleet_scheduler.policy.speeds import DEFAULTS as SPEEDS


def reuse(prompt: int = 4096, predicted: int = 0, *, tier: int = 0) -> Reuse:
    tiers = [0, 0, 0, 0]
    tiers[tier] = predicted
    return Reuse(
        prompt, predicted, predicted, predicted, predicted, (tiers[0], tiers[1], tiers[2], tiers[3])
    )


def make(replica: str = "a", held: Reuse | None = None, **fields: Any) -> Estimate:
    said = {"queue_s": 0.0, "certain": True} | fields
    return estimate(Candidate(replica, 0, held or reuse(), **said))


def order(policy: str, *estimates: Estimate, seed: int = 1) -> list[str]:
    ordered = make_policy(policy).order(estimates, random.Random(seed))
    return [each.candidate.replica for each in ordered]


def test_the_terms_add_up_to_the_estimate() -> None:
    made = make(held=reuse(4096, 2048, tier=1), queue_s=0.3, unproven=True)
    assert [term.name for term in made.terms] == ["queue", "prefill", "load_host", "unproven"]
    assert made.seconds == pytest.approx(sum(term.seconds for term in made.terms))


def test_prefill_is_superlinear_in_length() -> None:
    short, long = work_seconds(SPEEDS, reuse(16_000)), work_seconds(SPEEDS, reuse(32_000))
    assert long - SPEEDS.step_s > 2 * (short - SPEEDS.step_s)


def test_the_defaults_say_twenty_thousand_tokens_a_second() -> None:
    assert work_seconds(SPEEDS, reuse(8000)) == pytest.approx(0.040 + 0.4 + 0.0544)


@given(st.integers(1, 1_000_000), st.data())
def test_less_to_compute_never_costs_more(prompt: int, data: st.DataObject) -> None:
    less, more = sorted(data.draw(st.tuples(st.integers(0, prompt), st.integers(0, prompt))))
    assert work_seconds(SPEEDS, reuse(prompt, more)) <= work_seconds(SPEEDS, reuse(prompt, less))


@given(st.integers(1, 100_000))
def test_a_tier_further_away_never_costs_less(held: int) -> None:
    gpu, host, disk = (work_seconds(SPEEDS, reuse(100_000, held, tier=tier)) for tier in (0, 1, 2))
    assert gpu <= host <= disk


def test_cost_prefers_reuse_until_the_queue_outweighs_it() -> None:
    holder = reuse(16_000, 15_984)
    assert order("cost", make("empty"), make("holder", holder)) == ["holder", "empty"]
    busy = make("holder", holder, queue_s=2.0)
    assert order("cost", make("empty", reuse(16_000)), busy) == ["empty", "holder"]


def test_cost_breaks_near_ties_by_chance() -> None:
    firsts = {
        order("cost", make("a"), make("b", queue_s=0.0005), make("far", queue_s=1.0), seed=seed)[0]
        for seed in range(50)
    }
    assert firsts == {"a", "b"}


def test_cost_is_the_same_for_the_same_chance() -> None:
    candidates = [make(name) for name in "abcd"]
    assert order("cost", *candidates, seed=3) == order("cost", *candidates, seed=3)


def test_an_engine_that_may_be_gone_is_no_first_choice() -> None:
    assert order("cost", make("gone", unproven=True), make("b", queue_s=0.5)) == ["b", "gone"]


def test_least_loaded_looks_at_requests_only() -> None:
    holder = make("holder", reuse(4096, 4080), running_requests=2, waiting_requests=1)
    assert order("least-loaded", holder, make("empty", dispatched_requests=1)) == [
        "empty",
        "holder",
    ]


def test_least_loaded_does_not_add_what_was_sent_to_what_is_reported() -> None:
    both = make("both", running_requests=3, dispatched_requests=3)
    assert order("least-loaded", make("five", running_requests=5), both) == ["both", "five"]


def test_round_robin_takes_the_one_used_longest_ago() -> None:
    assert order(
        "round-robin",
        make("new", last_dispatch=9),
        make("old", last_dispatch=2),
        make("never"),
    ) == ["never", "old", "new"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_orders_all_that_it_is_given(policy: str) -> None:
    candidates = [make(name, queue_s=float(n)) for n, name in enumerate("abcde")]
    assert sorted(order(policy, *candidates)) == list("abcde")
    assert order(policy) == []


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'best' is unknown; known: cost"):
        make_policy("best")
