"""The Kubernetes client: every answer becomes an object or a typed error, in time, and nothing is written unasked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from servingfleet_operator.cluster import APPLY, Cluster
from servingfleet_operator.errors import (
    ClusterError,
    Conflict,
    Invalid,
    NotFound,
    NotLeading,
    Refused,
    Terminating,
    Unreachable,
)
from servingfleet_operator.kinds import CONFIG_MAP, FLEET, POD_MONITOR

Answer = Callable[[web.Request], Any]
BODY = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "a", "namespace": "ns"},
    "data": {"k": "v"},
}


class Server:
    """Answers as it is told, and remembers what it was asked."""

    def __init__(self) -> None:
        self.answer: Answer = lambda request: web.json_response({"metadata": {"name": "a"}})
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.tokens: list[str] = []
        self.bodies: list[str] = []
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self.test = TestServer(app)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path, dict(request.query)))
        self.tokens.append(request.headers.get("Authorization", ""))
        self.bodies.append(await request.text())
        found = self.answer(request)
        if asyncio.iscoroutine(found):
            found = await found
        assert isinstance(found, web.StreamResponse)
        return found

    def says(self, code: int, message: str = "no", **more: Any) -> None:
        status = {"kind": "Status", "message": message, **more}
        self.answer = lambda request: web.json_response(status, status=code)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    await made.test.start_server()
    yield made
    await made.test.close()


@pytest.fixture
async def cluster(server: Server) -> AsyncIterator[Cluster]:
    async with connected(server) as made:
        yield made


def connected(server: Server, **options: Any) -> Cluster:
    tokens = iter(f"t{number}" for number in range(10))

    def login() -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=str(server.test.make_url("/")), token=next(tokens))

    return Cluster(login, **{"may_write": lambda: True, **options})


async def test_an_apply_names_its_manager_and_says_whether_it_made_the_object(
    server: Server, cluster: Cluster
) -> None:
    server.answer = lambda request: web.json_response(
        {**BODY, "type": request.headers["Content-Type"]}, status=201
    )
    applied = await cluster.apply(BODY)
    assert applied.created
    assert applied.body["type"] == APPLY
    assert server.asked == [
        (
            "PATCH",
            "/api/v1/namespaces/ns/configmaps/a",
            {"fieldManager": "servingfleet-operator", "force": "true"},
        )
    ]
    assert json.loads(server.bodies[0]) == BODY


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (400, Invalid),
        (401, Refused),
        (403, Refused),
        (404, NotFound),
        (409, Conflict),
        (422, Invalid),
        (429, Unreachable),
        (500, Unreachable),
        (503, Unreachable),
        (418, ClusterError),
    ],
)
async def test_each_refusal_is_an_error_of_its_own_that_says_what_was_asked_and_answered(
    server: Server, cluster: Cluster, code: int, error: type[ClusterError]
) -> None:
    server.says(code, "because of the weather")
    with pytest.raises(error, match="because of the weather") as raised:
        await cluster.get(CONFIG_MAP, "a", "ns")
    assert type(raised.value) is error
    assert "get /api/v1/namespaces/ns/configmaps/a" in str(raised.value)


async def test_a_missing_right_is_told_with_who_can_give_it(
    server: Server, cluster: Cluster
) -> None:
    server.says(403, 'configmaps is forbidden: User "x" cannot get')
    with pytest.raises(Refused, match="whoever installed it must upgrade the chart"):
        await cluster.get(CONFIG_MAP, "a", "ns")


async def test_only_a_missing_right_counts_as_one(server: Server) -> None:
    lacking: list[tuple[str, str]] = []
    async with connected(server, lacking=lambda *request: lacking.append(request)) as cluster:
        server.says(403, "terminated", details={"causes": [{"reason": "NamespaceTerminating"}]})
        with pytest.raises(Terminating):
            await cluster.apply(BODY)
        assert lacking == []
        server.says(403, 'configmaps is forbidden: User "x" cannot patch')
        with pytest.raises(Refused):
            await cluster.apply(BODY)
        assert lacking == [("apply", "configmaps")]


async def test_a_namespace_that_is_going_is_no_missing_right(
    server: Server, cluster: Cluster
) -> None:
    server.says(403, "being terminated", details={"causes": [{"reason": "NamespaceTerminating"}]})
    with pytest.raises(Terminating):
        await cluster.apply(BODY)


async def test_an_apply_that_does_not_fit_the_schema_is_not_tried_for_ever(
    server: Server, cluster: Cluster
) -> None:
    # As the API server words it, and with this code.
    server.says(500, "failed to create typed patch object (ns/a; v1): .dta: field not declared")
    with pytest.raises(Invalid, match="field not declared"):
        await cluster.apply(BODY)


async def test_a_server_that_asks_for_patience_is_quoted(server: Server, cluster: Cluster) -> None:
    server.answer = lambda request: web.json_response(
        {"message": "slow down"}, status=429, headers={"Retry-After": "7"}
    )
    with pytest.raises(Unreachable) as raised:
        await cluster.get(CONFIG_MAP, "a", "ns")
    assert raised.value.retry_s == 7


async def test_a_path_that_is_not_served_is_not_found_although_the_answer_is_plain_text(
    server: Server, cluster: Cluster
) -> None:
    server.answer = lambda request: web.Response(text="404 page not found\n", status=404)
    assert not await cluster.serves(POD_MONITOR)


async def test_a_success_that_is_no_json_is_no_success(server: Server, cluster: Cluster) -> None:
    server.answer = lambda request: web.Response(text="<html>proxy</html>")
    with pytest.raises(Unreachable, match="proxy"):
        await cluster.get(CONFIG_MAP, "a", "ns")


async def test_a_server_that_stands_still_is_given_up_in_time(server: Server) -> None:
    release = asyncio.Event()

    async def never(_: web.Request) -> web.Response:
        await release.wait()
        return web.Response()

    server.answer = never
    async with connected(server, deadline_s=0.05) as cluster:
        with pytest.raises(Unreachable, match="no answer"):
            await cluster.get(CONFIG_MAP, "a", "ns")
    release.set()


async def test_a_server_that_is_away_is_told_with_its_address(server: Server) -> None:
    url = str(server.test.make_url("/")).rstrip("/")
    await server.test.close()
    async with Cluster(lambda: kopf.ConnectionInfo(server=url), may_write=lambda: True) as cluster:
        with pytest.raises(Unreachable, match=url):
            await cluster.get(CONFIG_MAP, "a", "ns")


async def test_credentials_that_can_t_be_read_now_are_no_end_of_the_world() -> None:
    def login() -> kopf.ConnectionInfo:
        raise FileNotFoundError("/var/run/secrets/token")

    async with Cluster(login, may_write=lambda: True) as cluster:
        with pytest.raises(Unreachable, match="/var/run/secrets/token"):
            await cluster.get(CONFIG_MAP, "a", "ns")


async def test_a_token_that_ended_is_read_again_once(server: Server, cluster: Cluster) -> None:
    server.answer = lambda request: web.json_response(
        {}, status=401 if request.headers["Authorization"] == "Bearer t0" else 200
    )
    await cluster.get(CONFIG_MAP, "a", "ns")
    assert server.tokens == ["Bearer t0", "Bearer t1"]
    server.says(401)
    with pytest.raises(Refused):
        await cluster.get(CONFIG_MAP, "a", "ns")
    assert len(server.tokens) == 4


async def test_nothing_is_sent_while_another_leads(server: Server) -> None:
    async with connected(server, may_write=lambda: False) as cluster:
        for write in (
            lambda: cluster.apply(BODY),
            lambda: cluster.create(BODY),
            lambda: cluster.replace(BODY),
            lambda: cluster.patch(CONFIG_MAP, "a", "ns", {}),
            lambda: cluster.delete(CONFIG_MAP, "a", "ns", "u"),
        ):
            with pytest.raises(NotLeading):
                await write()
        assert server.asked == []
        await cluster.get(CONFIG_MAP, "a", "ns")
        await cluster.create(BODY, elected=True)
        assert len(server.asked) == 2


async def test_a_long_list_is_read_page_by_page(server: Server, cluster: Cluster) -> None:
    def page(request: web.Request) -> web.Response:
        following = {"": "p2", "p2": ""}[request.query.get("continue", "")]
        item = {"metadata": {"name": request.query.get("continue", "p1"), "big": "x"}}
        metadata = {"resourceVersion": "7", "continue": following}
        return web.json_response({"metadata": metadata, "items": [item]})

    server.answer = page
    listing = await cluster.list(FLEET, keep=lambda body: {"name": body["metadata"]["name"]})
    assert listing.items == [{"name": "p1"}, {"name": "p2"}]
    assert listing.resource_version == "7"
    server.asked.clear()
    assert len((await cluster.list(FLEET, limit=1)).items) == 1
    assert len(server.asked) == 1


async def test_an_object_is_deleted_only_if_it_is_the_one_that_was_meant(
    server: Server, cluster: Cluster
) -> None:
    await cluster.delete(CONFIG_MAP, "a", "ns", "u-1")
    assert json.loads(server.bodies[0])["preconditions"] == {"uid": "u-1"}
    for code in (404, 409):
        server.says(code)
        await cluster.delete(CONFIG_MAP, "a", "ns", "u-1")


@pytest.mark.parametrize(
    ("major", "minor", "expected"), [("1", "34", (1, 34)), ("1", "29+", (1, 29)), ("", "", (0, 0))]
)
async def test_the_version_is_read_however_a_distribution_writes_it(
    server: Server, cluster: Cluster, major: str, minor: str, expected: tuple[int, int]
) -> None:
    server.answer = lambda request: web.json_response({"major": major, "minor": minor})
    assert await cluster.version() == expected


async def test_any_answer_is_a_sign_of_life_and_silence_is_none(
    server: Server, cluster: Cluster
) -> None:
    before = cluster.answered_at
    server.says(403)
    with pytest.raises(Refused):
        await cluster.get(CONFIG_MAP, "a", "ns")
    answered = cluster.answered_at
    assert answered > before
    await server.test.close()
    with pytest.raises(Unreachable):
        await cluster.get(CONFIG_MAP, "a", "ns")
    assert cluster.answered_at == answered
