"""The demo's report: by pool, by model, and over all of them."""

from __future__ import annotations

import pytest

from servingfleet_cli.demo_report import Demo, as_dict, print_report
from servingfleet_protos.v1 import fleet_pb2
from servingfleet_sim.arm import Arm, Totals
from servingfleet_sim.clients import Progress
from servingfleet_sim.lag import Lag
from servingfleet_sim.local_fleet import EngineSpec, mixed_engines
from servingfleet_sim.workload import Shape

ENGINES = mixed_engines(6)
PAIRS, PROMPT = 4, 100
"""Of each replica."""


def report(
    model: str, replicas: list[EngineSpec], replica: str, *, reused: int = 60
) -> fleet_pb2.ReuseReport:
    count = len(replicas)
    made = fleet_pb2.ReuseReport(model=model, replica=replica)
    sums = made.sums
    sums.pairs, sums.prompt = PAIRS * count, PROMPT * count
    sums.actual = sums.predicted = sums.agreed = reused * count
    sums.interval_hits = sums.pairs
    made.figures.add(
        name="reused_fraction",
        value=reused / PROMPT,
        low=0.5,
        high=0.7,
        numerator=sums.actual,
        denominator=sums.prompt,
        pairs=sums.pairs,
    )
    return made


def arm(policy: str) -> Arm:
    reports = []
    for model in dict.fromkeys(engine.model for engine in ENGINES):
        replicas = [engine for engine in ENGINES if engine.model == model]
        reports.append(report(model, replicas, ""))
        reports += [report(model, [engine], engine.replica) for engine in replicas]
    total = len(ENGINES)
    told = Totals(PAIRS * total, PROMPT * total, 60 * total)
    answer = fleet_pb2.GetReuseResponse(reports=reports)
    return Arm(policy, [], Progress(), answer, Lag(), [], told, 0)


def demo() -> Demo:
    return Demo(1, 2.0, 48.0, Shape(), ENGINES, arm("cost"), arm("round-robin"))


def test_every_replica_is_in_one_pool_and_has_one_model() -> None:
    told = as_dict(demo())
    pools = {replica["pool"]: replica["model"] for replica in told["replicas"]}
    assert pools == {
        "vllm": "emulated",
        "sglang": "emulated",
        "trtllm": "emulated",
        "vllm-window": "emulated-window",
        "vllm-state": "emulated-state",
    }
    assert {pool: row["cost"]["pairs"] for pool, row in told["pools"].items()} == {
        **dict.fromkeys(pools, PAIRS),
        "vllm": 2 * PAIRS,
    }


def test_figures_over_all_models_add_up_and_have_no_interval() -> None:
    arm_told = as_dict(demo())["policy"]
    whole = arm_told["figures"]["reused_fraction"]
    assert (whole["numerator"], whole["denominator"], whole["value"]) == (360, 600, 0.6)
    assert (whole["low"], whole["high"], whole["pairs"]) == (None, None, 6 * PAIRS)
    window = arm_told["models"]["emulated-window"]["figures"]["reused_fraction"]
    assert (window["numerator"], window["low"], window["high"]) == (60, 0.5, 0.7)


def test_the_ledger_is_that_of_all_models() -> None:
    assert demo().chosen.agrees
    assert demo().chosen.ledger == Totals(6 * PAIRS, 600, 360)


def test_people_are_shown_a_table_for_each_model_and_a_row_for_each_pool(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_report(demo())
    shown = capsys.readouterr().out
    for model in ("emulated", "emulated-window", "emulated-state"):
        assert f"{model}: the same 48 s of conversations" in shown
    for pool in ("vllm-window", "vllm-state", "trtllm", "sglang"):
        assert any(line.split()[:2] == [pool, "cost"] for line in shown.splitlines())
