"""How the relay proves itself and whom it believes, against gRPC servers with real certificates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from servingfleet_relay.settings import RelaySettings
from tests.unit.relay.authorities import Authority
from tests.unit.relay.intake import PATIENCE_S, Scheduler, impatient, linked, proven, publish

NAME = "f-scheduler.n.svc"


class Mounted:
    """The two files as a kubelet mounts them: replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        self.ca = folder / "ca.crt"
        self.token = folder / "token"

    def write(self, file: Path, content: bytes) -> None:
        fresh = file.with_suffix(".new")
        fresh.write_bytes(content)
        fresh.replace(file)

    def settings(self, *ports: int, name: str = NAME) -> RelaySettings:
        return replace(
            impatient([f"127.0.0.1:{port}" for port in ports]),
            scheduler_ca_file=self.ca,
            scheduler_name=name,
            token_file=self.token,
        )


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path)


Serve = Callable[..., Awaitable[tuple[Scheduler, int]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts schedulers, each on a port of its own, and stops them all."""
    started = []

    async def start(
        credentials: grpc.ServerCredentials | None = None, instance: str = "i", port: int = 0
    ) -> tuple[Scheduler, int]:
        scheduler = Scheduler(instance)
        started.append(scheduler)
        return scheduler, await scheduler.start(port, credentials)

    yield start
    for scheduler in started:
        await scheduler.stop()


async def logged(caplog: pytest.LogCaptureFixture, event: str) -> dict[str, Any]:
    """Waits for the first record of an event; its fields."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for record in caplog.records:
                if record.getMessage() == event:
                    return vars(record)
            await asyncio.sleep(0.01)


def count(caplog: pytest.LogCaptureFixture, event: str) -> int:
    return sum(record.getMessage() == event for record in caplog.records)


async def test_a_scheduler_is_dialled_by_its_name_and_shown_the_token(
    mounted: Mounted, serve: Serve
) -> None:
    authority = Authority("a")
    scheduler, port = await serve(authority.server(NAME))
    mounted.write(mounted.ca, authority.pem)
    mounted.write(mounted.token, b"one\n")
    async with linked(proven(), mounted.settings(port)):
        assert await scheduler.opened() == "Bearer one"
        await scheduler.until("snapshot_end")


@pytest.mark.parametrize("other", ["another authority", "another name"])
async def test_a_scheduler_that_can_not_prove_itself_hears_nothing(
    mounted: Mounted, serve: Serve, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority("a")
    signer = Authority("b") if other == "another authority" else authority
    scheduler, port = await serve(signer.server(NAME))
    mounted.write(mounted.ca, authority.pem)
    mounted.write(mounted.token, b"one")
    name = "x.n.svc" if other == "another name" else NAME
    async with linked(proven(), mounted.settings(port, name=name)):
        record = await logged(caplog, "scheduler away")
    expected = {"another authority": "CERTIFICATE_VERIFY_FAILED", "another name": "Hostname"}
    assert expected[other] in record["error"]
    assert scheduler.proofs.empty()


async def test_a_renewed_token_is_sent_over_the_open_stream_and_only_then(
    mounted: Mounted, serve: Serve
) -> None:
    authority = Authority("a")
    served = [await serve(authority.server(NAME), name) for name in ("one", "two")]
    schedulers = [scheduler for scheduler, _ in served]
    mounted.write(mounted.ca, authority.pem)
    mounted.write(mounted.token, b"one")
    pipeline = proven()
    async with linked(pipeline, mounted.settings(*(port for _, port in served))):
        for scheduler in schedulers:
            await scheduler.until("snapshot_end")
        mounted.write(mounted.token, b"two")
        for scheduler in schedulers:
            message = await scheduler.until("credential")
            assert (message.seq, message.credential.token) == (0, "two")
        publish(pipeline, 0)
        for scheduler in schedulers:
            # One proof for each stream, and one renewal: nothing was dialled anew, nothing sent twice.
            seen = ""
            while seen != "rank_state":
                seen = str((await scheduler.told.get()).WhichOneof("body"))
                assert seen != "credential"
            assert [await scheduler.opened(), scheduler.proofs.empty()] == ["Bearer one", True]


async def test_a_new_authority_is_believed_at_the_next_dial_and_ends_no_open_stream(
    mounted: Mounted,
    serve: Serve,
) -> None:
    old, new = Authority("old"), Authority("new")
    first, port = await serve(old.server(NAME), "first")
    other, other_port = await serve(new.server(NAME), "other")
    mounted.write(mounted.ca, old.pem)
    mounted.write(mounted.token, b"one")
    pipeline = proven()
    async with linked(pipeline, mounted.settings(port, other_port)):
        await first.until("snapshot_end")
        assert other.proofs.empty()
        mounted.write(mounted.ca, new.pem)
        await other.until("snapshot_end")
        publish(pipeline, 0)
        await first.until("delta")
        assert first.proofs.qsize() == 1
        await first.stop()
        second, _ = await serve(new.server(NAME), "second", port)
        await second.until("snapshot_end")


def nothing(path: Path) -> None:
    path.unlink(missing_ok=True)


def empty(path: Path) -> None:
    path.write_bytes(b"\n")


def nonsense(path: Path) -> None:
    path.write_bytes(b"\x00two words")


def endless(path: Path) -> None:
    path.write_bytes(b"x" * 2**21)


def a_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


@pytest.mark.parametrize("spoil", [nothing, empty, nonsense, endless, a_folder])
@pytest.mark.parametrize("which", ["ca", "token"])
async def test_a_file_that_can_not_be_used_is_told_once_and_waited_for(
    mounted: Mounted,
    serve: Serve,
    which: str,
    spoil: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    authority = Authority("a")
    served = [await serve(authority.server(NAME), name) for name in ("one", "two")]
    good = {"ca": authority.pem, "token": b"one"}
    for name, content in good.items():
        mounted.write(getattr(mounted, name), content)
    spoiled = getattr(mounted, which)
    spoil(spoiled)
    async with linked(proven(), mounted.settings(*(port for _, port in served))):
        record = await logged(caplog, "file not usable, schedulers wait for it")
        assert record["file"] == str(spoiled)
        if spoiled.is_dir():
            spoiled.rmdir()
        mounted.write(spoiled, good[which])
        for scheduler, _ in served:
            await scheduler.until("snapshot_end")
    assert count(caplog, "file not usable, schedulers wait for it") == 1
    assert count(caplog, "scheduler away") == 0


async def test_a_token_that_vanishes_does_not_end_an_open_stream(
    mounted: Mounted, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority("a")
    scheduler, port = await serve(authority.server(NAME))
    mounted.write(mounted.ca, authority.pem)
    mounted.write(mounted.token, b"one")
    async with linked(proven(), mounted.settings(port)):
        await scheduler.until("snapshot_end")
        mounted.token.unlink()
        await logged(caplog, "file not usable, schedulers wait for it")
        mounted.write(mounted.token, b"two")
        assert (await scheduler.until("credential")).credential.token == "two"
        assert scheduler.proofs.qsize() == 1


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, "--token-file"),
        (grpc.StatusCode.PERMISSION_DENIED, "--replica"),
    ],
)
async def test_a_refusal_is_told_once_with_what_to_do_and_tried_again(
    mounted: Mounted,
    serve: Serve,
    code: grpc.StatusCode,
    advice: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    authority = Authority("a")
    scheduler, port = await serve(authority.server(NAME))
    scheduler.refusal = (code, "not you")
    mounted.write(mounted.ca, authority.pem)
    mounted.write(mounted.token, b"secret-token")
    async with linked(proven(), mounted.settings(port)):
        record = await logged(caplog, "scheduler refuses")
        assert record["error"] == f"{code.name}: not you"
        assert advice in record["do"]
        for _ in range(3):
            await scheduler.opened()
        assert count(caplog, "scheduler refuses") == 1
        scheduler.refusal = None
        await scheduler.until("snapshot_end")
    assert "secret-token" not in caplog.text


async def test_without_an_authority_no_token_is_shown(mounted: Mounted, serve: Serve) -> None:
    mounted.write(mounted.token, b"one")
    scheduler, port = await serve()
    settings = replace(mounted.settings(port), scheduler_ca_file=None)
    async with linked(proven(), settings):
        assert await scheduler.opened() == ""
        await scheduler.until("snapshot_end")
