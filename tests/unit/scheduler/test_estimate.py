from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_scheduler.policy.candidate import Candidate, Estimate, Reuse
from servingfleet_scheduler.policy.estimate import (
    cut,
    estimate,
    estimates,
    prefill_seconds,
    work,
)
from servingfleet_scheduler.policy.others import others_seconds
from servingfleet_scheduler.policy.rules import LoadRule, Overlap, Rules
from servingfleet_scheduler.policy.speeds import DEFAULTS, Speeds, TierSpeed

PROMPT = 16_000
SLOW_DISK = replace(DEFAULTS, disk=TierSpeed(fixed_s=0.5, token_s=1e-3))
PLAIN = LoadRule()
QUEUE = LoadRule(Overlap.QUEUE, 0.5, always=True)
COMPUTE = LoadRule(Overlap.COMPUTE, 0.5, always=True)


def reuse(*tiers: int, prompt: int = PROMPT, **fields: Any) -> Reuse:
    """Held by gpu, host, disk and shared; certain unless `fields` say otherwise."""
    gpu, host, disk, shared, *_ = (*tiers, 0, 0, 0, 0)
    filled = (gpu, host, disk, shared)
    held = sum(filled)
    said: dict[str, Any] = {"lower": held, "predicted": held, "upper": held, "expected": held}
    return Reuse(prompt_tokens=prompt, tiers=filled, **(said | fields))


def make(held: Reuse | None = None, **fields: Any) -> Estimate:
    said = {"queue_s": 0.0, "certain": True} | fields
    return estimate(Candidate("a", 0, held or reuse(), **said))


def terms(made: Estimate) -> dict[str, float]:
    return {term.name: term.seconds for term in made.terms}


def rules(load: LoadRule = PLAIN, *, mixed_steps: bool = False) -> Rules:
    return Rules(mixed_steps, (load, load, load))


# What each part is


def test_a_tier_slower_than_recomputing_counts_as_recomputed() -> None:
    made = make(reuse(4000, 0, 8000), speeds=SLOW_DISK)
    computed = make(reuse(4000), speeds=SLOW_DISK)
    assert made.seconds == pytest.approx(computed.seconds)
    assert "load_disk" not in terms(made)
    assert terms(made)["recompute_disk"] > 0


def test_what_lies_behind_a_tier_that_is_too_slow_is_not_loaded_either() -> None:
    # A prefix is reused from its beginning: without the disk's part the store's is of no use.
    made = make(reuse(4000, 0, 1000, 500), speeds=SLOW_DISK)
    assert {"recompute_disk", "recompute_shared"} <= set(terms(made))


def test_a_tier_too_slow_for_itself_is_loaded_where_it_leads_to_more() -> None:
    speeds = replace(DEFAULTS, host=TierSpeed(0.06, 6e-5), shared=TierSpeed(0.0, 1e-6))
    alone = make(reuse(0, 1000), speeds=speeds)
    leading = make(reuse(0, 1000, 0, 14_000), speeds=speeds)
    assert "recompute_host" in terms(alone)
    assert {"load_host", "load_shared"} <= set(terms(leading))


def test_an_engine_that_loads_whatever_it_costs_is_charged_for_it() -> None:
    always = rules(LoadRule(always=True))
    made = make(reuse(4000, 0, 8000), speeds=SLOW_DISK, rules=always)
    assert terms(made)["load_disk"] == pytest.approx(0.5 + 8.0)
    assert made.seconds > make(reuse(4000), speeds=SLOW_DISK).seconds


def test_a_load_is_hidden_by_the_wait_where_the_engine_loads_meanwhile() -> None:
    held = reuse(0, 15_000)
    idle = terms(make(held, rules=rules(QUEUE)))["load_host"]
    waits = terms(make(held, queue_s=0.04, rules=rules(QUEUE)))["load_host"]
    assert idle - waits == pytest.approx(0.5 * 0.04)
    assert "load_host" not in terms(make(held, queue_s=2.0, rules=rules(QUEUE)))


def test_what_hid_one_load_does_not_hide_the_next() -> None:
    held = reuse(0, 6000, 0, 6000)
    made = terms(make(held, queue_s=0.04, rules=rules(QUEUE)))
    full = terms(make(held))
    assert full["load_host"] + full["load_shared"] == pytest.approx(
        made.get("load_host", 0.0) + made["load_shared"] + 0.5 * 0.04
    )


def test_a_load_is_hidden_by_computing_but_for_its_beginning() -> None:
    made = terms(make(reuse(0, 1000), rules=rules(COMPUTE)))
    assert made["load_host"] == pytest.approx(DEFAULTS.host.fixed_s)


def test_running_decodes_take_their_share_of_each_step() -> None:
    fields: dict[str, Any] = {"running_requests": 819, "kv_usage": 0.5}
    assert "decodes" not in terms(make(**fields))
    made = terms(make(**fields, rules=rules(mixed_steps=True)))
    assert made["decodes"] == pytest.approx(made["prefill"] * (819 / 7373 + 0.05))


def test_what_is_likely_to_be_evicted_is_a_part_of_its_own() -> None:
    held = reuse(8000, expected=6000.0)
    made = make(held, gone=0.25)
    assert terms(made)["evicted"] > 0
    assert made.seconds == pytest.approx(make(reuse(6000)).seconds)
    assert made.sd_s > make(held).sd_s


def test_uncertainty_is_priced_by_the_quantile() -> None:
    held = reuse(8000, lower=4000, upper=12_000)
    careful, middle, bold = (make(held, quantile=q) for q in (0.0, 0.5, 1.0))
    assert careful.seconds == pytest.approx(make(reuse(4000)).seconds)
    assert middle.seconds == pytest.approx(make(reuse(8000)).seconds)
    assert bold.seconds == pytest.approx(make(reuse(12_000)).seconds)
    assert terms(careful)["uncertain"] > 0 > terms(bold)["uncertain"]
    assert "uncertain" not in terms(middle)


def test_what_is_uncertain_widens_the_estimate() -> None:
    plain = make().sd_s
    assert make(reuse(0, upper=PROMPT)).sd_s > plain
    assert make(queue_sd_s=1.0).sd_s > plain
    assert make(scale_sd=0.2).sd_s > plain


def test_a_slower_rank_takes_longer_for_all_but_its_queue() -> None:
    held = reuse(4000, 4000)
    plain, slower = make(held, queue_s=1.0), make(held, queue_s=1.0, scale=1.5)
    assert slower.seconds - 1.0 == pytest.approx(1.5 * (plain.seconds - 1.0))


def test_a_long_prompt_takes_several_steps() -> None:
    assert DEFAULTS.steps(1) == 1
    assert DEFAULTS.steps(8192) == 1
    assert DEFAULTS.steps(8193) == 2
    short, long = prefill_seconds(DEFAULTS, 8192, 0), prefill_seconds(DEFAULTS, 8193, 0)
    assert long - short == pytest.approx(DEFAULTS.step_s, rel=0.01)


def test_loads_that_run_while_others_are_computed_are_no_work_of_the_engine() -> None:
    held = reuse(0, 12_000)
    loads, meanwhile = (
        work(Candidate("a", 0, held, 0.0, certain=True, rules=rules(rule)))
        for rule in (LoadRule(), QUEUE)
    )
    assert loads.tokens == meanwhile.tokens == 4000
    assert loads.seconds - meanwhile.seconds == pytest.approx(DEFAULTS.host.seconds(12_000))


# What holds for all of them

_SECONDS = st.floats(0.0, 100.0)
_RULE = st.builds(LoadRule, st.sampled_from(Overlap), st.floats(0.0, 1.0), st.booleans())
_FRUGAL = st.builds(LoadRule, st.sampled_from(Overlap), st.floats(0.0, 1.0), always=st.just(False))
_TIER = st.builds(TierSpeed, st.floats(0.0, 1.0), st.floats(1e-8, 1e-3))
_SPEEDS = st.builds(
    Speeds,
    step_s=st.floats(1e-4, 0.5),
    token_s=st.floats(1e-7, 1e-3),
    attention_s=st.floats(0.0, 1e-7),
    host=_TIER,
    disk=_TIER,
    shared=_TIER,
    step_tokens=st.integers(256, 16_384),
)
_TIERS = st.lists(st.integers(0, 4000), min_size=4, max_size=4)


@st.composite
def candidates(draw: st.DrawFn, rule: st.SearchStrategy[LoadRule] = _RULE) -> Candidate:
    tiers = draw(_TIERS)
    held = sum(tiers)
    lower, upper = draw(st.integers(0, held)), draw(st.integers(held, PROMPT))
    expected = draw(st.floats(0.0, upper))
    return Candidate(
        "a",
        0,
        reuse(*tiers, lower=lower, upper=upper, expected=expected),
        draw(_SECONDS),
        certain=draw(st.booleans()),
        unproven=draw(st.booleans()),
        running_requests=draw(st.integers(0, 10_000)),
        gone=draw(st.floats(0.0, 1.0)),
        speeds=draw(_SPEEDS),
        kv_usage=draw(st.floats(0.0, 1.0)),
        scale=draw(st.floats(0.2, 5.0)),
        scale_sd=draw(st.floats(0.0, 0.5)),
        rules=Rules(draw(st.booleans()), (draw(rule), draw(rule), draw(rule))),
        quantile=draw(st.floats(0.0, 1.0)),
    )


@given(candidates())
def test_the_terms_always_add_up_to_the_estimate(candidate: Candidate) -> None:
    made = estimate(candidate)
    assert sum(term.seconds for term in made.terms) == pytest.approx(made.seconds)
    assert made.work_s >= 0
    assert made.sd_s >= 0


@given(candidates(), _SECONDS)
def test_more_queue_never_costs_less(candidate: Candidate, more: float) -> None:
    longer = candidate._replace(queue_s=candidate.queue_s + more)
    assert estimate(longer).seconds >= estimate(candidate).seconds - 1e-9


@given(candidates(), _SECONDS, st.floats(0.0, 10.0), st.floats(0.0, 2.0), _SECONDS)
def test_more_load_never_costs_others_less(
    candidate: Candidate, more: float, arrivals: float, busy: float, gap_s: float
) -> None:
    # An engine that may choose computes what it would have to wait for, and loads it where waiting hides that.
    loads = tuple(rule._replace(always=True) for rule in candidate.rules.loads)
    light = candidate._replace(
        rules=candidate.rules._replace(loads=loads),  # type: ignore[arg-type]
        arrivals_per_s=arrivals,
        busy=busy,
        gap_s=gap_s,
        reuse=candidate.reuse._replace(expected=float(candidate.reuse.predicted)),
        quantile=0.5,
    )
    other = estimate(light._replace(replica="other", gap_s=0.0))
    for heavy in (
        light._replace(queue_s=light.queue_s + more),
        light._replace(arrivals_per_s=arrivals + more),
        light._replace(busy=busy + more),
    ):
        costs, less = (others_seconds([estimate(each), other])[0] for each in (heavy, light))
        assert costs >= less * (1.0 - 1e-9) - 1e-6


@given(candidates(), st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_more_decodes_never_cost_less(candidate: Candidate, more: int, fuller: float) -> None:
    busier = candidate._replace(
        running_requests=candidate.running_requests + more,
        kv_usage=max(candidate.kv_usage, fuller),
    )
    assert estimate(busier).seconds >= estimate(candidate).seconds - 1e-9


@given(candidates(_FRUGAL), st.integers(0, 10_000))
def test_more_to_compute_never_costs_less(candidate: Candidate, more: int) -> None:
    held = candidate.reuse
    longer = candidate._replace(reuse=held._replace(prompt_tokens=held.prompt_tokens + more))
    assert estimate(longer).seconds >= estimate(candidate).seconds - 1e-9


@given(_SPEEDS, st.integers(0, PROMPT), st.integers(0, PROMPT), _RULE)
def test_what_is_held_further_away_never_costs_less(
    speeds: Speeds, held: int, part: int, rule: LoadRule
) -> None:
    part = min(part, held)
    far = replace(
        speeds.host,
        fixed_s=max(speeds.host.fixed_s, speeds.disk.fixed_s),
        token_s=max(speeds.host.token_s, speeds.disk.token_s),
    )
    ordered = replace(speeds, disk=far)
    gpu, host, disk = (
        make(reuse(*tiers), speeds=ordered, rules=rules(rule)).seconds
        for tiers in ((held,), (held - part, part), (held - part, 0, part))
    )
    assert gpu <= host + 1e-9
    assert host <= disk + 1e-9


@given(candidates(st.just(PLAIN)), st.data())
def test_less_reuse_never_costs_less(candidate: Candidate, data: st.DataObject) -> None:
    # Where something hides loads, or a step is saved, part of a tier's hit may cost less; but engines load all of it.
    candidate = candidate._replace(speeds=replace(candidate.speeds, step_tokens=2 * PROMPT))
    held = candidate.reuse.predicted
    less = data.draw(st.integers(0, held))
    whole = [int(tokens) for tokens in cut(candidate.reuse.tiers, held)]
    shorter = [int(tokens) for tokens in cut(candidate.reuse.tiers, less)]
    more, fewer = (
        estimate(candidate._replace(reuse=reuse(*tiers), gone=0.0)) for tiers in (whole, shorter)
    )
    assert fewer.seconds >= more.seconds - 1e-9


@given(st.lists(candidates(), max_size=5))
def test_estimates_don_t_depend_on_one_another(several: list[Candidate]) -> None:
    assert estimates(several) == [estimate(each) for each in several]
