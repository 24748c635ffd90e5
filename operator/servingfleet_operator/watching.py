"""One kopf operator as a watch: it tells what happens, and nothing else of it is used.

Only `on.event` handlers are registered, for which kopf writes nothing on anybody's object. It runs on a thread and an event
loop of its own: when a kopf operator ends, it cancels every task of its loop that is younger than itself, and the webhook's
requests would be among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import kopf

from . import names
from .kinds import Kind
from .store import Body, Table

log = logging.getLogger(__name__)

STOP_S = 5.0

OnRequest = Callable[[str, Kind, int], None]
"""Told of each request of the watches: list or watch, of what, HTTP status (0: no answer)."""


def watch_settings(selectors: Mapping[Kind, str]) -> kopf.OperatorSettings:
    """How kopf watches. Every number was tried against an API server that is killed and one that is frozen."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    # Never used by on.event handlers; should one of another sort slip in, it leaves its traces under our name.
    settings.persistence.finalizer = f"operator.{names.GROUP}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(
        prefix=f"operator.{names.GROUP}", v1=False
    )
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(
        prefix=f"operator.{names.GROUP}", v1=False
    )
    settings.networking.connect_timeout = 5
    settings.networking.request_timeout = 10
    # Flat and long: an API server that comes back is noticed within 5 s. After ten minutes the process starts anew.
    settings.networking.error_backoffs = (0.5, 1, 2, 3) + (5,) * 120
    # A whole number: it is sent as it is, and the API server refuses "240.0".
    settings.watching.server_timeout = 240
    settings.watching.connect_timeout = 5
    # Bookmarks come once a minute: a stream that is silent for longer is dead.
    settings.watching.inactivity_timeout = 70
    settings.watching.chunk_size = 500
    # The process sees to its own end.
    settings.process.ultimate_exiting_timeout = None
    for kind, selector in selectors.items():
        if selector:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = selector
    return settings


@dataclass(frozen=True)
class Source:
    """Where a table's objects come from, and what is kept of them."""

    kind: Kind
    table: Table
    keep: Callable[[Body], Body]
    labels: str = ""
    """Selects them at the API server. Losing the label then looks like a deletion, which is what it amounts to."""


class Watch:
    """One kopf operator on a thread of its own."""

    def __init__(
        self,
        login: Callable[[], kopf.ConnectionInfo],
        sources: Mapping[Kind, Source],
        deliver: Callable[[Kind, str | None, Body], None],
        on_request: OnRequest,
    ) -> None:
        """deliver: told of each event's kind, type and object. Both are called on the event loop that made the Watch."""
        self._login = login
        self._sources = sources
        self._deliver = deliver
        self._on_request = on_request
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._watching: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done once the watch is over: with its error if nobody stopped it."""

    def start(self, namespaces: tuple[str, ...]) -> None:
        """Watches these namespaces; (): all of them."""
        name = f"watch {next(iter(self._sources)).plural}"
        # A thread that can't be stopped must not keep the process from ending.
        threading.Thread(target=self._run, args=(namespaces,), name=name, daemon=True).start()

    async def stop(self) -> None:
        """Ends the watch."""
        self._stopping.set()
        if self._watching is not None:
            loop, stop = self._watching
            with contextlib.suppress(RuntimeError):  # its loop is closed: it is over already
                loop.call_soon_threadsafe(stop.set)
        await asyncio.wait([self.ended], timeout=STOP_S)

    def _run(self, namespaces: tuple[str, ...]) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._operate(namespaces))
        except Exception as failure:
            log.exception("watch broke")
            error = failure
        if error is None and not self._stopping.is_set():
            error = RuntimeError("kopf ended without being asked to")
        self._tell(self._end, error)

    async def _operate(self, namespaces: tuple[str, ...]) -> None:
        stop = asyncio.Event()
        self._watching = (asyncio.get_running_loop(), stop)
        if self._stopping.is_set():
            return
        await kopf.operator(
            registry=self._registry(),
            settings=watch_settings({k: source.labels for k, source in self._sources.items()}),
            clusterwide=not namespaces,
            namespaces=namespaces,
            standalone=True,
            stop_flag=stop,
        )

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, *arguments)

    def _end(self, error: BaseException | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        async def log_in(**_: Any) -> kopf.AiohttpSession:
            info = self._login()
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
                headers={"User-Agent": names.CHILDREN_MANAGER, **info.as_http_headers()},
                trace_configs=[self._trace()],
            )
            return kopf.AiohttpSession(server=info.server, aiohttp_session=session)

        kopf.on.login(registry=registry)(log_in)
        for kind, source in self._sources.items():
            kopf.on.event(kind.group, kind.version, kind.plural, registry=registry)(
                self._handler(kind, source.keep)
            )
        return registry

    def _trace(self) -> aiohttp.TraceConfig:
        async def ended(_: object, __: object, request: aiohttp.TraceRequestEndParams) -> None:
            self._requested(request.url.path, "watch" in request.url.query, request.response.status)

        async def failed(
            _: object, __: object, request: aiohttp.TraceRequestExceptionParams
        ) -> None:
            self._requested(request.url.path, "watch" in request.url.query, 0)

        trace = aiohttp.TraceConfig()
        trace.on_request_end.append(ended)
        trace.on_request_exception.append(failed)
        return trace

    def _requested(self, path: str, is_watch: bool, status: int) -> None:
        for kind in self._sources:
            if path.endswith(f"/{kind.plural}") and f"/{kind.api_version}/" in path:
                self._tell(self._on_request, "watch" if is_watch else "list", kind, status)

    def _handler(self, kind: Kind, keep: Callable[[Body], Body]) -> Callable[..., Any]:
        async def seen(event: Mapping[str, Any], **_: Any) -> None:
            # Cut down here, on the watch's thread: what is not kept never reaches the other loop.
            self._tell(self._deliver, kind, event["type"], keep(event["object"]))

        return seen
