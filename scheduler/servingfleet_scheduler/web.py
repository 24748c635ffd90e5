"""The HTTP edge: /metrics, /healthz, /readyz.

A thread answers, but everything it says is computed on the event loop: /healthz so proves that the loop turns, and
nothing of the scheduler is touched from two threads.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

log = logging.getLogger(__name__)
LOOP_TIMEOUT_S = 2.0
CLIENT_TIMEOUT_S = 10.0


class Page(NamedTuple):
    """An answer."""

    status: HTTPStatus
    content_type: str
    body: bytes


def json_page(status: HTTPStatus, value: object) -> Page:
    """A JSON answer; dataclasses become objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return Page(status, "application/json", json.dumps(value).encode() + b"\n")


class _Server(ThreadingHTTPServer):
    """`::` is every address of both families, and every IPv4 address where the node has no IPv6."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        if host == "::" and not socket.has_dualstack_ipv6():
            host = "0.0.0.0"
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class Web:
    """Serves `pages` (path -> what it says) until closed."""

    def __init__(self, host: str, port: int, pages: dict[str, Callable[[], Page]]) -> None:
        loop = asyncio.get_running_loop()

        async def render(path: str) -> Page:
            page = pages.get(path)
            if page is None:
                return json_page(HTTPStatus.NOT_FOUND, {"known": sorted(pages)})
            return page()

        class Handler(BaseHTTPRequestHandler):
            timeout = CLIENT_TIMEOUT_S

            def do_GET(self) -> None:
                future = asyncio.run_coroutine_threadsafe(render(self.path.split("?")[0]), loop)
                try:
                    page = future.result(LOOP_TIMEOUT_S)
                except TimeoutError:
                    future.cancel()
                    page = json_page(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "event loop busy"})
                self.send_response(page.status)
                self.send_header("Content-Type", page.content_type)
                self.send_header("Content-Length", str(len(page.body)))
                self.end_headers()
                self.wfile.write(page.body)

            def log_message(self, format: str, *args: object) -> None:
                log.debug("http request", extra={"line": format % args})

        self._server = _Server(host, port, Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    async def close(self) -> None:
        """Stops serving."""
        # Not on the loop: a handler may be waiting for it.
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        self._thread.join(timeout=LOOP_TIMEOUT_S)
