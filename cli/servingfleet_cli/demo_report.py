"""The demo's report: for people as tables, for programs as one document whose keys stay."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from servingfleet_protos.v1 import fleet_pb2
from servingfleet_sim.arm import Arm
from servingfleet_sim.audit import Cause
from servingfleet_sim.clients import End
from servingfleet_sim.lag import quantile
from servingfleet_sim.local_fleet import EngineSpec
from servingfleet_sim.summary import (
    Difference,
    Estimate,
    p95,
    ttft,
    ttft_difference,
    work_difference,
)
from servingfleet_sim.workload import Shape

from .output import console, share, table

FIGURES: Mapping[str, str] = {
    "reused_fraction": "tokens reused / prompt",
    "fleet_ceiling": "longest predicted on any replica / prompt",
    "index_coverage": "predicted and reused / reused",
    "erroneous_credit": "predicted and not reused / predicted",
    "erroneous_credit_per_prompt": "predicted and not reused / prompt",
    "interval_hit": "outcomes within lower..upper / outcomes",
    "join_rate": "outcomes joined / decisions",
}
"""And what is divided by what: tokens, but for the last two."""

MEANING: Mapping[Cause, str] = {
    Cause.EVICTED: "there at routing, evicted before its turn came",
    Cause.EVICTION_UNDER_WAY: "evicted shortly before routing, the event was on its way",
    Cause.IN_FLIGHT: "credited to a request in flight that had not filled it yet",
    Cause.STORED: "stored between routing and execution",
    Cause.STORE_UNDER_WAY: "stored shortly before routing, the event was on its way",
    Cause.UNEXPLAINED: "nothing explains it: an error of the engine, its relay or the scheduler",
}

TTFT = "emulated s from Route to the first token"
MISSES_SHOWN = 10


@dataclass(frozen=True)
class Demo:
    """Both policies on the same workload."""

    seed: int
    minutes: float
    seconds: float
    """Load of each policy."""
    shape: Shape
    engines: tuple[EngineSpec, ...]
    chosen: Arm
    control: Arm

    @property
    def arms(self) -> tuple[Arm, Arm]:
        """The policy that is compared, then its control."""
        return self.chosen, self.control


def as_dict(demo: Demo) -> dict[str, Any]:
    """Everything of the report, absent values as null."""
    chosen, control = demo.arms
    return {
        "seed": demo.seed,
        "minutes": demo.minutes,
        "load_s": demo.seconds,
        "time": "emulated: engines take modelled times, on this machine's clock",
        "workload": asdict(demo.shape),
        "replicas": [
            {**asdict(engine), "model": engine.model, "pool": engine.pool}
            for engine in demo.engines
        ],
        "pools": {
            pool: {arm.policy: _pool_dict(demo, arm, pool) for arm in demo.arms}
            for pool in _pools(demo)
        },
        "policy": _arm(chosen),
        "control": _arm(control),
        "same_turns": {
            "requests": len(_finished(chosen) & _finished(control)),
            "ttft_emulated_s": asdict(ttft_difference(chosen.requests, control.requests)),
            "computed_prompt_tokens": asdict(work_difference(chosen.requests, control.requests)),
        },
        "agrees": chosen.agrees and control.agrees,
    }


def print_report(demo: Demo) -> None:
    """The report for people."""
    out = console()
    chosen, control = demo.arms
    out.print(table("the fleet: emulated engines, real relays and scheduler", *_fleet(demo)))
    out.print(table("by pool: tokens as the engines reported them", *_by_pool(demo)))
    for model in _models(demo):
        title = f"{model}: the same {demo.seconds:.0f} s of conversations, seed {demo.seed}"
        out.print(table(title, *_figures(demo, model)))
    turns = len(_finished(chosen) & _finished(control))
    rows = [
        _difference("TTFT, mean", ttft_difference(chosen.requests, control.requests), ".3f"),
        _difference(
            "prompt tokens computed", work_difference(chosen.requests, control.requests), ",.0f"
        ),
    ]
    columns = ["per request", f">{chosen.policy}", f">{control.policy}", ">difference"]
    columns += ["95% interval, over conversations"]
    title = f"the {turns} turns that finished under both; one run each: other runs differ by more"
    out.print(table(title, columns, rows))
    if any(arm.misses for arm in demo.arms):
        rows_ = [
            [cause.value, *(_cause(arm, cause) for arm in demo.arms), MEANING[cause]]
            for cause in Cause
            if any(arm.causes[cause] for arm in demo.arms)
        ]
        names = [f">{arm.policy}" for arm in demo.arms]
        title = "why reuse differed from its prediction: requests (tokens less, tokens more)"
        out.print(table(title, ["cause", *names, "the first block that differs was"], rows_))
    for arm in demo.arms:
        for line in _lines(arm):
            out.print(f"{arm.policy}: {line}", highlight=False, soft_wrap=True)


def _fleet(demo: Demo) -> tuple[list[str], list[list[object]]]:
    columns = ["replica", "model", "as fast as", ">ranks", ">block", ">blocks a rank"]
    columns += [">host blocks"]
    for arm in demo.arms:
        columns += [f">{arm.policy}: requests", ">reused"]
    rows: list[list[object]] = []
    for engine in demo.engines:
        row: list[object] = [engine.replica, engine.model, f"{engine.speed:g} x {engine.gpu}"]
        row += [engine.ranks, engine.block_tokens, engine.blocks, engine.host_blocks or None]
        for arm in demo.arms:
            found = [r.sums for r in arm.reuse.reports if r.replica == engine.replica]
            sums = found[0] if found else fleet_pb2.ReuseSums()
            row += [sums.pairs, share(sums.actual / sums.prompt) if sums.prompt else None]
        rows.append(row)
    return columns, rows


def _pools(demo: Demo) -> list[str]:
    return list(dict.fromkeys(engine.pool for engine in demo.engines))


def _models(demo: Demo) -> list[str]:
    return list(dict.fromkeys(engine.model for engine in demo.engines))


def _pool_sums(demo: Demo, arm: Arm, pool: str) -> list[fleet_pb2.ReuseSums]:
    """Of its replicas, in which anything was asked."""
    members = {engine.replica for engine in demo.engines if engine.pool == pool}
    return [each.sums for each in arm.reuse.reports if each.replica in members]


def _pool_dict(demo: Demo, arm: Arm, pool: str) -> dict[str, int]:
    sums = _pool_sums(demo, arm, pool)
    names = ("pairs", "prompt", "actual", "predicted", "agreed", "erroneous", "interval_hits")
    return {name: sum(getattr(each, name) for each in sums) for name in names}


def _by_pool(demo: Demo) -> tuple[list[str], list[list[object]]]:
    columns = ["pool", "policy", ">requests", ">reused", ">coverage", ">erroneous", ">in bounds"]
    rows: list[list[object]] = []
    for pool in _pools(demo):
        for number, arm in enumerate(demo.arms):
            sums = _pool_dict(demo, arm, pool)
            shares = (
                (sums["actual"], sums["prompt"]),
                (sums["agreed"], sums["actual"]),
                (sums["erroneous"], sums["predicted"]),
                (sums["interval_hits"], sums["pairs"]),
            )
            cells = [_percent(part / whole) if whole else None for part, whole in shares]
            rows.append(["" if number else pool, arm.policy, sums["pairs"], *cells])
    return columns, rows


def _figures(demo: Demo, model: str) -> tuple[list[str], list[list[object]]]:
    columns = ["figure", "policy", ">value", "95% interval", ">ratio", "of what"]
    rows: list[list[object]] = []
    for name, of_what in FIGURES.items():
        for number, arm in enumerate(demo.arms):
            report = arm.reports.get(model, fleet_pb2.ReuseReport())
            figure = next((f for f in report.figures if f.name == name), fleet_pb2.Figure())
            value = _percent(figure.value) if figure.HasField("value") else "<none>"
            interval = f"{_percent(figure.low)} to {_percent(figure.high)}"
            ratio = f"{figure.numerator:,.0f} / {figure.denominator:,.0f}"
            row = [arm.policy, value, interval if figure.HasField("low") else "<none>", ratio]
            rows.append(["" if number else name, *row, "" if number else of_what])
    for name, of in (("TTFT, mean", fmean), ("TTFT, p95", p95)):
        for number, arm in enumerate(demo.arms):
            requests = [each for each in arm.requests if each.model == model]
            found = ttft(requests, of)
            row = [arm.policy, _seconds(found.value), _interval(found, ".3f")]
            finished = sum(each.end is End.FINISHED for each in requests)
            row.append(f"{finished:,} requests")
            rows.append(["" if number else name, *row, "" if number else TTFT])
    return columns, rows


def _difference(name: str, found: Difference, form: str) -> list[object]:
    values = (found.first, found.second, found.difference.value)
    texts = ["<none>" if value is None else format(value, form) for value in values]
    return [name, *texts, _interval(found.difference, form)]


def _percent(value: float) -> str:
    # Finer than elsewhere: what is wrong here is a few hundredths.
    return f"{100 * value:.2f}%"


def _seconds(value: float | None) -> str:
    return "<none>" if value is None else f"{value:.3f}"


def _interval(estimate: Estimate, form: str) -> str:
    if estimate.low is None or estimate.high is None:
        return "<none>"
    return f"{estimate.low:{form}} to {estimate.high:{form}}"


def _cause(arm: Arm, cause: Cause) -> str:
    tokens = [miss.tokens for miss in arm.misses if miss.cause is cause]
    less = -sum(t for t in tokens if t < 0)
    more = sum(t for t in tokens if t > 0)
    return f"{len(tokens)} ({less}, {more})"


def _lines(arm: Arm) -> list[str]:
    progress, ledger, engines = arm.progress, arm.ledger, arm.engines
    ends = ", ".join(f"{progress.ends[end]} {end}" for end in End)
    counts = (
        f"{progress.asked} requests: {ends}; {progress.retries} retries, {progress.late} asked more "
        f"than 1 s after their time, {progress.unreported} reports not taken"
    )
    lines = [counts]
    same = "equal" if ledger == engines and not arm.misheard else "DIFFERENT"
    lines.append(
        f"ledger {ledger.cached} of {ledger.prompt} tokens reused in {ledger.requests} requests, the "
        f"engines' own accounts {engines.cached} of {engines.prompt} in {engines.requests}: {same}"
    )
    for miss in [m for m in arm.misses if m.cause is Cause.UNEXPLAINED][:MISSES_SHOWN]:
        lines.append(f"UNEXPLAINED {_miss(miss.request.name, arm)}")
    kept = "kept up" if arm.lag.kept_up else "DID NOT KEEP UP: times are in part this machine's"
    lines.append(
        f"this machine ({os.cpu_count()} CPUs) {kept}; late by, 99 of 100: timers "
        f"{_ms(quantile(arm.lag.loop, 0.99))}, engines {_ms(quantile(arm.lag.engines, 0.99))}"
    )
    return lines


def _miss(name: str, arm: Arm) -> dict[str, Any]:
    request = next(each for each in arm.requests if each.name == name)
    assert request.answer is not None
    prediction = request.answer.prediction
    return {
        "request": name,
        "replica": request.answer.target.replica,
        "rank": request.answer.target.rank,
        "prompt": prediction.prompt_tokens,
        "lower": prediction.lower,
        "predicted": prediction.predicted,
        "upper": prediction.upper,
        "cached": request.cached_tokens,
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def _finished(arm: Arm) -> set[tuple[int, int]]:
    return {(each.session, each.turn) for each in arm.requests if each.end is End.FINISHED}


def _arm(arm: Arm) -> dict[str, Any]:
    progress = arm.progress
    return {
        "policy": arm.policy,
        "requests": {
            "asked": progress.asked,
            **{end.value: progress.ends[end] for end in End},
            "retries": progress.retries,
            "late": progress.late,
            "unreported": progress.unreported,
        },
        "figures": _whole(arm.reports.values()),
        "models": {
            model: {
                "figures": {figure.name: _figure(figure) for figure in report.figures},
                "set_aside": dict(report.set_aside),
            }
            for model, report in arm.reports.items()
        },
        "ttft_emulated_s": {
            "mean": asdict(ttft(arm.requests, fmean)),
            "p95": asdict(ttft(arm.requests, p95)),
        },
        "ledger": asdict(arm.ledger),
        "engines": asdict(arm.engines),
        "misheard": arm.misheard,
        "misses": {cause.value: arm.causes[cause] for cause in Cause},
        "unexplained": [
            _miss(miss.request.name, arm) for miss in arm.misses if miss.cause is Cause.UNEXPLAINED
        ],
        "machine": {
            "kept_up": arm.lag.kept_up,
            "timers_late_p99_s": quantile(arm.lag.loop, 0.99),
            "engines_late_p99_s": quantile(arm.lag.engines, 0.99),
        },
        "agrees": arm.agrees,
    }


def _whole(reports: Collection[fleet_pb2.ReuseReport]) -> dict[str, Any]:
    """The figures over all models. Only those of one model have an interval."""
    found: dict[str, Any] = {}
    for figure in (figure for report in reports for figure in report.figures):
        row = _figure(figure)
        if figure.name in found:
            so_far = found[figure.name]
            row = {**row, "low": None, "high": None}
            for name in ("numerator", "denominator", "pairs"):
                row[name] += so_far[name]
            row["value"] = row["numerator"] / row["denominator"] if row["denominator"] else None
        found[figure.name] = row
    return found


def _figure(figure: fleet_pb2.Figure) -> dict[str, Any]:
    return {
        "value": figure.value if figure.HasField("value") else None,
        "low": figure.low if figure.HasField("low") else None,
        "high": figure.high if figure.HasField("high") else None,
        "numerator": figure.numerator,
        "denominator": figure.denominator,
        "pairs": figure.pairs,
        "definition": figure.definition,
    }
