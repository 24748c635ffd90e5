"""Both clients against a scheduler in the same process: errors, deadlines, what is tried again, what is waited for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest

import servingfleet_client as client
from servingfleet_client.requests import Stage
from servingfleet_protos.v1 import routing_pb2, routing_pb2_grpc
from servingfleet_scheduler import errors as scheduler_errors
from servingfleet_scheduler.rich_errors import Context, abort
from tests.unit.relay.authorities import Authority

PATIENCE_S = 20.0
Refusal = scheduler_errors.SchedulerError


class Router(routing_pb2_grpc.RouterServicer):
    """Refuses as long as it has refusals, then sends everybody to the same engine."""

    def __init__(self) -> None:
        self.refusals: list[Refusal | grpc.StatusCode] = []
        self.routed: list[routing_pb2.RouteRequest] = []
        self.reported: list[routing_pb2.ReportRequest] = []
        self.stuck = False
        """True: it answers nothing."""
        self.cancelled = asyncio.Event()
        """A call ended before its answer."""

    async def _answer(self, context: Context) -> None:
        if self.stuck:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        if self.refusals:
            refusal = self.refusals.pop(0)
            if isinstance(refusal, Refusal):
                await abort(context, refusal)
            await context.abort(refusal, "says gRPC")

    async def Route(
        self, request: routing_pb2.RouteRequest, context: Context
    ) -> routing_pb2.RouteResponse:
        self.routed.append(request)
        await self._answer(context)
        return routing_pb2.RouteResponse(decision_id="d", endpoint="engine:1")

    async def Report(
        self, request: routing_pb2.ReportRequest, context: Context
    ) -> routing_pb2.ReportResponse:
        await self._answer(context)
        self.reported.append(request)
        return routing_pb2.ReportResponse(disposition=routing_pb2.ReportResponse.DISPOSITION_JOINED)

    @property
    def stages(self) -> set[str]:
        return {Stage.Name(report.stage).removeprefix("STAGE_") for report in self.reported}


@pytest.fixture
async def router() -> Router:
    return Router()  # type: ignore[abstract]  # no client calls Explain


@pytest.fixture
async def target(router: Router) -> AsyncIterator[str]:
    async with serving(router) as started:
        yield started


@asynccontextmanager
async def serving(
    router: Router, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[str]:
    server = grpc.aio.server()
    routing_pb2_grpc.add_RouterServicer_to_server(router, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Asking(Protocol):
    """Either client, as a test uses it."""

    lost: Counter[str]
    """Reports that the last client lost."""

    async def route(self, scheduler: client.Scheduler, **options: Any) -> client.Routed:
        """What a client routes that is then closed."""
        ...

    async def block(
        self, scheduler: client.Scheduler, inside: Callable[[client.Routed], None]
    ) -> None:
        """A block of a client that is closed after it."""
        ...


class Async:
    def __init__(self) -> None:
        self.lost = Counter[str]()

    async def route(self, scheduler: client.Scheduler, **options: Any) -> client.Routed:
        async with client.AsyncClient(scheduler, "m") as asking:
            self.lost = asking.lost_reports
            return await asking.route([1, 2], **options)

    async def block(
        self, scheduler: client.Scheduler, inside: Callable[[client.Routed], None]
    ) -> None:
        async with (
            client.AsyncClient(scheduler, "m") as asking,
            asking.request([1, 2]) as routed,
        ):
            self.lost = asking.lost_reports
            inside(routed)


class Sync:
    def __init__(self) -> None:
        self.lost = Counter[str]()

    async def route(self, scheduler: client.Scheduler, **options: Any) -> client.Routed:
        def ask() -> client.Routed:
            with client.Client(scheduler, "m") as asking:
                self.lost = asking.lost_reports
                return asking.route([1, 2], **options)

        return await asyncio.to_thread(ask)

    async def block(
        self, scheduler: client.Scheduler, inside: Callable[[client.Routed], None]
    ) -> None:
        def ask() -> None:
            with client.Client(scheduler, "m") as asking, asking.request([1, 2]) as routed:
                self.lost = asking.lost_reports
                inside(routed)

        await asyncio.to_thread(ask)


@pytest.fixture(params=[Async, Sync])
def asking(request: pytest.FixtureRequest) -> Asking:
    made: Asking = request.param()
    return made


Errors = type[client.FleetError]


@pytest.mark.parametrize(
    ("refusal", "kind", "reason"),
    [
        (scheduler_errors.ModelUnknown("no"), client.UnknownModel, "MODEL_UNKNOWN"),
        (scheduler_errors.TargetUnknown("no"), client.UnknownTarget, "TARGET_UNKNOWN"),
        (scheduler_errors.InvalidRequest("model", "no"), client.InvalidRequest, "INVALID_FIELD"),
        (
            scheduler_errors.AccessRefused(16, "BAD_CREDENTIAL", "no"),
            client.NotAuthenticated,
            "BAD_CREDENTIAL",
        ),
        (scheduler_errors.AccessRefused(7, "NOT_ALLOWED", "no"), client.NotAllowed, "NOT_ALLOWED"),
        (grpc.StatusCode.INTERNAL, client.Unexpected, ""),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, client.Unexpected, ""),
    ],
)
async def test_a_refusal_is_an_exception_of_its_own(
    router: Router,
    target: str,
    asking: Asking,
    refusal: Refusal | grpc.StatusCode,
    kind: Errors,
    reason: str,
) -> None:
    router.refusals = [refusal]
    with pytest.raises(client.FleetError, match=r"no|says gRPC") as refused:
        await asking.route(client.Scheduler(target))
    assert type(refused.value) is kind
    assert refused.value.reason == reason
    assert len(router.routed) == 1


async def test_an_early_no_says_why_and_when_to_come_back(
    router: Router, target: str, asking: Asking
) -> None:
    router.refusals = [
        scheduler_errors.DeadlineUnreachable("no", metadata={"estimate_s": "3.000"}, retry_s=1.5)
    ]
    with pytest.raises(client.Rejected) as rejected:
        await asking.route(client.Scheduler(target), deadline_s=1.0)
    assert rejected.value.retry_after_s == 1.5
    assert rejected.value.facts == {"estimate_s": "3.000"}
    assert rejected.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_route_is_asked_again_once_under_the_same_id(
    router: Router, target: str, asking: Asking
) -> None:
    router.refusals = [grpc.StatusCode.UNAVAILABLE]
    routed = await asking.route(client.Scheduler(target))
    assert [request.request_id for request in router.routed] == [routed.request_id] * 2
    assert len(routed.request_id) == 32
    router.refusals = [scheduler_errors.NoReplicas("none", retry_s=2.0)] * 2
    with pytest.raises(client.NoReplicas) as refused:
        await asking.route(client.Scheduler(target), request_id="mine")
    assert refused.value.retry_after_s == 2.0
    assert [request.request_id for request in router.routed[2:]] == ["mine"] * 2


async def test_nobody_there_is_told_at_once(asking: Asking) -> None:
    with pytest.raises(client.Unavailable) as refused:
        await asking.route(client.Scheduler("127.0.0.1:9", route_timeout_s=PATIENCE_S))
    assert (refused.value.reason, refused.value.retry_after_s) == ("", None)


async def test_a_scheduler_that_does_not_answer_is_not_waited_for(
    router: Router, target: str, asking: Asking
) -> None:
    router.stuck = True
    with pytest.raises(client.TimedOut):
        await asking.route(client.Scheduler(target, route_timeout_s=0.05))
    async with asyncio.timeout(PATIENCE_S):
        await router.cancelled.wait()


async def test_a_cancelled_route_is_cancelled_at_the_scheduler(router: Router, target: str) -> None:
    router.stuck = True
    async with client.AsyncClient(client.Scheduler(target, route_timeout_s=PATIENCE_S), "m") as a:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await a.route([1])
        async with asyncio.timeout(PATIENCE_S):
            await router.cancelled.wait()


async def test_closing_waits_for_the_reports(router: Router, target: str, asking: Asking) -> None:
    def inside(routed: client.Routed) -> None:
        routed.started()
        routed.first_token()
        routed.finished({"prompt_tokens": 2})

    await asking.block(client.Scheduler(target), inside)
    assert not asking.lost
    assert router.stages == {"STARTED", "FIRST_TOKEN", "FINISHED"}


async def test_a_report_is_made_again_until_it_is_taken(
    router: Router, target: str, asking: Asking
) -> None:
    def inside(routed: client.Routed) -> None:
        router.refusals = [scheduler_errors.OwnerSilent("again", retry_s=1.0)]
        routed.finished()

    await asking.block(client.Scheduler(target), inside)
    assert not asking.lost
    assert router.stages == {"FINISHED"}


async def test_a_report_that_nobody_takes_harms_no_request(
    router: Router, target: str, asking: Asking
) -> None:
    def inside(routed: client.Routed) -> None:
        router.stuck = True
        routed.first_token()
        routed.finished()

    scheduler = client.Scheduler(target, report_timeout_s=0.05)
    await asking.block(scheduler, inside)
    assert asking.lost == {"DEADLINE_EXCEEDED": 2}


async def test_a_report_after_the_clients_end_is_counted_as_lost(
    router: Router, target: str, asking: Asking
) -> None:
    routed = await asking.route(client.Scheduler(target))
    routed.finished()
    assert not router.reported
    assert asking.lost == {"CLOSED": 1}


async def test_a_cancelled_block_is_reported_although_its_task_is_gone(
    router: Router, target: str
) -> None:
    async with client.AsyncClient(client.Scheduler(target), "m") as asking:
        inside = asyncio.Event()

        async def handler() -> None:
            async with asking.request([1]):
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(handler())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert router.stages == {"ABORTED"}


@pytest.mark.parametrize("made", [client.AsyncClient, client.Client])
async def test_a_new_ca_is_trusted_without_a_restart(
    router: Router,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: type[client.AsyncClient | client.Client],
) -> None:
    monkeypatch.setattr("servingfleet_client.connection.REREAD_S", 0.0)
    old, new = Authority("old"), Authority("new")
    ca_file = tmp_path / "ca.crt"
    ca_file.write_bytes(old.pem)
    async with serving(router, new.server("fleet")) as target:
        asking = made(client.Scheduler(target, ca_file, server_name="fleet"), "m")

        async def ask() -> client.Routed:
            if isinstance(asking, client.AsyncClient):
                return await asking.route([1])
            return await asyncio.to_thread(asking.route, [1])

        with pytest.raises(client.Unavailable):
            await ask()
        ca_file.write_bytes(old.pem + new.pem)
        await ask()
        closing = asking.close()
        if closing is not None:
            await closing
