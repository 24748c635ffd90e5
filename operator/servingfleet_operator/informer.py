"""The watches: kopf tells what happens, and nothing else of it is used.

Only `on.event` handlers are registered, for which kopf writes nothing on anybody's object. Each kopf operator runs on a
thread and an event loop of its own: when one ends, kopf cancels every task of its loop that is younger than itself, and
the webhook's requests would be among them.

kopf's watches miss deletions: when one can't be resumed ("410 Gone", as after a restart of the API server) kopf lists what
is there and says nothing of what is not. So kopf is given a session that tells when it lists a kind, and the same is listed
once more here, after it, to find what is gone. Every ten minutes that is done in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import kopf

from . import names
from .cluster import Cluster
from .errors import ClusterError
from .kinds import Kind
from .store import Body, Table, key_of

log = logging.getLogger(__name__)

RELIST_S = 600.0
"""Every kind is listed this often, come what may."""
SETTLE_S = 0.3
"""After a fleet came into a new namespace: others may follow, and each change of the set starts a watch anew."""
RELIST_SETTLE_S = 2.0
"""After a list of kopf's: the next kinds follow, and its own objects are still on their way."""
RETRY_S = 5.0
STOP_S = 5.0

OnChange = Callable[[Kind, Body | None, Body | None], None]
"""Told of each change: the kind, the object before (None: new) and after (None: gone)."""
OnRequest = Callable[[str, Any, int], None]
"""Told of each request of the watches: list or watch, what, HTTP status (0: no answer)."""


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


class Informer:
    """Keeps some tables of a Store true, wherever `namespaces` says, and tells what changes in them."""

    def __init__(
        self,
        cluster: Cluster,
        sources: Sequence[Source],
        *,
        login: Callable[[], kopf.ConnectionInfo],
        namespaces: Callable[[], tuple[str, ...]],
        on_change: OnChange,
        on_request: OnRequest,
        rng: random.Random,
    ) -> None:
        """namespaces: which to watch now; ("",): all. After it changed, `look` must be called."""
        self._cluster = cluster
        self._sources = {source.kind: source for source in sources}
        self._login = login
        self._namespaces = namespaces
        self._on_change = on_change
        self._on_request = on_request
        self._rng = rng
        self._known: frozenset[str] = frozenset()
        self._watch: Watch | None = None
        self._stale: set[Kind] = set()
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self.listed = asyncio.Event()
        """Set once everything was listed."""

    def knows(self, namespace: str) -> bool:
        """What is in that namespace is known."""
        return bool({"", namespace} & self._known)

    def look(self) -> None:
        """The namespaces may have changed."""
        if frozenset(self._namespaces()) != self._known:
            self._wake_in(SETTLE_S)

    async def run(self) -> None:
        """Watches for ever. Raises what ended the watch."""
        try:
            while True:
                self._wake.clear()
                await self._turn_to(self._namespaces())
                await self._until_woken(RELIST_S * self._rng.uniform(0.8, 1.0))
        finally:
            if self._watch is not None:
                await self._watch.stop()

    async def _turn_to(self, namespaces: tuple[str, ...]) -> None:
        moved = frozenset(namespaces) != self._known
        if moved or not self._stale:
            self._stale = set(self._sources)
        if not await self._list(namespaces):
            return
        for namespace in self._known - {*namespaces}:
            for source in self._sources.values():
                source.table.drop(namespace)
        self._known = frozenset(namespaces)
        self.listed.set()
        if not moved:
            return
        if self._watch is not None:
            await self._watch.stop()
            self._watch = None
        if namespaces:
            self._watch = Watch(self._login, self._sources, self._seen, self._requested)
            self._watch.start(() if namespaces == ("",) else namespaces)

    async def _list(self, namespaces: tuple[str, ...]) -> bool:
        """Lists what is stale. Returns whether all of it was answered."""
        try:
            for kind in [kind for kind in self._sources if kind in self._stale]:
                source = self._sources[kind]
                for namespace in namespaces:
                    listing = await self._cluster.list(
                        kind, namespace, labels=source.labels, keep=source.keep
                    )
                    for before, after in source.table.replace(
                        namespace, listing.items, listing.resource_version
                    ):
                        self._on_change(kind, before, after)
                self._stale.discard(kind)
        except ClusterError as error:
            log.warning("list failed", extra={"error": str(error), "retry_s": RETRY_S})
            self._wake_in(RETRY_S)
            return False
        return True

    async def _until_woken(self, seconds: float) -> None:
        woken = asyncio.ensure_future(self._wake.wait())
        waiting: list[asyncio.Future[Any]] = [woken]
        if self._watch is not None:
            waiting.append(self._watch.ended)
        try:
            done, _ = await asyncio.wait(
                waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            woken.cancel()
        for future in done:
            future.result()

    def _wake_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._wake.set)

    def _seen(self, kind: Kind, event: str | None, body: Body) -> None:
        table = self._sources[kind].table
        before = table.get(key_of(body))
        if event == "DELETED":
            if table.remove(body):
                self._on_change(kind, before, None)
        elif table.put(body):
            self._on_change(kind, before, body)

    def _requested(self, verb: str, kind: Kind, status: int) -> None:
        self._on_request(verb, kind.plural, status)
        if verb == "list" and status == 200:
            self._stale.add(kind)
            self._wake_in(RELIST_SETTLE_S)
