"""Emulated engines with a tree of pages: what their scheduler shares, keeps, frees and tells, and how SGLang answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_relay.adapters import sglang
from servingfleet_relay.load import identity_of, parse_metrics
from servingfleet_sim.emulator.api import BadRequest, Reader
from servingfleet_sim.emulator.engine import Engine
from servingfleet_sim.emulator.events import GPU, Cleared, Event, Removed, Stored
from servingfleet_sim.emulator.hicache import CPU_PINNED, LOAD_BACK_TOKENS, TieredTree
from servingfleet_sim.emulator.radix_scheduler import (
    DECODE_LOG_INTERVAL,
    TRTLLM,
    Habits,
    RadixScheduler,
)
from servingfleet_sim.emulator.sequence import Asked, Phase, Sequence
from servingfleet_sim.emulator.settings import Settings
from servingfleet_sim.emulator.sglang_events import SglangForm, sglang_form
from servingfleet_sim.emulator.sglang_server import SglangServer
from servingfleet_sim.emulator.speed import INSTANT
from servingfleet_sim.emulator.steps import Limits

PATIENCE_S = 10.0
LIMITS = Limits(blocks=33, block_size=4, max_step_tokens=64)
SGLANG = Habits()
PROMPT = tuple(range(10, 30))


class Rank:
    """A scheduler, driven by hand."""

    def __init__(self, limits: Limits = LIMITS, habits: Habits = SGLANG) -> None:
        self.scheduler = RadixScheduler(limits, habits)
        self.numbers = 0
        self.batches: list[list[Event]] = []
        self.steps: list[int] = []
        """Which step told each batch."""
        self.made = 0

    def ask(self, prompt: tuple[int, ...] = PROMPT, tokens: int = 1, **asked: Any) -> Sequence:
        sequence = Sequence(self.numbers, Asked(prompt, tokens, **asked))
        self.numbers += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> bool:
        step = self.scheduler.schedule(0.0)
        if step is None:
            return False
        self.made += 1
        events = self.scheduler.complete(step).events
        if events:
            self.batches.append(events)
            self.steps.append(self.made)
        return True

    def run(self) -> None:
        while self.step():
            pass

    def pages(self) -> list[str]:
        """Every event so far, in short."""
        return [
            f"{type(event).__name__} {len(getattr(event, 'hashes', ()))}"
            for batch in self.batches
            for event in batch
        ]


def test_a_new_engine_tells_that_it_is_empty_without_being_asked() -> None:
    rank = Rank()
    rank.run()
    assert rank.batches == [[Cleared()]]


def test_the_last_token_is_never_found_and_only_whole_pages_are() -> None:
    rank = Rank()
    first = rank.ask()
    rank.run()
    again = [rank.ask(PROMPT[:length]) for length in (20, 19, 17, 16, 8, 3)]
    rank.run()
    assert first.cached_tokens == 0
    assert [sequence.cached_tokens for sequence in again] == [16, 16, 16, 12, 4, 0]


def test_pages_of_a_prompt_are_told_after_its_step_and_of_an_answer_at_its_end() -> None:
    rank = Rank()
    sequence = rank.ask(tokens=6)
    rank.step()
    assert rank.pages() == ["Cleared 0", "Stored 5"]
    rank.run()
    # 20 and 5 tokens are computed; the sixth answer is not.
    assert rank.pages() == ["Cleared 0", "Stored 5", "Stored 1"]
    assert sequence.phase is Phase.FINISHED


def test_two_that_compute_the_same_at_once_leave_one_copy() -> None:
    rank = Rank()
    both = [rank.ask(tokens=2), rank.ask(tokens=2)]
    rank.step()
    assert rank.scheduler.usage == 5 / 32
    rank.run()
    assert [sequence.cached_tokens for sequence in both] == [0, 0]
    assert rank.pages() == ["Cleared 0", "Stored 5"]
    assert rank.scheduler.tree.size == 5
    assert rank.scheduler.usage == 0


def test_an_engine_that_only_decodes_tells_late() -> None:
    rank = Rank(replace(LIMITS, blocks=200))
    rank.ask(tokens=8)
    rank.ask(tuple(range(50, 70)), tokens=3 * DECODE_LOG_INTERVAL)
    rank.run()
    # The prompts; the first one's answer, with the fortieth step of the second's; that one's.
    assert [len(batch) for batch in rank.batches] == [3, 1, 1]
    assert rank.steps[1] == 1 + DECODE_LOG_INTERVAL


def test_the_least_used_leaf_goes_as_a_whole_and_never_what_is_in_use() -> None:
    rank = Rank(replace(LIMITS, blocks=13))
    rank.ask(tuple(range(100, 120)))
    rank.run()
    rank.ask(tuple(range(200, 220)))
    rank.run()
    rank.ask(tuple(range(100, 121)))
    rank.run()
    rank.ask(tuple(range(300, 320)))
    rank.run()
    assert rank.pages()[-2:] == ["Removed 5", "Stored 5"]
    removed = rank.batches[-1][0]
    second = rank.batches[1][0]
    assert isinstance(removed, Removed)
    assert isinstance(second, Stored)
    assert removed.hashes == second.hashes


def test_a_flush_is_refused_under_load_and_told_at_once_without() -> None:
    rank = Rank()
    rank.ask(tokens=3)
    rank.step()
    assert not rank.scheduler.reset(running=True)
    rank.run()
    assert rank.scheduler.reset()
    rank.run()
    assert rank.batches[-1] == [Cleared()]
    assert rank.scheduler.tree.size == 0


def test_what_an_aborted_sequence_computed_stays_and_its_room_is_free() -> None:
    rank = Rank(replace(LIMITS, max_step_tokens=8))
    gone = rank.ask()
    waiting = rank.ask(tuple(range(60, 80)))
    rank.step()
    rank.scheduler.abort(gone)
    rank.scheduler.abort(waiting)
    rank.run()
    assert rank.scheduler.tree.size == 2
    assert rank.scheduler.usage == 0
    rank.ask()
    rank.run()
    assert rank.pages() == ["Cleared 0", "Stored 2", "Stored 2", "Stored 1"]


@pytest.mark.parametrize(
    "habits", [SGLANG, Habits(pairs=True), TRTLLM], ids=["", "pairs", "trtllm"]
)
@given(
    asked=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40), st.integers(1, 9)), max_size=30)
)
def test_events_tell_exactly_what_is_held_and_no_page_is_lost(
    habits: Habits, asked: list[tuple[int, int, int]]
) -> None:
    rank = Rank(replace(LIMITS, blocks=14, max_step_tokens=24), habits)
    for number, (start, length, answer) in enumerate(asked):
        rank.ask(tuple(range(start, start + length)), answer)
        if number % 3:
            rank.step()
    rank.run()
    held: set[bytes] = set()
    for event in (event for batch in rank.batches for event in batch):
        match event:
            case Stored():
                assert held.isdisjoint(event.hashes), "one copy of each page"
                assert event.parent is None or event.parent in held
                held.update(event.hashes)
            case Removed():
                assert held.issuperset(event.hashes)
                held.difference_update(event.hashes)
            case Cleared():
                held.clear()
    scheduler = rank.scheduler
    assert len(held) == scheduler.tree.size <= scheduler.capacity
    assert (scheduler.tree.held, scheduler.usage) == (0, 0)


@given(
    asked=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 40), st.integers(1, 9)), max_size=40
    ),
    host=st.integers(1, 24),
)
def test_with_a_host_tier_events_tell_what_each_tier_holds_and_what_is_reused(
    asked: list[tuple[int, int, int]], host: int
) -> None:
    rank = Rank(replace(LIMITS, blocks=14, max_step_tokens=24, host_chunks=host))
    scheduler = rank.scheduler
    tree = scheduler.tree
    assert isinstance(tree, TieredTree)
    tiers: dict[str, set[bytes]] = {GPU: set(), CPU_PINNED: set()}
    places: dict[tuple[bytes | None, tuple[object, ...]], bytes] = {}
    for number, (start, length, answer) in enumerate(asked):
        rank.run()
        told(rank, tiers, places)
        assert (len(tiers[GPU]), len(tiers[CPU_PINNED])) == (tree.size, tree.host_size)
        assert tree.size <= scheduler.capacity
        assert tree.host_size <= host
        assert (tree.held, scheduler.usage) == (0, 0)
        prompt = tuple(range(start, start + length))
        expected = reusable(prompt, tiers, places)
        sequence = rank.ask(prompt, answer)
        rank.step()
        assert sequence.cached_tokens == expected
        if number % 4 == 0:
            rank.ask((*prompt[:-1], 99), answer)  # joins while it is computed


def told(
    rank: Rank,
    tiers: dict[str, set[bytes]],
    places: dict[tuple[bytes | None, tuple[object, ...]], bytes],
) -> None:
    """Takes in what was told, and forgets it."""
    for event in (event for batch in rank.batches for event in batch):
        match event:
            case Stored():
                assert tiers[event.medium].isdisjoint(event.hashes), "one copy of each page"
                assert event.parent is None or event.parent in tiers[event.medium]
                tiers[event.medium].update(event.hashes)
                parent = event.parent
                for at, name in enumerate(event.hashes):
                    page = event.tokens[at * event.block_size : (at + 1) * event.block_size]
                    places[parent, page] = parent = name
            case Removed():
                assert tiers[event.medium].issuperset(event.hashes)
                tiers[event.medium].difference_update(event.hashes)
    rank.batches.clear()


def reusable(
    prompt: tuple[int, ...],
    tiers: dict[str, set[bytes]],
    places: dict[tuple[bytes | None, tuple[object, ...]], bytes],
) -> int:
    """Tokens: whole pages, never the last token; of the host's pages none if they are few."""
    page = LIMITS.block_size
    parent: bytes | None = None
    device = found = 0
    for at in range(0, (len(prompt) - 1) // page * page, page):
        parent = places.get((parent, prompt[at : at + page]))
        if parent is None or not (parent in tiers[GPU] or parent in tiers[CPU_PINNED]):
            break
        found += page
        device += page * (parent in tiers[GPU])
    return found if found - device >= LOAD_BACK_TOKENS else device


def test_a_copy_is_told_with_the_next_step_and_outlives_the_gpu() -> None:
    rank = Rank(replace(LIMITS, blocks=7, host_chunks=12))
    rank.ask()
    rank.step()
    assert rank.pages() == ["Cleared 0", "Stored 5"]
    rank.run()
    assert media(rank) == ["Stored GPU", "Stored CPU_PINNED"]
    rank.ask(tuple(range(50, 70)))
    rank.run()
    again = rank.ask()
    rank.run()
    assert (again.cached_tokens, again.host_tokens) == (16, 16)
    # The other prompt takes the first one's place, and that one its own again: four pages loaded and one computed are
    # told as one run, and the host keeps both.
    assert media(rank)[2:] == [
        *("Removed GPU", "Stored GPU", "Stored CPU_PINNED"),
        *("Removed GPU", "Stored GPU"),
    ]


def media(rank: Rank) -> list[str]:
    events = [event for batch in rank.batches for event in batch]
    return [f"{type(e).__name__} {e.medium}" for e in events if not isinstance(e, Cleared)]


@pytest.mark.parametrize("version", ["0.5.20", "0.5.22", "0.5.23"])
def test_the_relay_reads_every_generation(version: str) -> None:
    rank = Rank()
    rank.ask()
    rank.run()
    rank.ask(cache_salt="s")
    rank.ask(adapter="french")
    rank.run()
    form = sglang_form(version)
    seen = [
        event
        for batch in rank.batches
        for event in sglang.decode((b"", bytes(8), form.encode(batch, 1.0, 0))).events
    ]
    assert [type(event).__name__ for event in seen] == ["Cleared", "Stored", "Stored", "Stored"]
    assert [getattr(event, "cache_salt", "") for event in seen] == ["", "", "s", ""]
    assert form.replay_topic is (version != "0.5.20")


@pytest.mark.parametrize("version", ["0.5.19", "main"])
def test_a_release_that_it_can_not_speak_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        sglang_form(version)


@pytest.mark.parametrize(
    ("engine", "fields", "rank"),
    [
        ("sglang", {"routed_dp_rank": 1}, 1),
        ("sglang", {"data_parallel_rank": 1}, 1),
        ("sglang", {"routed_dp_rank": 0, "data_parallel_rank": 1}, 0),
        ("sglang", {}, None),
        ("vllm", {"routed_dp_rank": 1}, None),
    ],
)
def test_the_body_may_name_the_rank(engine: Any, fields: dict[str, int], rank: int | None) -> None:
    reader = Reader(Settings(limits=LIMITS, speed=INSTANT, engine=engine, ranks=2))
    assert reader.completion({"prompt": [1], **fields}).rank == rank


@pytest.mark.parametrize("named", [2, -1, "1", True])
def test_a_rank_that_is_none_is_refused(named: object) -> None:
    reader = Reader(Settings(limits=LIMITS, speed=INSTANT, engine="sglang", ranks=2))
    with pytest.raises(BadRequest, match="ranks 0 to 1"):
        reader.completion({"prompt": [1], "routed_dp_rank": named})


async def test_the_server_answers_as_sglang_does() -> None:
    settings = Settings(
        limits=LIMITS,
        speed=INSTANT,
        engine="sglang",
        engine_version="0.5.23",
        form=SglangForm(),
        events_port=0,
        replay_port=0,
        vocabulary=1000,
    )
    engine = Engine(settings, b"")
    opened = asyncio.Event()
    running = asyncio.create_task(engine.run(opened))
    await asyncio.wait_for(opened.wait(), PATIENCE_S)
    try:
        async with TestClient(TestServer(SglangServer(engine).app())) as http:
            await _answers(http)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _answers(http: TestClient[Any, Any]) -> None:
    async def post(path: str, **body: Any) -> tuple[int, Any]:
        async with http.post(path, json=body) as response:
            return response.status, await response.json(content_type=None)

    _, first = await post("/v1/completions", prompt=list(PROMPT), max_tokens=2)
    _, second = await post("/v1/completions", prompt=[list(PROMPT)] * 2, max_tokens=2)
    assert first["usage"]["prompt_tokens_details"] is None
    assert first["choices"][0]["matched_stop"] is None
    # Both of its prompts count.
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    async with http.get("/server_info") as response:
        found = identity_of(await response.json(), None, None)
    assert found is not None
    assert (found.engine, found.version) == ("sglang", "0.5.23")
    async with http.get("/metrics") as response:
        metrics = parse_metrics(await response.text(), (0,))
    assert (metrics.engine, metrics.gpu_tokens) == ("sglang", 128)
    assert (metrics.loads[0].running_requests, metrics.started) == (0, None)
    async with http.get("/version") as response:
        assert response.status == 404
    async with http.post("/flush_cache") as response:
        assert response.status == 200
    status, refused = await post("/v1/completions", prompt=[])
    assert (status, refused["object"]) == (400, "error")
