"""`servingfleet-scheduler`: reads settings, serves until told to stop."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import click

from .logs import configure
from .policy import POLICIES
from .server import serve
from .settings import SchedulerSettings, ServerSettings, StaticReplica

DEFAULTS = SchedulerSettings()
PORTS = ServerSettings()


class StaticReplicaParam(click.ParamType[StaticReplica]):
    """model=...,replica=...[,endpoint=host:port][,ranks=N]"""

    name = "model=M,replica=R[,endpoint=H:P][,ranks=N]"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> StaticReplica:
        if isinstance(value, StaticReplica):
            return value
        fields = dict(part.partition("=")[::2] for part in str(value).split(","))
        unknown = set(fields) - {"model", "replica", "endpoint", "ranks"}
        if unknown or not fields.get("model") or not fields.get("replica"):
            self.fail(f"{value!r}: expected {self.name}", param, ctx)
        ranks = fields.get("ranks", "1")
        if not ranks.isdecimal() or not 1 <= int(ranks) <= DEFAULTS.max_ranks:
            self.fail(f"ranks={ranks}: expected 1 to {DEFAULTS.max_ranks}", param, ctx)
        return StaticReplica(
            fields["model"], fields["replica"], fields.get("endpoint", ""), int(ranks)
        )


@click.command(
    context_settings={
        "auto_envvar_prefix": "SERVINGFLEET_SCHEDULER",
        "help_option_names": ["-h", "--help"],
        "show_default": True,
    }
)
@click.option("--listen", default=PORTS.listen, help="gRPC address, host:port; port 0: any free.")
@click.option("--http-host", default=PORTS.http_host, help="Address of /metrics and /readyz.")
@click.option("--http-port", default=PORTS.http_port, help="0: any free port.")
@click.option(
    "--block-tokens",
    default=DEFAULTS.block_tokens,
    type=click.IntRange(1, 65_536),
    help="Canonical block size; the same in every relay.",
)
@click.option(
    "--policy", default=DEFAULTS.policy, type=click.Choice(sorted(POLICIES)), help="Who is chosen."
)
@click.option(
    "--snapshot-slots",
    default=DEFAULTS.snapshot_slots,
    type=click.IntRange(min=1),
    help="Relays that may send snapshots at once.",
)
@click.option(
    "--static-replica",
    "static_replicas",
    multiple=True,
    type=StaticReplicaParam(),
    help="A replica known without a relay; may be given again. In the environment: separated by spaces.",
)
@click.option(
    "--min-pairs",
    default=DEFAULTS.min_pairs,
    type=click.IntRange(min=1),
    help="A figure from fewer pairs is shown as unknown.",
)
@click.option(
    "--max-prompt-tokens",
    default=DEFAULTS.max_prompt_tokens,
    type=click.IntRange(min=1),
    help="Longer prompts are refused.",
)
@click.option(
    "--window-s",
    default=DEFAULTS.window_s,
    type=click.FloatRange(min=60),
    help="Seconds that the figures span.",
)
@click.option(
    "--replica-ttl-s",
    default=DEFAULTS.replica_ttl_s,
    type=click.FloatRange(min=0),
    help="Seconds after which a replica without its relay is forgotten.",
)
@click.option(
    "--token-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Key of decision ids, shared by the schedulers of a fleet. Absent: a random one.",
)
@click.option(
    "--drain-s", default=PORTS.drain_s, help="Seconds that calls get to end after SIGTERM."
)
@click.option(
    "--log-level",
    default="info",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Least level logged, as JSON on standard error.",
)
@click.version_option(package_name="servingfleet")
def main(
    listen: str,
    http_host: str,
    http_port: int,
    block_tokens: int,
    policy: str,
    snapshot_slots: int,
    static_replicas: tuple[StaticReplica, ...],
    min_pairs: int,
    max_prompt_tokens: int,
    window_s: float,
    replica_ttl_s: float,
    token_key_file: Path | None,
    drain_s: float,
    log_level: str,
) -> None:
    """Routes prompts to the replica that already holds their prefix, and checks itself.

    Each option can also be set in the environment, as SERVINGFLEET_SCHEDULER_<OPTION>.
    """
    configure(log_level)
    settings = SchedulerSettings(
        block_tokens=block_tokens,
        policy=policy,
        snapshot_slots=snapshot_slots,
        static_replicas=static_replicas,
        min_pairs=min_pairs,
        max_prompt_tokens=max_prompt_tokens,
        window_s=window_s,
        replica_ttl_s=replica_ttl_s,
    )
    ports = ServerSettings(
        listen=listen,
        http_host=http_host,
        http_port=http_port,
        drain_s=drain_s,
        token_key=_token_key(token_key_file),
    )
    try:
        asyncio.run(_run(settings, ports))
    except OSError as error:
        raise click.ClickException(str(error)) from error


def _token_key(path: Path | None) -> bytes:
    if path is None:
        return b""
    key = path.read_bytes().strip()
    if len(key) < 16:
        raise click.BadParameter(f"{path} holds {len(key)} bytes; at least 16 are needed")
    return key


async def _run(settings: SchedulerSettings, ports: ServerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serve(settings, ports):
        await stop.wait()


if __name__ == "__main__":
    main()
