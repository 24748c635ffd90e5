"""The edge of Route: a caller that is gone leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import grpc
import pytest

from servingfleet_protos.v1 import routing_pb2, routing_pb2_grpc
from servingfleet_scheduler.clock import Clock
from servingfleet_scheduler.metrics import Metrics
from servingfleet_scheduler.rich_errors import Context
from servingfleet_scheduler.routing import RouterServicer
from servingfleet_scheduler.service import Scheduler

from .helpers import make_scheduler, route_request


class Call:
    """A call whose caller stays, or goes."""

    def __init__(self, left_s: float | None = None) -> None:
        self.gone = False
        self._left_s = left_s
        self._ended: list[Callable[[Any], None]] = []

    def time_remaining(self) -> float | None:
        return self._left_s

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise RuntimeError(code)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._ended.append(callback)

    def done(self) -> bool:
        return not self.gone

    def end(self, *, gone: bool = False) -> None:
        self.gone = gone
        for callback in self._ended:
            callback(self)


async def route(scheduler: Scheduler, call: Call, **fields: Any) -> routing_pb2.RouteResponse:
    clock = Clock()
    servicer = RouterServicer(scheduler, clock, Metrics(scheduler, clock))
    return await servicer.Route(route_request(**fields), cast("Context", call))


def open_things(scheduler: Scheduler) -> tuple[int, int, int]:
    dispatched = sum(len(k.dispatches) for r in scheduler.fleet for k in r.ranks.values())
    return len(scheduler.decisions), len(scheduler.credits), dispatched


async def test_a_route_whose_caller_is_gone_leaves_nothing_behind() -> None:
    scheduler, call = make_scheduler(static=["r1"]), Call()
    await route(scheduler, call)
    assert open_things(scheduler) == (1, 1, 1)
    call.end(gone=True)
    assert open_things(scheduler) == (0, 0, 0)


async def test_a_route_that_was_answered_stays_open() -> None:
    scheduler, call = make_scheduler(static=["r1"]), Call()
    await route(scheduler, call)
    call.end()
    assert open_things(scheduler) == (1, 1, 1)


async def test_a_route_that_is_reached_after_its_deadline_opens_nothing() -> None:
    scheduler = make_scheduler(static=["r1"])
    with pytest.raises(RuntimeError, match="DEADLINE_EXCEEDED"):
        await route(scheduler, Call(0.0))
    assert open_things(scheduler) == (0, 0, 0)
    await route(scheduler, Call(0.5))
    assert open_things(scheduler) == (1, 1, 1)


async def test_what_another_call_was_given_too_stays_for_that() -> None:
    scheduler, first, second = make_scheduler(static=["r1"]), Call(), Call()
    one = await route(scheduler, first, request_id="q")
    two = await route(scheduler, second, request_id="q")
    assert one.decision_id == two.decision_id
    first.end(gone=True)
    assert open_things(scheduler) == (1, 1, 1)
    second.end(gone=True)
    assert open_things(scheduler) == (0, 0, 0)


async def test_grpc_tells_of_a_caller_that_went_away() -> None:
    """The servicer rests on it: in its callback, a call that its caller gave up is not done."""
    done: list[bool] = []
    asked, ended = asyncio.Event(), asyncio.Event()

    class Router(routing_pb2_grpc.RouterServicer):
        async def Route(
            self, request: routing_pb2.RouteRequest, context: Context
        ) -> routing_pb2.RouteResponse:
            def end(call: Context) -> None:
                done.append(call.done())
                ended.set()

            context.add_done_callback(end)  # type: ignore[arg-type]  # its stub takes no functions
            asked.set()
            if request.request_id == "wait":
                await asyncio.Event().wait()
            return routing_pb2.RouteResponse()

    server = grpc.aio.server()
    routing_pb2_grpc.add_RouterServicer_to_server(Router(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            router = routing_pb2_grpc.RouterStub(channel)
            await router.Route(routing_pb2.RouteRequest(), timeout=5)
            await asyncio.wait_for(ended.wait(), 5)
            asked.clear()
            ended.clear()
            call = router.Route(routing_pb2.RouteRequest(request_id="wait"), timeout=5)
            await asyncio.wait_for(asked.wait(), 5)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.wait_for(ended.wait(), 5)
    finally:
        await server.stop(None)
    assert done == [True, False]
