"""Pulls what a live engine keeps for one reader (TensorRT-LLM), so that it can be recorded or checked.

Edge. Reading takes the entries away: a relay beside the engine loses what it knew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from servingfleet_relay.adapters.trtllm_pulled import message_of
from servingfleet_relay.load import EngineHttp, ScrapeFailed
from servingfleet_relay.pull import pull
from servingfleet_relay.settings import RelaySettings

from .recorder import NEVER_QUIET_S, NotHeard
from .recordings import Message

INTERVAL_S = RelaySettings.pull_interval_s
UNREADABLE = (b"", b"", b"")
"""Of an entry of no rank that we know: whoever listens is to know that it came."""


class PullRecorder:
    """Hands on every entry of every rank as a message, as `Recorder` does what is published."""

    def __init__(
        self,
        http: str,
        ranks: Sequence[int],
        heard: Callable[[Message], None],
        clock: Callable[[], float],
    ) -> None:
        self.messages = 0
        self.controls: list[dict[str, Any]] = []
        """The engine as it went and came back, each as a line of requests.jsonl."""
        self.replays_failed = 0
        self._http = http
        self._ranks = tuple(ranks)
        self._hand_on = heard
        self._clock = clock
        self._over = asyncio.Event()
        self._begun = self._ended = 0
        """Pulls."""
        self._pulled = asyncio.Event()

    async def during(self, work: Callable[[], Awaitable[None]], connect_s: float) -> None:
        """Pulls until `work` has ended, and what came by then. Raises NotHeard, and what `work` raises."""
        engine = EngineHttp(self._http, RelaySettings(sockets=(), schedulers=()))
        try:
            await self._join(engine, connect_s)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_pulling(engine))
                await work()
                # Not cancelled: a pull that is given up takes its entries with it.
                self._over.set()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await engine.close()

    async def quiet(self, seconds: float, at_most_s: float = NEVER_QUIET_S) -> None:
        """Waits so long, and then until a pull has brought nothing, at most `at_most_s`."""
        await asyncio.sleep(seconds)
        heard = -1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                while heard != self.messages:
                    heard, begun = self.messages, self._begun
                    while self._ended <= begun:
                        self._pulled.clear()
                        await self._pulled.wait()

    async def _join(self, engine: EngineHttp, connect_s: float) -> None:
        try:
            async with asyncio.timeout(connect_s):
                self._take(await pull(engine))
        except (ScrapeFailed, TimeoutError) as error:
            why = str(error) or f"no answer within {connect_s:g} s"
            raise NotHeard(
                f"{self._http}: {why}; expected an engine that keeps its events for one reader"
            ) from error

    async def _keep_pulling(self, engine: EngineHttp) -> None:
        last = False
        while not last:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S):
                    await self._over.wait()
            last = self._over.is_set()
            self._begun += 1
            try:
                self._take(await pull(engine))
            except ScrapeFailed:
                self._turn("engine gone")
            else:
                self._turn("engine healthy")
            self._ended = self._begun
            self._pulled.set()

    def _turn(self, control: str) -> None:
        known = self.controls[-1]["control"] if self.controls else "engine healthy"
        if control != known:
            self.controls.append({"t": self._clock(), "control": control})

    def _take(self, entries: Iterable[object]) -> None:
        for entry in entries:
            rank, frames = message_of(entry) or (-1, UNREADABLE)
            if rank not in self._ranks:
                rank, frames = self._ranks[0], UNREADABLE
            self._hand_on(Message(self._clock(), rank, frames))
            self.messages += 1
