"""The probes tell the truth: healthy is who hears from the API server, ready is who can answer the webhook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import aiohttp
import pytest

from servingfleet_operator.cluster import Cluster
from servingfleet_operator.health import SILENCE_S, Health, serve
from servingfleet_operator.metrics import Metrics


@dataclass
class Answered:
    answered_at: float = 0.0


@dataclass
class World:
    now: float = 0.0
    serving: bool = False

    def __post_init__(self) -> None:
        self.cluster = Answered()
        self.health = Health(cast("Cluster", self.cluster), lambda: self.serving, lambda: self.now)


@pytest.fixture
def world() -> World:
    return World()


def test_silence_of_the_api_server_makes_it_unhealthy_and_an_answer_heals_it(world: World) -> None:
    world.now = SILENCE_S
    assert world.health.healthy()[0]
    world.now = SILENCE_S + 1
    healthy, why = world.health.healthy()
    assert not healthy
    assert "181 s" in why
    world.cluster.answered_at = world.now
    assert world.health.healthy()[0]


def test_it_is_ready_once_the_webhook_can_answer_whatever_the_api_server_does(world: World) -> None:
    assert not world.health.ready()[0]
    world.serving = True
    world.now = SILENCE_S * 10
    assert world.health.ready()[0]


async def test_the_probes_and_the_metrics_are_served(world: World) -> None:
    metrics = Metrics()
    metrics.request("get", "pods", 200, 0.1)
    async with (
        serve("127.0.0.1", 0, world.health, metrics) as port,
        aiohttp.ClientSession() as http,
    ):
        seen = {}
        for path in ("/healthz", "/readyz", "/metrics"):
            async with http.get(f"http://127.0.0.1:{port}{path}") as answer:
                seen[path] = (answer.status, await answer.text())
    assert seen["/healthz"] == (200, "ok\n")
    assert seen["/readyz"][0] == 503
    assert 'servingfleet_operator_api_requests_total{code="200"' in seen["/metrics"][1]
