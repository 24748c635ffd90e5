"""Lets callers in: what is known of a token, or else what the API server says of it.

Edge, but for `reviews` without I/O of its own. An API server that is away costs nobody who was known before: verdicts
hold for a time of grace, and nobody waits for it meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar

from google.rpc import code_pb2

from .access import (
    API_GROUP,
    CLIENTS,
    LET_THROUGH,
    RESOURCE,
    RIGHTS,
    Caller,
    Right,
    Verdicts,
    bearer,
    check_relay,
    check_token,
    claims,
    fingerprint,
    why_not,
)
from .clock import Clock
from .errors import AccessRefused
from .settings import AccessSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

Metadata = Iterable[tuple[str, str | bytes]]


class NoApiServer(Exception):
    """Nothing says where the API server is: whoever starts the scheduler must act."""


class ReviewsUnavailable(Exception):
    """The API server gave no verdict. The text says why, and never holds a token."""


class Reviews(Protocol):
    """The API server's word. Both raise ReviewsUnavailable."""

    async def caller(self, token: str, audience: str) -> Caller | None:
        """Whose token this is, made for that audience; None: nobody's."""
        ...

    async def allowed(self, caller: Caller, right: Right) -> Literal[True] | None:
        """Whether the caller has this right on the fleet; None: no."""
        ...

    async def close(self) -> None: ...


class Gate:
    """Asked before each call; for a relay's stream again and again."""

    def __init__(self, settings: AccessSettings, reviews: Reviews, clock: Clock) -> None:
        self.settings = settings
        self.refusals: Counter[str] = Counter()
        """Callers turned away, by reason."""
        self.reviews: Counter[tuple[str, str]] = Counter()
        """Questions to the API server, by kind (token, right) and answer (yes, no, unavailable)."""
        self._ask = reviews
        self._clock = clock
        self._callers: Verdicts[Caller] = Verdicts(settings.keeping, settings.max_verdicts)
        self._rights: Verdicts[Literal[True]] = Verdicts(settings.keeping, settings.max_verdicts)
        self._running: dict[bytes, asyncio.Task[Any]] = {}
        self._away = False
        self._retry_at = 0.0

    async def check(self, method: str, metadata: Metadata) -> None:
        """Raises AccessRefused, and counts it, unless the caller may call this method."""
        with self._counted():
            if method in LET_THROUGH:
                return
            right = RIGHTS.get(method)
            if right is None:
                raise AccessRefused(
                    code_pb2.PERMISSION_DENIED, "UNKNOWN_METHOD", f"nobody may call {method}"
                )
            if right in CLIENTS and not self.settings.client_tokens:
                return
            token = bearer(metadata)
            caller = await self._caller(token, self.settings.audience)
            if not await self._allowed(token, caller, right):
                fleet = f"{self.settings.namespace}/{self.settings.fleet}"
                raise AccessRefused(
                    code_pb2.PERMISSION_DENIED,
                    "NOT_ALLOWED",
                    f"{caller.username} may not {right} of fleet {fleet}: grant it the verb "
                    f"{right.verb} on {RESOURCE}.{API_GROUP}/{right.subresource} there",
                    metadata={"verb": right.verb, "subresource": right.subresource},
                )

    async def relay(self, token: str) -> Caller:
        """The pod that a relay's token proves. Raises AccessRefused, and counts it."""
        with self._counted():
            caller = await self._caller(token, self.settings.relay_audience)
            check_relay(caller, self.settings.namespace)
            return caller

    async def close(self) -> None:
        """Ends what is asked still."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._ask.close()

    async def _caller(self, token: str, audience: str) -> Caller:
        check_token(token)
        key = fingerprint(token) + audience.encode()
        caller = await self._known(
            "token", self._callers, key, token, lambda: self._ask.caller(token, audience)
        )
        if caller is None:
            why = why_not(claims(token), audience, self._clock())
            raise AccessRefused(code_pb2.UNAUTHENTICATED, "BAD_CREDENTIAL", why)
        return caller

    async def _allowed(self, token: str, caller: Caller, right: Right) -> Literal[True] | None:
        key = fingerprint(token) + right.subresource.encode()
        return await self._known(
            "right", self._rights, key, token, lambda: self._ask.allowed(caller, right)
        )

    async def _known(
        self,
        kind: str,
        verdicts: Verdicts[T],
        key: bytes,
        token: str,
        ask: Callable[[], Awaitable[T | None]],
    ) -> T | None:
        """A verdict: the one that is kept, or a new one."""
        now = self._clock()
        known = verdicts.get(key, now)
        if known is not None and (now < known.fresh_until or self._away):
            if now >= known.refresh_at and (not self._away or now >= self._retry_at):
                self._review(kind, verdicts, key, token, ask)
            return known.value
        review = self._review(kind, verdicts, key, token, ask)
        try:
            if review is None:
                raise ReviewsUnavailable(f"{len(self._running)} reviews are under way")
            # Shielded: others wait for the same answer.
            return await asyncio.shield(review)
        except ReviewsUnavailable:
            known = verdicts.get(key, self._clock())
            if known is not None:
                return known.value
            raise AccessRefused(
                code_pb2.UNAVAILABLE,
                "REVIEW_UNAVAILABLE",
                "the API server can't be asked who the caller is: try again",
                retry_s=self.settings.retry_s,
            ) from None

    def _review(
        self,
        kind: str,
        verdicts: Verdicts[T],
        key: bytes,
        token: str,
        ask: Callable[[], Awaitable[T | None]],
    ) -> asyncio.Task[T | None] | None:
        """The one question under way for this key. None: too many are."""
        running = self._running.get(key)
        if running is None and len(self._running) < self.settings.max_reviews:
            running = asyncio.create_task(self._asked(kind, verdicts, key, token, ask))
            self._running[key] = running
            running.add_done_callback(lambda done: self._ended(key, done))
        return running

    async def _asked(
        self,
        kind: str,
        verdicts: Verdicts[T],
        key: bytes,
        token: str,
        ask: Callable[[], Awaitable[T | None]],
    ) -> T | None:
        try:
            value = await ask()
        except ReviewsUnavailable as error:
            self.reviews[kind, "unavailable"] += 1
            self._retry_at = self._clock() + self.settings.retry_s
            if not self._away:
                self._away = True
                log.warning("api server away", extra={"error": str(error)})
            raise
        if self._away:
            self._away = False
            log.info("api server back")
        self.reviews[kind, "no" if value is None else "yes"] += 1
        verdicts.put(key, value, self._clock(), claims(token).expires)
        return value

    def _ended(self, key: bytes, review: asyncio.Task[Any]) -> None:
        del self._running[key]
        if review.cancelled():
            return
        error = review.exception()
        if error is not None and not isinstance(error, ReviewsUnavailable):
            # Perhaps nobody waits for it.
            log.error("defect in a review", exc_info=error)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except AccessRefused as refused:
            self.refusals[refused.reason] += 1
            raise
