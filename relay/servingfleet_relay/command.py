"""The relay process: reads its options, puts the parts together, runs them until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import signal
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import click
import zmq
import zmq.asyncio

from . import heartbeat, logs
from .adapters.registry import ADAPTERS, AUTO
from .load import EngineHttp, learn_model, watch_engine
from .metrics import RelayCollector, serve
from .options import (
    BadOption,
    check_events,
    check_identity,
    check_memory,
    checked,
    host_port,
    labels,
    layer_groups,
    rank_sockets,
    targets,
)
from .pipeline import Pipeline, Status
from .pull import Puller
from .settings import PipelineSettings, RelaySettings, messages_within, units_within
from .stream import Links
from .tap import Replays, Tap

log = logging.getLogger("servingfleet_relay")


class _Stopped(Exception):
    """A signal asked the process to end."""


@click.command(context_settings={"auto_envvar_prefix": "SERVINGFLEET_RELAY", "show_default": True})
@click.option("--replica", required=True, help="Pod uid, or an id of your own.")
@click.option(
    "--model", default="", help="Model as clients name it. Empty: asked from --engine-http."
)
@click.option(
    "--engine-events",
    multiple=True,
    help="Event socket of rank 0, tcp://host:port (rank r: port + r); or once for each rank.",
)
@click.option("--engine-replay", multiple=True, help="Replay socket likewise. None: no replay.")
@click.option(
    "--pull",
    is_flag=True,
    help="No event sockets: pull the events from --engine-http (TensorRT-LLM). One reader only.",
)
@click.option("--engine-bind", is_flag=True, help="Bind the event socket: the engine connects.")
@click.option(
    "--engine",
    default="auto",
    type=click.Choice([*ADAPTERS, AUTO]),
    help="auto: what --engine-http says that it is.",
)
@click.option("--hybrid", is_flag=True, help="The model has window or recurrent layers (SGLang).")
@click.option("--extra-keys", is_flag=True, help="Requests use SGLang's extra_key.")
@click.option(
    "--shared-store",
    default="",
    help="Name of the store behind the engine's connector (Mooncake, LMCache) that others load from, too.",
)
@click.option(
    "--less-units",
    default=0,
    type=click.IntRange(0, 16),
    help="Blocks that the engine computes again at the end of a match: 1 where vLLM drafts with EAGLE.",
)
@click.option(
    "--canary",
    is_flag=True,
    help="Send each life of the engine a prompt of our own, twice, and hold its events to it.",
)
@click.option("--ranks", default=1, type=click.IntRange(1, 1024), help="Number of ranks.")
@click.option("--first-rank", default=0, type=click.IntRange(0, 65_000), help="Rank of the first.")
@click.option("--engine-http", default="", help="Base address of the engine's HTTP server.")
@click.option("--scheduler", multiple=True, required=True, help="host:port of the schedulers.")
@click.option(
    "--scheduler-ca-file",
    type=click.Path(path_type=Path),
    help="PEM certificates of who vouches for schedulers; read at each dial. None: plain text.",
)
@click.option(
    "--scheduler-name",
    default="",
    help="Name in the schedulers' certificates. Empty: the address that is dialled.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="Token that proves which replica this is; read at each dial, and sent on when it changes.",
)
@click.option("--endpoint", default="", help="host:port where clients reach the engine.")
@click.option("--label", multiple=True, help="key=value, for people and constraints.")
@click.option("--block-tokens", default=16, type=click.IntRange(1, 65_536), help="Canonical block.")
@click.option("--engine-block-tokens", default=0, type=click.IntRange(0), help="0: learned.")
@click.option("--host-unit-tokens", default=0, type=click.IntRange(0), help="CPU offload chunk.")
@click.option(
    "--layer-group",
    multiple=True,
    help="KIND:BLOCK or KIND:BLOCK:WINDOW in tokens, once for each group, in the engine's order. None: learned.",
)
@click.option("--metrics-port", default=-1, type=int, help="-1: none, 0: any.")
@click.option("--metrics-host", default="0.0.0.0")
@click.option("--log-level", default="info", type=click.Choice(logs.LEVELS))
@click.option(
    "--supervise",
    is_flag=True,
    help="Run the relay as a child that is started again whenever it ends; end on a signal only.",
)
@click.option(
    "--worker-memory-mib",
    default=0,
    type=click.IntRange(0),
    help="With --supervise: data of the child at most, some 32 MiB below the container's. 0: no limit.",
)
@click.option("--heartbeat-fd", type=int, hidden=True)  # the supervisor's own word to its child
def main(
    replica: str,
    model: str,
    engine_events: tuple[str, ...],
    engine_replay: tuple[str, ...],
    pull: bool,
    engine_bind: bool,
    engine: str,
    hybrid: bool,
    extra_keys: bool,
    shared_store: str,
    less_units: int,
    canary: bool,
    ranks: int,
    first_rank: int,
    engine_http: str,
    scheduler: tuple[str, ...],
    endpoint: str,
    label: tuple[str, ...],
    block_tokens: int,
    engine_block_tokens: int,
    host_unit_tokens: int,
    layer_group: tuple[str, ...],
    metrics_port: int,
    metrics_host: str,
    log_level: str,
    scheduler_ca_file: Path | None,
    scheduler_name: str,
    token_file: Path | None,
    supervise: bool,
    worker_memory_mib: int,
    heartbeat_fd: int | None,
) -> None:
    """Mirrors one engine's cache to every scheduler."""
    logs.configure(log_level)
    if heartbeat_fd is not None:
        heartbeat.prepare()
    try:
        check_identity(scheduler_ca_file, scheduler_name, token_file)
        check_memory(worker_memory_mib, supervise=supervise)
        numbers = tuple(range(first_rank, first_rank + ranks))
        check_events(engine_events, engine_http, pull=pull, unit=engine_block_tokens)
        sockets = (
            () if pull else rank_sockets(numbers, engine_events, engine_replay, bind=engine_bind)
        )
        if not model and not engine_http:
            raise BadOption("neither --model nor --engine-http is given: the model is unknown")
        settings = RelaySettings(
            sockets=sockets,
            schedulers=targets(scheduler),
            engine_http=engine_http or None,
            canary=canary,
            metrics_port=None if metrics_port < 0 else metrics_port,
            metrics_host=metrics_host,
            scheduler_ca_file=scheduler_ca_file,
            scheduler_name=scheduler_name,
            token_file=token_file,
            heartbeat_fd=heartbeat_fd,
            receive_high_water_messages=messages_within(worker_memory_mib, ranks),
        )
        pipeline_settings = PipelineSettings(
            replica=checked("--replica", replica, 253),
            model=checked("--model", model, 512),
            ranks=numbers,
            stream_id=uuid.uuid4().hex,
            engine=engine,
            hybrid=hybrid,
            extra_keys=extra_keys,
            shared_store=checked("--shared-store", shared_store, 256),
            less_units=less_units,
            endpoint=host_port("--endpoint", endpoint),
            labels=labels(label),
            block_tokens=block_tokens,
            engine_block_tokens=engine_block_tokens,
            host_unit_tokens=host_unit_tokens,
            layer_groups=layer_groups(layer_group),
            replay=bool(engine_replay),
            pull=pull,
            max_units=units_within(worker_memory_mib, ranks),
        )
        if canary and not engine_http:
            raise BadOption("--canary is given and --engine-http is not: nowhere to send it")
        if engine == AUTO and not engine_http:
            raise BadOption(
                f"--engine is {AUTO} and --engine-http is not given: name the engine, "
                f"one of {', '.join(ADAPTERS)}"
            )
    except BadOption as error:
        raise click.UsageError(str(error)) from error
    with asyncio.Runner() as runner:
        status = runner.run(run(settings, pipeline_settings))
        # Not by way of the runner's end, which waits for a name look-up as long as its resolver does.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)


async def run(settings: RelaySettings, pipeline_settings: PipelineSettings) -> int:
    """Runs until a signal. Returns the exit status."""
    engine = EngineHttp(settings.engine_http, settings) if settings.engine_http else None
    context = zmq.asyncio.Context()
    status = 0
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_until_signal(), name="signals")
            if settings.heartbeat_fd is not None:
                beats = heartbeat.beat(settings.heartbeat_fd, settings.heartbeat_interval_s)
                group.create_task(beats, name="heartbeat")
            await _relay(group, context, engine, settings, pipeline_settings)
    except* _Stopped:
        log.info("relay ended", extra={"replica": pipeline_settings.replica})
    except* (zmq.ZMQError, OSError) as errors:
        # An address that can't be used: nothing works until someone corrects it.
        for error in errors.exceptions:
            log.error("relay can't run", extra={"error": str(error)})
        status = 2
    except* MemoryError:
        log.error("relay out of memory", extra={"replica": pipeline_settings.replica})
        status = 1
    except* Exception:
        log.exception("relay failed")
        status = 1
    finally:
        context.destroy(linger=0)
        if engine is not None:
            await engine.close()
    return status


async def _relay(
    group: asyncio.TaskGroup,
    context: zmq.asyncio.Context,
    engine: EngineHttp | None,
    settings: RelaySettings,
    pipeline_settings: PipelineSettings,
) -> None:

    if engine is not None and not pipeline_settings.model:
        pipeline_settings = replace(pipeline_settings, model=await learn_model(engine, settings))
    pipeline = Pipeline(pipeline_settings, time.monotonic())
    collector = RelayCollector()
    links = Links(settings, pipeline, random.Random(secrets.randbits(64)))
    replays = Replays(context, settings, pipeline, group)

    def on_output() -> None:
        replays.start_wanted()
        links.wake()

    pipeline.on_output = on_output
    port = None
    if settings.metrics_port is not None:
        port = serve(collector, settings.metrics_host, settings.metrics_port)
    log.info(
        "relay started",
        extra={
            "replica": pipeline_settings.replica,
            "model": pipeline_settings.model,
            "ranks": len(pipeline_settings.ranks),
            "metrics_port": port,
        },
    )
    for sockets in settings.sockets:
        group.create_task(
            Tap(context, sockets, settings, pipeline).run(), name=f"tap of rank {sockets.rank}"
        )
    group.create_task(links.run(), name="links")
    group.create_task(_tick(settings, pipeline, collector), name="ticks")
    if engine is not None:
        if pipeline_settings.pull:
            group.create_task(Puller(engine, settings, pipeline).run(), name="event puller")

        def failed() -> None:
            collector.scrapes_failed += 1

        rng = random.Random(secrets.randbits(64)) if settings.canary else None
        group.create_task(
            watch_engine(engine, settings, pipeline, failed, rng=rng), name="engine http"
        )


async def _tick(settings: RelaySettings, pipeline: Pipeline, collector: RelayCollector) -> None:
    counted = -settings.status_interval_s
    told: dict[int, tuple[str, ...]] = {}
    while True:
        now = time.monotonic()
        pipeline.tick(now, time.time())
        if now - counted >= settings.status_interval_s:
            counted = now
            collector.status = pipeline.status()
            _tell_conditions(collector.status, told, pipeline.settings.replica)
        await asyncio.sleep(settings.tick_s)


def _tell_conditions(status: Status, told: dict[int, tuple[str, ...]], replica: str) -> None:
    """Logs what each stream is good for, when that has changed."""
    for rank in status.ranks:
        tiers = [f"{name} {condition}: {why}" for name, (condition, why) in rank.tiers.items()]
        now = (rank.condition, rank.reason if rank.condition != "live" else "", *tiers)
        if told.get(rank.rank) != now:
            told[rank.rank] = now
            level = logging.INFO if rank.condition in ("live", "resyncing") else logging.WARNING
            fields = {"replica": replica, "rank": rank.rank, "condition": rank.condition}
            log.log(level, "stream condition", extra={**fields, "reason": now[1], "tiers": tiers})


async def _until_signal() -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    raise _Stopped


if __name__ == "__main__":
    main(prog_name="servingfleet-relay")
