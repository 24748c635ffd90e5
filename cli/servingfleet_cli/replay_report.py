"""What `servingfleet replay` prints for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from servingfleet_sim.replay.definitions import DEFINITIONS
from servingfleet_sim.replay.document import Comparing
from servingfleet_sim.replay.losses import MEANING, Loss
from servingfleet_sim.replay.repeats import LEAST_REPEATS, Case, Comparison, Interval, as_text

from .output import console, share, table

TIMES: Mapping[str, str] = {
    "ttft_mean_s": "mean",
    "ttft_p50_s": "p50",
    "ttft_p95_s": "p95",
    "ttft_p99_s": "p99",
    "e2e_mean_s": "to the last token",
}
COMPARED: Mapping[str, str] = {"ttft_mean_s": "mean", "ttft_p95_s": "p95"}
ENDS: Mapping[str, str] = {
    "goodput": "in target",
    "late_share": "late",
    "rejected_share": "rejected",
    "failed_share": "failed",
    "disagreement": "schedulers disagree",
    "other_choice": "other choice",
}
REUSE: Mapping[str, str] = {
    "reused_fraction": "reused",
    "index_coverage": "coverage",
    "erroneous_credit": "erroneous",
    "erroneous_credit_per_prompt": "per prompt",
    "interval_hit": "in bounds",
    "unseen_reuse": "unseen",
    "tier_misplacement": "wrong tier",
    "imbalance_max": "busiest/mean",
    "imbalance_cv": "variation",
}
CALIBRATION: Mapping[str, str] = {
    "expected_bias": "expected bias",
    "expected_error": "error",
    "estimate_bias": "seconds bias",
    "estimate_error": "median error",
    "estimate_within_sd": "within sd",
}
CEILINGS: Mapping[str, str] = {
    "ceiling_u1": "U1 endless cache",
    "ceiling_u2": "U2 all memory, Belady",
    "ceiling_u3": "U3 all memory, LRU",
    "ceiling_u4": "U4 greedy, perfect knowledge",
}


def print_report(found: Comparing) -> None:
    """The whole report."""
    out = console()
    facts = ", ".join(f"{key} {value}" for key, value in found.trace.items())
    out.print(facts, highlight=False, soft_wrap=True)
    repeats = len(found.baseline.runs)
    title = f"seconds to first token: means of {repeats} repeats, ± half a 95% t-interval"
    out.print(table(title, *_by_case(found.cases, TIMES)))
    if len(found.cases) > 1 and repeats > 1:
        out.print(table(f"less {found.baseline.name}, same seeds", *_compared(found)))
    if _told(found.cases, ENDS):
        out.print(table("of requests", *_by_case(found.cases, _told(found.cases, ENDS))))
    out.print(table("reuse, and the load of ranks", *_by_case(found.cases, REUSE)))
    out.print(table("where prompt tokens went", *_losses(found.cases)))
    for loss in Loss:
        out.print(f"  {loss}: {MEANING[loss]}", highlight=False, soft_wrap=True)
    ceilings = ", ".join(
        f"{text} {as_text(found.baseline.figures[name], 'share')}"
        for name, text in CEILINGS.items()
    )
    out.print(f"ceilings: {ceilings}", highlight=False, soft_wrap=True)
    out.print(table("what was said, and what came, by pool", *_by_pool(found.cases)))
    for line in _notes(found):
        out.print(line, highlight=False, soft_wrap=True)


def _told(cases: Sequence[Case], names: Mapping[str, str]) -> dict[str, str]:
    """Those that some case tells, and not as zero."""
    return {
        name: text
        for name, text in names.items()
        if any(case.figures[name].value > 0 for case in cases)
    }


def _by_case(
    cases: Iterable[Case], names: Mapping[str, str]
) -> tuple[list[str], list[list[object]]]:
    columns = ["case", *(f">{text}" for text in names.values())]
    rows: list[list[object]] = [
        [case.name, *(as_text(case.figures[name], DEFINITIONS[name].unit) for name in names)]
        for case in cases
    ]
    return columns, rows


def _compared(found: Comparing) -> tuple[list[str], list[list[object]]]:
    columns = ["case"]
    for text in COMPARED.values():
        columns += [f">{text}, s", f">{text}, %", "verdict"]
    rows: list[list[object]] = []
    for name, of_case in found.against_baseline().items():
        by_figure = {each.figure: each for each in of_case}
        row: list[object] = [name]
        for figure in COMPARED:
            row += _comparison(by_figure[figure])
        rows.append(row)
    return columns, rows


def _comparison(found: Comparison) -> list[object]:
    return [
        signed(found.difference, 1, ".3f"),
        signed(found.relative, 100, ".1f"),
        found.verdict or "<none>",
    ]


def signed(found: Interval, factor: float, form: str) -> str:
    """A difference with half its interval, `factor` times."""
    if math.isnan(found.value):
        return "<none>"
    half = factor * (found.high - found.value)
    value = f"{factor * found.value:+{form}}"
    return value if math.isnan(half) else f"{value} ±{half:{form}}"


def _losses(cases: Iterable[Case]) -> tuple[list[str], list[list[object]]]:
    rows: list[list[object]] = []
    for case in cases:
        values = [case.losses[loss].value for loss in Loss]
        rows.append(
            [case.name, *("<none>" if math.isnan(value) else share(value) for value in values)]
        )
    return ["case", *(f">{loss}" for loss in Loss)], rows


def _by_pool(cases: Iterable[Case]) -> tuple[list[str], list[list[object]]]:
    columns = ["case", "pool", ">requests", ">mean s", ">reused"]
    columns += [f">{text}" for text in CALIBRATION.values()]
    rows: list[list[object]] = []
    for case in cases:
        for number, (pool, values) in enumerate(case.pools.items()):
            row: list[object] = ["" if number else case.name, pool]
            row += [f"{values['requests'].value:,.0f}"]
            for name in ("ttft_mean_s", "reused_fraction", *CALIBRATION):
                unit = DEFINITIONS[name].unit
                row.append(as_text(values[name], "share" if unit == "ratio" else unit))
            rows.append(row)
    return columns, rows


def _notes(found: Comparing) -> Iterable[str]:
    repeats = len(found.baseline.runs)
    if repeats < LEAST_REPEATS:
        yield f"{repeats} repeats say little: one run is chaotic, so take {LEAST_REPEATS} or more"
    for case in found.cases:
        counters: dict[str, int] = {}
        for run in case.runs:
            for name, count in run.counters.items():
                counters[name] = counters.get(name, 0) + count
        shown = ", ".join(f"{count:,} {name}" for name, count in sorted(counters.items()) if count)
        if shown:
            yield f"{case.name}: {shown} in all repeats"
        if not case.agrees:
            yield f"{case.name}: the schedulers' ledgers DIFFER from what the clients saw"
    speeds = [run.requests / run.wall_s for case in found.cases for run in case.runs if run.wall_s]
    if speeds:
        yield f"{sum(speeds) / len(speeds):,.0f} requests simulated per second and process"
