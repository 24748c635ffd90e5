"""One vLLM server with two data-parallel ranks: two caches, two streams, one address."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from .client import Account
from .environment import Environment
from .rig import Rig, rig_running, whole

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rig(
    environment: Environment, account: Account, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rig]:
    """One engine of two ranks."""
    logs = tmp_path_factory.mktemp("vllm-ranks")
    async with rig_running(environment, account, logs, ranks=2) as started:
        yield started


async def test_each_rank_is_predicted_by_what_it_holds_itself(rig: Rig) -> None:
    prompts = [rig.prompts.tokens(length) for length in (100, 150, 200)]
    for prompt in prompts:
        for rank in (1, 0):
            verdict, _ = await rig.client.ask("two ranks", prompt, rank=rank)
            assert verdict.reported == 0
            verdict, _ = await rig.client.ask("two ranks", prompt, rank=rank)
            assert verdict.reported == whole(len(prompt))


async def test_a_prompt_goes_to_the_rank_that_holds_it_by_the_headers_of_the_answer(
    rig: Rig,
) -> None:
    for rank in (1, 0):
        prompt = rig.prompts.tokens(300)
        await rig.client.ask("two ranks", prompt, rank=rank)
        decision = await rig.client.route(prompt, rank=None)
        assert decision.target.rank == rank
        answer = await rig.engine.complete(prompt, headers=dict(decision.headers))
        verdict = await rig.client.settle("two ranks", decision, answer, rank=rank)
        assert verdict.reported == whole(300)
