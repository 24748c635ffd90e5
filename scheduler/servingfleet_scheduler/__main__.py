"""`servingfleet-scheduler`: reads settings, serves until told to stop."""

from __future__ import annotations

import asyncio
import gc
import math
import re
import signal
from pathlib import Path

import click

from servingfleet_core.logs import configure

from .gate import NoApiServer
from .policy import POLICIES
from .policy.speeds import Speeds
from .pools import BadPools, read_pools
from .server import serve
from .settings import (
    AccessSettings,
    AdmissionSettings,
    AdmissionTarget,
    PeerSettings,
    SchedulerSettings,
    ServerSettings,
    StaticReplica,
)
from .tls import BadCertificate
from .tokens import MAX_ADDRESS_BYTES

DEFAULTS = SchedulerSettings()
PORTS = ServerSettings()
_TARGET = re.compile(
    r"(?P<priority>-?\d{1,10})=(?P<seconds>\d+(\.\d+)?)(/(?P<queue>\d+(\.\d+)?))?", re.ASCII
)
YOUNG_OBJECTS = 10_000
"""Between looks of the garbage collector. A route makes some for each rank: at Python's default of 700 these looks take a
fifth of its time with 256 ranks."""
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


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


class TargetParam(click.ParamType[AdmissionTarget]):
    """PRIORITY=SECONDS[/QUEUE_SECONDS]"""

    name = "PRIORITY=SECONDS[/QUEUE_SECONDS]"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> AdmissionTarget:
        if isinstance(value, AdmissionTarget):
            return value
        found = _TARGET.fullmatch(str(value))
        if found is None or not float(found["seconds"]):
            self.fail(f"{value!r}: expected {self.name}, more than 0 seconds", param, ctx)
        queue = found["queue"]
        return AdmissionTarget(
            int(found["priority"]),
            float(found["seconds"]),
            math.inf if queue is None else float(queue),
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
    "--learn/--no-learn",
    default=DEFAULTS.learn,
    help="Whether speeds and corrections are learned from outcomes.",
)
@click.option(
    "--quantile",
    default=DEFAULTS.quantile,
    type=click.FloatRange(0, 1),
    help="Where between lower and upper an uncertain reuse is priced; 0.5: as expected.",
)
@click.option(
    "--explore-share",
    default=DEFAULTS.explore_share,
    type=click.FloatRange(0, 1),
    help="Share of decisions that explore among the near ties.",
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
    "--target",
    "targets",
    multiple=True,
    type=TargetParam(),
    help="Time to first token promised to requests of this priority and above, up to the next target; they are turned "
    "away when it can't be kept, and not sent where more than QUEUE_SECONDS of work wait. May be given again.",
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
    type=FILE,
    help="Key of decision ids, shared by the schedulers of a fleet. Absent: a random one.",
)
@click.option(
    "--pools-file",
    type=FILE,
    help="JSON with the speeds of pools that differ from the defaults: see docs/scheduler.md.",
)
@click.option("--tls-cert-file", type=FILE, help="Certificate chain, PEM. Absent: plain text.")
@click.option(
    "--tls-key-file", type=FILE, help="Its key, PEM. Both are read again when they change."
)
@click.option(
    "--auth",
    default="none",
    type=click.Choice(["none", "kubernetes"]),
    help="Who asks callers for a token: nobody, or the API server. Needs --tls-cert-file.",
)
@click.option("--fleet", default="", help="Name of the fleet, for --auth kubernetes.")
@click.option("--namespace", default="", help="Its namespace: relays must be pods of it.")
@click.option(
    "--audience", default="", help="Audience of clients' tokens; of relays' the same with /relay."
)
@click.option(
    "--client-auth",
    default="token",
    type=click.Choice(["token", "none"]),
    help="Whether Route and Report need a token, with --auth kubernetes.",
)
@click.option(
    "--advertise",
    default="",
    help="host or host:port where the fleet's other schedulers reach this one. Absent: nowhere.",
)
@click.option(
    "--peer-ca-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Who signs the other schedulers' certificates, PEM. Absent: they speak plain text.",
)
@click.option("--scheduler-name", default="", help="Name in the other schedulers' certificates.")
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
    learn: bool,
    quantile: float,
    explore_share: float,
    snapshot_slots: int,
    static_replicas: tuple[StaticReplica, ...],
    min_pairs: int,
    max_prompt_tokens: int,
    targets: tuple[AdmissionTarget, ...],
    window_s: float,
    replica_ttl_s: float,
    token_key_file: Path | None,
    pools_file: Path | None,
    tls_cert_file: Path | None,
    tls_key_file: Path | None,
    auth: str,
    fleet: str,
    namespace: str,
    audience: str,
    client_auth: str,
    advertise: str,
    peer_ca_file: Path | None,
    scheduler_name: str,
    drain_s: float,
    log_level: str,
) -> None:
    """Routes prompts to the replica that already holds their prefix, and checks itself.

    Each option can also be set in the environment, as SERVINGFLEET_SCHEDULER_<OPTION>.
    """
    configure(log_level)
    if len({each.priority for each in targets}) < len(targets):
        raise click.UsageError("--target names a priority twice")
    settings = SchedulerSettings(
        block_tokens=block_tokens,
        policy=policy,
        learn=learn,
        quantile=quantile,
        explore_share=explore_share,
        snapshot_slots=snapshot_slots,
        static_replicas=static_replicas,
        min_pairs=min_pairs,
        max_prompt_tokens=max_prompt_tokens,
        admission=AdmissionSettings(targets),
        window_s=window_s,
        replica_ttl_s=replica_ttl_s,
        pools=_pools(pools_file),
    )
    tls_files = _pair(tls_cert_file, tls_key_file)
    access = None
    if auth == "kubernetes":
        access = AccessSettings(fleet, namespace, audience, client_tokens=client_auth == "token")
        _check_access(access, tls_files)
    if len(advertise) > MAX_ADDRESS_BYTES - len(":65535"):
        raise click.UsageError(f"--advertise has {len(advertise)} characters: too long for a host")
    if advertise and token_key_file is None:
        raise click.UsageError("--advertise needs --token-key-file: others can't read its ids else")
    if advertise and tls_files and peer_ca_file is None:
        raise click.UsageError("--advertise with TLS needs --peer-ca-file, to believe the others")
    ports = ServerSettings(
        listen=listen,
        http_host=http_host,
        http_port=http_port,
        drain_s=drain_s,
        token_key=_token_key(token_key_file),
        tls_files=tls_files,
        access=access,
        advertise=advertise,
        peers=PeerSettings(peer_ca_file, scheduler_name),
    )
    try:
        gc.set_threshold(YOUNG_OBJECTS)
        asyncio.run(_run(settings, ports))
    except (OSError, BadCertificate, NoApiServer) as error:
        raise click.ClickException(str(error)) from error


def _pair(cert_file: Path | None, key_file: Path | None) -> tuple[Path, Path] | None:
    if cert_file is not None and key_file is not None:
        return cert_file, key_file
    if cert_file is not None or key_file is not None:
        raise click.UsageError("--tls-cert-file and --tls-key-file go together")
    return None


def _check_access(access: AccessSettings, tls_files: tuple[Path, Path] | None) -> None:
    for option, value in (
        ("--fleet", access.fleet),
        ("--namespace", access.namespace),
        ("--audience", access.audience),
    ):
        if not value:
            raise click.UsageError(f"--auth kubernetes needs {option}")
    if tls_files is None:
        raise click.UsageError(
            "--auth kubernetes needs --tls-cert-file and --tls-key-file: "
            "on a plain connection anybody could read the tokens"
        )


def _pools(path: Path | None) -> dict[str, Speeds]:
    if path is None:
        return {}
    try:
        return read_pools(path.read_bytes())
    except BadPools as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="--pools-file") from error


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
