"""The Kubernetes client against a stand-in of the API server."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from servingfleet_scheduler.access import EXPLAIN, POD_UID, ROUTE, Caller
from servingfleet_scheduler.gate import NoApiServer, ReviewsUnavailable
from servingfleet_scheduler.reviews import KubernetesReviews
from servingfleet_scheduler.settings import AccessSettings
from tests.apiserver import ApiServer, api_server

from .reviewers import ACCESS

SECRET = "a secret token"
USER = {
    "username": "system:serviceaccount:llm:engine",
    "uid": "u1",
    "groups": ["system:serviceaccounts"],
    "extra": {POD_UID: ["uid-1"], "scope": ["a", "b"]},
}


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with api_server(tmp_path) as started:
        monkeypatch.setattr(
            "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(started.kubeconfig)
        )
        started.users[SECRET, ACCESS.audience] = USER
        yield started


@pytest.fixture
async def reviews(server: ApiServer) -> AsyncIterator[KubernetesReviews]:
    made = KubernetesReviews(replace(ACCESS, review_s=1.0))
    yield made
    await made.close()


async def unavailable(settings: AccessSettings = ACCESS) -> str:
    """What is said when it can't be asked."""
    reviews = KubernetesReviews(settings)
    try:
        with pytest.raises(ReviewsUnavailable) as error:
            await reviews.caller(SECRET, ACCESS.audience)
    finally:
        await reviews.close()
    return str(error.value)


async def test_a_token_is_reviewed_for_the_fleets_audience(
    server: ApiServer, reviews: KubernetesReviews
) -> None:
    caller = await reviews.caller(SECRET, ACCESS.audience)
    assert caller == Caller(
        USER["username"],  # type: ignore[arg-type]
        "u1",
        ("system:serviceaccounts",),
        {POD_UID: ("uid-1",), "scope": ("a", "b")},
    )
    assert caller.pod_uid == "uid-1"
    assert server.asked[0]["spec"] == {"token": SECRET, "audiences": [ACCESS.audience]}


async def test_a_token_for_another_audience_is_nobodys(
    server: ApiServer, reviews: KubernetesReviews
) -> None:
    server.users = {(SECRET, "https://kubernetes.default.svc"): USER}
    assert await reviews.caller(SECRET, ACCESS.audience) is None


async def test_an_api_server_that_ignores_audiences_is_not_believed(
    server: ApiServer, reviews: KubernetesReviews
) -> None:
    server.audiences = False
    assert await reviews.caller(SECRET, ACCESS.audience) is None


async def test_a_right_is_asked_for_with_all_that_is_known_of_the_caller(
    server: ApiServer, reviews: KubernetesReviews
) -> None:
    caller = await reviews.caller(SECRET, ACCESS.audience)
    assert caller is not None
    server.rights.add((caller.username, "create", "route"))
    assert await reviews.allowed(caller, ROUTE) is True
    assert await reviews.allowed(caller, EXPLAIN) is None
    assert server.asked[1]["spec"] == {
        "user": caller.username,
        "uid": "u1",
        "groups": ["system:serviceaccounts"],
        "extra": {POD_UID: ["uid-1"], "scope": ["a", "b"]},
        "resourceAttributes": {
            "group": "servingfleet.dev",
            "resource": "servingfleets",
            "subresource": "route",
            "name": "demo",
            "namespace": "llm",
            "verb": "create",
        },
    }


@pytest.mark.parametrize(
    ("status", "words"),
    [(403, "may create tokenreviews"), (500, "status 500"), (429, "status 429")],
)
async def test_an_error_is_no_verdict_and_tells_what_to_do(
    server: ApiServer, status: int, words: str
) -> None:
    server.status = status
    said = await unavailable()
    assert words in said
    assert SECRET not in said


async def test_an_api_server_that_is_gone_is_no_verdict(server: ApiServer) -> None:
    config = json.loads(server.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:9"
    server.kubeconfig.write_text(json.dumps(config))
    assert "refused" in await unavailable()


async def test_an_api_server_that_is_silent_is_no_verdict(server: ApiServer) -> None:
    server.answering.clear()
    async with asyncio.timeout(10):
        await unavailable(replace(ACCESS, review_s=0.1))
    server.answering.set()


async def test_without_any_api_server_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", "/no/where")
    with pytest.raises(NoApiServer, match="KUBECONFIG"):
        KubernetesReviews(ACCESS)


async def test_the_client_logs_no_token_at_any_level(
    reviews: KubernetesReviews, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await reviews.caller(SECRET, ACCESS.audience)
    assert SECRET not in json.dumps([vars(record) for record in caplog.records], default=str)


def test_a_scheduler_that_asks_nobody_does_not_load_the_client() -> None:
    script = (
        "import sys, servingfleet_scheduler.__main__, servingfleet_scheduler.server;"
        "sys.exit('kubernetes' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0
