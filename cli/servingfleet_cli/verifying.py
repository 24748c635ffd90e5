"""`servingfleet verify`: recorded streams, every prediction held to what the engine reported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from servingfleet_sim.recordings import RecordingError, read
from servingfleet_sim.verify import Verification, verify

from . import exits
from .output import console, format_option, print_json, table


@click.command("verify", epilog=exits.HELP)
@click.argument(
    "folders", nargs=-1, required=True, metavar="DIR...", type=click.Path(path_type=Path)
)
@click.option("--quiet", is_flag=True, help="Only the summary.")
@format_option
def verify_command(folders: tuple[Path, ...], quiet: bool, output: str) -> None:
    """Play recorded streams through relay, index and router, and check every prediction.

    Each DIR holds events.jsonl and requests.jsonl (docs/recordings.md). Ends with 1 if a
    prediction missed what the engine reported and nothing in the recording explains it.
    """
    results: list[Verification] = []
    for folder in folders:
        try:
            results.append(verify(read(folder)))
        except (RecordingError, OSError, ValueError) as error:
            raise exits.Exit(str(error), exits.USAGE) from error
    if output == "json":
        print_json([_as_dict(result, quiet) for result in results])
    else:
        out = console()
        for result in results if not quiet else ():
            out.print(_requests_table(result))
        out.print(_summary_table(results))
    if any(result.wrong for result in results):
        raise SystemExit(exits.NO)


def _requests_table(result: Verification) -> Table:
    rows = [
        [
            v.request.number,
            v.rank,
            v.request.prompt_tokens,
            v.predicted,
            v.lower,
            v.upper,
            v.request.cached_tokens,
            "WRONG" if v.wrong else v.cause or "",
            v.request.label,
        ]
        for v in result.verdicts
    ]
    columns = [">n", ">rank", ">prompt", ">predicted", ">lower", ">upper", ">reported"]
    return table(result.recording.name, [*columns, "cause of a miss", "request"], rows)


def _summary_table(results: list[Verification]) -> Table:
    rows: list[list[object]] = []
    for r in results:
        causes = sorted({str(v.cause) for v in r.verdicts if v.cause})
        rows.append([r.recording.name, *_counts([r]), ", ".join(causes)])
    if len(results) > 1:
        rows.append(["all", *_counts(results), ""])
    columns = ["recording", ">requests", ">exact", ">explained", ">wrong", "causes"]
    return table("predicted reuse against reported reuse", columns, rows)


def _counts(results: Sequence[Verification]) -> list[int]:
    return [
        sum(len(r.verdicts) for r in results),
        sum(r.exact for r in results),
        sum(r.explained for r in results),
        sum(r.wrong for r in results),
    ]


def _as_dict(result: Verification, quiet: bool) -> dict[str, object]:
    summary: dict[str, object] = {
        "recording": result.recording.name,
        "requests": len(result.verdicts),
        "exact": result.exact,
        "explained": result.explained,
        "wrong": result.wrong,
        "relay_totals": result.counters,
    }
    if not quiet:
        summary["verdicts"] = [
            {
                "n": v.request.number,
                "label": v.request.label,
                "rank": v.rank,
                "prompt_tokens": v.request.prompt_tokens,
                "predicted": v.predicted,
                "lower": v.lower,
                "upper": v.upper,
                "reported": v.request.cached_tokens,
                "cause": v.cause,
                "wrong": v.wrong,
            }
            for v in result.verdicts
        ]
    return summary
