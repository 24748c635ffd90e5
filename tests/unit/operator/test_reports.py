"""Schedulers are asked by their own addresses with a token of their fleet's; who does not answer is named."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from servingfleet_operator import names
from servingfleet_operator.cluster import Cluster
from servingfleet_operator.reports import TOKEN_USED_S, Caller, Tokens, ask
from servingfleet_protos.v1 import fleet_pb2, fleet_pb2_grpc

from .api import FakeCluster

PLAIN = Caller(None, "demo-scheduler.serving.svc", "secret")


class Fleet(fleet_pb2_grpc.FleetServicer):
    """A scheduler that says its name to whoever has the token, and knows three replicas."""

    def __init__(self) -> None:
        self.draining: dict[str, set[str]] = {"r1": set(), "r2": {"cli"}, "r3": {"operator"}}
        self.told: list[str] = []
        self.refusal: grpc.StatusCode | None = None

    async def SetDraining(
        self,
        request: fleet_pb2.SetDrainingRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> fleet_pb2.SetDrainingResponse:
        if self.refusal is not None:
            await context.abort(self.refusal, "because")
        if ("authorization", "Bearer secret") not in tuple(context.invocation_metadata() or ()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        self.told.append(request.replica)
        drainers = self.draining[request.replica]
        (drainers.add if request.draining else drainers.discard)(request.by)
        return fleet_pb2.SetDrainingResponse(draining_by=sorted(drainers))

    async def GetReuse(
        self,
        request: fleet_pb2.GetReuseRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> fleet_pb2.GetReuseResponse:
        if ("authorization", "Bearer secret") not in tuple(context.invocation_metadata() or ()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        return fleet_pb2.GetReuseResponse(instance_id="one")

    async def ListReplicas(
        self,
        request: fleet_pb2.ListReplicasRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> fleet_pb2.ListReplicasResponse:
        return fleet_pb2.ListReplicasResponse(
            instance_id="one",
            replicas=[
                fleet_pb2.Replica(replica=name, draining_by=sorted(drainers))
                for name, drainers in self.draining.items()
            ],
        )


@pytest.fixture
def scheduler() -> Fleet:
    return Fleet()


@pytest.fixture
async def address(scheduler: Fleet) -> AsyncIterator[str]:
    """Loopback address of the scheduler, on the port that all have."""
    server = grpc.aio.server()
    fleet_pb2_grpc.add_FleetServicer_to_server(scheduler, server)
    found = "127." + ".".join(str(random.randrange(1, 255)) for _ in range(3))
    assert server.add_insecure_port(f"{found}:{names.GRPC_PORT}")
    await server.start()
    yield found
    await server.stop(None)


def pod(name: str, address: str, *, ready: bool = True, **metadata: str) -> dict[str, Any]:
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    return {
        "metadata": {"name": name, **metadata},
        "status": {"podIP": address, "conditions": [condition]},
    }


async def test_each_ready_pod_is_asked_and_the_others_are_not_expected_to_answer(
    address: str,
) -> None:
    pods = [
        pod("a", address),
        pod("b", "127.0.0.1", ready=False),
        pod("c", "127.0.0.1", deletionTimestamp="now"),
        pod("d", ""),
    ]
    answers = await ask(pods, PLAIN, {})
    assert [(each.pod, each.reuse.instance_id) for each in answers.reports] == [("a", "one")]
    assert answers.unanswered == ()


async def test_a_pod_that_does_not_answer_is_named_with_the_reason_and_hinders_no_other(
    address: str,
) -> None:
    answers = await ask([pod("a", address), pod("b", "127.255.255.254")], PLAIN, {})
    assert [each.pod for each in answers.reports] == ["a"]
    [line] = answers.unanswered
    assert line.startswith("b: UNAVAILABLE from 127.255.255.254:7070")


async def test_a_refused_token_is_told(address: str) -> None:
    answers = await ask([pod("a", address)], PLAIN.__class__(None, "x", "wrong"), {})
    assert answers.reports == ()
    assert "a: UNAUTHENTICATED" in answers.unanswered[0]


async def test_schedulers_are_told_who_drains_where_they_do_not_know_it(
    address: str, scheduler: Fleet
) -> None:
    draining = {"r1": True, "r2": True, "r3": True, "not known there": True}
    for _ in range(2):
        answers = await ask([pod("a", address)], PLAIN, draining)
        assert answers.untold == ()
        said = {each.replica: [*each.draining_by] for each in answers.reports[0].replicas.replicas}
        assert said == {"r1": ["operator"], "r2": ["cli", "operator"], "r3": ["operator"]}
    assert sorted(scheduler.told) == ["r1", "r2"]
    assert scheduler.draining["r2"] == {"cli", "operator"}


async def test_what_drains_no_longer_is_taken_back_and_what_others_drain_is_left_alone(
    address: str, scheduler: Fleet
) -> None:
    await ask([pod("a", address)], PLAIN, {"r1": False, "r2": False, "r3": False})
    assert scheduler.told == ["r3"]
    assert scheduler.draining == {"r1": set(), "r2": {"cli"}, "r3": set()}


async def test_one_that_drained_until_its_pod_was_gone_does_not_come_back(
    address: str, scheduler: Fleet
) -> None:
    await ask([pod("a", address)], PLAIN, {"r1": False})
    assert scheduler.draining["r3"] == {"operator"}


async def test_who_may_not_tell_is_named_and_the_answers_count_all_the_same(
    address: str, scheduler: Fleet
) -> None:
    scheduler.refusal = grpc.StatusCode.PERMISSION_DENIED
    answers = await ask([pod("a", address)], PLAIN, {"r1": True})
    assert answers.untold == ("a: PERMISSION_DENIED: because",)
    assert [each.pod for each in answers.reports] == ["a"]
    scheduler.refusal = grpc.StatusCode.NOT_FOUND  # forgotten since it was listed
    assert (await ask([pod("a", address)], PLAIN, {"r1": True})).untold == ()


def tokens(api: FakeCluster, now: list[float]) -> Tokens:
    return Tokens(cast("Cluster", api), lambda: now[0])


async def test_a_token_is_of_our_own_account_for_one_fleet_and_kept_while_it_is_good() -> None:
    api, now = FakeCluster(), [0.0]
    kept = tokens(api, now)
    first = await kept.token("servingfleet.dev/a/x")
    assert await kept.token("servingfleet.dev/a/x") == first
    assert await kept.token("servingfleet.dev/a/y") != first
    now[0] = TOKEN_USED_S
    assert await kept.token("servingfleet.dev/a/x") != first
    assert api.calls[0] == ("whoami", "", "")
    assert [call[1] for call in api.calls[1:]] == ["operator"] * 3


async def test_a_token_that_was_refused_is_not_used_again() -> None:
    api, now = FakeCluster(), [0.0]
    kept = tokens(api, now)
    first = await kept.token("a")
    kept.forget("a")
    assert await kept.token("a") != first


async def test_who_is_no_account_has_no_token_to_give() -> None:
    api = FakeCluster(user="kubernetes-admin")
    assert await tokens(api, [0.0]).token("a") == ""
