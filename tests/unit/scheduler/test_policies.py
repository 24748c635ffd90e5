from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_scheduler.policy import POLICIES, make_policy
from servingfleet_scheduler.policy.candidate import Candidate, Estimate, Policy, Reuse
from servingfleet_scheduler.policy.cost import Cost
from servingfleet_scheduler.policy.estimate import estimate, work_seconds
from servingfleet_scheduler.policy.least_loaded import LeastLoaded
from servingfleet_scheduler.policy.others import others_seconds
from servingfleet_scheduler.policy.prefix_overlap import PrefixOverlap
from servingfleet_scheduler.policy.round_robin import RoundRobin
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


@pytest.mark.parametrize("policy", [Cost(explore_share=0.3), LeastLoaded(), PrefixOverlap()])
def test_each_is_chosen_as_often_as_its_propensity_says(policy: Policy) -> None:
    # a and b tie, c is within 10% of them, d is not; for those that count requests b and c tie.
    estimates = [
        make("a", queue_s=1.0, running_requests=3, waiting_requests=1),
        make("b", queue_s=1.005),
        make("c", queue_s=1.08),
        make("d", queue_s=2.0, running_requests=1, waiting_requests=1),
    ]
    rng, runs = random.Random(5), 4000
    counts: Counter[str] = Counter()
    for _ in range(runs):
        ordered = policy.order(estimates, rng)
        counts[ordered[0].candidate.replica] += 1
    said = {each.candidate.replica: each.propensity for each in ordered}
    assert sum(said.values()) == pytest.approx(1.0)
    for name, propensity in said.items():
        # Five standard deviations of a share.
        assert counts[name] / runs == pytest.approx(propensity, abs=5 * 0.5 / runs**0.5)
        assert (counts[name] > 0) == (propensity > 0)


def test_what_explores_goes_to_any_within_ten_percent() -> None:
    near = [make("a"), make("b", queue_s=0.015), make("far", queue_s=0.05)]
    ordered = Cost(explore_share=0.2).order(near, random.Random(1))
    said = {each.candidate.replica: each.propensity for each in ordered}
    assert said == {"a": pytest.approx(0.9), "b": pytest.approx(0.1), "far": 0.0}
    ordered = Cost(explore_share=0.0).order(near, random.Random(1))
    assert [each.propensity for each in ordered] == [1.0, 0.0, 0.0]


def test_a_prompt_stays_where_it_costs_others_least() -> None:
    # 100,000 tokens: held by a rank where 5 s wait, or computed in 13.6 s by an idle one.
    traffic: dict[str, Any] = {"arrivals_per_s": 0.3, "busy": 0.5, "gap_s": 20.0}
    holder = make("holder", reuse(100_000, 99_984), queue_s=14.5, **traffic)
    idle = make("idle", reuse(100_000), **traffic)
    assert idle.seconds < holder.seconds
    assert order("cost", idle, holder) == ["holder", "idle"]
    alone = Cost(price_others=False).order([holder, idle], random.Random(1))
    assert alone[0].candidate.replica == "idle"
    # Where nobody else comes, there is nobody to wait.
    quiet = [each._replace(candidate=each.candidate._replace(arrivals_per_s=0.0)) for each in alone]
    assert order("cost", *quiet) == ["idle", "holder"]


def test_who_can_not_leave_waits_for_this_work_until_the_engine_is_idle() -> None:
    made = make(queue_s=2.0, arrivals_per_s=0.5, busy=0.75, gap_s=1e6)
    until_idle = (2.0 + made.work_s) / 0.25
    assert others_seconds([made]) == [pytest.approx(made.work_s * 0.5 * until_idle)]
    assert made.seconds == pytest.approx(2.0 + made.work_s)
    # Who would lose half as much elsewhere loses that, and adds to what all wait.
    half = make(queue_s=2.0, arrivals_per_s=0.5, busy=0.75, gap_s=made.work_s / 2)
    staying = made.work_s / 2 * 0.5 * until_idle
    assert others_seconds([half])[0] > staying
    swamped = make(queue_s=2.0, arrivals_per_s=0.5, busy=7.0, gap_s=1e6)
    assert others_seconds([swamped]) == [
        pytest.approx(made.work_s * 0.5 * (2.0 + made.work_s) / 0.2)
    ]


def test_who_leaves_makes_all_wait_for_the_shortest_queue() -> None:
    here = make("here", queue_s=5.0, arrivals_per_s=0.5, busy=0.6)
    slow = make("slow", queue_s=2.0, arrivals_per_s=0.1, busy=0.2, scale=3.0)
    # Of all that both do in a second, three quarters are done here.
    pooled_s = 0.75 * here.work_s
    busy = 0.75 * 0.6 + 0.25 * 0.2
    expected = 0.6 * (2.0 + pooled_s) / (1.0 - busy) * pooled_s
    assert others_seconds([here, slow])[0] == pytest.approx(expected)
    assert others_seconds([make("a"), make("b")]) == [0.0, 0.0]


def test_a_cold_rank_is_tried_until_it_is_known() -> None:
    warm = make("warm", labels=200)
    slower: dict[str, Any] = {"scale": 1.2}
    assert order("cost", warm, make("cold", labels=0, **slower)) == ["cold", "warm"]
    assert order("cost", warm, make("known", labels=20, **slower)) == ["warm", "known"]
    # Its queue is not taken to be shorter, and where all are cold nobody is preferred.
    assert order("cost", warm, make("cold", labels=0, queue_s=0.3)) == ["warm", "cold"]
    assert order("cost", make("a", labels=0), make("b", labels=0, **slower)) == ["a", "b"]


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


def test_prefix_overlap_weighs_the_cached_share_the_queue_and_the_cache_in_use() -> None:
    holder = reuse(4096, 4080)
    assert order("prefix-overlap", make("empty"), make("holder", holder)) == ["holder", "empty"]
    # 3 for all of the prompt, against 2 for the shortest queue and 2 for an empty cache.
    busy = make("busy", holder, waiting_requests=5)
    assert order("prefix-overlap", make("empty"), busy) == ["busy", "empty"]
    full = make("full", holder, waiting_requests=5, kv_usage=0.9)
    assert order("prefix-overlap", make("empty"), full) == ["empty", "full"]
    # What was sent and does not run yet waits.
    assert order("prefix-overlap", make("sent", dispatched_requests=3), make("idle")) == [
        "idle",
        "sent",
    ]


def test_prefix_overlap_takes_a_fifth_off_what_is_beyond_the_gpu() -> None:
    held = [make(name, reuse(4096, 4080, tier=tier)) for tier, name in enumerate(("gpu", "host"))]
    assert order("prefix-overlap", *held) == ["gpu", "host"]
    more = make("host", reuse(4096, 4080, tier=1))
    assert order("prefix-overlap", make("gpu", reuse(4096, 3000)), more) == ["host", "gpu"]


def test_round_robin_takes_the_one_used_longest_ago() -> None:
    assert order(
        "round-robin",
        make("new", last_dispatch=9),
        make("old", last_dispatch=2),
        make("never"),
    ) == ["never", "old", "new"]


def test_round_robin_leaves_nothing_to_chance() -> None:
    ordered = RoundRobin().order([make(name) for name in "ba"], random.Random(1))
    assert [(each.candidate.replica, each.propensity) for each in ordered] == [
        ("a", 1.0),
        ("b", 0.0),
    ]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_orders_all_that_it_is_given(policy: str) -> None:
    candidates = [make(name, queue_s=float(n)) for n, name in enumerate("abcde")]
    assert sorted(order(policy, *candidates)) == list("abcde")
    assert order(policy) == []


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'best' is unknown; known: cost"):
        make_policy("best")
