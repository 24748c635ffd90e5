"""One vLLM server under every kind of request and every accident: predicted is what it reports, each time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from servingfleet_protos.v1 import common_pb2, routing_pb2
from tests.integration.fleet import PATIENCE_S

from .client import RESET, Account
from .engine import BLOCK, BLOCKS, MODEL, Message
from .environment import Environment
from .model import words
from .rig import Rig, rig_running, whole

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rig(
    environment: Environment, account: Account, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rig]:
    """One engine for all tests here: it takes a minute to start. Each test brings prompts of its own."""
    async with rig_running(environment, account, tmp_path_factory.mktemp("vllm")) as started:
        yield started


async def test_the_relay_learns_what_the_engine_is(rig: Rig) -> None:
    (replica,) = (await rig.scheduler.replicas(MODEL)).values()
    assert replica.engine == "vllm"
    assert replica.engine_version.startswith("0.32.0")
    assert (await rig.rank()).state == common_pb2.STREAM_STATE_LIVE


async def test_nothing_is_predicted_for_prompts_never_seen(rig: Rig) -> None:
    for length in (1, 31, 32, 33, 64, 100, 257):
        verdict, _ = await rig.client.ask("cold", rig.prompts.tokens(length))
        assert verdict.reported == 0


async def test_repeats_are_predicted_up_to_the_block_before_the_last_token(rig: Rig) -> None:
    for length in (31, 33, 64, 65, 100, 128, 300):
        prompt = rig.prompts.tokens(length)
        await rig.client.ask("cold", prompt)
        for _ in range(2):
            verdict, _ = await rig.client.ask("repeats", prompt)
            assert verdict.reported == whole(length)


async def test_shared_prefixes_are_predicted_to_the_block_where_prompts_part(rig: Rig) -> None:
    prefix = rig.prompts.tokens(160)
    await rig.client.ask("cold", prefix)
    for shared, own in ((160, 10), (160, 50), (150, 40), (33, 100), (31, 40), (160, 200)):
        prompt = prefix[:shared] + rig.prompts.tokens(own)
        verdict, _ = await rig.client.ask("shared prefixes", prompt)
        assert verdict.reported == shared // BLOCK * BLOCK


async def test_a_conversation_reuses_what_its_answers_left_behind(rig: Rig) -> None:
    prompt = rig.prompts.tokens(70)
    held = 0
    # Answers that end inside a block, at its end, and one token after it.
    for output in (20, 1, 2, 3, 31, 32, 33, 40):
        verdict, answer = await rig.client.ask("several turns, with decode", prompt, output=output)
        assert verdict.reported == whole(held) if held else verdict.reported == 0
        assert len(answer.output) == output
        # The last token of an answer was sampled, never computed.
        held = len(prompt) + output
        prompt = prompt + answer.output + rig.prompts.tokens(15)


async def test_a_chat_is_predicted_by_the_engines_own_tokens(rig: Rig) -> None:
    chat: list[Message] = [{"role": "system", "content": words(rig.prompts.tokens(90))}]
    reused = []
    for output in (30, 12, 45, 20):
        chat.append({"role": "user", "content": words(rig.prompts.tokens(25))})
        prompt = await rig.engine.tokens(chat)
        decision = await rig.client.route(prompt)
        answer = await rig.engine.chat(chat, output=output)
        verdict = await rig.client.settle("chat", decision, answer)
        reused.append(verdict.reported)
        chat.append({"role": "assistant", "content": answer.text})
    assert reused[0] == 0
    assert reused[1:] == sorted(set(reused[1:])), "each turn reuses more than the one before"


async def test_prompts_of_other_salts_share_nothing(rig: Rig) -> None:
    prompt = rig.prompts.tokens(140)
    for salt in ("", "tenant-a", "tenant-b"):
        verdict, _ = await rig.client.ask("cache_salt", prompt, salt=salt)
        assert verdict.reported == 0
    for salt in ("tenant-b", "", "tenant-a"):
        verdict, _ = await rig.client.ask("cache_salt", prompt, salt=salt)
        assert verdict.reported == whole(140)


async def test_predictions_follow_eviction_when_memory_is_short(rig: Rig) -> None:
    usable = (BLOCKS - 1) * BLOCK
    talks = [rig.prompts.tokens(rig.prompts.rng.randint(100, 400)) for _ in range(7)]
    assert sum(map(len, talks)) > 1.5 * usable
    asked: dict[int, int] = {}
    lost = kept = 0
    for _ in range(36):
        number = rig.prompts.rng.randrange(len(talks))
        talk = talks[number] = talks[number] + rig.prompts.tokens(rig.prompts.rng.randint(0, 20))
        verdict, _ = await rig.client.ask("eviction", talk)
        if number in asked:
            lost += verdict.reported < whole(asked[number])
            kept += verdict.reported > 0
        asked[number] = len(talk)
    assert lost, "no prompt lost blocks: this put no pressure on memory"
    assert kept, "no prompt kept blocks: this showed nothing but cold prompts"


async def test_concurrent_identical_prompts_stay_in_bounds_and_what_they_leave_is_exact(
    rig: Rig,
) -> None:
    talks = []
    for _ in range(3):
        prompt = rig.prompts.tokens(130)
        decisions = [await rig.client.route(prompt) for _ in range(3)]
        answers = await asyncio.gather(*(rig.engine.complete(prompt, output=70) for _ in decisions))
        for decision, answer in zip(decisions, answers, strict=True):
            await rig.client.settle("concurrent duplicates", decision, answer, bounds_only=True)
        talks.append(prompt + answers[0].output)
    # Each of the three decoded the same blocks for itself: evicted one copy at a time, and held until the last.
    assert rig.engine.most_copies() == 3
    for talk in (*reversed(talks), *talks):
        await rig.client.ask("copies under pressure", talk)
        await rig.client.ask("copies under pressure", rig.prompts.tokens(100))


async def test_prompt_logprobs_reuse_nothing_and_leave_what_others_reuse(rig: Rig) -> None:
    prompt = rig.prompts.tokens(150)
    await rig.client.ask("cold", prompt)
    for _ in range(2):
        verdict, _ = await rig.client.ask("prompt_logprobs", prompt, prompt_logprobs=True)
        assert verdict.reported == 0
    verdict, _ = await rig.client.ask("after prompt_logprobs", prompt)
    assert verdict.reported == whole(150)
    # Its blocks look like those that an engine in report mode "full" tells again: they count in `upper` only.
    assert rig.engine.most_copies() == 3
    for length in (300, 200, 300, 200, 400):
        await rig.client.ask("cold", rig.prompts.tokens(length))
        verdict, _ = await rig.client.ask(
            "copies that prompt_logprobs left", prompt, bounds_only=True
        )
        assert verdict.upper == whole(150)


async def test_a_reset_is_known_with_the_engines_next_step(rig: Rig) -> None:
    prompt = rig.prompts.tokens(150)
    await rig.client.ask("cold", prompt)
    await rig.engine.reset()
    verdict, _ = await rig.client.ask("the request after a reset", prompt, exception=RESET)
    assert (verdict.predicted, verdict.reported) == (whole(150), 0)
    for _ in range(2):
        verdict, _ = await rig.client.ask("after a reset", prompt)
        assert verdict.reported == whole(150)


async def test_a_relay_that_starts_again_learns_by_replay_what_it_missed(rig: Rig) -> None:
    before, meanwhile = rig.prompts.tokens(130), rig.prompts.tokens(170)
    await rig.client.ask("cold", before)
    assert await rig.relay.stop() == 0
    # Asked past the scheduler, and heard by no one.
    await rig.engine.complete(meanwhile, output=2)
    await rig.restart_relay()
    await rig.client.caught_up()
    for prompt in (meanwhile, before):
        verdict, _ = await rig.client.ask("after a restart of the relay", prompt)
        assert verdict.reported == whole(len(prompt))
    await rig.client.ask("cold", rig.prompts.tokens(100))


async def test_a_killed_engine_is_promised_nothing_and_begins_anew_in_its_place(rig: Rig) -> None:
    prompt = rig.prompts.tokens(150)
    await rig.client.ask("cold", prompt)
    assert (await rig.client.route(prompt)).prediction.predicted == whole(150)
    life = (await rig.rank()).incarnation

    await rig.engine.kill()
    await rig.scheduler.until(
        lambda seen: any(
            rank.state == common_pb2.STREAM_STATE_UNPROVEN
            for replica in seen.values()
            for rank in replica.ranks
        ),
        "the engine's death",
    )
    decision = await rig.client.route(prompt)
    assert (decision.prediction.lower, decision.prediction.predicted) == (0, 0)
    await rig.scheduler.router.Report(
        routing_pb2.ReportRequest(
            decision_id=decision.decision_id, stage=routing_pb2.ReportRequest.STAGE_FAILED
        ),
        timeout=PATIENCE_S,
    )

    await rig.engine.start()
    assert await rig.client.caught_up() is None, "a new engine has published nothing"
    verdict, _ = await rig.client.ask("the first request of a new life", prompt)
    assert verdict.reported == 0
    assert await rig.engine.last_sequence() == 0
    assert (await rig.rank()).incarnation > life
    for _ in range(2):
        verdict, _ = await rig.client.ask("in a new life", prompt)
        assert verdict.reported == whole(150)
