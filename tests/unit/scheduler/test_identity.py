"""Callers and relays that must prove who they are, on a loopback port: what they see of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from servingfleet_protos.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    routing_pb2_grpc,
    stream_pb2,
    stream_pb2_grpc,
)
from servingfleet_scheduler.access import EXPLAIN, REPORT, REUSE, ROUTE, Caller, Right
from servingfleet_scheduler.server import Running, serve
from servingfleet_scheduler.settings import AccessSettings

from .helpers import MODEL, finished, hello, route_request
from .reviewers import ACCESS, FakeReviews, pod
from .test_server import PORTS, SETTINGS, details, failure

JANE = (("authorization", "Bearer jane's token"),)
POD = (("authorization", "Bearer pod token"),)


@dataclass
class Rig:
    """A scheduler that checks its callers, the API server that it asks, and a channel."""

    running: Running
    reviews: FakeReviews
    channel: grpc.aio.Channel

    @property
    def router(self) -> Any:
        return routing_pb2_grpc.RouterStub(self.channel)

    @property
    def fleet(self) -> Any:
        return fleet_pb2_grpc.FleetStub(self.channel)

    async def relay(self, metadata: Sequence[tuple[str, str]] = POD, replica: str = "uid-1") -> Any:
        """A stream whose hello is sent, unless it is refused before."""
        call: Any = stream_pb2_grpc.RelayIntakeStub(self.channel).Stream(metadata=tuple(metadata))
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(stream_pb2.RelayMessage(hello=hello(replica)))
        return call


@asynccontextmanager
async def checked(access: AccessSettings = ACCESS) -> AsyncIterator[Rig]:
    reviews = FakeReviews()
    reviews.callers |= {"jane's token": Caller("jane"), "pod token": pod("uid-1")}
    ports = replace(PORTS, access=access)
    async with (
        serve(SETTINGS, ports, reviews) as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        yield Rig(running, reviews, channel)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with checked() as made:
        yield made


async def welcomed(call: Any) -> None:
    assert (await call.read()).HasField("welcome")


async def ended(call: Any) -> grpc.aio.AioRpcError:
    """How the scheduler ends the stream, after whatever it says before."""

    async def drain() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    async with asyncio.timeout(5):
        return await failure(drain())


def reason(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str]:
    return error.code(), details(error)["ErrorInfo"].reason


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    return reason(await failure(call))


async def test_each_call_needs_its_own_right(rig: Rig) -> None:
    calls: dict[Right, Callable[[], Any]] = {
        ROUTE: lambda: rig.router.Route(route_request(), metadata=JANE, timeout=5),
        EXPLAIN: lambda: rig.router.Explain(route_request(), metadata=JANE, timeout=5),
        REPORT: lambda: rig.router.Report(finished("no id"), metadata=JANE, timeout=5),
        REUSE: lambda: rig.fleet.GetReuse(fleet_pb2.GetReuseRequest(), metadata=JANE, timeout=5),
    }
    for right, call in calls.items():
        rig.reviews.rights["jane"] = set(calls) - {right}
        assert await refused(call()) == (grpc.StatusCode.PERMISSION_DENIED, "NOT_ALLOWED")


async def test_a_caller_with_all_rights_is_served(rig: Rig) -> None:
    rig.reviews.rights["jane"] = {ROUTE, REPORT, EXPLAIN, REUSE}
    decision = await rig.router.Route(route_request(), metadata=JANE, timeout=5)
    await rig.router.Report(finished(decision.decision_id), metadata=JANE, timeout=5)
    await rig.router.Explain(route_request(), metadata=JANE, timeout=5)
    await rig.fleet.ListReplicas(fleet_pb2.ListReplicasRequest(), metadata=JANE, timeout=5)
    reuse = await rig.fleet.GetReuse(fleet_pb2.GetReuseRequest(), metadata=JANE, timeout=5)
    assert [each.sums.pairs for each in reuse.reports if each.model == MODEL] == [1]


async def test_a_caller_without_a_token_is_told_what_to_send(rig: Rig) -> None:
    error = await failure(rig.router.Route(route_request(), timeout=5))
    assert reason(error) == (grpc.StatusCode.UNAUTHENTICATED, "NO_CREDENTIAL")
    assert details(error)["ErrorInfo"].domain == "servingfleet.dev"
    assert "authorization" in (error.details() or "")


async def test_a_caller_is_told_to_come_again_while_the_api_server_is_away(rig: Rig) -> None:
    rig.reviews.away = True
    error = await failure(rig.router.Route(route_request(), metadata=JANE, timeout=5))
    assert reason(error) == (grpc.StatusCode.UNAVAILABLE, "REVIEW_UNAVAILABLE")
    assert details(error)["RetryInfo"].retry_delay.ToTimedelta().total_seconds() > 0


async def test_clients_need_no_token_where_the_fleet_asks_for_none() -> None:
    async with checked(replace(ACCESS, client_tokens=False)) as rig:
        await rig.router.Route(route_request(), timeout=5)
        call = rig.router.Explain(route_request(), timeout=5)
        assert await refused(call) == (grpc.StatusCode.UNAUTHENTICATED, "NO_CREDENTIAL")


async def test_a_defect_in_a_check_lets_nobody_in(rig: Rig) -> None:
    rig.reviews.defect = True
    error = await failure(rig.router.Route(route_request(), metadata=JANE, timeout=5))
    assert reason(error) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    error = await ended(await rig.relay())
    assert reason(error) == (grpc.StatusCode.INTERNAL, "INTERNAL")


async def test_health_is_open_and_reflection_is_off(rig: Rig) -> None:
    make_health: Any = health_pb2_grpc.HealthStub
    health = make_health(rig.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
    call = make_stub(rig.channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    assert reason(await ended(call)) == (grpc.StatusCode.PERMISSION_DENIED, "UNKNOWN_METHOD")


async def test_refusals_are_in_the_metrics_by_reason(rig: Rig) -> None:
    await failure(rig.router.Route(route_request(), timeout=5))
    await failure(rig.router.Route(route_request(), metadata=JANE, timeout=5))
    async with httpx.AsyncClient() as client:
        page = await client.get(f"http://127.0.0.1:{rig.running.http_port}/metrics")
    assert 'servingfleet_scheduler_access_refusals_total{reason="NO_CREDENTIAL"} 1.0' in page.text
    assert 'access_reviews_total{answer="yes",kind="token"} 1.0' in page.text
    assert 'access_reviews_total{answer="no",kind="right"} 1.0' in page.text


async def test_a_relay_speaks_for_its_own_pod(rig: Rig) -> None:
    await welcomed(await rig.relay())


async def test_a_relay_without_a_token_is_refused(rig: Rig) -> None:
    error = await ended(await rig.relay(metadata=()))
    assert reason(error) == (grpc.StatusCode.UNAUTHENTICATED, "NO_CREDENTIAL")


async def test_a_relay_can_not_speak_for_another_pod_nor_disturb_its_relay(rig: Rig) -> None:
    rig.reviews.callers["other token"] = pod("uid-2")
    true_one = await rig.relay()
    await welcomed(true_one)
    false_one = await rig.relay(metadata=(("authorization", "Bearer other token"),))
    error = await ended(false_one)
    assert reason(error) == (grpc.StatusCode.PERMISSION_DENIED, "OTHER_REPLICA")
    assert "uid-2" in (error.details() or "")
    assert rig.running.scheduler.streams.speaking("uid-1") is not None
    await true_one.write(stream_pb2.RelayMessage(seq=1))
    async with asyncio.timeout(5):
        while not (await true_one.read()).HasField("ack"):
            pass


async def test_a_user_is_no_relay(rig: Rig) -> None:
    error = await ended(await rig.relay(metadata=JANE))
    assert reason(error) == (grpc.StatusCode.PERMISSION_DENIED, "NOT_A_POD")


def impatient(recheck_s: float = 0.01, renewal_gap_s: float = 0.001) -> AccessSettings:
    """Verdicts are not kept, and streams are checked again at once."""
    keeping = replace(ACCESS.keeping, yes_s=0.0, refresh_s=0.0, no_s=0.0, grace_s=0.0)
    return replace(ACCESS, keeping=keeping, recheck_s=recheck_s, renewal_gap_s=renewal_gap_s)


async def asked_again(rig: Rig, token: str, times: int) -> None:
    before = rig.reviews.asked[token]
    async with asyncio.timeout(5):
        while rig.reviews.asked[token] < before + times:  # noqa: ASYNC110 - a counter
            await asyncio.sleep(0.005)


async def test_an_open_stream_ends_when_its_token_is_good_no_more() -> None:
    async with checked(impatient()) as rig:
        call = await rig.relay()
        await welcomed(call)
        del rig.reviews.callers["pod token"]
        error = await ended(call)
        assert reason(error) == (grpc.StatusCode.UNAUTHENTICATED, "BAD_CREDENTIAL")


async def test_an_open_stream_outlives_an_api_server_that_is_away() -> None:
    async with checked(impatient()) as rig:
        call = await rig.relay()
        await welcomed(call)
        rig.reviews.away = True
        await asked_again(rig, "pod token", times=3)
        assert rig.running.scheduler.streams.speaking("uid-1") is not None
        rig.reviews.away = False
        del rig.reviews.callers["pod token"]
        assert (await ended(call)).code() == grpc.StatusCode.UNAUTHENTICATED


async def test_a_renewed_token_keeps_the_stream_open() -> None:
    async with checked(impatient()) as rig:
        call = await rig.relay()
        await welcomed(call)
        rig.reviews.callers["fresh"] = pod("uid-1")
        fresh = stream_pb2.Credential(token="fresh")
        await call.write(stream_pb2.RelayMessage(credential=fresh))
        await asked_again(rig, "fresh", times=1)
        del rig.reviews.callers["pod token"]
        await asked_again(rig, "fresh", times=3)
        assert rig.running.scheduler.streams.speaking("uid-1") is not None


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("made up", (grpc.StatusCode.UNAUTHENTICATED, "BAD_CREDENTIAL")),
        ("", (grpc.StatusCode.UNAUTHENTICATED, "NO_CREDENTIAL")),
        ("x" * 17_000, (grpc.StatusCode.UNAUTHENTICATED, "BAD_CREDENTIAL")),
        ("of another pod", (grpc.StatusCode.PERMISSION_DENIED, "OTHER_REPLICA")),
        ("jane's token", (grpc.StatusCode.PERMISSION_DENIED, "NOT_A_POD")),
    ],
)
async def test_a_renewal_that_proves_nothing_ends_the_stream(
    rig: Rig, token: str, expected: tuple[grpc.StatusCode, str]
) -> None:
    rig.reviews.callers["of another pod"] = pod("uid-2")
    call = await rig.relay()
    await welcomed(call)
    renewal = stream_pb2.RelayMessage(credential=stream_pb2.Credential(token=token))
    await call.write(renewal)
    assert reason(await ended(call)) == expected


async def test_a_flood_of_renewals_is_asked_about_now_and_then() -> None:
    async with checked(impatient(recheck_s=300.0, renewal_gap_s=0.2)) as rig:
        call = await rig.relay()
        await welcomed(call)
        rig.reviews.callers |= {f"fresh {number}": pod("uid-1") for number in range(200)}
        for number in range(200):
            fresh = stream_pb2.Credential(token=f"fresh {number}")
            await call.write(stream_pb2.RelayMessage(credential=fresh))
        await asked_again(rig, "fresh 199", times=1)
        assert sum(count for token, count in rig.reviews.asked.items() if "fresh" in token) < 20


async def test_no_token_is_ever_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await failure(rig.router.Route(route_request(), metadata=JANE, timeout=5))
    await ended(await rig.relay(metadata=JANE))
    call = await rig.relay()
    await welcomed(call)
    renewal = stream_pb2.RelayMessage(credential=stream_pb2.Credential(token="secret"))
    await call.write(renewal)
    await ended(call)
    said = json.dumps([vars(record) for record in caplog.records], default=str)
    assert "relay refused" in said
    for token in ("jane's token", "pod token", "secret"):
        assert token not in said


async def test_a_credential_is_ignored_where_nobody_is_asked() -> None:
    async with (
        serve(SETTINGS, PORTS) as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        call: Any = stream_pb2_grpc.RelayIntakeStub(channel).Stream()
        await call.write(stream_pb2.RelayMessage(hello=hello("r1")))
        await call.write(stream_pb2.RelayMessage(credential=stream_pb2.Credential(token="x")))
        await call.write(stream_pb2.RelayMessage(seq=1))
        async with asyncio.timeout(5):
            while not (await call.read()).HasField("ack"):
                pass
        assert not running.scheduler.streams.refusals
        assert running.scheduler.streams.drops == {"unknown_body": 1}


@pytest.mark.parametrize(
    ("listen", "warned"), [("127.0.0.1:0", False), ("localhost:0", False), ("0.0.0.0:0", True)]
)
async def test_a_scheduler_that_anybody_reaches_unasked_says_so(
    listen: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(SETTINGS, replace(PORTS, listen=listen)):
        events = {record.getMessage() for record in caplog.records}
    assert ("open to whoever reaches the port" in events) == warned
