"""Pulls an engine's events over HTTP (TensorRT-LLM): reading takes them away, so that there must be one reader.

Edge. The engine keeps a bounded number of entries and drops the oldest: a hole in their numbers tells.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Iterator

from .answers import ScrapeFailed
from .load import EngineHttp
from .pipeline import Pipeline
from .settings import RelaySettings

log = logging.getLogger(__name__)

PATH = "/kv_cache_events"

_BEGIN = re.compile(r"[ \t\n\r]*\[[ \t\n\r]*")
_NEXT = re.compile(r"[ \t\n\r]*([,\]])[ \t\n\r]*")


async def pull(engine: EngineHttp) -> Iterator[object]:
    """What the engine has kept since the last pull: nobody is given it again. Raises ScrapeFailed, and on the way."""
    return entries_of(await engine.drain(PATH))


def entries_of(answer: str) -> Iterator[object]:
    """The entries of a JSON list. Raises ScrapeFailed for what is none, and, on the way, where it ends to be one."""
    begin = _BEGIN.match(answer)
    if begin is None:
        raise ScrapeFailed(f"{PATH} answers no list of entries: is event_buffer_max_size above 0?")
    return _each_entry(answer, begin.end())


def _each_entry(answer: str, at: int) -> Iterator[object]:
    # One after the other: all of them, read, take eight times the memory of their text.
    decoder = json.JSONDecoder()
    more = not answer.startswith("]", at)
    while more:
        try:
            entry, at = decoder.raw_decode(answer, at)
        except (ValueError, RecursionError) as error:
            raise ScrapeFailed(f"{PATH} is no JSON: {error}"[:200]) from error
        yield entry
        following = _NEXT.match(answer, at)
        if following is None:
            raise ScrapeFailed(f"{PATH} is no JSON: its list has no end")
        more, at = following[1] == ",", following.end()


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
                if not up:
                    log.info("engine events pulled", extra=fields)
                    self._each(self._pipeline.socket_up)
                up = True
                self._pipeline.pulled(entries, self._clock())
            except ScrapeFailed as error:
                if up is not False:
                    log.warning("engine events not pulled", extra={**fields, "error": str(error)})
                    self._each(self._pipeline.socket_down)
                up = False
            await asyncio.sleep(self._settings.pull_interval_s)

    def _each(self, told: Callable[[int, float], None]) -> None:
        for rank in self._pipeline.settings.ranks:
            told(rank, self._clock())
