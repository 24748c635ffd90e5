"""`make routing`: replays public traces, and puts what each part of routing is worth into docs/routing.md.

Every table is one `servingfleet replay`; the command stands above it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUT = HERE / "out" / "routing"
DOCUMENT = HERE.parent / "docs" / "routing.md"
COMMAND = Path(sys.executable).with_name("servingfleet")
TRACES = "$TRACES/"
DIFFERS = 1
"""Exit code: outcomes came later than the schedulers remember decisions, for one."""

Case = Mapping[str, Any]
Document = Mapping[str, Any]
Cell = Callable[[Document, Case], str]


@dataclass(frozen=True)
class Table:
    """One command, and what is shown of its report: a row for each case."""

    name: str
    arguments: str
    """Of `servingfleet replay`; traces lie in $TRACES."""
    columns: Mapping[str, Cell]
    report: str = ""
    """Of another table with the same command, which is not run again."""


def figure(name: str, factor: float = 1.0, form: str = ".2f") -> Cell:
    """A figure with half its interval."""

    def cell(document: Document, case: Case) -> str:
        return _with_half(case["figures"][name], factor, form)

    return cell


def share(name: str, form: str = ".1f") -> Cell:
    """Likewise, in percent."""
    return figure(name, 100.0, form)


def less_first(
    name: str, kind: str = "relative", factor: float = 100.0, form: str = "+.1f"
) -> Cell:
    """The difference from the first case on the same seeds, and what it proves."""

    def cell(document: Document, case: Case) -> str:
        if case["name"] == document["baseline"]:
            return ""
        for each in document["comparisons"]:
            if each["case"] == case["name"] and each["figure"] == name:
                return f"{_with_half(each[kind], factor, form)} {each['verdict'] or ''}".rstrip()
        raise KeyError(name)

    return cell


def _with_half(found: Mapping[str, Any], factor: float, form: str) -> str:
    value, high = found["value"], found["high"]
    if value is None:
        return "-"
    text = format(factor * value, form)
    return text if high is None else f"{text} ±{format(factor * (high - value), form.lstrip('+'))}"


TIMES: Mapping[str, Cell] = {
    "mean, s": figure("ttft_mean_s"),
    "p95, s": figure("ttft_p95_s"),
    "mean less first, %": less_first("ttft_mean_s"),
    "p95 less first, %": less_first("ttft_p95_s"),
}
REUSE: Mapping[str, Cell] = {
    "reused, %": share("reused_fraction"),
    "coverage, %": share("index_coverage", ".2f"),
    "erroneous, %": share("erroneous_credit", ".2f"),
}
LOADS: Mapping[str, Cell] = {"busiest/mean": figure("imbalance_max")}

CALIBRATION: Mapping[str, Cell] = {
    "expected less reused, % of prompts": share("expected_bias", "+.2f"),
    "estimated less real, %": share("estimate_bias", "+.1f"),
    "median error, %": share("estimate_error"),
    "within sd, %": share("estimate_within_sd"),
}
TARGETS: Mapping[str, Cell] = {
    "in target, %": share("goodput"),
    "late, %": share("late_share"),
    "rejected, %": share("rejected_share"),
    "finished/s": figure("finished_per_s"),
    "mean, s": figure("ttft_mean_s"),
    "p95, s": figure("ttft_p95_s"),
}
SCHEDULERS: Mapping[str, Cell] = {
    "predictions differ, % of prompts": share("disagreement", ".2f"),
    "other choice, %": share("other_choice"),
    "reused less first, points": less_first("reused_fraction", "difference", 100, "+.2f"),
}

FLEET = "--fleet examples/replay/fleet.yaml"
LONG = "--fleet examples/replay/fleet-long.yaml"
POLICIES = " ".join(
    f"--policy {policy}"
    for policy in (
        *("cost", "oracle", "least-loaded", "round-robin", "prefix-overlap", "approximate"),
    )
)
WORTH = (
    "--variant credits-off:credit=false --variant learning-off:learn=false "
    "--variant tiers-priced-alike:price_tiers=false --variant tiers-untold:tell_tiers=false "
    "--variant others-unpriced:price_others=false"
)
CONVERSATION = f"{TRACES}mooncake_conversation.jsonl --first 1500"
SYNTHETIC = f"{TRACES}mooncake_synthetic.jsonl --first 1500 --rate 1.2"
AGENTIC = f"{TRACES}agentic_weka_sample.jsonl.gz --first 500 --closed-loop --start-every 60"
BURSTS = (
    "generated:conversations=1000,turns=1,starts_per_s=5,burstiness=40,prompts=200,skew=0.5,"
    "system_tokens=12000"
)
LAGS = (
    "--variant lag-0.5:lag=0.5 --variant lag-2:lag=2 --variant credits-off:credit=false "
    "--variant lag-2-credits-off:lag=2,credit=false"
)
RATES = " ".join(f"--variant rate-{rate}:rate={rate}" for rate in (1.0, 1.2, 1.4, 1.8))

TABLES = (
    Table("conversation", f"{CONVERSATION} {FLEET} {POLICIES}", {**TIMES, **REUSE, **LOADS}),
    Table(
        "conversation-busy",
        f"{CONVERSATION} {FLEET} --rate 1.2 {POLICIES} --variant others-unpriced:price_others=false",
        {**TIMES, **REUSE, **LOADS},
    ),
    Table("synthetic", f"{SYNTHETIC} {FLEET} {POLICIES}", {**TIMES, **REUSE, **LOADS}),
    Table("agentic", f"{AGENTIC} {LONG} {POLICIES}", {**TIMES, **REUSE, **LOADS}),
    Table("worth-conversation", f"{CONVERSATION} {FLEET} {WORTH}", {**TIMES, **REUSE}),
    Table(
        "calibration",
        f"{CONVERSATION} {FLEET} {WORTH}",
        {**CALIBRATION, "in bounds, %": share("interval_hit", ".2f")},
        report="worth-conversation",
    ),
    Table("worth-synthetic", f"{SYNTHETIC} {FLEET} {WORTH}", {**TIMES, **REUSE}),
    Table("worth-agentic", f"{AGENTIC} {LONG} {WORTH}", {**TIMES, **REUSE}),
    Table(
        "misjudged",
        f"{CONVERSATION} --fleet examples/replay/fleet-misjudged.yaml "
        "--variant learning-off:learn=false",
        {**TIMES, **CALIBRATION},
    ),
    Table(
        "slow-tiers",
        f"{SYNTHETIC} --fleet examples/replay/fleet-slow-tiers.yaml "
        "--variant tiers-priced-alike:price_tiers=false --variant tiers-untold:tell_tiers=false "
        "--variant learning-off:learn=false",
        {**TIMES, **REUSE},
    ),
    Table("lag", f"{CONVERSATION} {FLEET} {LAGS}", {**TIMES, **REUSE}),
    Table("bursts", f"{BURSTS} {FLEET} {LAGS}", {**TIMES, **REUSE}),
    Table(
        "schedulers",
        f"{CONVERSATION} {FLEET} --variant two:schedulers=2 --variant two-lag-2:schedulers=2,lag=2 "
        "--variant two-credits-off:schedulers=2,credit=false --variant four:schedulers=4",
        {**TIMES, "reused, %": share("reused_fraction"), **SCHEDULERS},
    ),
    Table("load", f"{CONVERSATION} {FLEET} --target 10 --no-admission --rate 0.8 {RATES}", TARGETS),
    Table(
        "overload",
        f"{CONVERSATION} {FLEET} --target 10 --rate 1.8 --policy cost --policy least-loaded "
        "--variant admission-off:admission=false "
        "--variant least-loaded-admission-off:policy=least-loaded,admission=false",
        {**TARGETS, "in target less first, points": less_first("goodput", "difference", 100)},
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/routing.py", description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder of the public traces")
    parser.add_argument("--only", action="append", help="tables to make; all if none")
    parser.add_argument("--jobs", type=int, help="runs at once; one for each CPU if not given")
    parser.add_argument(
        "--rewrite", action="store_true", help="only show again what the last runs found"
    )
    arguments = parser.parse_args()
    names = [each.name for each in TABLES]
    if unknown := set(arguments.only or ()) - set(names):
        parser.error(f"--only {', '.join(sorted(unknown))}; tables: {', '.join(names)}")
    OUT.mkdir(parents=True, exist_ok=True)
    for table in TABLES:
        if arguments.only and table.name not in arguments.only:
            continue
        if not arguments.rewrite and not table.report:
            if TRACES in table.arguments and arguments.traces is None:
                parser.error(f"table {table.name} needs --traces, the folder of the public traces")
            _run(table, arguments.traces, arguments.jobs)
        document = json.loads(_report(table).read_text())
        _write(table.name, _markdown(table, document))
    return 0


def _report(table: Table) -> Path:
    return OUT / f"{table.report or table.name}.json"


def _run(table: Table, traces: Path | None, jobs: int | None) -> None:
    """Makes the report and the page of a table. Raises SystemExit where the command fails."""
    line = table.arguments.replace(TRACES, f"{traces}/" if traces is not None else "")
    command = [str(COMMAND), "replay", *shlex.split(line), "--json", str(_report(table))]
    command += ["--html", str(_report(table).with_suffix(".html")), "--progress"]
    if jobs is not None:
        command += ["--jobs", str(jobs)]
    _report(table).unlink(missing_ok=True)
    began = time.monotonic()
    print(f"{table.name}: servingfleet replay {table.arguments}", flush=True)
    done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, cwd=HERE.parent)
    # A command that broke ends with 1, too.
    if done.returncode not in (0, DIFFERS) or not _report(table).exists():
        raise SystemExit(f"{table.name}: servingfleet replay ended with {done.returncode}")
    differs = "; a ledger DIFFERS from what clients saw" if done.returncode == DIFFERS else ""
    print(f"  {time.monotonic() - began:.0f} s{differs}", flush=True)


def _markdown(table: Table, document: Document) -> str:
    trace = document["trace"]
    repeats = len(document["seeds"])
    load = (
        f"{trace['requests']:,} requests with {trace['prompt_tokens'] / 1e6:.1f} million prompt tokens "
        f"in {trace['seconds'] / trace['rate']:,.0f} s, {repeats} repeats."
    )
    lines = [
        "```",
        f"servingfleet replay {table.arguments}",
        "```",
        "",
        load,
        "",
        "| case | " + " | ".join(table.columns) + " |",
        "| --- |" + " --: |" * len(table.columns),
    ]
    for case in document["cases"]:
        cells = (cell(document, case) for cell in table.columns.values())
        lines.append(f"| {case['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _write(name: str, text: str) -> None:
    """Rewrites what lies between a table's markers. Raises SystemExit if they are not there."""
    begin, end = f"<!-- routing: {name} -->", f"<!-- routing: {name}, end -->"
    before, found, rest = DOCUMENT.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"docs/{DOCUMENT.name} has no {begin} with {end} after it")
    DOCUMENT.write_text(f"{before}{begin}\n{text}\n{end}{after}")


if __name__ == "__main__":
    sys.exit(main())
