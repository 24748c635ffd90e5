"""The edges, on a loopback port: what a client or a relay sees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from servingfleet_protos.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    routing_pb2,
    routing_pb2_grpc,
    stream_pb2,
    stream_pb2_grpc,
)
from servingfleet_scheduler.server import Running, serve
from servingfleet_scheduler.settings import SchedulerSettings, ServerSettings, StaticReplica

from .helpers import BLOCK, MODEL, finished, hashes, hello, route_request

PORTS = ServerSettings(listen="127.0.0.1:0", drain_s=1.0, tick_s=0.02)
SETTINGS = SchedulerSettings(
    block_tokens=BLOCK, static_replicas=(StaticReplica(MODEL, "r0", "r0:8000"),)
)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with serve(SETTINGS, PORTS) as started:
        yield started


@pytest.fixture
async def channel(running: Running) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{running.port}",
        options=[("grpc.max_send_message_length", 64 * 1024 * 1024)],
    ) as opened:
        yield opened


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """The google.rpc details of an error, by name."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    found: dict[str, Any] = {}
    for packed in status.details:
        for kind in ("ErrorInfo", "BadRequest", "RetryInfo"):
            message = getattr(error_details_pb2, kind)()
            if packed.Unpack(message):
                found[kind] = message
    return found


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


async def until_away(channel: grpc.aio.Channel, replica: str) -> None:
    """Asks until the replica's relay is seen to be gone."""
    fleet = fleet_pb2_grpc.FleetStub(channel)
    connected = True
    async with asyncio.timeout(5):
        while connected:
            listed = await fleet.ListReplicas(fleet_pb2.ListReplicasRequest(), timeout=5)
            connected = any(each.replica == replica and each.connected for each in listed.replicas)


async def test_a_route_and_its_report_are_joined(channel: grpc.aio.Channel) -> None:
    router = routing_pb2_grpc.RouterStub(channel)
    response = await router.Route(route_request(), timeout=5)
    report = await router.Report(finished(response.decision_id), timeout=5)
    assert report.disposition == routing_pb2.ReportResponse.DISPOSITION_JOINED
    reuse = await fleet_pb2_grpc.FleetStub(channel).GetReuse(
        fleet_pb2.GetReuseRequest(model=MODEL), timeout=5
    )
    assert reuse.reports[0].sums.pairs == 1


async def test_a_malformed_field_is_named(channel: grpc.aio.Channel) -> None:
    request = routing_pb2.RouteRequest(model=MODEL)
    request.prompt.tokens_le32 = b"123"
    error = await failure(routing_pb2_grpc.RouterStub(channel).Route(request, timeout=5))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    found = details(error)
    assert [each.field for each in found["BadRequest"].field_violations] == ["prompt.tokens_le32"]
    assert (found["ErrorInfo"].reason, found["ErrorInfo"].domain) == (
        "INVALID_FIELD",
        "servingfleet.dev",
    )


async def test_an_unknown_model_is_told_by_reason(channel: grpc.aio.Channel) -> None:
    request = route_request()
    request.model = "unknown"
    error = await failure(routing_pb2_grpc.RouterStub(channel).Explain(request, timeout=5))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert details(error)["ErrorInfo"].reason == "MODEL_UNKNOWN"


async def test_a_deadline_out_of_reach_says_when_to_retry(channel: grpc.aio.Channel) -> None:
    request = route_request(200_000, deadline_s=0.001)
    router = routing_pb2_grpc.RouterStub(channel)
    request.prompt.prompt_logprobs = True
    error = await failure(router.Route(request, timeout=5))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    found = details(error)
    assert found["ErrorInfo"].reason == "DEADLINE_UNREACHABLE"
    assert float(found["ErrorInfo"].metadata["estimate_s"]) > 0.001
    assert 1 <= found["RetryInfo"].retry_delay.ToTimedelta().total_seconds() <= 36


async def test_a_million_tokens_are_routed(channel: grpc.aio.Channel) -> None:
    request = routing_pb2.RouteRequest(model=MODEL)
    request.prompt.tokens_le32 = bytes(4 * 1_000_000)
    response = await routing_pb2_grpc.RouterStub(channel).Route(request, timeout=10)
    assert response.prediction.prompt_tokens == 1_000_000


async def test_a_message_beyond_the_limit_is_refused(channel: grpc.aio.Channel) -> None:
    request = routing_pb2.RouteRequest(model=MODEL)
    request.prompt.tokens_le32 = bytes(PORTS.max_message_bytes + 1)
    error = await failure(routing_pb2_grpc.RouterStub(channel).Route(request, timeout=10))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_defect_is_told_as_internal_and_nothing_more(
    running: Running, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(running.scheduler, "route", broken)
    error = await failure(routing_pb2_grpc.RouterStub(channel).Route(route_request(), timeout=5))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in (error.details() or "")


async def test_health_is_told_for_every_service(channel: grpc.aio.Channel) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    for service in ("", "servingfleet.v1.Router", "servingfleet.v1.RelayIntake"):
        response = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_lists_the_services(channel: grpc.aio.Channel) -> None:
    make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
    stub = make_stub(channel)
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    async for response in call:
        names = {each.name for each in response.list_services_response.service}
        assert {"servingfleet.v1.Router", "servingfleet.v1.Fleet"} <= names
        break
    call.cancel()


async def test_a_relay_is_welcomed_granted_and_acknowledged(channel: grpc.aio.Channel) -> None:
    call: Any = stream_pb2_grpc.RelayIntakeStub(channel).Stream()
    await call.write(stream_pb2.RelayMessage(hello=hello("r1")))
    first, second = await call.read(), await call.read()
    assert (first.welcome.expected_seq, list(second.grant_snapshot.ranks)) == (1, [0])
    delta = stream_pb2.Delta(op=stream_pb2.Delta.OP_HOLD, hashes=hashes(64))
    await call.write(stream_pb2.RelayMessage(seq=1, delta=delta))
    assert (await call.read()).ack.seq == 1
    request = route_request(65)
    request.only.add(replica="r1")
    response = await routing_pb2_grpc.RouterStub(channel).Route(request, timeout=5)
    assert response.prediction.predicted == 64
    assert (await call.read()).credit_opened.decision_id == response.decision_id
    await call.done_writing()
    assert await call.read() == grpc.aio.EOF
    await until_away(channel, "r1")


async def test_a_refused_relay_is_told_why(channel: grpc.aio.Channel) -> None:
    call: Any = stream_pb2_grpc.RelayIntakeStub(channel).Stream()
    await call.write(stream_pb2.RelayMessage(hello=hello(block_tokens=32)))
    error = await failure(call.read())
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert details(error)["ErrorInfo"].reason == "BLOCK_SIZE"


async def test_a_relay_out_of_order_is_told_to_reconnect(channel: grpc.aio.Channel) -> None:
    call: Any = stream_pb2_grpc.RelayIntakeStub(channel).Stream()
    await call.write(stream_pb2.RelayMessage(hello=hello()))
    await call.write(stream_pb2.RelayMessage(seq=2))
    await call.read()
    await call.read()
    error = await failure(call.read())
    assert error.code() == grpc.StatusCode.ABORTED
    assert details(error)["ErrorInfo"].metadata["expected"] == "1"


async def test_a_relay_that_vanishes_is_away(channel: grpc.aio.Channel) -> None:
    call: Any = stream_pb2_grpc.RelayIntakeStub(channel).Stream()
    await call.write(stream_pb2.RelayMessage(hello=hello("r1")))
    await call.read()
    call.cancel()
    await until_away(channel, "r1")


async def test_streams_are_ended_when_the_scheduler_stops() -> None:
    async with serve(SETTINGS, PORTS) as started:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{started.port}")
        call: Any = stream_pb2_grpc.RelayIntakeStub(channel).Stream()
        await call.write(stream_pb2.RelayMessage(hello=hello("r1")))
        await call.read()
        await call.read()
    error = await failure(call.read())
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert details(error)["ErrorInfo"].reason == "SHUTTING_DOWN"
    await channel.close()


async def test_a_port_that_is_taken_is_told_by_its_address(running: Running) -> None:
    ports = ServerSettings(listen=f"127.0.0.1:{running.port}")
    with pytest.raises(OSError, match=f"127.0.0.1:{running.port}"):
        async with serve(SETTINGS, ports):
            pass


async def test_readiness_says_how_warm_the_index_is(running: Running) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.http_port}") as client:
        ready = await client.get("/readyz")
        healthy = await client.get("/healthz")
        missing = await client.get("/nothing")
    assert ready.status_code == healthy.status_code == 200
    assert json.loads(ready.text)["warm"] is None
    assert json.loads(ready.text)["replicas"] == 1
    assert missing.status_code == 404


async def test_metrics_tell_figures_but_no_ids_and_no_hit_rate(
    running: Running, channel: grpc.aio.Channel
) -> None:
    router = routing_pb2_grpc.RouterStub(channel)
    ids = []
    for n in range(20):
        response = await router.Route(route_request(64, first=n * 100, request_id=f"q{n}"))
        await router.Report(finished(response.decision_id, cached=16))
        ids.append(response.decision_id)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.http_port}") as client:
        text = (await client.get("/metrics")).text
    assert f'servingfleet_scheduler_actual_tokens_total{{model="{MODEL}"}} 320.0' in text
    assert 'bound="value",figure="reused_fraction"' in text
    assert "servingfleet_scheduler_route_duration_seconds_count 20.0" in text
    assert "hit_rate" not in text
    assert not any(each in text for each in ids)
