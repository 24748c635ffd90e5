"""A relay's standing proof of which pod it is, for as long as its stream is open. Edge."""

from __future__ import annotations

import asyncio
import contextlib
from typing import NoReturn

from google.rpc import code_pb2

from .access import bearer
from .errors import AccessRefused
from .gate import Gate, Metadata


class Proof:
    """The newest token of one stream. Looked at when it comes, and again and again."""

    def __init__(self, gate: Gate, token: str, pod_uid: str) -> None:
        self.pod_uid = pod_uid
        self._gate = gate
        self._token = token
        self._renewed = asyncio.Event()

    @classmethod
    async def begin(cls, gate: Gate, metadata: Metadata) -> Proof:
        """From the call's metadata. Raises AccessRefused."""
        token = bearer(metadata)
        caller = await gate.relay(token)
        return cls(gate, token, caller.pod_uid)

    def renew(self, token: str) -> None:
        """The relay has sent a token; only the last counts."""
        self._token = token
        self._renewed.set()

    async def hold(self) -> NoReturn:
        """Raises AccessRefused when the token proves its pod no longer. An API server that is away ends nothing."""
        settings = self._gate.settings
        wait_s = settings.recheck_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._renewed.wait()
            self._renewed.clear()
            wait_s = settings.recheck_s
            try:
                caller = await self._gate.relay(self._token)
            except AccessRefused as refused:
                if refused.code != code_pb2.UNAVAILABLE:
                    raise
                wait_s = min(wait_s, settings.keeping.yes_s)
            else:
                if caller.pod_uid != self.pod_uid:
                    raise AccessRefused(
                        code_pb2.PERMISSION_DENIED,
                        "OTHER_REPLICA",
                        f"the stream is pod {self.pod_uid}'s, the new token pod {caller.pod_uid}'s",
                    )
            await asyncio.sleep(settings.renewal_gap_s)
