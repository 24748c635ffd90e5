"""`servingfleet check-stream`: a recorded or live stream through the relay's decoder."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import click
import zmq

from servingfleet_relay.adapters.registry import ADAPTERS
from servingfleet_sim.checking import StreamReport, check
from servingfleet_sim.recordings import Message, RecordingError, adapter_of, read_events

from . import exits
from .output import console, format_option, print_json, table

MAX_MESSAGE_BYTES = 8 * 1024 * 1024


@click.command("check-stream", epilog=exits.HELP)
@click.argument("source", metavar="DIR|tcp://HOST:PORT")
@click.option(
    "--engine",
    type=click.Choice(list(ADAPTERS)),
    default=None,
    help="How to read the events; default: as the recording says, else vllm.",
)
@click.option("--block-tokens", default=16, show_default=True, help="The fleet's canonical block.")
@click.option(
    "--host-unit-tokens", default=0, help="Chunk of the engine's CPU offload; 0: as its blocks."
)
@click.option("--ranks", default=1, show_default=True, help="Live: ranks, on consecutive ports.")
@click.option("--seconds", default=10.0, show_default=True, help="Live: how long to listen.")
@click.option("--messages", default=10_000, show_default=True, help="Live: messages at most.")
@format_option
def check_stream(
    source: str,
    engine: str | None,
    block_tokens: int,
    host_unit_tokens: int,
    ranks: int,
    seconds: float,
    messages: int,
    output: str,
) -> None:
    """Say what an engine's event stream is, what would be indexed, and what is wrong with it.

    The source is a folder of a recorded stream (docs/recordings.md), or the endpoint where a live
    engine publishes. Ends with 1 if anything was dropped or odd, or if nothing was received.
    """
    try:
        if source.startswith("tcp://"):
            heard: Iterable[Message] = listen(source, ranks, seconds, messages)
        else:
            heard, ranks = read_events(Path(source))
            engine = engine or adapter_of(Path(source))
        report = check(heard, ranks, block_tokens, host_unit_tokens, engine or "vllm")
    except (RecordingError, OSError, ValueError) as error:
        raise exits.Exit(str(error), exits.USAGE) from error
    if output == "json":
        print_json({**asdict(report), "sound": report.sound})
    else:
        _print(source, report)
    if not (report.sound and report.messages):
        raise SystemExit(exits.NO)


def listen(endpoint: str, ranks: int, seconds: float, limit: int) -> Iterator[Message]:
    """Messages of a live engine: rank r at the endpoint's port + r. Raises ValueError."""
    host, _, port = endpoint.rpartition(":")
    if not port.isdigit():
        raise ValueError(f"{endpoint}: no port; expected tcp://host:port")
    poller = zmq.Poller()
    ranks_of: dict[zmq.Socket[bytes], int] = {}
    with zmq.Context() as context:
        for rank in range(ranks):
            socket = context.socket(zmq.SUB)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.subscribe(b"")
            socket.connect(f"{host}:{int(port) + rank}")
            poller.register(socket, zmq.POLLIN)
            ranks_of[socket] = rank
        try:
            yield from islice(_received(poller, ranks_of, time.monotonic() + seconds), limit)
        finally:
            for socket in ranks_of:
                socket.close()


def _received(
    poller: zmq.Poller, ranks_of: dict[zmq.Socket[bytes], int], end: float
) -> Iterator[Message]:
    while (left := end - time.monotonic()) > 0:
        for socket, _ in poller.poll(int(left * 1000) + 1):
            yield Message(time.time(), ranks_of[socket], tuple(socket.recv_multipart()))


def _print(source: str, report: StreamReport) -> None:
    out = console()
    if not report.messages:
        out.print(f"{source}: nothing received. Are events switched on, and was there traffic?")
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.kinds.items()))
    out.print(f"{source}: {report.messages} messages: {kinds}")
    rows = []
    for rank in report.ranks:
        traits = "; ".join(f"{name}: {value}" for name, value in rank.traits.items())
        rows.append([rank.rank, rank.state.replace("_", " "), rank.reason, traits])
    out.print(table("ranks", [">rank", "stream", "reason", "how the engine writes"], rows))
    out.print("indexed: " + ("; ".join(report.lanes) or "nothing"))
    for name, count in report.troubles.items():
        out.print(f"trouble: {name} {count}")
    for example in report.examples:
        out.print(f"  {example}", soft_wrap=True)
    out.print("sound" if report.sound else "NOT SOUND")
