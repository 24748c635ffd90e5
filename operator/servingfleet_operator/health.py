"""/metrics, /healthz and /readyz, and the heartbeat that makes /healthz tell the truth.

A loop that turns proves little: kopf's own endpoint said 200 all through a frozen API server. So /healthz asks when the
API server last answered, and once a minute somebody asks it something. /readyz is about the webhook alone, which can
serve without the API server once it knows the fleets.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from .cluster import Cluster
from .errors import ClusterError
from .kinds import FLEET
from .metrics import Metrics

HEARTBEAT_S = 60.0
SILENCE_S = 180.0
"""Two heartbeats lost, and the time that the third takes: then a restart may help."""


async def heartbeat(cluster: Cluster, namespace: str) -> None:
    """Asks the API server for next to nothing, for ever. namespace: where we may; "": everywhere."""
    while True:
        # An answer of any kind is a sign of life, and the cluster notes it.
        with contextlib.suppress(ClusterError):
            await cluster.list(FLEET, namespace, limit=1)
        await asyncio.sleep(HEARTBEAT_S)


class Health:
    """What the probes are told."""

    def __init__(
        self, cluster: Cluster, serving: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        """serving: the webhook can answer."""
        self._cluster = cluster
        self._serving = serving
        self._clock = clock

    def silence_s(self) -> float:
        """Seconds since the API server last answered."""
        return self._clock() - self._cluster.answered_at

    def healthy(self) -> tuple[bool, str]:
        """Whether this process is of use, and why not."""
        silence = self.silence_s()
        if silence > SILENCE_S:
            return False, f"the API server has not answered for {silence:.0f} s"
        return True, "ok"

    def ready(self) -> tuple[bool, str]:
        """Whether the webhook can serve."""
        if self._serving():
            return True, "ok"
        return False, (
            "the webhook can't answer yet: it has no certificate, which the leading replica makes, "
            "or the API server has not listed the fleets"
        )


@contextlib.asynccontextmanager
async def serve(host: str, port: int, health: Health, metrics: Metrics) -> AsyncIterator[int]:
    """Serves until the block ends; yields the port. Raises OSError if it can't be had."""

    def probe(
        judge: Callable[[], tuple[bool, str]],
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(_: web.Request) -> web.Response:
            good, text = judge()
            return web.Response(text=f"{text}\n", status=200 if good else 503)

        return answer

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/healthz", probe(health.healthy))
    app.router.add_get("/readyz", probe(health.ready))
    app.router.add_get("/metrics", exposition)
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
