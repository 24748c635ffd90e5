"""Keeps the store true, by watches and lists.

kopf's watches miss deletions: when one can't be resumed ("410 Gone", as after a restart of the API server) kopf lists what
is there and says nothing of what is not. So each list that a watch makes is made once more here, after it, to find what is
gone. Every ten minutes that is done in any case.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import kopf

from .cluster import Cluster
from .errors import ClusterError
from .kinds import Kind
from .store import Body, key_of
from .watching import OnRequest, Source, Watch

log = logging.getLogger(__name__)

RELIST_S = 600.0
"""Every kind is listed this often, come what may."""
SETTLE_S = 0.3
"""After a fleet came into a new namespace: others may follow, and each change of the set starts a watch anew."""
RELIST_SETTLE_S = 2.0
"""After a list of kopf's: the next kinds follow, and its own objects are still on their way."""
RETRY_S = 5.0

OnChange = Callable[[Kind, Body | None, Body | None], None]
"""Told of each change: the kind, the object before (None: new) and after (None: gone)."""


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
        self._on_request(verb, kind, status)
        if verb == "list" and status == 200:
            self._stale.add(kind)
            self._wake_in(RELIST_SETTLE_S)
