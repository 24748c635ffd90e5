"""The load's clients: what they report, what they try again, how they count it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, cast

import grpc
import httpx
import pytest
from grpc.aio import AioRpcError, Metadata

from servingfleet_protos.v1 import common_pb2, routing_pb2
from servingfleet_sim import clients
from servingfleet_sim.clients import Clients, End
from servingfleet_sim.workload import Session, Turn

if TYPE_CHECKING:  # this name exists for type checkers only
    from servingfleet_protos.v1.routing_pb2_grpc import RouterAsyncStub

Stage = routing_pb2.ReportRequest.Stage
SESSION = Session(0, 0, (Turn(0.0, (1, 2, 3), 2), Turn(0.0, (4,), 2)), "m")


class FakeRouter:
    """Sends to the first replica that is not excluded."""

    def __init__(self, *refusals: grpc.StatusCode) -> None:
        self.refusals = list(refusals)
        self.replicas: tuple[str, ...] = ("a", "b")
        self.routed: list[routing_pb2.RouteRequest] = []
        self.reported: list[routing_pb2.ReportRequest] = []

    async def Route(
        self,
        request: routing_pb2.RouteRequest,
        *,
        timeout: float,  # noqa: ASYNC109 - as in gRPC
    ) -> routing_pb2.RouteResponse:
        self.routed.append(request)
        if self.refusals:
            raise AioRpcError(self.refusals.pop(0), Metadata(), Metadata(), details="no")
        excluded = {target.replica for target in request.exclude}
        replica = next(name for name in self.replicas if name not in excluded)
        return routing_pb2.RouteResponse(
            decision_id=f"d{len(self.routed)}",
            target=common_pb2.Target(replica=replica, rank=0),
            endpoint=f"{replica}:1",
        )

    async def Report(
        self,
        request: routing_pb2.ReportRequest,
        *,
        timeout: float,  # noqa: ASYNC109 - as in gRPC
    ) -> routing_pb2.ReportResponse:
        self.reported.append(request)
        return routing_pb2.ReportResponse(disposition=routing_pb2.ReportResponse.DISPOSITION_JOINED)

    @property
    def stages(self) -> list[tuple[str, int]]:
        return [(report.decision_id, report.stage) for report in self.reported]


def events(*parts: dict[str, Any], done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(part)}\n\n" for part in parts]
    return "".join([*lines, *(["data: [DONE]\n\n"] if done else [])]).encode()


TOKENS = {"choices": [{"token_ids": [8, 9]}]}
USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 1},
    },
}

Engine = Callable[[httpx.Request], httpx.Response]


async def play(router: FakeRouter, engine: Engine) -> Clients:
    async with httpx.AsyncClient(transport=httpx.MockTransport(engine)) as http:
        played = Clients(cast("RouterAsyncStub", router), http)
        await played.play([SESSION], seconds=1.0)
    return played


async def test_an_answer_is_reported_to_the_token_and_goes_into_the_next_prompt() -> None:
    router, bodies = FakeRouter(), []

    def engine(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, content=events(TOKENS, USAGE))

    played = await play(router, engine)
    assert [body["prompt"] for body in bodies] == [[1, 2, 3], [1, 2, 3, 8, 9, 4]]
    assert all(body["stream_options"] == {"include_usage": True} for body in bodies)
    assert router.stages[:2] == [("d1", Stage.STAGE_FIRST_TOKEN), ("d1", Stage.STAGE_FINISHED)]
    last = router.reported[1]
    assert (last.prompt_tokens, last.cached_tokens, last.output_tokens) == (3, 1, 2)
    assert last.ttft_s > 0
    assert played.progress.ends == {End.FINISHED: 2}
    assert played.progress.open == 0
    assert all(request.joined for request in played.requests)


async def test_what_failed_before_its_first_token_is_tried_elsewhere() -> None:
    router = FakeRouter()

    def engine(request: httpx.Request) -> httpx.Response:
        if request.url.host == "a":
            return httpx.Response(503, text="busy")
        return httpx.Response(200, content=events(TOKENS, USAGE))

    played = await play(router, engine)
    assert [t.replica for t in router.routed[1].exclude] == ["a"]
    assert router.stages[0] == ("d1", Stage.STAGE_FAILED)
    assert router.stages[2] == ("d2", Stage.STAGE_FINISHED)
    assert len({request.request_id for request in router.routed}) == len(router.routed)
    assert played.progress.ends == {End.FINISHED: 2}
    assert played.progress.retries == 2


@pytest.mark.parametrize(
    "answer",
    [events(TOKENS, done=False), events(TOKENS), events(TOKENS, {"no choices": 1})],
    ids=["broken off", "no usage", "no choices"],
)
async def test_half_an_answer_has_failed_and_is_not_tried_again(answer: bytes) -> None:
    router = FakeRouter()
    played = await play(router, lambda _: httpx.Response(200, content=answer))
    assert played.progress.ends == {End.FAILED: 1}  # the second turn has nothing to follow
    assert router.stages[-1] == ("d1", Stage.STAGE_FAILED)
    assert len(router.routed) == 1
    assert played.requests[0].cached_tokens is None


async def test_tries_have_an_end() -> None:
    router = FakeRouter()

    def engine(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("nobody there")

    router.replicas = ("a", "b", "c", "d")
    played = await play(router, engine)
    assert played.progress.ends == {End.FAILED: 1}
    assert len(router.routed) == 1 + clients.MAX_RETRIES
    assert [stage for _, stage in router.stages] == [Stage.STAGE_FAILED] * len(router.routed)


async def test_a_refusal_is_final_and_an_absent_scheduler_is_asked_again() -> None:
    answer = httpx.Response(200, content=events(TOKENS, USAGE))
    final = await play(FakeRouter(grpc.StatusCode.RESOURCE_EXHAUSTED), lambda _: answer)
    assert final.progress.ends == {End.REFUSED: 1}
    assert "RESOURCE_EXHAUSTED" in final.requests[0].reason
    again = await play(
        FakeRouter(grpc.StatusCode.UNAVAILABLE),
        lambda _: httpx.Response(200, content=events(TOKENS, USAGE)),
    )
    assert again.progress.ends == {End.FINISHED: 2}
    assert again.progress.retries == 1


async def test_a_request_that_takes_too_long_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "REQUEST_S", 0.05)
    router = FakeRouter()

    async def never() -> AsyncIterator[bytes]:
        yield events(TOKENS, done=False)
        await asyncio.Event().wait()

    played = await play(router, lambda _: httpx.Response(200, content=never()))
    assert played.progress.ends == {End.ABORTED: 1}
    assert router.stages == [("d1", Stage.STAGE_FIRST_TOKEN), ("d1", Stage.STAGE_ABORTED)]
    assert played.progress.open == 0
