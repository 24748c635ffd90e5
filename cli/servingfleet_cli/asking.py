"""Commands that ask a running scheduler: route, explain, reuse, replicas."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

import click

from servingfleet_core.reports import NotAddable, added
from servingfleet_protos.v1 import common_pb2, fleet_pb2, routing_pb2
from servingfleet_protos.v1.fleet_pb2_grpc import FleetStub
from servingfleet_protos.v1.routing_pb2_grpc import RouterStub

from . import exits
from .connecting import Scheduler, scheduler_options, schedulers_options
from .output import console, format_option, print_json, share, table

F = TypeVar("F", bound=Callable[..., Any])


def prompt_options(function: F) -> F:
    """Adds everything that makes a RouteRequest."""
    options = [
        click.option("--model", required=True, help="Model, as its relays announce it."),
        click.option("--tokens", help="Token ids: 1,2,3 or a JSON list."),
        click.option(
            "--tokens-file",
            type=click.File(),
            help="File with token ids (the same forms), or - for standard input.",
        ),
        click.option("--adapter", default="", help="LoRA adapter of the request."),
        click.option("--cache-salt", default="", help="Cache salt of the request."),
        click.option("--replica", help="Only this replica."),
        click.option("--rank", type=int, help="Only this data-parallel rank of --replica."),
        click.option("--deadline", type=float, help="Largest time to first token, seconds."),
        click.option("--fallbacks", default=0, help="Next best targets to name."),
        click.option(
            "--label", "labels", multiple=True, help="KEY=VALUE that the replica must have; again."
        ),
        click.option("--session", default="", help="Conversation to which it belongs."),
        click.option("--pin", is_flag=True, help="Stay where --session went last."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def parse_tokens(text: str) -> bytes:
    """Token ids, as commas, spaces, lines or a JSON list, packed. Raises click.BadParameter."""
    try:
        ids = json.loads(text) if text.lstrip().startswith("[") else text.replace(",", " ").split()
        return struct.pack(f"<{len(ids)}I", *map(int, ids))
    except (ValueError, TypeError, struct.error) as error:
        raise click.BadParameter(
            f"not token ids: {error}; expected integers from 0 to 4294967295", param_hint="--tokens"
        ) from error


def _request(
    model: str,
    tokens: str | None,
    tokens_file: TextIO | None,
    adapter: str,
    cache_salt: str,
    replica: str | None,
    rank: int | None,
    deadline: float | None,
    fallbacks: int,
    labels: Sequence[str],
    session: str,
    pin: bool,
) -> routing_pb2.RouteRequest:
    if (tokens is None) == (tokens_file is None):
        raise click.UsageError("give the prompt by one of --tokens and --tokens-file")
    if rank is not None and replica is None:
        raise click.UsageError("--rank needs --replica")
    if any("=" not in label for label in labels):
        raise click.BadParameter("expected KEY=VALUE", param_hint="--label")
    text = tokens if tokens is not None else tokens_file.read() if tokens_file else ""
    request = routing_pb2.RouteRequest(
        model=model,
        prompt=routing_pb2.Prompt(
            tokens_le32=parse_tokens(text), adapter=adapter, cache_salt=cache_salt
        ),
        deadline_s=deadline,
        max_fallbacks=fallbacks,
        labels={key: value for key, _, value in (label.partition("=") for label in labels)},
        session_id=session,
        pin_session=pin,
    )
    if replica is not None:
        request.only.add(replica=replica, rank=rank)
    return request


@click.command()
@scheduler_options
@prompt_options
@format_option
def route(scheduler: Scheduler, output: str, **asked: Any) -> None:
    """Say where a prompt should go now. Opens a credit there, as a gateway's call would."""
    request = _request(**asked)
    with scheduler.channel() as channel:
        answer = RouterStub(channel).Route(request, timeout=scheduler.timeout_s)
    if output == "json":
        print_json(answer)
        return
    out = console()
    out.print(
        table(
            f"{request.model}: {answer.policy}, {_basis(answer.basis)}",
            [
                "",
                "replica",
                ">rank",
                "endpoint",
                ">predicted",
                ">lower",
                ">upper",
                ">prompt",
                ">TTFT s",
            ],
            [
                _target_row("target", answer),
                *(
                    _target_row(f"fallback {i}", next_)
                    for i, next_ in enumerate(answer.fallbacks, 1)
                ),
            ],
        )
    )
    for name, value in sorted(answer.headers.items()):
        out.print(f"send header {name}: {value}")
    for name, value in sorted(answer.body.items()):
        out.print(f"set in the body {name}: {value}")
    if answer.pinned:
        out.print("the session stays where it went last")
    if answer.last_resort:
        out.print("requests keep failing on every target: this is the least bad")
    out.print(f"report the outcome under decision id\n{answer.decision_id}", soft_wrap=True)


def _target_row(
    what: str, answer: routing_pb2.RouteResponse | routing_pb2.Fallback
) -> list[object]:
    p = answer.prediction
    return [
        what,
        answer.target.replica,
        answer.target.rank,
        answer.endpoint,
        p.predicted,
        p.lower,
        p.upper,
        p.prompt_tokens,
        f"{answer.estimated_ttft_s:.3f}",
    ]


@click.command()
@scheduler_options
@prompt_options
@format_option
def explain(scheduler: Scheduler, output: str, **asked: Any) -> None:
    """Show every candidate for a prompt, with what it holds and each term of its cost."""
    request = _request(**asked)
    with scheduler.channel() as channel:
        answer = RouterStub(channel).Explain(request, timeout=scheduler.timeout_s)
    if output == "json":
        print_json(answer)
        return
    names = sorted({term.name for c in answer.candidates for term in c.terms})
    rows = []
    for c in answer.candidates:
        terms = {term.name: term.seconds for term in c.terms}
        rows.append(
            [
                "=>" if c.chosen else "",
                c.target.replica,
                c.target.rank,
                _stream(c.stream_state),
                c.prediction.predicted,
                c.prediction.lower,
                c.prediction.upper,
                *(f"{terms[name]:.4f}" if name in terms else "" for name in names),
                f"{c.estimated_ttft_s:.4f}",
                f"{c.estimated_sd_s:.4f}",
                f"{c.others_s:.4f}",
                c.refused,
            ]
        )
    columns = ["", "replica", ">rank", "stream", ">predicted", ">lower", ">upper"]
    title = f"{request.model}: {answer.policy}, {_basis(answer.basis)}"
    columns += [*(f">{name} s" for name in names), ">TTFT s", ">±", ">others s", "refused"]
    console().print(table(title, columns, rows))


@click.command()
@schedulers_options
@click.option("--model", default="", help="Only this model.")
@click.option("--window", default=0.0, help="Seconds back from now; 0: all that is kept.")
@click.option("--by-replica", is_flag=True, help="Also one report per replica.")
@format_option
def reuse(
    schedulers: Sequence[Scheduler], model: str, window: float, by_replica: bool, output: str
) -> None:
    """Show predicted against reported reuse, with 95% intervals: one scheduler's, or the sum of several."""
    asked = fleet_pb2.GetReuseRequest(model=model, window_s=window, by_replica=by_replica)
    answers = []
    for scheduler in schedulers:
        with scheduler.channel() as channel:
            answers.append(FleetStub(channel).GetReuse(asked, timeout=scheduler.timeout_s))
    try:
        answer = answers[0] if len(answers) == 1 else added(answers)
    except NotAddable as error:
        raise exits.Exit(str(error), exits.REFUSED) from error
    if output == "json":
        print_json(answer)
        return
    if len(answers) > 1:
        instances = len({each.instance_id for each in answers})
        console().print(f"{instances} schedulers, added up")
    print_reuse(answer)


def print_reuse(answer: fleet_pb2.GetReuseResponse) -> None:
    """The figures of a GetReuse answer, as tables."""
    out = console()
    if not answer.reports:
        out.print("no decisions in this window")
    for report in answer.reports:
        rows = []
        for f in report.figures:
            known = f.HasField("value")
            interval = f"{share(f.low)} to {share(f.high)}" if f.HasField("low") else "<none>"
            value = share(f.value) if known else "<none>"
            counts = f"{f.numerator:.0f} / {f.denominator:.0f}"
            rows.append([f.name, value, interval, counts, f.pairs, f.definition])
        where = f", replica {report.replica}" if report.replica else ""
        title = f"{report.model}{where}: {report.sums.pairs} outcomes of {report.sums.decisions} decisions"
        columns = [
            "figure",
            ">value",
            "95% interval",
            ">ratio",
            ">pairs",
            "what is divided by what",
        ]
        out.print(table(title, columns, rows))
        for reason, count in sorted(report.set_aside.items()):
            out.print(f"  set aside: {reason} {count}")


@click.command()
@scheduler_options
@click.option("--model", default="", help="Only this model.")
@format_option
def replicas(scheduler: Scheduler, model: str, output: str) -> None:
    """List replicas and ranks: stream state, what they hold, load."""
    with scheduler.channel() as channel:
        answer = FleetStub(channel).ListReplicas(
            fleet_pb2.ListReplicasRequest(model=model), timeout=scheduler.timeout_s
        )
    if output == "json":
        print_json(answer)
        return
    rows = []
    for replica in answer.replicas:
        for rank in replica.ranks:
            held = ", ".join(
                f"{common_pb2.Tier.Name(lane.tier).removeprefix('TIER_').lower()} {lane.blocks}"
                for lane in rank.lanes
            )
            rows.append(
                [
                    replica.replica,
                    rank.rank,
                    replica.model,
                    f"{replica.engine} {replica.engine_version}".strip(),
                    _stream(rank.state),
                    held,
                    rank.credits,
                    rank.running_requests if rank.HasField("running_requests") else None,
                    rank.waiting_requests if rank.HasField("waiting_requests") else None,
                    rank.engine_seq if rank.HasField("engine_seq") else None,
                    "; ".join(filter(None, (*trouble(replica, rank), rank.reason))),
                ]
            )
    columns = ["replica", ">rank", "model", "engine", "stream", "blocks held", ">credits"]
    columns += [">running", ">waiting", ">engine seq", "reason"]
    warm = f"index {share(answer.warm)} warm" if answer.HasField("warm") else "no ranks known"
    console().print(table(warm, columns, rows))


def trouble(replica: fleet_pb2.Replica, rank: fleet_pb2.Rank) -> list[str]:
    """Why it gets no requests, whatever its stream is worth."""
    said = []
    if replica.draining_by:
        said.append(f"draining ({', '.join(replica.draining_by)})")
    if rank.broken_s:
        said.append(f"requests fail: none for {rank.broken_s:.0f} s")
    return said


BASES: Mapping[int, str] = {
    routing_pb2.BASIS_INDEX: "from live streams",
    routing_pb2.BASIS_INDEX_PARTIAL: "from streams that are in part unknown",
    routing_pb2.BASIS_NO_STREAMS: "no relay is connected: by load only",
}


def _basis(basis: int) -> str:
    return BASES.get(basis, "basis unknown")


def _stream(state: common_pb2.StreamState.ValueType) -> str:
    name = common_pb2.StreamState.Name(state).removeprefix("STREAM_STATE_").lower()
    return "none" if name == "unspecified" else name.replace("_", " ")
