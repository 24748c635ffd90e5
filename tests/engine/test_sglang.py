"""SGLang's own cache, from its wheel: predicted is what it finds, prompt by prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.fleet import fleet_in

from .client import REPLICA, Account, Client
from .engine import MODEL
from .environment import Environment
from .rig import Prompts
from .sglang_process import SglangCache, cache_running

CAPACITY = 2048
"""Tokens."""
BLOCK = 16
"""Tokens of a canonical block."""


@asynccontextmanager
async def client_of(
    environment: Environment,
    packages: Path,
    account: Account,
    logs: Path,
    page: int,
    *,
    pairs: bool = False,
) -> AsyncIterator[tuple[Client, SglangCache]]:
    """A cache with the relay and the scheduler that stand beside an engine in a fleet."""
    async with (
        fleet_in(logs) as fleet,
        cache_running(environment, packages, page, CAPACITY, pairs=pairs) as cache,
    ):
        scheduler = await fleet.scheduler()
        await fleet.process(
            "servingfleet_relay",
            *("--replica", REPLICA, "--model", MODEL),
            *("--engine", "sglang"),
            *("--engine-events", f"tcp://127.0.0.1:{cache.ports.events}"),
            *("--engine-replay", f"tcp://127.0.0.1:{cache.ports.replay}"),
            *("--scheduler", scheduler.target),
            *("--metrics-port", "0"),
        )
        client = Client(cache, scheduler, account)
        await client.caught_up()
        yield client, cache


@pytest.mark.parametrize(
    ("page", "pairs"), [(16, False), (1, False), (16, True)], ids=["16", "1", "eagle"]
)
async def test_conversations_are_predicted_while_pages_are_evicted_and_after_a_flush(
    environment: Environment,
    sglang: Path,
    account: Account,
    tmp_path: Path,
    page: int,
    pairs: bool,
) -> None:
    kind = f"SGLang, pages of {page}{', EAGLE' if pairs else ''}"
    prompts = Prompts(page)
    async with client_of(environment, sglang, account, tmp_path, page, pairs=pairs) as (
        client,
        cache,
    ):
        assert cache.core == "RustUnifiedTreeCore", "not what SGLang takes by default"
        parts = page < BLOCK  # of a canonical block, of which only whole ones are known
        systems = [prompts.tokens(count) for count in (150, 330, 64)]
        talks = [prompts.rng.choice(systems) for _ in range(9)]
        reused = lost = 0
        for _ in range(100):
            number = prompts.rng.randrange(len(talks))
            prompt = talks[number] + prompts.tokens(prompts.rng.randint(1, 60))
            output = prompts.rng.randint(1, 40)
            salt = "tenant" if number == 0 else ""
            verdict, answer = await client.ask(
                kind, prompt, output=output, salt=salt, bounds_only=parts
            )
            assert verdict.predicted == verdict.reported // BLOCK * BLOCK
            reused += verdict.reported
            lost += verdict.reported < (len(talks[number]) - 2) // page * page
            talks[number] = prompt + answer.output
            if len(talks[number]) > 600:
                talks[number] = prompts.rng.choice(systems)
        assert reused > 5_000
        assert cache.evicted > CAPACITY
        assert lost, "no prompt lost pages: this put no pressure on memory"

        await cache.reset()
        await client.caught_up()
        verdict, _ = await client.ask("SGLang, after a flush", talks[1])
        assert verdict.reported == 0
