"""What starts when: no fleet waits for what does not concern it, and no damaged object ends the process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import kopf
import pytest

from servingfleet_operator import names, pki, process
from servingfleet_operator.cluster import Cluster
from servingfleet_operator.errors import Invalid
from servingfleet_operator.pki import Certificates
from servingfleet_operator.process import Process

from .api import FakeCluster
from .pods import SETTINGS, selector

CRDS = Path(__file__).parents[3] / "crds"
CERTIFICATES = pki.plan(None, None, ["localhost"], "webhook", datetime.now(UTC)).certificates


@pytest.fixture
async def replica(monkeypatch: pytest.MonkeyPatch) -> Process:
    """A replica that knows one fleet, without an API server."""
    for pause in ("RETRY_S", "FIRST_CERTIFICATE_S", "CERTIFICATE_S"):
        monkeypatch.setattr(process, pause, 0.0)
    made = Process(
        replace(SETTINGS, crd_dir=str(CRDS)), lambda: kopf.ConnectionInfo(server="http://no.where")
    )
    metadata = {"name": "demo", "namespace": "serving", "uid": "u", "resourceVersion": "1"}
    pools = [{"name": "main", "selector": selector(app="vllm")}]
    spec = {"model": {"name": "m"}, "pools": pools}
    made._store.fleets.put(
        {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": spec}
    )
    return made


async def test_without_the_fleets_it_is_not_ready_for_pods(replica: Process) -> None:
    assert not replica._can_answer()
    replica._webhook.use(CERTIFICATES)
    assert not replica._can_answer(), "every pod would pass without its relay"
    replica._main.listed.set()
    assert replica._can_answer()


async def test_a_damaged_certificate_is_told_and_the_next_one_shown(
    replica: Process, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = Certificates(CERTIFICATES.ca_bundle, b"damaged", CERTIFICATES.key)
    held = [damaged, CERTIFICATES]
    shown = asyncio.Event()

    async def served() -> Certificates:
        if len(held) == 1:
            shown.set()
            return held[0]
        return held.pop(0)

    replica._certificates = cast("Any", type("Kept", (), {"served": staticmethod(served)}))
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        task = group.create_task(replica._serve_certificate())
        await shown.wait()
        task.cancel()
    assert replica._webhook.serving
    [told] = [line for line in caplog.records if line.levelname == "WARNING"]
    assert told.message == "webhook certificate not loaded"


async def test_a_definition_that_can_t_be_looked_at_holds_up_no_fleet(replica: Process) -> None:
    api = FakeCluster()
    tried = asyncio.Event()

    def refuse(verb: str, kind: str, name: str) -> Exception | None:
        if len(api.calls) > 2:
            tried.set()
        return Invalid("no such thing")

    api.fails = refuse
    replica._cluster = cast("Cluster", api)
    replica._leadership._leading_until = float("inf")
    replica._leadership.elected.set()
    replica._leadership.lost.clear()
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(part)
            for part in (replica._keep_definition(), replica._on_elections())
        ]
        await tried.wait()
        for task in tasks:
            task.cancel()
    assert len(replica._queue) == 1
