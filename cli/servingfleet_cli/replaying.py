"""`servingfleet replay`: a trace against a simulated fleet, under several policies or settings, on the same seeds."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from servingfleet_sim.replay.fleet import FleetSpec
from servingfleet_sim.replay.traces import Trace, shaped

from . import exits
from .output import format_option, print_json
from .replay_cases import PLAYED, Choices, read_choices
from .replay_inputs import GENERATED, fleet_of, trace_of

if TYPE_CHECKING:
    from servingfleet_sim.replay.cases import Setting
    from servingfleet_sim.replay.repeats import Case

EXTRA = "servingfleet[replay]"


@click.command(epilog=exits.HELP)
@click.argument("trace")
@click.option(
    "--fleet",
    "fleet_file",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The fleet, as YAML (docs/replay.md).",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help=f"One case each: {', '.join(PLAYED)}. Default: cost. The others are compared with the first.",
)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="NAME:KEY=VALUE,...",
    help="One more case each, like the first but for these: "
    f"{', '.join(Choices.__struct_fields__)}.",
)
@click.option("--repeats", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Of the first repeat; each further one has the next.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Arrivals come so many times as fast as in the trace.",
)
@click.option(
    "--start-every",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    help="Mean seconds between two conversations' beginnings, where the trace tells none (agentic).",
)
@click.option("--first", type=click.IntRange(1), help="Only so many requests, from the start.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    help="Only the trace's first so many seconds.",
)
@click.option(
    "--closed-loop",
    is_flag=True,
    help="A session's next request waits for the one before; else arrivals are the trace's.",
)
@click.option(
    "--jitter",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="Seconds that an arrival comes later at most, by the seed.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 1024),
    default=lambda: os.cpu_count() or 1,
    show_default="one for each CPU",
    help="Runs at once.",
)
@click.option("--schedulers", type=click.IntRange(1, 16), help="Default: as the fleet file says.")
@click.option(
    "--lag", type=click.FloatRange(0), help="Seconds that events take. Default: as the file says."
)
@click.option(
    "--credit/--no-credit", default=True, help="What was dispatched counts as held at once."
)
@click.option(
    "--learn/--no-learn", default=True, help="Speeds and corrections are learned from outcomes."
)
@click.option(
    "--tier-blind", is_flag=True, help="A hit in a slower tier is priced like one on the GPU."
)
@click.option("--gpu-only", is_flag=True, help="Schedulers are not told of slower tiers.")
@click.option(
    "--target",
    type=click.FloatRange(0, min_open=True),
    help="Seconds to first token that every request asks for.",
)
@click.option(
    "--admission/--no-admission",
    default=True,
    help="Requests name their target, and are turned away where it can't be met.",
)
@click.option(
    "--quantile",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="Where between lower and upper an uncertain prediction is priced.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the whole report here, as -o json prints it.",
)
@click.option(
    "--html",
    "html_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a page with plots here. It needs no network.",
)
@click.option(
    "--progress/--no-progress",
    default=None,
    help="A bar on stderr. Default: only on a terminal.",
)
@format_option
def replay(
    trace: str,
    fleet_file: Path,
    policies: tuple[str, ...],
    variants: tuple[str, ...],
    repeats: int,
    seed: int,
    rate: float,
    start_every: float,
    first: int | None,
    seconds: float | None,
    closed_loop: bool,
    jitter: float,
    jobs: int,
    schedulers: int | None,
    lag: float | None,
    credit: bool,
    learn: bool,
    tier_blind: bool,
    gpu_only: bool,
    target: float | None,
    admission: bool,
    quantile: float,
    json_file: Path | None,
    html_file: Path | None,
    progress: bool | None,
    output: str,
) -> None:
    """Replay TRACE against a simulated fleet: production schedulers, simulated engines and time.

    TRACE is a file of requests (Mooncake's or the agentic format, docs/replay.md), "-", or made up:
    generated:KEY=VALUE,... Each --policy and --variant is replayed on the same seeds, and compared with the first. Exits
    with 1 if the schedulers' ledgers differ from what the clients saw.
    """
    base = Choices(
        rate=rate,
        target=target,
        admission=admission,
        credit=credit,
        learn=learn,
        price_tiers=not tier_blind,
        tell_tiers=not gpu_only,
        schedulers=schedulers,
        lag=lag,
        quantile=quantile,
        jitter=jitter,
        closed_loop=closed_loop,
    )
    choices = read_choices(base, policies, variants)
    _needs_extra()
    from servingfleet_sim.replay.document import Comparing, as_dict

    from .replay_report import print_report

    fleet = fleet_of(fleet_file)
    requests = trace_of(trace, seed, start_every)
    kept = shaped(requests.requests, first=first, seconds=seconds)
    if not kept:
        raise exits.Exit(f"{trace}: none of its requests is left to replay", exits.USAGE)
    cases = _play(
        replace(requests, requests=kept),
        fleet,
        choices,
        range(seed, seed + repeats),
        jobs,
        show=sys.stderr.isatty() if progress is None else progress,
    )
    found = Comparing(
        command=shlex.join(["servingfleet", *sys.argv[1:]]),
        trace={
            "name": trace if trace.startswith(GENERATED) else Path(trace).name,
            "requests": len(kept),
            "prompt_tokens": sum(each.prompt_tokens for each in kept),
            "output_tokens": sum(each.output_tokens for each in kept),
            "seconds": round(kept[-1].at - kept[0].at, 3),
            "rate": rate,
        },
        fleet=msgspec.to_builtins(fleet),
        options={name: msgspec.structs.asdict(each) for name, each in choices.items()},
        cases=tuple(cases),
    )
    if json_file is not None:
        _write(json_file, json.dumps(as_dict(found), indent=1) + "\n")
    if html_file is not None:
        from servingfleet_sim.replay.html import page

        _write(html_file, page(found))
    if output == "json":
        print_json(as_dict(found))
    else:
        print_report(found)
    if not all(case.agrees for case in cases):
        raise SystemExit(exits.NO)


def _needs_extra() -> None:
    """Raises exits.Exit."""
    try:
        import plotly  # noqa: F401
        import scipy  # noqa: F401
        import yaml  # noqa: F401
    except ModuleNotFoundError as error:
        raise exits.Exit(
            f"replay needs {error.name}, which is not installed: pip install '{EXTRA}'", exits.USAGE
        ) from None


def _play(
    trace: Trace,
    fleet: FleetSpec,
    choices: dict[str, Choices],
    seeds: Sequence[int],
    jobs: int,
    *,
    show: bool,
) -> list[Case]:
    from servingfleet_sim.replay.cases import Setting, run_cases

    settings: list[Setting] = [
        Setting(name, each.options(trace.block_tokens), each.rate, each.target)
        for name, each in choices.items()
    ]
    total = len(settings) * len(seeds) * len(trace.requests)
    bar: AbstractContextManager[Callable[[int], None]]
    bar = _Bar(total) if show else nullcontext(lambda ended: None)
    with bar as progress:
        return run_cases(trace.requests, fleet, settings, seeds, jobs, progress)


class _Bar:
    """Requests that have ended, of those of all runs, on stderr."""

    def __init__(self, total: int) -> None:
        self._bar = Progress(
            TextColumn("replaying"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("requests"),
            TimeRemainingColumn(),
            console=Console(stderr=True, force_terminal=True),
            transient=True,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Callable[[int], None]:
        self._bar.start()
        return lambda ended: self._bar.update(self._task, completed=ended)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise exits.Exit(str(error), exits.USAGE) from error
