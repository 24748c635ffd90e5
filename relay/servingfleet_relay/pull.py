"""Pulls an engine's events over HTTP (TensorRT-LLM): reading takes them away, so that there must be one reader.

Edge. The engine keeps a bounded number of entries and drops the oldest: a hole in their numbers tells.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from .answers import ScrapeFailed
from .load import EngineHttp
from .pipeline import Pipeline
from .settings import RelaySettings

log = logging.getLogger(__name__)

PATH = "/kv_cache_events"


async def pull(engine: EngineHttp) -> list[object]:
    """What the engine has kept since the last pull: nobody is given it again. Raises ScrapeFailed."""
    answer = await engine.drain(PATH)
    if not isinstance(answer, list):
        kind = type(answer).__name__
        raise ScrapeFailed(
            f"{PATH} answers {kind}; expected a list: is event_buffer_max_size above 0?"
        )
    return answer


class Puller:
    """The one reader of an engine's entries, of all its ranks."""

    def __init__(
        self,
        engine: EngineHttp,
        settings: RelaySettings,
        pipeline: Pipeline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._pipeline = pipeline
        self._clock = clock

    async def run(self) -> None:
        """Pulls until it is cancelled."""
        up: bool | None = None
        fields = {"replica": self._pipeline.settings.replica}
        while True:
            try:
                entries = await pull(self._engine)
            except ScrapeFailed as error:
                if up is not False:
                    log.warning("engine events not pulled", extra={**fields, "error": str(error)})
                    self._each(self._pipeline.socket_down)
                up = False
            else:
                if not up:
                    log.info("engine events pulled", extra=fields)
                    self._each(self._pipeline.socket_up)
                up = True
                self._pipeline.pulled(entries, self._clock())
            await asyncio.sleep(self._settings.pull_interval_s)

    def _each(self, told: Callable[[int, float], None]) -> None:
        for rank in self._pipeline.settings.ranks:
            told(rank, self._clock())
