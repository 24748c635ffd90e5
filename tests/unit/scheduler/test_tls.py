"""The scheduler behind TLS: who believes its certificate, and how it is replaced while it serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from servingfleet_protos.v1 import routing_pb2_grpc, stream_pb2, stream_pb2_grpc
from servingfleet_scheduler.server import serve
from servingfleet_scheduler.tls import BadCertificate, ServerCertificate
from tests.unit.relay.authorities import Authority

from .helpers import hello, route_request
from .test_server import PORTS, SETTINGS, failure

NAME = "demo-scheduler.llm.svc"


class Served:
    """A scheduler's certificate on disk, and its port."""

    def __init__(self, folder: Path) -> None:
        self.files = (folder / "tls.crt", folder / "tls.key")
        self.port = 0

    def install(self, authority: Authority, name: str = NAME) -> None:
        """A new certificate, with a new key."""
        for file, content in zip(self.files, authority.issued(name), strict=True):
            file.write_bytes(content)

    def channel(self, authority: Authority, name: str = NAME) -> grpc.aio.Channel:
        """Of a client that believes this authority, on a connection of its own."""
        return grpc.aio.secure_channel(
            f"127.0.0.1:{self.port}",
            grpc.ssl_channel_credentials(authority.pem),
            options=[
                ("grpc.ssl_target_name_override", name),
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )


@asynccontextmanager
async def served(folder: Path, authority: Authority) -> AsyncIterator[Served]:
    made = Served(folder)
    made.install(authority)
    async with serve(SETTINGS, replace(PORTS, tls_files=made.files)) as running:
        made.port = running.port
        yield made


async def reached(channel: grpc.aio.Channel) -> None:
    async with channel:
        await routing_pb2_grpc.RouterStub(channel).Route(route_request(), timeout=5)


async def not_reached(channel: grpc.aio.Channel) -> None:
    async with channel:
        router = routing_pb2_grpc.RouterStub(channel)
        error = await failure(router.Route(route_request(), timeout=5))
    assert error.code() == grpc.StatusCode.UNAVAILABLE


async def test_only_who_believes_its_authority_reaches_it(tmp_path: Path) -> None:
    authority = Authority("ca")
    async with served(tmp_path, authority) as scheduler:
        await reached(scheduler.channel(authority))
        await not_reached(scheduler.channel(Authority("ca")))
        await not_reached(scheduler.channel(authority, name="another.llm.svc"))
        await not_reached(grpc.aio.insecure_channel(f"127.0.0.1:{scheduler.port}"))


async def test_a_new_certificate_is_used_at_once_and_open_streams_outlive_the_old(
    tmp_path: Path,
) -> None:
    before, after = Authority("before"), Authority("after")
    async with served(tmp_path, before) as scheduler, scheduler.channel(before) as channel:
        call: Any = stream_pb2_grpc.RelayIntakeStub(channel).Stream()
        await call.write(stream_pb2.RelayMessage(hello=hello("r1")))
        assert (await call.read()).HasField("welcome")
        scheduler.install(after)
        await reached(scheduler.channel(after))
        await not_reached(scheduler.channel(before))
        await call.write(stream_pb2.RelayMessage(seq=1))
        async with asyncio.timeout(5):
            while not (await call.read()).HasField("ack"):
                pass


async def test_a_pair_that_does_not_match_is_not_taken_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    authority = Authority("ca")
    async with served(tmp_path, authority) as scheduler:
        cert_file, key_file = scheduler.files
        cert, key = authority.issued(NAME)
        cert_file.write_bytes(cert)  # as where the key is yet to come
        for _ in range(2):
            await reached(scheduler.channel(authority))
        key_file.write_bytes(key)
        for _ in range(2):
            await reached(scheduler.channel(authority))
        cert_file.unlink()
        await reached(scheduler.channel(authority))
    events = [record.getMessage() for record in caplog.records if "tls" in record.name]
    assert events == ["certificate not usable", "certificate replaced", "certificate not usable"]


@pytest.mark.parametrize("broken", ["missing", "noise", "another key"])
def test_without_a_certificate_it_does_not_start(tmp_path: Path, broken: str) -> None:
    authority = Authority("ca")
    cert, key = authority.issued(NAME)
    cert_file, key_file = tmp_path / "tls.crt", tmp_path / "tls.key"
    cert_file.write_bytes(b"noise" if broken == "noise" else cert)
    if broken != "missing":
        key_file.write_bytes(authority.issued(NAME)[1] if broken == "another key" else key)
    with pytest.raises(BadCertificate, match=r"tls\.crt with .*tls\.key: "):
        ServerCertificate(cert_file, key_file)
