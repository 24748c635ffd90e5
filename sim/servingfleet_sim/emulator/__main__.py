"""Starts an emulated engine: `python -m servingfleet_sim.emulator`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Literal

import click
import zmq
from aiohttp import web

from . import logs
from .engine import Engine
from .events import Form, HashForm, generation
from .groups import STATE, LayerGroup, layer_group
from .server import Server
from .settings import Settings
from .sglang_events import sglang_form
from .sglang_server import SglangServer
from .speed import GPUS
from .steps import Limits
from .trtllm_events import TrtllmForm
from .trtllm_server import TrtllmServer

log = logging.getLogger(__name__)

PORT = click.IntRange(0, 65535)
STOP_S = 0.05
"""How long a stop lets requests finish. Not 0, which would be for ever."""

NEWEST = {"vllm": "0.33.0", "sglang": "0.5.23", "trtllm": "1.2.1"}
SERVERS = {"vllm": Server, "sglang": SglangServer, "trtllm": TrtllmServer}

POSITIVE = click.IntRange(min=1)


@click.command(context_settings={"show_default": True})
@click.option("--host", default="127.0.0.1", help="Address to bind, for HTTP and events.")
@click.option("--port", type=PORT, default=8000, help="HTTP port; 0: a free one.")
@click.option("--events-port", type=PORT, default=5557, help="Of rank 0; 0: free ones.")
@click.option(
    "--events-connect",
    is_flag=True,
    help="Publish to a relay that binds the event ports on loopback; replay on loopback, too.",
)
@click.option("--replay-port", type=PORT, default=5657, help="Of rank 0; 0: free ones.")
@click.option("--no-replay", is_flag=True, help="Serve no replay.")
@click.option("--topic", default="kv-events", help="First frame of every message.")
@click.option("--buffer-steps", type=POSITIVE, default=10_000, help="Batches kept for replay.")
@click.option("--model", default="emulated", help="Name under which the model is served.")
@click.option("--adapter", "adapters", multiple=True, help="Name of a LoRA adapter; repeatable.")
@click.option("--ranks", type=POSITIVE, default=1, help="Data-parallel ranks.")
@click.option("--blocks", type=click.IntRange(min=2), default=1024, help="GPU blocks of a rank.")
@click.option("--block-size", type=POSITIVE, default=16, help="Tokens in a block.")
@click.option(
    "--layer-group",
    "layer_groups",
    multiple=True,
    metavar="KIND[:TOKENS]",
    help="vLLM, a group of the model's layers: full_attention, sliding_window:TOKENS, mamba; repeatable.",
)
@click.option("--host-blocks", type=click.IntRange(min=0), default=0, help="Of the host tier.")
@click.option("--host-chunk-blocks", type=POSITIVE, default=1, help="Blocks moved as one.")
@click.option("--host-described", is_flag=True, help="Host events hold tokens.")
@click.option("--max-model-len", type=click.IntRange(min=0), default=0, help="0: what fits.")
@click.option("--max-num-seqs", type=POSITIVE, default=256, help="Sequences in one step.")
@click.option("--max-step-tokens", type=POSITIVE, default=8192, help="Tokens of one step.")
@click.option("--vocabulary", type=click.IntRange(min=8), default=32_000, help="Token ids.")
@click.option("--gpu", type=click.Choice(sorted(GPUS)), default="h100", help="Whose speed.")
@click.option(
    "--speed", type=click.FloatRange(0, min_open=True), default=1.0, help="Times as fast as that."
)
@click.option(
    "--engine",
    type=click.Choice(["vllm", "sglang", "trtllm"]),
    default="vllm",
    help="Whose caches, events and API.",
)
@click.option("--engine-version", help="Its release, whose format events have.")
@click.option("--pairs", is_flag=True, help="SGLang with EAGLE: the cache is keyed by pairs.")
@click.option(
    "--hash-form",
    type=click.Choice([form.value for form in HashForm]),
    default=HashForm.INTEGER.value,
    help="How block hashes are published.",
)
@click.option("--hash-seed", help="The same gives the same hashes. By default every start differs.")
@click.option("--log", "truth", type=click.Path(path_type=Path), help="Append the truth here.")
@click.option("--log-tokens", is_flag=True, help="Stored blocks in it with their tokens.")
def main(
    host: str,
    port: int,
    events_port: int,
    events_connect: bool,
    replay_port: int,
    no_replay: bool,
    topic: str,
    buffer_steps: int,
    model: str,
    adapters: tuple[str, ...],
    ranks: int,
    blocks: int,
    block_size: int,
    layer_groups: tuple[str, ...],
    host_blocks: int,
    host_chunk_blocks: int,
    host_described: bool,
    max_model_len: int,
    max_num_seqs: int,
    max_step_tokens: int,
    vocabulary: int,
    gpu: str,
    speed: float,
    engine: Literal["vllm", "sglang", "trtllm"],
    engine_version: str | None,
    pairs: bool,
    hash_form: str,
    hash_seed: str | None,
    truth: Path | None,
    log_tokens: bool,
) -> None:
    """An engine without a GPU: its API, cache, events and timing, with made-up answers."""
    if host_blocks % host_chunk_blocks:
        raise click.UsageError(
            f"--host-blocks {host_blocks} is no multiple of --host-chunk-blocks {host_chunk_blocks}"
        )
    if engine == "trtllm" and host_blocks:
        raise click.UsageError("--engine trtllm has no host tier")
    if engine != "vllm" and (host_chunk_blocks > 1 or hash_form != HashForm.INTEGER.value):
        raise click.UsageError(f"--engine {engine} has neither chunks nor whole hashes")
    if layer_groups and engine != "vllm":
        raise click.UsageError("--layer-group is for --engine vllm")
    if STATE in layer_groups and host_blocks:
        raise click.UsageError(f"--layer-group {STATE} has no host tier")
    try:
        groups = tuple(map(layer_group, layer_groups)) or (LayerGroup(),)
    except ValueError as error:
        raise click.UsageError(f"--layer-group {error}") from error
    if pairs and engine != "sglang":
        raise click.UsageError("--pairs is for --engine sglang")
    engine_version = engine_version or NEWEST[engine]
    form: Form
    try:
        if engine == "sglang":
            form = sglang_form(engine_version)
        elif engine == "trtllm":
            form = TrtllmForm(blocks - 1, max_model_len or (blocks - 1) * block_size, ranks > 1)
        else:
            form = generation(engine_version, HashForm(hash_form))
    except ValueError as error:
        raise click.UsageError(f"--engine-version: {error}") from error
    settings = Settings(
        limits=Limits(
            blocks,
            block_size,
            max_num_seqs,
            max_step_tokens,
            max_model_len,
            host_blocks // host_chunk_blocks,
            host_chunk_blocks,
            host_described,
            groups,
        ),
        speed=GPUS[gpu].scaled(speed),
        ranks=ranks,
        model=model,
        adapters={name: number for number, name in enumerate(adapters, 1)},
        vocabulary=vocabulary,
        engine=engine,
        engine_version=engine_version,
        pairs=pairs,
        form=form,
        topic=topic,
        buffer_steps=buffer_steps,
        host=host,
        port=port,
        events_port=events_port,
        events_connect=events_connect,
        replay_port=None if no_replay else replay_port,
        log=truth,
        log_tokens=log_tokens,
    )
    logs.setup()
    seed = os.urandom(32) if hash_seed is None else hash_seed.encode()
    try:
        asyncio.run(_serve(settings, seed))
    except (OSError, zmq.ZMQError) as error:
        log.error("not started", extra={"reason": str(error)})
        sys.exit(1)


async def _serve(settings: Settings, seed: bytes) -> None:
    engine = Engine(settings, seed)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    opened = asyncio.Event()
    running = asyncio.create_task(engine.run(opened))
    stopping = asyncio.create_task(stopped.wait())
    opening = asyncio.create_task(opened.wait())
    runner: web.AppRunner | None = None
    try:
        await asyncio.wait({opening, running}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            # Requests end with their clients, and at a stop at once.
            runner = web.AppRunner(
                SERVERS[settings.engine](engine).app(),
                access_log=None,
                handler_cancellation=True,
                shutdown_timeout=STOP_S,
            )
            await runner.setup()
            site = web.TCPSite(runner, settings.host, settings.port)
            await site.start()
            log.info("listening", extra=_addresses(engine, runner))
            await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()  # raises what ended it
    finally:
        for task in (running, stopping, opening):
            task.cancel()
        await asyncio.gather(running, stopping, opening, return_exceptions=True)
        if runner is not None:
            await runner.cleanup()


def _addresses(engine: Engine, runner: web.AppRunner) -> dict[str, object]:
    published = engine.settings.engine != "trtllm"
    return {
        "http_port": runner.addresses[0][1],
        "events_port": engine.endpoints.events_port if published else 0,
        "replay_port": engine.endpoints.replay_port if published else 0,
        "ranks": engine.settings.ranks,
        "model": engine.settings.model,
        "engine": f"{engine.settings.engine} {engine.settings.engine_version}",
    }


if __name__ == "__main__":
    main()
