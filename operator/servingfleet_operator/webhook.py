"""Serves the admission webhook: every replica does, leading or not, and whether or not the API server can be reached.

Edge. What is answered is `admission`'s business; here are the sockets, the deadline and the certificate, which is replaced
while connections go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from . import admission
from .admission import Answer, BadReview
from .metrics import Metrics
from .pki import Certificates
from .settings import OperatorSettings
from .spec import Fleet

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 1024 * 1024
"""The API server takes objects of 3 MiB at most."""
DEADLINE_S = admission.TIMEOUT_S - 0.5
"""For reading a review. Whoever asked has given up soon after."""
_QUIET = frozenset({"Injected", "NotSelected", "OptedOut", "AlreadyInjected", "InjectionOff"})


class Webhook:
    """Answers the API server's reviews of new pods."""

    def __init__(
        self,
        settings: OperatorSettings,
        fleet_of: Callable[[str, str], Fleet | None],
        kubernetes: Callable[[], tuple[int, int]],
        metrics: Metrics,
    ) -> None:
        """fleet_of: the fleet of a namespace and name, from memory. kubernetes: the API server's version."""
        self._settings = settings
        self._fleet_of = fleet_of
        self._kubernetes = kubernetes
        self._metrics = metrics
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._shown: Certificates | None = None

    @property
    def serving(self) -> bool:
        """It has a certificate to show: until then every handshake fails, and pods start without a relay."""
        return self._shown is not None

    def use(self, certificates: Certificates) -> None:
        """Shows this certificate from the next handshake on. Raises ssl.SSLError for one that can't be used."""
        if self._shown is not None and self._shown.cert == certificates.cert:
            return
        # The library reads files only.
        with tempfile.TemporaryDirectory() as folder:
            cert, key = Path(folder, "tls.crt"), Path(folder, "tls.key")
            cert.write_bytes(certificates.cert)
            key.touch(0o600)
            key.write_bytes(certificates.key)
            # One that can't be used would leave the context with neither.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
            self._context.load_cert_chain(cert, key)
        self._shown = certificates
        log.info("webhook certificate loaded")

    @contextlib.asynccontextmanager
    async def serve(self, host: str, port: int) -> AsyncIterator[int]:
        """Serves until the block ends; yields the port. Raises OSError if it can't be had."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/inject/{namespace}/{fleet}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=DEADLINE_S)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port, ssl_context=self._context)
            await site.start()
            yield int(runner.addresses[0][1])
        finally:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        started = time.perf_counter()
        outcome = "Failed"
        try:
            answer = await self._answer(request)
            outcome = answer.outcome
            return web.json_response(answer.body)
        except BadReview as error:
            outcome = "BadReview"
            log.warning("review refused", extra={"error": str(error)})
            return web.Response(status=400, text=f"{error}\n")
        except web.HTTPRequestEntityTooLarge:
            outcome = "TooLarge"
            raise
        except TimeoutError:
            outcome = "Late"
            return web.Response(status=408, text=f"no review within {DEADLINE_S} s\n")
        finally:
            self._metrics.admissions.labels(outcome).inc()
            self._metrics.admission_duration.observe(time.perf_counter() - started)

    async def _answer(self, request: web.Request) -> Answer:
        namespace, name = request.match_info["namespace"], request.match_info["fleet"]
        async with asyncio.timeout(DEADLINE_S):
            body = await request.read()
        review = _parsed(body)
        try:
            answer = admission.answer(
                review,
                namespace,
                name,
                self._fleet_of,
                self._settings,
                kubernetes=self._kubernetes(),
            )
        except BadReview:
            raise
        except Exception:
            # A fault of ours must not keep anybody's pod from starting.
            log.exception("injection failed", extra={"fleet": name, "namespace": namespace})
            return admission.unchanged(review, "Failed")
        level = logging.DEBUG if answer.outcome in _QUIET else logging.INFO
        fields = {"fleet": name, "namespace": namespace, "outcome": answer.outcome}
        log.log(level, "pod reviewed", extra={**fields, "reason": answer.message or None})
        return answer


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadReview("the body is no JSON") from error
