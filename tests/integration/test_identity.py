"""A real relay proves its pod to a real scheduler, over TLS and with a token that is renewed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from servingfleet_scheduler.access import POD_UID
from servingfleet_sim.playing import relay_arguments
from servingfleet_sim.processes import Process
from servingfleet_sim.wire import RecordedEngine
from tests.apiserver import ApiServer
from tests.integration.fleet import PATIENCE_S, Fleet, Scheduler
from tests.integration.secured import NAME, RELAY_AUDIENCE, secured
from tests.unit.relay.authorities import Authority

POD = {"username": "system:serviceaccount:llm:engine", "extra": {POD_UID: ["uid-1"]}}


@pytest.fixture
async def scheduler(fleet: Fleet, tmp_path: Path, server: ApiServer) -> Scheduler:
    """Its CA is in tls/ca.crt. Two tokens are of the pod uid-1."""
    server.users["first", RELAY_AUDIENCE] = server.users["second", RELAY_AUDIENCE] = POD
    authority = Authority("ca")
    return await secured(fleet, tmp_path / "tls", [], authority, trusted=authority)


async def relay(fleet: Fleet, folder: Path, scheduler: Scheduler, replica: str) -> Process:
    """A relay that says it is this replica; its token is in the file token."""
    (folder / "token").write_text("first")
    engine = await fleet.stack.enter_async_context(RecordedEngine(1, "vllm"))
    return await fleet.process(
        "servingfleet_relay",
        *relay_arguments(engine, replica, "m", scheduler.target),
        *("--scheduler-ca-file", str(folder / "tls" / "ca.crt"), "--scheduler-name", NAME),
        *("--token-file", str(folder / "token"), "--log-level", "debug"),
    )


def logged(process: Process) -> str:
    return json.dumps(process.lines())


async def test_a_relay_is_welcomed_and_its_renewed_token_is_looked_at(
    fleet: Fleet, tmp_path: Path, scheduler: Scheduler, server: ApiServer
) -> None:
    started = await relay(fleet, tmp_path, scheduler, "uid-1")
    assert (await scheduler.process.event("relay connected"))["replica"] == "uid-1"
    (tmp_path / "token").write_text("second")
    async with asyncio.timeout(PATIENCE_S):
        while not any(each["spec"].get("token") == "second" for each in server.asked):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert "relay refused" not in logged(scheduler.process)
    assert '"second"' not in logged(scheduler.process) + logged(started)


async def test_a_relay_that_says_it_is_another_pod_is_refused(
    fleet: Fleet, tmp_path: Path, scheduler: Scheduler
) -> None:
    await relay(fleet, tmp_path, scheduler, "uid-2")
    refusal = await scheduler.process.event("relay refused")
    assert refusal["reason"] == "OTHER_REPLICA"
    assert "relay connected" not in logged(scheduler.process)
