"""Tests of `servingfleet_sim.replay`: whole runs over the production schedulers, by hand and at rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servingfleet_protos.v1 import common_pb2, routing_pb2
from servingfleet_sim.replay.driver import simulate
from servingfleet_sim.replay.fleet import EventsSpec, FailureSpec, FleetSpec, TierSpec
from servingfleet_sim.replay.generator import Load, generate
from servingfleet_sim.replay.memory import Job
from servingfleet_sim.replay.options import ORACLE, Options
from servingfleet_sim.replay.playing import Playing
from servingfleet_sim.replay.results import Outcome, Run
from servingfleet_sim.replay.traces import Request

from .worlds import BLOCK, NOW, fleet, pool, trace

CALM = Options(block_tokens=BLOCK, jitter_s=0.0, explore_share=0.0)
HOST = (TierSpec(tier="host", tokens=3000),)
LOAD = Load(
    conversations=30,
    starts_per_s=4.0,
    think_s=1.0,
    answer_s=0.5,
    prompts=3,
    system_tokens=300.0,
    turn_tokens=60.0,
    answer_tokens=20.0,
    block_tokens=BLOCK,
)
MIXED = fleet(
    pool("a", replicas=2, gpu_tokens=4000, tiers=HOST),
    pool("b", ranks=2, engine="sglang", gpu_tokens=3000, tiers=HOST),
    events=EventsSpec(lag_s=0.05),
)


def played(
    requests: Sequence[Request], spec: FleetSpec, options: Options = CALM, seed: int = 1
) -> Playing:
    """A run whose schedulers can be looked at."""
    playing = Playing(requests, spec, options, seed)
    playing.play()
    return playing


def outcomes(run: Run) -> list[tuple[object, ...]]:
    """Comparable: nan equals itself."""
    return [
        tuple("nan" if isinstance(v, float) and math.isnan(v) else v for v in each)
        for each in run.outcomes
    ]


def rests(playing: Playing) -> None:
    """Nothing is left of any request, in schedulers and engines alike."""
    for scheduler in playing.world.schedulers:
        assert len(scheduler.credits) == 0
        assert len(scheduler.decisions) == 0
        for replica in scheduler.fleet:
            assert all(not rank.dispatches for rank in replica.ranks.values())
        assert not scheduler.streams.drops
        assert not scheduler.streams.refusals
    for engine in playing.world.engines:
        assert not engine.queued
        assert not engine.running
        assert engine.memory.private == engine.memory.gpu.pinned == engine.context == 0


def knows_what_is_held(playing: Playing) -> None:
    """Every scheduler's index holds what every engine's caches hold."""
    for scheduler in playing.world.schedulers:
        index = scheduler.fleet.index("replayed")
        assert index is not None
        for engine in playing.world.engines:
            name, _, rank = engine.name.partition("/")
            replica = scheduler.fleet.get(name)
            assert replica is not None
            for lane, cache in enumerate(engine.memory.lanes):
                held = {
                    each.hashes[at : at + 8]
                    for each in cache.holdings()
                    for at in range(0, len(each.hashes), 8)
                }
                told = index.holdings(replica.number, int(rank), lane, 1)
                assert {told[at : at + 8] for at in range(0, len(told), 8)} == held


def test_times_of_one_engine_are_those_worked_out_by_hand() -> None:
    requests = trace([(1.0, 100, 1, "abcdef"), (2.0, 100, 3, "abcxyz")])
    run = simulate(requests, fleet(pool(), events=NOW), CALM, seed=1)
    first, second = run.outcomes
    assert first.ttft_s == pytest.approx(0.004 + 100e-4 + 1e-6 * 100 * 50)
    assert second.ttft_s == pytest.approx(0.004 + 52e-4 + 1e-6 * 52 * 74)
    decodes = 2 * 0.007 + 1e-7 * (100 + 101)
    assert second.finished_s == pytest.approx(2.0 + second.ttft_s + decodes)
    assert (first.actual, second.actual, second.seen) == (0, 48, 48)
    assert (second.lower, second.predicted, second.upper, second.best_predicted) == (48,) * 4
    assert (second.replica, second.pool, second.rank, second.fate) == (
        "plain-0",
        "plain",
        0,
        "finished",
    )
    assert run.computed_tokens == {"plain-0": 152}
    assert run.busy_s == {"plain-0/0": pytest.approx(first.ttft_s + second.ttft_s + decodes)}
    assert (run.scheduler_sums[0].pairs, run.scheduler_sums[0].actual) == (2, 48)


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.text("abc", min_size=1, max_size=20), min_size=1, max_size=20),
    st.sampled_from(["vllm", "sglang"]),
    st.integers(0, BLOCK - 1),
)
def test_predicts_exactly_where_nothing_lags_and_nothing_runs_at_once(
    prompts: list[str], engine: str, rest: int
) -> None:
    # Memory for about 30 blocks, so that prompts are evicted and come back from the host.
    spec = fleet(pool(replicas=2, engine=engine, gpu_tokens=30 * BLOCK, tiers=HOST), events=NOW)
    rows = [(10.0 * at, len(p) * BLOCK + rest, 1, p) for at, p in enumerate(prompts)]
    playing = played(trace([row for row in rows if row[1]]), spec)
    for each in playing.run(0.0).outcomes:
        assert each.lower == each.predicted == each.upper == each.actual
        assert each.predicted_tiers == each.actual_tiers
        assert each.best_predicted == each.best_actual <= each.seen
    rests(playing)
    knows_what_is_held(playing)


@pytest.mark.parametrize("policy", ["cost", "least-loaded", "round-robin", ORACLE])
def test_the_same_seed_gives_the_same_run_and_another_another(policy: str) -> None:
    options = replace(CALM, policy=policy, jitter_s=0.5)
    requests = generate(LOAD, 1).requests
    first, again, other = (simulate(requests, MIXED, options, seed) for seed in (1, 1, 2))
    assert outcomes(first) == outcomes(again)
    assert first.busy_s == again.busy_s
    assert outcomes(first) != outcomes(other)
    assert [each.prompt for each in first.outcomes] == [each.prompt for each in other.outcomes]


@pytest.mark.parametrize("schedulers", [1, 2])
@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_at_rest_every_credit_has_ended_and_every_scheduler_knows_what_is_held(
    schedulers: int, loss: float
) -> None:
    spec = FleetSpec(
        pools=MIXED.pools,
        schedulers=schedulers,
        events=EventsSpec(lag_s=0.3, loss=loss),
        failures=(FailureSpec(at=3.0, replica="a-0", for_s=2.0),),
    )
    requests = generate(LOAD, 1).requests
    playing = played(requests, spec, replace(CALM, compare_every=4))
    run = playing.run(0.0)
    assert all(each.fate == "finished" for each in run.outcomes)
    assert {each.scheduler for each in run.outcomes} == set(range(schedulers))
    rests(playing)
    if loss:
        assert run.counters["event_batches_lost"] >= run.counters["event_replays"] > 5
    else:
        knows_what_is_held(playing)
    assert bool(run.disagreement.samples) == (schedulers > 1)


def test_what_was_lost_is_known_again_when_the_next_batch_has_come() -> None:
    letters = ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op"]
    spec = fleet(pool(), events=EventsSpec(lag_s=0.01, loss=0.5, replay_s=0.1))
    for seed in range(8):
        playing = played(
            trace([(10.0 * at, 2 * BLOCK, 1, each) for at, each in enumerate(letters)]),
            spec,
            seed=seed,
        )
        index = playing.world.schedulers[0].fleet.index("replayed")
        assert index is not None
        blocks = sum(count for _, count in index.held(0, 0))
        lost = playing.counters["event_batches_lost"]
        # Those lost after the last that came are not missed yet.
        missed = len(letters) * 2 - blocks
        assert 0 <= missed <= 2 * lost
        if playing.counters["event_replays"]:
            assert missed < 2 * lost
    assert lost


def test_a_request_whose_engine_dies_goes_elsewhere() -> None:
    spec = fleet(
        pool(replicas=2),
        events=NOW,
        failures=(FailureSpec(at=1.01, replica="plain-0", for_s=100.0),),
    )
    requests = trace([(0.0, 330, 1, "a" * 20), (1.0, 330, 1, "a" * 20)])
    warm = simulate(requests[:1], spec, CALM, seed=1).outcomes[0].replica
    failures = (FailureSpec(at=1.001, replica=warm, for_s=100.0),)
    playing = played(requests, FleetSpec(pools=spec.pools, events=NOW, failures=failures))
    run = playing.run(0.0)
    second = run.outcomes[1]
    assert (second.fate, second.actual) == ("finished", 0)
    assert second.replica != warm
    # The time that was lost counts.
    assert second.ttft_s == pytest.approx(0.001 + 0.004 + 330e-4 + 1e-6 * 330 * 165)
    assert run.counters == {"engine_died": 1}
    assert run.scheduler_sums[0].decisions == 3
    rests(playing)


def test_a_request_goes_only_where_it_could_be_held() -> None:
    small, large = pool(replicas=3, gpu_tokens=160), pool("large", gpu_tokens=320)
    rows = [(float(at), prompt, 1, "") for at, prompt in enumerate([200, 200, 200, 400])]
    playing = played(trace(rows), fleet(small, large))
    run = playing.run(0.0)
    assert [each.replica for each in run.outcomes] == ["large-0"] * 3 + [""]
    last = run.outcomes[3]
    assert (last.fate, last.reason, last.actual) == ("failed", "too_long", 0)
    assert math.isnan(last.ttft_s)
    assert run.counters == {"too_long": 1}
    assert run.scheduler_sums[0].decisions == 3
    rests(playing)


def test_a_request_is_given_up_when_every_attempt_met_a_dead_engine() -> None:
    spec = pool(replicas=4)
    failures = tuple(FailureSpec(at=0.5, replica=f"plain-{n}", for_s=9.0) for n in range(4))
    # Nobody knows yet that they are away.
    events = EventsSpec(lag_s=2.0)
    run = simulate(
        trace([(1.0, 100, 1, "")]),
        FleetSpec(pools=(spec,), events=events, failures=failures),
        CALM,
        1,
    )
    (only,) = run.outcomes
    assert (only.fate, only.reason) == ("failed", "engine_away")
    assert run.counters == {"engine_away": 3}


def test_a_client_in_a_closed_loop_comes_back_when_it_was_told_to() -> None:
    rows = [(0.0, 500, 1, ""), (0.001, 500, 1, ""), (0.002, 500, 1, "")]
    requests = [
        replace(each, session=f"s{number}", target_s=0.35)
        for number, each in enumerate(trace(rows))
    ]
    run = simulate(requests, fleet(pool(), events=NOW), replace(CALM, closed_loop=True), seed=1)
    assert [each.fate for each in run.outcomes] == ["finished"] * 3
    assert run.counters["refused_deadline_unreachable"] >= 1
    # Its wait counts from when it first came.
    assert max(each.ttft_s for each in run.outcomes) > 0.35


def test_in_a_closed_loop_a_turn_is_sent_when_its_client_has_thought_about_the_answer() -> None:
    requests = generate(LOAD, 1).requests
    run = simulate(requests, MIXED, replace(CALM, closed_loop=True), seed=1)
    before: dict[str, Outcome] = {}
    followed = 0
    for number, outcome in enumerate(run.outcomes):
        earlier = before.get(outcome.session)
        if earlier is not None:
            assert outcome.at == pytest.approx(earlier.finished_s + requests[number].think_s)
            followed += 1
        before[outcome.session] = outcome
    assert followed > 20


def test_a_request_that_cannot_be_served_in_time_is_turned_away_if_it_says_so() -> None:
    rows = [(0.0, 500, 1, ""), (0.0, 500, 1, ""), (0.0, 500, 1, "")]
    requests = trace(rows, target_s=0.35)
    spec = fleet(pool(), events=NOW)
    fates = [each.fate for each in simulate(requests, spec, CALM, seed=1).outcomes]
    assert fates.count("rejected") >= 1
    assert fates[0] == "finished"
    rejected = next(
        each for each in simulate(requests, spec, CALM, seed=1).outcomes if each.fate == "rejected"
    )
    assert (rejected.replica, rejected.rank, rejected.pool) == ("", -1, "")
    assert rejected.reason == "DEADLINE_UNREACHABLE"
    silent = simulate(requests, spec, replace(CALM, deadlines=False), seed=1)
    assert [each.fate for each in silent.outcomes] == ["finished"] * 3
    assert [each.target_s for each in silent.outcomes] == [0.35] * 3


def test_schedulers_that_hear_of_gpu_memory_only_predict_no_other() -> None:
    # Memory for two or three conversations.
    spec = fleet(pool(gpu_tokens=1500, tiers=HOST), pool("other", gpu_tokens=1500, tiers=HOST))
    playing = played(generate(LOAD, 1).requests, spec, replace(CALM, tell_tiers=False))
    rests(playing)
    run = playing.run(0.0)
    assert all(each.predicted == each.predicted_tiers[0] for each in run.outcomes)
    assert sum(each.actual_tiers[1] for each in run.outcomes) > 0


@pytest.mark.parametrize("tells", [False, True])
def test_schedulers_hear_of_tiers_only_from_engines_that_tell(tells: bool) -> None:
    tiers = (TierSpec(tier="host", tokens=3000),)
    spec = fleet(pool(gpu_tokens=20 * BLOCK, tiers=tiers, tells_tiers=tells), events=NOW)
    rows = [(0.0, 161, 1, "a" * 10), (1.0, 161, 1, "b" * 10), (2.0, 161, 1, "a" * 10)]
    playing = Playing(trace(rows), spec, CALM, seed=1)
    (scheduler,) = playing.world.schedulers
    heard: list[dict[int, int]] = []
    report = scheduler.report

    def listens(request: routing_pb2.ReportRequest, now: float) -> routing_pb2.ReportResponse:
        if request.stage == routing_pb2.ReportRequest.STAGE_FINISHED:
            heard.append({each.tier: each.tokens for each in request.cached_by_tier})
        return report(request, now)

    scheduler.report = listens  # type: ignore[method-assign]
    playing.play()
    last = playing.run(0.0).outcomes[2]
    assert last.actual_tiers[1] > 0
    gpu, host = common_pb2.TIER_GPU, common_pb2.TIER_HOST
    told = {gpu: last.actual_tiers[0], host: last.actual_tiers[1]}
    assert heard[2] == ({tier: count for tier, count in told.items() if count} if tells else {})


def test_schedulers_disagree_by_what_one_has_sent_and_the_other_has_not_heard_of() -> None:
    spec = fleet(pool(), schedulers=2, events=EventsSpec(lag_s=5.0, link_s=2.0))
    requests = trace([(0.0, 100, 1, "abcdef"), (0.01, 100, 1, "abcxyz"), (20.0, 100, 1, "abc")])
    run = simulate(requests, spec, replace(CALM, compare_every=1), seed=1)
    # Of the second prompt one scheduler counts on the first's 3 blocks, the other knows of none; of the third both know.
    disagreement = run.disagreement
    assert (disagreement.samples, disagreement.prompt, disagreement.tokens) == (3, 300, 48)
    assert disagreement.other_choice == 0


def test_a_run_ends_even_where_an_engine_lost_a_request() -> None:
    playing = Playing(trace([(0.0, 100, 1, ""), (1.0, 100, 1, "")]), fleet(pool()), CALM, seed=1)
    left: list[Job] = []
    playing.clock.at(0.001, lambda: left.extend(playing.world.engines[0].stop()))
    playing.play()
    assert [each.fate for each in playing.run(0.0).outcomes] == ["unfinished", "finished"]
    assert [job.number for job in left] == [0]


def test_the_oracle_is_first_with_the_first_token() -> None:
    requests = generate(replace(LOAD, conversations=60, starts_per_s=8.0), 1).requests

    def mean(policy: str) -> float:
        run = simulate(requests, MIXED, replace(CALM, policy=policy), seed=1)
        return sum(each.ttft_s for each in run.outcomes) / len(run.outcomes)

    assert mean(ORACLE) < min(mean("round-robin"), mean("least-loaded"))
