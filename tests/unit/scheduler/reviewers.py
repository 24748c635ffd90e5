"""An API server for tests that answers from a dictionary, and can be away or slow."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Literal

from servingfleet_scheduler.access import POD_UID, Caller, Right
from servingfleet_scheduler.gate import ReviewsUnavailable
from servingfleet_scheduler.settings import AccessSettings

NAMESPACE = "llm"
ACCESS = AccessSettings(fleet="demo", namespace=NAMESPACE, audience="servingfleet.dev/llm/demo")


def pod(uid: str, namespace: str = NAMESPACE) -> Caller:
    """The identity of a pod's token."""
    return Caller(f"system:serviceaccount:{namespace}:engine", extra={POD_UID: (uid,)})


class FakeReviews:
    """Knows `callers` by token, and `rights` by user name."""

    def __init__(self) -> None:
        self.callers: dict[str, Caller] = {}
        self.rights: dict[str, set[Right]] = {}
        self.audiences: dict[str, set[str]] = {}
        """Those that a token is made for; not here: any."""
        self.away = False
        self.defect = False
        self.asked: Counter[str] = Counter()
        """Questions, by token or by user and right."""
        self.answering = asyncio.Event()
        """Answers wait for it."""
        self.answering.set()
        self.closed = False

    async def caller(self, token: str, audience: str) -> Caller | None:
        await self._answer(token)
        return (
            self.callers.get(token) if audience in self.audiences.get(token, (audience,)) else None
        )

    async def allowed(self, caller: Caller, right: Right) -> Literal[True] | None:
        await self._answer(f"{caller.username} {right}")
        return True if right in self.rights.get(caller.username, ()) else None

    async def close(self) -> None:
        self.closed = True

    async def _answer(self, question: str) -> None:
        self.asked[question] += 1
        await self.answering.wait()
        if self.away:
            raise ReviewsUnavailable("connection refused")
        if self.defect:
            raise ZeroDivisionError("defect")
