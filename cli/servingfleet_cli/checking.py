"""`servingfleet check-stream`: a recorded or live stream through the relay's decoder."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import httpx

from servingfleet_relay.adapters.registry import ADAPTERS
from servingfleet_relay.conformance.canary import LEAST_TOKEN, MOST_TOKEN
from servingfleet_relay.load import ScrapeFailed
from servingfleet_relay.options import BadOption
from servingfleet_sim.checking import Checker, StreamReport, check
from servingfleet_sim.driving import REQUEST_S, Driver, Step
from servingfleet_sim.pulling import PullRecorder
from servingfleet_sim.recorder import NotHeard, Recorder, wall_clock
from servingfleet_sim.recordings import Message, RecordingError, read

from . import exits
from .interrupts import run_to_end
from .listening import PULLED, Source, identity, live_options, pulled_facts, source_of
from .output import console, format_option, print_json, table

HELP = "Exit codes: 0 sound, 1 degraded, unusable or silent, 2 wrong usage, 3 engine unreachable."
CONNECT_S = 10.0
QUIET_S = 0.5
LEARNING_TOKENS = 600
"""Of a prompt that shows the engine's block, where nothing else has shown it: more than one block of most engines."""


@click.command("check-stream", epilog=HELP)
@click.argument("source", metavar="DIR|tcp://HOST:PORT|http://HOST:PORT")
@click.option(
    "--engine",
    type=click.Choice(list(ADAPTERS)),
    default=None,
    help="How to read the events; default: as the recording or the engine says, else vllm.",
)
@click.option("--engine-version", help="Its release, to whose form events are held; likewise.")
@click.option("--block-tokens", default=16, show_default=True, help="The fleet's canonical block.")
@click.option("--engine-block-tokens", default=0, help="The engine's own block; 0: learned.")
@click.option(
    "--host-unit-tokens", default=0, help="Chunk of the engine's CPU offload; 0: as its blocks."
)
@live_options
@click.option("--replay", metavar="tcp://HOST:PORT", help="Live: where the engine replays.")
@click.option("--engine-http", metavar="URL", help="Live: the engine's HTTP server.")
@click.option(
    "--canary", metavar="URL", help="Live: send a prompt of our own to this HTTP server, twice."
)
@click.option("--ranks", default=1, show_default=True, help="Live: ranks, on consecutive ports.")
@click.option("--seconds", default=10.0, show_default=True, help="Live: how long to listen.")
@click.option("--messages", default=10_000, show_default=True, help="Live: messages at most.")
@format_option
def check_stream(
    source: str,
    engine: str | None,
    engine_version: str | None,
    block_tokens: int,
    engine_block_tokens: int,
    host_unit_tokens: int,
    bind: bool,
    take_events: bool,
    replay: str | None,
    engine_http: str | None,
    canary: str | None,
    ranks: int,
    seconds: float,
    messages: int,
    output: str,
) -> None:
    """Say what an engine's event stream is, which invariants hold, what would be indexed, and what not.

    The source is a folder of a recorded stream (docs/recordings.md), or the endpoint where a live
    engine publishes. docs/check-stream.md says what the report holds and when it is sound.
    """
    try:
        if source.startswith(("tcp://", *PULLED)):
            events = source_of(
                *(source, replay, ranks),
                bind=bind,
                take_events=take_events,
                unit_tokens=engine_block_tokens,
            )
            http = engine_http or canary or (source if events.pulled else None)
            facts = run_to_end(_facts(events, engine, http))
            name = engine or next(name for name in ADAPTERS if name in facts)
            checker = Checker(
                ranks,
                block_tokens,
                name,
                engine_version or facts.get(name, ""),
                host_unit_tokens,
                engine_block_tokens,
                pulled=events.pulled,
            )
            live = _Live(checker, events, seconds, messages, canary, str(facts.get("model", "")))
            report = run_to_end(live.run())
        else:
            recording = read(Path(source))
            name = engine or recording.adapter
            checker = Checker(
                recording.ranks,
                block_tokens,
                name,
                engine_version or str(recording.engine.get(name, "")),
                host_unit_tokens or recording.host_unit_tokens,
                engine_block_tokens or recording.pulled_unit_tokens,
                recording.layer_groups,
                pulled=bool(recording.pulled_unit_tokens),
            )
            report = check(recording.messages, checker)
    except (NotHeard, ScrapeFailed, httpx.HTTPError) as error:
        raise exits.Exit(str(error) or type(error).__name__, exits.UNREACHABLE) from error
    except (BadOption, RecordingError, OSError, ValueError) as error:
        raise exits.Exit(str(error), exits.USAGE) from error
    if output == "json":
        print_json(as_dict(source, report))
    else:
        _print(source, report)
    if report.verdict != "sound":
        raise SystemExit(exits.NO)


async def _facts(source: Source, engine: str | None, engine_http: str | None) -> dict[str, Any]:
    if engine_http is None:
        return {engine or "vllm": ""}
    facts = await identity(source.ranks, engine or "auto", engine_http)
    return facts | pulled_facts(source, facts)


class _Live:
    """One listening, with a canary or without."""

    def __init__(
        self,
        checker: Checker,
        source: Source,
        seconds: float,
        messages: int,
        canary: str | None,
        model: str,
    ) -> None:
        self._checker = checker
        self._source = source
        self._seconds = seconds
        self._left = messages
        self._enough = asyncio.Event()
        self._canary = canary
        self._model = model
        self._clock = wall_clock()

    async def run(self) -> StreamReport:
        """Raises NotHeard, httpx.HTTPError."""
        recorder = self._source.recorder(self._hear, self._clock)

        async def work() -> None:
            if self._canary is not None:
                await self._send(self._canary, recorder)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await self._enough.wait()

        await recorder.during(work, CONNECT_S)
        return self._checker.report()

    def _hear(self, message: Message) -> None:
        if self._left:
            self._left -= 1
            self._checker.hear(message)
        if not self._left:
            self._enough.set()

    async def _send(self, url: str, recorder: Recorder | PullRecorder) -> None:
        rng = random.SystemRandom()
        checker, rank = self._checker, self._source.ranks[0]

        async def settled() -> None:
            await recorder.quiet(QUIET_S)

        async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S, trust_env=False) as http:
            driver = Driver(http, self._model, self._clock)

            def step(prompt: Sequence[int]) -> Step:
                headers = {"X-data-parallel-rank": str(rank)}
                return Step(request={"prompt": list(prompt), "max_tokens": 1}, headers=headers)

            pipeline = checker.pipeline(self._clock())
            if not (checker.engine_block_tokens or pipeline.unit_tokens):
                unknown = [rng.randrange(LEAST_TOKEN, MOST_TOKEN) for _ in range(LEARNING_TOKENS)]
                await driver.play([step(unknown)], settled)
                driver.rows.clear()
            unit = checker.engine_block_tokens or pipeline.unit_tokens
            if not unit:
                # So that it is known to be sent, and what is announced for it.
                unit = checker.block_tokens
            canary = pipeline.new_canary(rng, unit)
            checker.canary(rank, canary, self._clock())
            await driver.play([step(canary.prompt)] * 2, settled)
        first, second = (row.get("cached_tokens") for row in driver.rows)
        checker.canary_answered(rank, canary, first, second, self._clock())


def as_dict(source: str, report: StreamReport) -> dict[str, Any]:
    """The report for programs: its keys stay (docs/check-stream.md)."""
    return {
        "source": source,
        "verdict": report.verdict,
        "engine": report.engine,
        "version": report.version,
        "messages": report.messages,
        "events": dict(report.kinds),
        "ranks": [
            {
                "rank": rank.rank,
                "state": rank.state,
                "condition": rank.condition.value,
                "reason": rank.reason,
                "fingerprint": rank.traits,
                "tiers": {
                    name: {"condition": condition.value, "reason": reason}
                    for name, (condition, reason) in rank.tiers.items()
                },
            }
            for rank in report.ranks
        ],
        "invariants": [asdict(each) for each in report.invariants],
        "indexed": list(report.indexed),
        "not_indexed": [asdict(each) for each in report.not_indexed],
        "examples": list(report.examples),
        "canary": None if report.canary is None else list(report.canary),
    }


def _print(source: str, report: StreamReport) -> None:
    out = console()
    what = f"{source}: {report.engine} {report.version}".rstrip()
    if not report.messages:
        out.print(f"{what}: nothing received. Are events switched on, and was there traffic?")
        out.print("SILENT")
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.kinds.items())
    out.print(f"{what}: {report.messages} messages: {kinds}", soft_wrap=True)
    rows = []
    for rank in report.ranks:
        traits = "; ".join(f"{name}: {value}" for name, value in rank.traits.items())
        state = rank.state.replace("_", " ")
        rows.append([rank.rank, state, rank.condition.value, rank.reason, traits])
    columns = [">rank", "stream", "good for", "reason", "how the engine writes"]
    out.print(table("ranks", columns, rows))
    failed = [each for each in report.invariants if each.failures]
    if failed:
        rows = [
            [each.id, each.result, each.checks, failure["count"], failure["detail"], each.act]
            for each in failed
            for failure in each.failures
        ]
        columns = ["", "", "what should hold", ">times", "first seen", "what to do"]
        out.print(table("invariants that do not hold", columns, rows))
    held = sum(each.result == "holds" for each in report.invariants)
    unseen = [f"{each.id} ({each.why})" for each in report.invariants if each.why]
    out.print(f"{held} invariants hold; not checked: {', '.join(unseen)}", soft_wrap=True)
    if report.canary is not None:
        out.print("canary: " + ("; ".join(report.canary) or "as it should be"), soft_wrap=True)
    out.print("indexed: " + ("; ".join(report.indexed) or "nothing"), soft_wrap=True)
    for each in report.not_indexed:
        out.print(f"not indexed: {each.what}: {each.why}", soft_wrap=True)
    for example in report.examples:
        out.print(f"  {example}", soft_wrap=True)
    out.print(report.verdict.upper())
