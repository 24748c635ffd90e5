"""A scheduler process behind TLS that asks its callers for a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from servingfleet_protos.v1.fleet_pb2_grpc import FleetStub
from servingfleet_protos.v1.routing_pb2_grpc import RouterStub
from tests.integration.fleet import Fleet, Scheduler
from tests.unit.relay.authorities import Authority

NAME = "demo-scheduler.llm.svc"
"""In its certificate."""
AUDIENCE = "servingfleet.dev/llm/demo"
RELAY_AUDIENCE = f"{AUDIENCE}/relay"


def install(folder: Path, certificate: bytes, key: bytes, trusted: bytes) -> None:
    """The files of a scheduler's Secret."""
    folder.mkdir()
    for name, content in (("tls.crt", certificate), ("tls.key", key), ("ca.crt", trusted)):
        (folder / name).write_bytes(content)


async def secured(
    fleet: Fleet, folder: Path, arguments: list[str], authority: Authority, *, trusted: Authority
) -> Scheduler:
    """A scheduler whose certificate is of `authority`, and that believes `trusted` of others."""
    install(folder, *authority.issued(NAME), trusted.pem)
    process = await fleet.process(
        "servingfleet_scheduler",
        *(*arguments, "--listen", "127.0.0.1:0", "--http-port", "0", "--log-level", "debug"),
        *("--tls-cert-file", str(folder / "tls.crt"), "--tls-key-file", str(folder / "tls.key")),
        *("--peer-ca-file", str(folder / "ca.crt"), "--scheduler-name", NAME),
        *("--auth", "kubernetes", "--fleet", "demo", "--namespace", "llm"),
        *("--audience", AUDIENCE),
        log=folder / "scheduler.log",
    )
    target = f"127.0.0.1:{(await process.event('listening'))['port']}"
    options: list[tuple[str, Any]] = [("grpc.ssl_target_name_override", NAME)]
    credentials = grpc.ssl_channel_credentials(authority.pem)
    channel = await fleet.stack.enter_async_context(
        grpc.aio.secure_channel(target, credentials, options=options)
    )
    return Scheduler(process, target, RouterStub(channel), FleetStub(channel))
