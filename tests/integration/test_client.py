"""The client package and the example gateway: a real scheduler, a real relay, an emulated engine."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from examples.gateway import gateway

import servingfleet_client as client
from servingfleet_protos.v1 import fleet_pb2
from tests.apiserver import ApiServer
from tests.integration.fleet import PATIENCE_S, Fleet, Scheduler
from tests.integration.secured import AUDIENCE, NAME, secured
from tests.unit.relay.authorities import Authority

MODEL = "emulated"
PROMPT = list(range(1000, 1200))


async def engine(
    fleet: Fleet,
    scheduler: Scheduler,
    *arguments: str,
    ranks: int = 2,
    name: str = "gpu-0",
    adapter: str = "tuned",
) -> str:
    """An emulated engine with its relay, connected; returns its endpoint."""
    process = await fleet.process(
        "servingfleet_sim.emulator",
        *("--port", "0", "--events-port", "0", "--replay-port", "0"),
        *("--gpu", "instant", "--ranks", str(ranks), "--adapter", adapter, *arguments),
    )
    ports = await process.event("listening")
    endpoint = f"127.0.0.1:{ports['http_port']}"
    await fleet.process(
        "servingfleet_relay",
        *("--replica", name, "--model", MODEL, "--ranks", str(ranks)),
        *("--engine-events", f"tcp://127.0.0.1:{ports['events_port']}"),
        *("--engine-replay", f"tcp://127.0.0.1:{ports['replay_port']}"),
        *("--engine-http", f"http://{endpoint}", "--endpoint", endpoint),
        *("--scheduler", scheduler.target),
    )
    await scheduler.until(
        lambda seen: (
            name in seen
            and len(seen[name].ranks) == ranks
            and all(rank.HasField("load_age_s") for rank in seen[name].ranks)
        ),
        "the engine's load",
    )
    return endpoint


async def figures(
    scheduler: Scheduler, reached: Callable[[fleet_pb2.ReuseReport], bool]
) -> fleet_pb2.ReuseReport:
    """The model's figures, when they are as expected."""
    seen = fleet_pb2.ReuseReport()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not reached(seen):  # another process
                await asyncio.sleep(0.01)
                answer = await scheduler.fleet.GetReuse(
                    fleet_pb2.GetReuseRequest(model=MODEL), timeout=PATIENCE_S
                )
                seen = next(iter(answer.reports), seen)
    except TimeoutError:
        raise AssertionError(f"last seen: {seen}") from None
    return seen


async def joined(scheduler: Scheduler, pairs: int) -> fleet_pb2.ReuseReport:
    """The model's figures, when they speak of that many outcomes."""
    return await figures(scheduler, lambda seen: seen.sums.pairs == pairs)


async def sent(routed: client.Routed) -> dict[str, Any]:
    """The engine's answer to the prompt."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            f"http://{routed.endpoint}/v1/completions", json=body, headers=dict(routed.headers)
        ) as response,
    ):
        assert response.status == 200
        answer: dict[str, Any] = await response.json()
    return answer


async def test_what_a_client_reports_is_joined_with_what_it_was_told(fleet: Fleet) -> None:
    scheduler = await fleet.scheduler()
    await engine(fleet, scheduler)
    reported = 0
    async with client.AsyncClient(client.Scheduler(scheduler.target), MODEL) as asking:
        for round_ in range(3):
            async with asking.request(PROMPT, session_id="s") as routed:
                predicted = routed.decision.prediction.predicted
                usage = (await sent(routed))["usage"]
                routed.finished(usage)
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert (predicted, cached) == ((0, 0) if round_ == 0 else (192, 192))
            reported += cached
            # Its events, not only its own credit.
            await scheduler.until(
                lambda seen: any(
                    lane.blocks >= 12 for rank in seen["gpu-0"].ranks for lane in rank.lanes
                ),
                "the prompt's blocks",
            )
            # Before the report is there, it still counts as waiting: so short a prompt would not queue behind itself.
            seen = await joined(scheduler, round_ + 1)
    assert not asking.lost_reports
    assert seen.sums.actual == seen.sums.predicted == reported == 384


async def test_what_ran_on_a_fallback_is_joined_there(fleet: Fleet) -> None:
    scheduler = await fleet.scheduler()
    await engine(fleet, scheduler)
    async with (
        client.AsyncClient(client.Scheduler(scheduler.target), MODEL) as asking,
        asking.request(PROMPT, max_fallbacks=2) as routed,
    ):
        first = routed.target.rank
        assert routed.headers == {"X-data-parallel-rank": str(first)}
        assert routed.fall_back()
        assert routed.headers == {"X-data-parallel-rank": str(1 - first)}
        routed.finished((await sent(routed))["usage"])
    seen = await joined(scheduler, 1)
    assert dict(seen.set_aside) == {"ran_elsewhere": 1}


async def test_without_asyncio_it_is_the_same(fleet: Fleet) -> None:
    scheduler = await fleet.scheduler()
    await engine(fleet, scheduler)
    loop = asyncio.get_running_loop()

    def ask() -> None:
        with client.Client(client.Scheduler(scheduler.target), MODEL) as asking:
            with asking.request(PROMPT) as routed:
                answer = asyncio.run_coroutine_threadsafe(sent(routed), loop).result(PATIENCE_S)
                routed.first_token()
                routed.finished(answer["usage"])
            with pytest.raises(KeyError), asking.request(PROMPT):
                raise KeyError
            with asking.request(PROMPT):
                pass
        assert not asking.lost_reports

    await asyncio.to_thread(ask)
    seen = await figures(scheduler, lambda seen: seen.sums.decisions == 3)
    assert seen.sums.pairs == 1
    assert dict(seen.set_aside) == {"failed": 1, "aborted": 1}


async def test_each_refusal_has_its_type(fleet: Fleet) -> None:
    scheduler = await fleet.scheduler("--static-replica", f"model={MODEL},replica=gpu-0")
    async with client.AsyncClient(client.Scheduler(scheduler.target), MODEL) as asking:
        with pytest.raises(client.Rejected) as rejected:
            await asking.route(PROMPT, deadline_s=0.0)
        assert rejected.value.reason == "DEADLINE_UNREACHABLE"
        assert rejected.value.retry_after_s is not None
        assert {"estimate_s", "queue_s", "over_s"} <= rejected.value.facts.keys()
        with pytest.raises(client.InvalidRequest) as invalid:
            await asking.route(PROMPT, max_fallbacks=17)
        assert invalid.value.fields == [("max_fallbacks", "is 17; at most 16")]
        with pytest.raises(client.UnknownTarget):
            await asking.route(PROMPT, only=[client.Target(replica="nobody")])
        with pytest.raises(client.NoReplicas) as none:
            await asking.route(PROMPT, exclude=[client.Target(replica="gpu-0")])
        assert none.value.retry_after_s == 2.0
    async with client.AsyncClient(client.Scheduler(scheduler.target), "another") as asking:
        with pytest.raises(client.UnknownModel, match="another"):
            await asking.route(PROMPT)


async def test_a_token_is_shown_and_read_again(
    fleet: Fleet, tmp_path: Path, server: ApiServer
) -> None:
    server.users["good", AUDIENCE] = {"username": "jane"}
    server.users["poor", AUDIENCE] = {"username": "joe"}
    server.rights = {("jane", "create", "route"), ("jane", "create", "report")}
    authority = Authority("ca")
    replica = ["--static-replica", f"model={MODEL},replica=gpu-0"]
    scheduler = await secured(fleet, tmp_path / "tls", replica, authority, trusted=authority)
    token = tmp_path / "token"
    token.write_text("good\n")
    reached = client.Scheduler(
        scheduler.target,
        ca_file=tmp_path / "tls" / "ca.crt",
        token_file=token,
        server_name=NAME,
    )
    async with client.AsyncClient(reached, MODEL) as asking:
        routed = await asking.route(PROMPT)
        told = client.ReportRequest(
            decision_id=routed.decision.decision_id, prompt_tokens=len(PROMPT), cached_tokens=0
        )
        answer = await asking.report(told)
        assert answer.disposition == client.ReportResponse.DISPOSITION_JOINED
        token.write_text("poor\n")
        with pytest.raises(client.NotAllowed, match="joe may not create servingfleets/route"):
            await asking.route(PROMPT)
        token.write_text("stolen\n")
        with pytest.raises(client.NotAuthenticated) as refused:
            await asking.route(PROMPT)
        assert "stolen" not in str(refused.value)
        # It may be about to be replaced: the last one is shown.
        token.write_text("")
        with pytest.raises(client.NotAuthenticated):
            await asking.route(PROMPT)
        token.write_text("good\n")
        with await asking.route(PROMPT):
            pass
    assert not asking.lost_reports


@asynccontextmanager
async def front(scheduler: Scheduler, endpoint: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A user's connection to the example."""
    options = argparse.Namespace(
        scheduler=scheduler.target,
        model=MODEL,
        tokenizer=f"http://{endpoint}",
        ca_file=None,
        token_file=None,
        server_name="",
        pin=True,
        label=[],
    )
    runner = web.AppRunner(await gateway.app(options), handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        async with aiohttp.ClientSession(f"http://{host}:{port}") as http:
            yield http
    finally:
        await runner.cleanup()


CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": " ".join(f"t{n}" for n in range(200))}],
    "max_tokens": 5,
}


async def test_the_gateway_streams_what_the_engine_says_and_reports_it(fleet: Fleet) -> None:
    scheduler = await fleet.scheduler()
    endpoint = await engine(fleet, scheduler)
    async with front(scheduler, endpoint) as http:
        async with http.post("/v1/chat/completions", json=CHAT) as response:
            whole = await response.json()
        assert response.status == 200
        for wanted in (False, True):
            options = {"stream": True, "stream_options": {"include_usage": wanted}}
            async with http.post("/v1/chat/completions", json=CHAT | options) as response:
                assert response.content_type == "text/event-stream"
                text = await response.text()
            events = [each.removeprefix("data: ") for each in text.split("\n\n") if each]
            assert events[-1] == "[DONE]"
            parts = [json.loads(each) for each in events[:-1]]
            assert [part["usage"]["prompt_tokens"] for part in parts if "usage" in part] == (
                [whole["usage"]["prompt_tokens"]] if wanted else []
            )
            said = "".join(
                choice["delta"]["content"] for part in parts for choice in part["choices"]
            )
            assert said == whole["choices"][0]["message"]["content"]
        before = await joined(scheduler, 3)
        for more in ({"model": "tuned"}, {"cache_salt": "s"}):  # what each holds is its own
            async with http.post("/v1/chat/completions", json=CHAT | more) as response:
                assert response.status == 200
    seen = await joined(scheduler, 5)
    assert seen.sums.actual == seen.sums.predicted == before.sums.actual > 0
    assert not seen.set_aside  # so that its tokens are the engine's, to the last


async def test_the_gateway_tries_another_engine_and_tells_of_the_first(fleet: Fleet) -> None:
    scheduler = await fleet.scheduler(
        *("--policy", "round-robin"),
        *("--static-replica", f"model={MODEL},replica=gone,endpoint=127.0.0.1:9"),
    )
    endpoint = await engine(fleet, scheduler, ranks=1)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
    async with front(scheduler, endpoint) as http:
        for _ in range(2):  # in turns: at least one goes to the other first
            async with http.post("/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
    seen = await joined(scheduler, 2)
    assert set(seen.set_aside) == {"ran_elsewhere"}


async def test_an_engine_that_is_gone_is_soon_left_alone(fleet: Fleet) -> None:
    scheduler = await fleet.scheduler(
        *("--policy", "round-robin"),
        *("--static-replica", f"model={MODEL},replica=gone,endpoint=127.0.0.1:9"),
    )
    endpoint = await engine(fleet, scheduler, ranks=1)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}

    async def ask(http: aiohttp.ClientSession) -> None:
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()

    async with front(scheduler, endpoint) as http:
        for _ in range(10):  # in turns: five of them fail there first
            await ask(http)
        await scheduler.until(lambda seen: seen["gone"].ranks[0].broken_s > 0, "its breaker")
        before = await joined(scheduler, 10)
        for _ in range(4):
            await ask(http)
    after = await joined(scheduler, 14)
    assert after.set_aside == before.set_aside


async def test_a_request_goes_where_its_adapter_is_loaded(fleet: Fleet) -> None:
    scheduler = await fleet.scheduler("--policy", "round-robin")
    await engine(fleet, scheduler, ranks=1, name="law", adapter="law")
    await engine(fleet, scheduler, ranks=1, name="sql", adapter="sql")
    async with client.AsyncClient(client.Scheduler(scheduler.target), MODEL) as asking:

        async def chosen(adapter: str) -> set[str]:
            routed = [await asking.route(PROMPT, adapter=adapter) for _ in range(4)]
            for each in routed:
                each.aborted()
            return {each.target.replica for each in routed}

        assert await chosen("law") == {"law"}
        assert await chosen("sql") == {"sql"}
        assert await chosen("loaded nowhere yet") == {"law", "sql"}
        assert await chosen("") == {"law", "sql"}


async def test_the_gateway_says_no_early_and_when_to_come_back(fleet: Fleet) -> None:
    scheduler = await fleet.scheduler()
    endpoint = await engine(fleet, scheduler)
    async with front(scheduler, endpoint) as http:
        hurry = {"X-First-Token-Within": "0.000001"}
        async with http.post("/v1/chat/completions", json=CHAT, headers=hurry) as response:
            refused = await response.json()
        assert response.status == 429
        assert refused["error"]["code"] == "DEADLINE_UNREACHABLE"
        assert int(response.headers["Retry-After"]) >= 1
        bodies: list[Any] = [
            [],
            {"prompt": [[1], [2]]},
            {"prompt": [-1]},
            {"prompt": [1], "max_tokens": "x"},
        ]
        for wrong in bodies:
            async with http.post("/v1/completions", json=wrong) as response:
                assert response.status == 400


async def test_a_user_who_leaves_the_gateway_is_an_abort(fleet: Fleet) -> None:
    scheduler = await fleet.scheduler()
    slow = ["--gpu", "l40s", "--speed", "0.1", "--blocks", "4000"]
    endpoint = await engine(fleet, scheduler, *slow, ranks=1)
    endless = CHAT | {"stream": True, "max_tokens": 20_000}
    async with (
        front(scheduler, endpoint) as http,
        http.post("/v1/chat/completions", json=endless) as response,
    ):
        assert await response.content.readline()
        response.close()
        seen = await figures(scheduler, lambda seen: bool(seen.set_aside))
    assert dict(seen.set_aside) == {"aborted": 1}
