"""A stand-in for the Kubernetes API server: only reviews, over HTTP, as the real one words them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


@dataclass
class ApiServer:
    """Knows users by (token, audience), and what each may do."""

    kubeconfig: Path
    users: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    rights: set[tuple[str, str, str]] = field(default_factory=set)
    """User name, verb, subresource."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Every review as it came."""
    status: int = 201
    """Other than 201: what every review is answered with."""
    audiences: bool = True
    """False: as an API server that knows of none."""
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    """Answers wait for it; set at first."""

    async def token_review(self, request: web.Request) -> web.Response:
        review = await self._asked(request)
        spec = review["spec"]
        for audience in spec["audiences"]:
            user = self.users.get((spec["token"], audience))
            if user is not None:
                audiences = [audience] if self.audiences else []
                status = {"authenticated": True, "user": user, "audiences": audiences}
                return self._answer(review | {"status": status})
        return self._answer(review | {"status": {"error": "[invalid bearer token]"}})

    async def access_review(self, request: web.Request) -> web.Response:
        review = await self._asked(request)
        spec = review["spec"]
        asked = spec["resourceAttributes"]
        allowed = (spec["user"], asked["verb"], asked["subresource"]) in self.rights
        return self._answer(review | {"status": {"allowed": allowed}})

    async def _asked(self, request: web.Request) -> dict[str, Any]:
        review: dict[str, Any] = await request.json()
        self.asked.append(review)
        await self.answering.wait()
        return review

    def _answer(self, review: dict[str, Any]) -> web.Response:
        # The real one repeats what was asked in its errors too.
        return web.json_response(review, status=self.status)


@asynccontextmanager
async def api_server(folder: Path) -> AsyncIterator[ApiServer]:
    """Serves on a free port; `kubeconfig` names it."""
    server = ApiServer(folder / "kubeconfig")
    server.answering.set()
    app = web.Application()
    app.router.add_post(TOKEN_REVIEWS, server.token_review)
    app.router.add_post(ACCESS_REVIEWS, server.access_review)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"http://{host}:{port}"}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    server.kubeconfig.write_text(json.dumps(config))
    try:
        yield server
    finally:
        server.answering.set()
        await runner.cleanup()
