"""Two schedulers of one fleet, and outcomes that are reported to the one that did not decide."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import grpc
import httpx
import pytest

from servingfleet_core.reports import added
from servingfleet_protos.v1 import fleet_pb2, routing_pb2
from tests.apiserver import ApiServer
from tests.integration.fleet import PATIENCE_S, Fleet, Scheduler
from tests.integration.secured import AUDIENCE, secured
from tests.unit.relay.authorities import Authority

Response = routing_pb2.ReportResponse
Metadata = Sequence[tuple[str, str]]

MODEL = "m"
JANE: Metadata = (("authorization", "Bearer jane's token"),)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """What the schedulers of the fleet have in common."""
    key = tmp_path / "key"
    key.write_bytes(b"one key for both of them")
    replica = f"model={MODEL},replica=r0,endpoint=10.0.0.1:8000"
    return ["--token-key-file", str(key), "--static-replica", replica, "--advertise", "127.0.0.1"]


@pytest.fixture
async def pair(fleet: Fleet, arguments: list[str]) -> tuple[Scheduler, Scheduler]:
    """Owner and peer."""
    return await fleet.scheduler(*arguments), await fleet.scheduler(*arguments)


async def routed(scheduler: Scheduler, metadata: Metadata = ()) -> str:
    """The id of a decision."""
    prompt = routing_pb2.Prompt(tokens_le32=bytes(4 * 64))
    request = routing_pb2.RouteRequest(model=MODEL, prompt=prompt)
    answer = await scheduler.router.Route(request, timeout=PATIENCE_S, metadata=tuple(metadata))
    return answer.decision_id


async def reported(
    scheduler: Scheduler, decision_id: str, metadata: Metadata = (), timeout_s: float = PATIENCE_S
) -> str:
    """What became of a finished request's outcome."""
    request = routing_pb2.ReportRequest(decision_id=decision_id, prompt_tokens=64, cached_tokens=0)
    answer = await scheduler.router.Report(request, timeout=timeout_s, metadata=tuple(metadata))
    return Response.Disposition.Name(answer.disposition).removeprefix("DISPOSITION_")


async def reuse(scheduler: Scheduler, metadata: Metadata = ()) -> fleet_pb2.GetReuseResponse:
    request = fleet_pb2.GetReuseRequest(model=MODEL)
    return await scheduler.fleet.GetReuse(request, timeout=PATIENCE_S, metadata=tuple(metadata))


async def counted(scheduler: Scheduler, metadata: Metadata = ()) -> tuple[int, int, int]:
    """Decisions, those that found their outcome, and pairs."""
    (report,) = (await reuse(scheduler, metadata)).reports
    return report.sums.decisions, report.sums.joined, report.sums.pairs


async def metric(scheduler: Scheduler, line: str) -> float:
    """The value of one metric line."""
    port = (await scheduler.process.event("listening"))["http_port"]
    async with httpx.AsyncClient() as client:
        page = await client.get(f"http://127.0.0.1:{port}/metrics")
    for each in page.text.splitlines():
        if each.startswith(f"servingfleet_scheduler_{line} "):
            return float(each.rpartition(" ")[2])
    return 0.0


async def test_an_outcome_is_joined_by_the_scheduler_that_decided(
    pair: tuple[Scheduler, Scheduler],
) -> None:
    owner, peer = pair
    assert await reported(peer, await routed(owner)) == "JOINED"
    assert await counted(owner) == (1, 1, 1)
    assert await counted(peer) == (0, 0, 0)
    assert await metric(owner, "decisions_open") == 0
    assert await metric(owner, 'reports_total{disposition="joined"}') == 1
    assert await metric(peer, 'reports_total{disposition="joined"}') == 0
    assert await metric(peer, 'reports_passed_on_total{result="answered"}') == 1


async def test_an_outcome_reported_everywhere_counts_once(
    pair: tuple[Scheduler, Scheduler],
) -> None:
    owner, peer = pair
    decision = await routed(owner)
    said = [await reported(each, decision) for each in (peer, owner, peer)]
    assert said == ["JOINED", "DUPLICATE", "DUPLICATE"]
    (report,) = added([await reuse(owner), await reuse(peer)]).reports
    assert (report.sums.decisions, report.sums.joined, report.sums.pairs) == (1, 1, 1)


async def test_a_refusal_of_the_owner_is_the_callers(pair: tuple[Scheduler, Scheduler]) -> None:
    owner, peer = pair
    request = routing_pb2.ReportRequest(
        decision_id=await routed(owner), prompt_tokens=64, cached_tokens=65
    )
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await peer.router.Report(request, timeout=PATIENCE_S)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "cached_tokens" in (error.value.details() or "")
    assert any(key == "grpc-status-details-bin" for key, _ in error.value.trailing_metadata())
    assert await reported(peer, request.decision_id) == "JOINED"


async def test_a_report_makes_one_hop(pair: tuple[Scheduler, Scheduler]) -> None:
    owner, peer = pair
    hop = (("servingfleet-passed-on", "1"),)
    assert await reported(peer, await routed(owner), hop) == "ORPHAN_JOIN"


async def test_an_outcome_whose_owner_is_gone_is_counted_where_it_arrives(
    pair: tuple[Scheduler, Scheduler],
) -> None:
    owner, peer = pair
    known, unknown = await routed(owner), await routed(owner)
    assert await reported(peer, known) == "JOINED"
    owner.process.child.kill()
    await owner.process.child.wait()
    assert await reported(peer, unknown) == "ORPHAN_JOIN"
    assert await counted(peer) == (0, 0, 1)
    assert await metric(peer, 'reports_passed_on_total{result="gone"}') == 1


async def test_who_took_the_owners_address_counts_its_outcome(
    fleet: Fleet, arguments: list[str], pair: tuple[Scheduler, Scheduler]
) -> None:
    owner, peer = pair
    decision = await routed(owner)
    await owner.process.stop()
    successor = await fleet.scheduler(*arguments, listen=owner.target)
    assert await reported(peer, decision) == "ORPHAN_JOIN"
    assert await reported(successor, decision) == "DUPLICATE"
    assert await counted(successor) == (0, 0, 1)
    assert await counted(peer) == (0, 0, 0)


async def test_an_owner_that_stands_still_may_have_counted_it_so_nobody_else_does(
    pair: tuple[Scheduler, Scheduler],
) -> None:
    owner, peer = pair
    first, second = await routed(owner), await routed(owner)
    assert await reported(peer, first) == "JOINED"  # they are connected
    os.kill(owner.process.child.pid, signal.SIGSTOP)
    try:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await reported(peer, second)
    finally:
        os.kill(owner.process.child.pid, signal.SIGCONT)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "report again" in (error.value.details() or "")
    assert await reported(peer, second) in ("JOINED", "DUPLICATE")
    assert await counted(owner) == (2, 2, 2)
    assert await counted(peer) == (0, 0, 0)


# Encrypted, and with callers that are asked who they are.


@pytest.fixture
def known(server: ApiServer) -> ApiServer:
    """The API server, which knows Jane and lets her do what the tests do."""
    server.users["jane's token", AUDIENCE] = {"username": "jane"}
    server.rights = {("jane", "create", each) for each in ("route", "report")}
    server.rights.add(("jane", "get", "reuse"))
    return server


async def test_a_callers_token_goes_with_its_report_and_into_no_log(
    fleet: Fleet, tmp_path: Path, arguments: list[str], known: ApiServer
) -> None:
    authority = Authority("ca")
    owner, peer = [
        await secured(fleet, tmp_path / name, arguments, authority, trusted=authority)
        for name in ("owner", "peer")
    ]
    assert await reported(peer, await routed(owner, JANE), JANE) == "JOINED"
    assert await counted(owner, JANE) == (1, 1, 1)
    reviewed = [each for each in known.asked if each["spec"].get("token") == "jane's token"]
    assert len(reviewed) == 2, "each scheduler has asked for itself, once"
    for scheduler in (owner, peer):
        assert "jane's token" not in scheduler.process.log.read_text()
    known.rights = set()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await reported(owner, "no id")
    assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_a_peer_that_can_not_prove_itself_gets_no_report(
    fleet: Fleet, tmp_path: Path, arguments: list[str], known: ApiServer
) -> None:
    authority, stranger = Authority("ca"), Authority("stranger")
    owner = await secured(fleet, tmp_path / "a", arguments, stranger, trusted=authority)
    peer = await secured(fleet, tmp_path / "b", arguments, authority, trusted=authority)
    assert await reported(peer, await routed(owner, JANE), JANE) == "ORPHAN_JOIN"
    (tmp_path / "b" / "ca.crt").write_bytes(stranger.pem)
    assert await reported(peer, await routed(owner, JANE), JANE) == "JOINED"
