"""`servingfleet record`: a live engine's events and its answers, as a recording that can be verified."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx

from servingfleet_relay.adapters.registry import ADAPTERS, AUTO
from servingfleet_relay.load import ScrapeFailed
from servingfleet_relay.options import BadOption
from servingfleet_sim.driving import FLAGS, REQUEST_S, Driver, Step, read_steps
from servingfleet_sim.recorder import NotHeard, wall_clock
from servingfleet_sim.recordings import Message, RecordingError, message_line

from . import exits
from .interrupts import run_to_end
from .listening import PULLED, Source, identity, live_options, pulled_facts, source_of

HELP = (
    "Exit codes: 0 recorded, 1 nothing was published or no reuse was reported, 2 wrong usage, "
    "3 engine unreachable."
)
FILE = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.command("record", epilog=HELP)
@click.argument("events", metavar="tcp://HOST:PORT|http://HOST:PORT")
@click.option("--replay", metavar="tcp://HOST:PORT", help="Where the engine replays its events.")
@click.option("--ranks", default=1, show_default=True, help="Ranks, on consecutive ports.")
@click.option("--engine-http", metavar="URL", help="The engine's HTTP server: says what it is.")
@click.option(
    "--engine",
    type=click.Choice([AUTO, *ADAPTERS]),
    default=AUTO,
    show_default=True,
    help="What publishes there; auto: as --engine-http says.",
)
@live_options
@click.option("--engine-block-tokens", default=0, help="Of http://...: the engine's block.")
@click.option("--facts", type=FILE, help="JSON laid into engine.json: arguments, layer groups.")
@click.option("--prompts", type=FILE, help="Ask the engine these: the lines of a requests.jsonl.")
@click.option("--seconds", default=10.0, show_default=True, help="How long, without --prompts.")
@click.option(
    "--quiet-s",
    default=0.2,
    show_default=True,
    help="A request has been published when nothing came for so long.",
)
@click.option("--connect-s", default=10.0, show_default=True, help="How long to wait for it.")
@click.option(
    "-o",
    "--output",
    "directory",
    metavar="DIR",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the recording: new, or empty.",
)
def record_command(
    events: str,
    replay: str | None,
    ranks: int,
    engine_http: str | None,
    engine: str,
    bind: bool,
    take_events: bool,
    engine_block_tokens: int,
    facts: Path | None,
    prompts: Path | None,
    seconds: float,
    quiet_s: float,
    connect_s: float,
    directory: Path,
) -> None:
    """Record what an engine publishes, so that verify and check-stream can read it (docs/recordings.md).

    With --prompts each line is asked of the engine in turn, and what it reports to have reused is
    recorded with it. Whatever else the engine is asked meanwhile spoils the verification.

    Events of http://... (TensorRT-LLM) are pulled, and there is one reader: a relay beside the
    engine loses what it knew.
    """
    engine_http = engine_http or (events if events.startswith(PULLED) else None)
    if prompts is not None and engine_http is None:
        raise click.UsageError("--prompts needs --engine-http: nobody to ask")
    if engine == AUTO and engine_http is None:
        raise click.UsageError("--engine or --engine-http must say what publishes there")
    try:
        source = source_of(
            *(events, replay, ranks),
            bind=bind,
            take_events=take_events,
            unit_tokens=engine_block_tokens,
        )
        steps = read_steps(prompts) if prompts is not None else None
        known = json.loads(facts.read_text()) if facts is not None else {}
        if not isinstance(known, dict):
            raise RecordingError(f"{facts}: {type(known).__name__}, expected an object")
        _make(directory)
    except (BadOption, RecordingError, ValueError, OSError) as error:
        raise exits.Exit(str(error), exits.USAGE) from error
    wanted = _Wanted(source, engine, engine_http, known, steps, seconds, quiet_s, connect_s)
    try:
        summary = run_to_end(_record(wanted, directory))
    except (NotHeard, ScrapeFailed, httpx.HTTPError) as error:
        said = str(error) or type(error).__name__
        raise exits.Exit(said, exits.UNREACHABLE) from error
    click.echo("\n".join(_lines(directory, summary)))
    if not summary["messages"] or not summary["reports_reuse"]:
        raise SystemExit(exits.NO)


@dataclass(frozen=True)
class _Wanted:
    source: Source
    engine: str
    engine_http: str | None
    facts: Mapping[str, Any]
    steps: list[Step] | None
    seconds: float
    quiet_s: float
    connect_s: float


def _make(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise RecordingError(f"{directory}: not empty; expected a new folder for the recording")


async def _record(wanted: _Wanted, directory: Path) -> dict[str, Any]:
    source = wanted.source
    facts = await identity(source.ranks, wanted.engine, wanted.engine_http)
    facts |= pulled_facts(source, facts)
    (directory / "engine.json").write_text(json.dumps({**facts, **wanted.facts}, indent=1) + "\n")
    clock = wall_clock()
    async with httpx.AsyncClient(
        base_url=wanted.engine_http or "", timeout=REQUEST_S, trust_env=False
    ) as http:
        driver = Driver(http, str(facts.get("model", "")), clock)
        with (directory / "events.jsonl").open("w", buffering=1) as events:

            def write(message: Message) -> None:
                events.write(message_line(message, source.name(message.rank)))

            recorder = source.recorder(write, clock)

            async def settled() -> None:
                await recorder.quiet(wanted.quiet_s)

            async def work() -> None:
                if wanted.steps is None:
                    await asyncio.sleep(wanted.seconds)
                else:
                    await driver.play(wanted.steps, settled)

            try:
                await recorder.during(work, wanted.connect_s)
            finally:
                # One that is interrupted holds what was recorded until then.
                lines = sorted([*driver.finished(), *recorder.controls], key=lambda line: line["t"])
                text = "".join(json.dumps(line) + "\n" for line in lines)
                (directory / "requests.jsonl").write_text(text)
    asked = [row for row in driver.rows if "request" in row]
    return {
        "engine": facts,
        "messages": recorder.messages,
        "requests": len(asked),
        "refused": driver.refused,
        "prompt_tokens": sum(row.get("prompt_tokens", 0) for row in asked),
        "cached_tokens": sum(row.get("cached_tokens") or 0 for row in asked),
        "reports_reuse": driver.reports_reuse or not asked,
        "disconnections": sum(row["control"] == "engine gone" for row in recorder.controls),
        "replays_failed": recorder.replays_failed,
    }


def _lines(directory: Path, summary: Mapping[str, Any]) -> list[str]:
    engine = " ".join(f"{name} {value}".strip() for name, value in summary["engine"].items())
    lines = [f"{directory}: {engine}: {summary['messages']} messages"]
    if not summary["messages"]:
        lines.append("nothing was published: are events switched on, and was there traffic?")
    if summary["requests"]:
        reused = f"{summary['cached_tokens']} of {summary['prompt_tokens']} prompt tokens reused"
        lines.append(f"{summary['requests']} requests, {summary['refused']} refused; {reused}")
    if not summary["reports_reuse"]:
        flags = ", ".join(f"{flag} ({name})" for name, flag in FLAGS.items())
        lines.append(
            f"no answer told what it reused: nothing to verify. Start the engine with {flags}, "
            "and ask some prompt twice"
        )
    for name in ("disconnections", "replays_failed"):
        if summary[name]:
            lines.append(f"{name.replace('_', ' ')}: {summary[name]}")
    return lines
