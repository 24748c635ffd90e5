"""Where a live engine's events are had, and what it says that it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click
import httpx

from servingfleet_relay.adapters.registry import ADAPTERS, AUTO
from servingfleet_relay.load import EngineHttp, ScrapeFailed
from servingfleet_relay.options import rank_sockets
from servingfleet_relay.settings import RankSockets, RelaySettings
from servingfleet_sim.pulling import PullRecorder
from servingfleet_sim.recorder import Recorder
from servingfleet_sim.recordings import Message

Command = TypeVar("Command", bound=Callable[..., Any])
PULLED = ("http://", "https://")


@dataclass(frozen=True)
class Source:
    """One live engine."""

    address: str
    ranks: tuple[int, ...]
    sockets: tuple[RankSockets, ...]
    """(): its events are pulled from `address`."""
    unit_tokens: int
    """Tokens of its block, which pulled events don't tell. 0: its events do."""

    @property
    def pulled(self) -> bool:
        """Over HTTP, by one reader."""
        return not self.sockets

    def recorder(
        self, heard: Callable[[Message], None], clock: Callable[[], float]
    ) -> Recorder | PullRecorder:
        """Hears all of it, once."""
        if self.pulled:
            return PullRecorder(self.address, self.ranks, heard, clock)
        return Recorder(self.sockets, heard, clock)

    def name(self, rank: int) -> str:
        """As `src` of a recording's events."""
        return (
            f"pull {self.address} rank:{rank}"
            if self.pulled
            else f"sub {self.sockets[rank].events}"
        )


def live_options(command: Command) -> Command:
    """How a live engine's events are had."""
    for option in (
        click.option(
            "--take-events",
            is_flag=True,
            help="Of http://...: take them, although a relay beside the engine then loses what it knew.",
        ),
        click.option(
            "--bind",
            is_flag=True,
            help="The engine connects, as vLLM does given a concrete address: take the relay's place there.",
        ),
    ):
        command = option(command)
    return command


def source_of(
    address: str,
    replay: str | None,
    ranks: int,
    *,
    bind: bool,
    take_events: bool,
    unit_tokens: int,
) -> Source:
    """Raises BadOption and UsageError for what can't be heard."""
    numbers = tuple(range(ranks))
    if not address.startswith(PULLED):
        sockets = rank_sockets(numbers, [address], [replay] if replay else [], bind=bind)
        return Source(address, numbers, sockets, unit_tokens)
    if bind or replay is not None:
        raise click.UsageError(f"{address}: what is pulled has no socket to bind, and no replay")
    if not take_events:
        raise click.UsageError(
            f"{address}: reading such events takes them away, so that a relay beside the engine loses what it knew: stop "
            "it, and say --take-events"
        )
    if not unit_tokens:
        raise click.UsageError(
            f"{address}: such events don't tell the engine's block; expected --engine-block-tokens, its tokens_per_block "
            "(32 where nobody set it)"
        )
    return Source(address, numbers, (), unit_tokens)


async def identity(ranks: Sequence[int], engine: str, engine_http: str | None) -> dict[str, Any]:
    """What engine.json holds of the engine's own answers. Raises ScrapeFailed."""
    if engine_http is None:
        return {engine: ""}
    asked = EngineHttp(engine_http, RelaySettings(sockets=(), schedulers=()))
    try:
        found = await asked.identity(tuple(ranks))
        if engine not in (AUTO, found.engine):
            raise ScrapeFailed(
                f"{engine_http} is {found.engine}; expected {engine}, as --engine says"
            )
        facts: dict[str, Any] = {found.engine: found.version, "model": await asked.model()}
    finally:
        await asked.close()
    if found.engine == "sglang":
        facts |= await _page_size(engine_http)
    return facts


def pulled_facts(source: Source, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What engine.json holds of how the events were had. Raises ScrapeFailed where this engine has none to pull."""
    if not source.pulled:
        return {}
    name = next(name for name in ADAPTERS if name in facts)
    if ADAPTERS[name].pulled is None:
        raise ScrapeFailed(f"{source.address} is {name}, whose events can't be pulled")
    return {"pulled": True, "tokens_per_block": source.unit_tokens}


async def _page_size(engine_http: str) -> dict[str, Any]:
    """Where pages are smaller than a block, whole blocks are all that can be known.

    Nothing else of that answer is kept: it holds the engine's arguments, and with them its key.
    """
    async with httpx.AsyncClient(base_url=engine_http, trust_env=False) as http:
        for path in ("/server_info", "/get_server_info"):
            answer = await http.get(path)
            with contextlib.suppress(ValueError):
                told = answer.json() if answer.status_code == httpx.codes.OK else None
                if isinstance(told, dict) and isinstance(told.get("page_size"), int):
                    return {"page_size": told["page_size"]}
    return {}
