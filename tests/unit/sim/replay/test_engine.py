"""Tests of `servingfleet_sim.replay.engine`: one rank against the emulator's, and by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servingfleet_sim.emulator.radix_scheduler import RadixScheduler
from servingfleet_sim.emulator.scheduler import Scheduler
from servingfleet_sim.emulator.sequence import Asked
from servingfleet_sim.emulator.sequence import Sequence as Emulated
from servingfleet_sim.emulator.steps import Limits
from servingfleet_sim.replay.clock import Clock
from servingfleet_sim.replay.engine import RankEngine
from servingfleet_sim.replay.fleet import PoolSpec, TierSpec
from servingfleet_sim.replay.memory import Change, Job
from servingfleet_sim.replay.oracle import first_token_s

from .worlds import BLOCK, SPEED, pool

Arrival = tuple[float, tuple[int, ...], int]
"""When, the prompt's tokens, output tokens."""


def hashes(tokens: Sequence[int]) -> bytes:
    """Packed hashes of the full blocks."""
    digest, found = hashlib.blake2b(digest_size=8), b""
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        digest.update(repr(tuple(tokens[end - BLOCK : end])).encode())
        found += digest.digest()
    return found


class Rank:
    """A rank, its clock and what it said."""

    def __init__(self, spec: PoolSpec, *, watch_coming: bool = False) -> None:
        self.clock = Clock()
        self.batches: list[list[Change]] = []
        self.ended: dict[int, tuple[float, int]] = {}
        self.firsts: dict[int, float] = {}
        self.reused: dict[int, int] = {}
        self.engine = RankEngine(
            "rank", spec, BLOCK, self.clock, self, self.batches.append, watch_coming=watch_coming
        )

    def first_token(self, job: Job) -> None:
        self.firsts[job.number] = self.clock.now
        self.reused[job.number] = job.reused

    def finished(self, job: Job) -> None:
        self.ended[job.number] = (self.clock.now, job.reused)

    def play(self, arrivals: Iterable[Arrival]) -> None:
        for number, (at, tokens, output) in enumerate(arrivals):
            job = Job(number, len(tokens), output, hashes(tokens))
            self.clock.at(at, lambda job=job: self.engine.submit(job))  # type: ignore[misc]
        while self.clock.step():
            pass


def emulated(
    scheduler: Scheduler | RadixScheduler, arrivals: Sequence[Arrival]
) -> dict[int, tuple[float, float, int]]:
    """First token, end and reused tokens of each request, by the emulator's rank."""
    waiting = sorted(enumerate(arrivals), key=lambda each: each[1][0])
    now = 0.0
    found: dict[int, tuple[float, float, int]] = {}
    while True:
        while waiting and waiting[0][1][0] <= now:
            number, (_, tokens, output) = waiting.pop(0)
            scheduler.add(Emulated(number, Asked(prompt=tokens, max_tokens=output)))
        step = scheduler.schedule(now, SPEED.load_s, SPEED.load_token_s)
        if step is None:
            if not waiting:
                return found
            now = waiting[0][1][0]
            continue
        now += SPEED.step(step.work)
        for sequence, _ in scheduler.complete(step).sampled:
            first = found.get(sequence.number, (now,))[0]
            found[sequence.number] = (first, now, sequence.cached_tokens or 0)


def prompt(families: list[int], length: int, number: int) -> tuple[int, ...]:
    """Begins with a block of each family, goes on as nobody else's."""
    shared = [10_000 * family + at for at, family in enumerate(families) for _ in range(BLOCK)]
    return (*shared, *range(10**6 * (number + 1), 10**6 * (number + 1) + length))


ARRIVALS = st.lists(
    st.tuples(
        st.floats(0.0, 0.1),
        st.lists(st.integers(0, 1), max_size=6),
        st.integers(1, 300),
        st.integers(1, 20),
    ),
    min_size=1,
    max_size=8,
).map(
    lambda rows: [
        (at, prompt(families, length, number), output)
        for number, (at, families, length, output) in enumerate(sorted(rows))
    ]
)


@settings(deadline=None, max_examples=30)
@given(ARRIVALS, st.sampled_from([64, 200, 4096]), st.sampled_from([2, 256]))
def test_serves_as_the_emulated_vllm_does(
    arrivals: list[Arrival], step_tokens: int, sequences: int
) -> None:
    # Room for all: what differs by design is only how room for answers is kept.
    rank = Rank(pool(gpu_tokens=64_000, step_tokens=step_tokens, max_sequences=sequences))
    rank.play(arrivals)
    limits = Limits(
        blocks=4001, block_size=BLOCK, max_sequences=sequences, max_step_tokens=step_tokens
    )
    said = emulated(Scheduler(limits, b"seed"), arrivals)
    assert rank.reused == {number: each[2] for number, each in said.items()}
    assert rank.firsts == pytest.approx({number: each[0] for number, each in said.items()})
    ends = {number: each[0] for number, each in rank.ended.items()}
    assert ends == pytest.approx({number: each[1] for number, each in said.items()})


@settings(deadline=None, max_examples=30)
@given(ARRIVALS)
def test_serves_as_the_emulated_sglang_does(arrivals: list[Arrival]) -> None:
    # Prompts of one part: SGLang cuts parts at pages.
    rank = Rank(pool(gpu_tokens=64_000, step_tokens=16_000, engine="sglang"))
    rank.play(arrivals)
    limits = Limits(blocks=4001, block_size=BLOCK, max_step_tokens=16_000)
    said = emulated(RadixScheduler(limits), arrivals)
    assert rank.reused == {number: each[2] for number, each in said.items()}
    assert rank.firsts == pytest.approx({number: each[0] for number, each in said.items()})


def test_one_prompt_takes_as_long_as_the_formula_says() -> None:
    rank = Rank(pool(step_tokens=512))
    rank.play([(1.0, prompt([], 800, 0), 3)])
    first = 0.004 + 1e-4 * 512 + 1e-6 * 512 * 256
    second = 0.004 + 1e-4 * 288 + 1e-6 * 288 * (512 + 144)
    decode = 0.004 + 0.003 + 1e-7 * 800
    assert rank.firsts[0] == pytest.approx(1.0 + first + second)
    assert rank.ended[0][0] == pytest.approx(1.0 + first + second + 2 * decode + 1e-7)
    assert rank.engine.busy_s == pytest.approx(rank.ended[0][0] - 1.0)
    assert rank.engine.computed_tokens == 800


def test_a_full_prompt_on_the_gpu_is_computed_from_its_last_block_on() -> None:
    rank = Rank(pool())
    rank.play([(0.0, prompt([], 64, 0), 1), (1.0, prompt([], 64, 0), 1)])
    assert rank.reused == {0: 0, 1: 48}


def test_memory_that_is_too_small_for_two_lets_the_second_wait_for_the_end_of_the_first() -> None:
    rank = Rank(pool(gpu_tokens=640))
    rank.play([(0.0, prompt([], 400, 0), 100), (0.0, prompt([], 400, 1), 1)])
    assert rank.firsts[1] > rank.ended[0][0]
    assert rank.engine.memory.private == 0
    assert rank.engine.memory.gpu.pinned == 0


def test_evicts_the_prompt_used_longest_ago_and_says_so_with_the_step() -> None:
    rank = Rank(pool(gpu_tokens=320))
    first, second, third = (prompt([], 160, number) for number in range(3))
    rank.play([(0.0, first, 1), (1.0, second, 1), (2.0, third, 1), (3.0, second, 1)])
    assert rank.reused == {0: 0, 1: 0, 2: 0, 3: 144}
    told: set[bytes] = set()
    for batch in rank.batches:
        for change in batch:
            run = change.what.hashes
            blocks = {run[at : at + 8] for at in range(0, len(run), 8)}
            told = told | blocks if change.held else told - blocks
    assert told == {
        each.hashes[at : at + 8]
        for each in rank.engine.memory.gpu.holdings()
        for at in range(0, len(each.hashes), 8)
    }


HOST = (TierSpec(tier="host", tokens=16_000, bandwidth_bytes_per_s=131072 / 1e-5, latency_s=0.002),)


def test_vllm_loads_from_the_host_before_the_prompts_turn_while_others_compute() -> None:
    spec = pool(gpu_tokens=1280, tiers=HOST)
    rank = Rank(spec)
    old, other, third = prompt([], 640, 0), prompt([], 640, 1), prompt([], 500, 2)
    rank.play([(0.0, old, 1), (1.0, other, 1), (2.0, third, 1), (3.0, old, 1), (3.0, third, 1)])
    # Its blocks went from the GPU for the third; the host has all of them, and may fill the whole prompt.
    assert rank.reused[3] == 640
    # Of its 40 blocks 8 are there still: the GPU has 80, and the others used 72.
    alone = 0.002 + 32 * BLOCK * 1e-5
    last = 0.004 + max(0.003, 1e-4 + 1e-6 * 639.5)
    assert rank.firsts[4] < rank.firsts[3]
    assert rank.firsts[3] == pytest.approx(max(3.0 + alone, rank.firsts[4]) + last)


def test_sglang_hides_a_part_of_the_load_behind_the_prefill() -> None:
    spec = pool(gpu_tokens=1280, tiers=HOST, engine="sglang", step_tokens=16_000, overlap=0.5)
    rank = Rank(spec)
    old, other, third = prompt([], 648, 0), prompt([], 640, 1), prompt([], 500, 2)
    rank.play([(0.0, old, 1), (1.0, other, 1), (2.0, third, 1), (3.0, old, 1)])
    assert rank.reused[3] == 640
    compute = max(0.003, 8e-4 + 1e-6 * 8 * 644)
    load = 0.002 + 32 * BLOCK * 1e-5
    assert rank.firsts[3] == pytest.approx(3.0 + 0.004 + compute + load - 0.5 * compute)


def test_two_loads_at_once_share_the_link() -> None:
    rank = Rank(pool(gpu_tokens=3200, tiers=HOST))
    first, second, other = (prompt([], 640, number) for number in range(3))
    big = prompt([], 3190, 3)
    arrivals = [(0.0, first, 1), (1.0, second, 1), (2.0, other, 1), (3.0, big, 1)]
    rank.play([*arrivals, (9.0, first, 1), (9.0, second, 1)])
    assert (rank.reused[4], rank.reused[5]) == (640, 640)
    load = 0.002 + 640 * 1e-5
    last = 0.004 + 0.003
    assert rank.firsts[4] == pytest.approx(9.0 + load + last)
    assert rank.firsts[5] == pytest.approx(9.0 + load + max(load, last) + last)


def test_an_engine_that_dies_leaves_what_it_had_and_starts_empty() -> None:
    rank = Rank(pool())
    left: list[Job] = []
    rank.clock.at(0.02, lambda: left.extend(rank.engine.stop()))
    rank.play([(0.0, prompt([], 900, 0), 50), (0.01, prompt([], 900, 1), 50)])
    assert [job.number for job in left] == [0, 1]
    assert rank.firsts == {}
    assert rank.engine.memory.gpu.size == rank.engine.memory.private == 0
    assert rank.engine.busy_s == pytest.approx(0.02)
    # What it was at does not haunt its new life.
    rank.engine.submit(Job(2, 100, 5, b""))
    while rank.clock.step():
        pass
    assert rank.firsts.keys() == rank.ended.keys() == {2}


def test_the_oracle_knows_what_those_ahead_will_leave() -> None:
    rank = Rank(pool(step_tokens=100_000), watch_coming=True)
    shared = prompt([0], 784, 0)
    alike = [(*shared, *prompt([], 16, number)) for number in (1, 2)]
    guess: list[float] = []

    def ask() -> None:
        guess.append(first_token_s(rank.engine, hashes(alike[1]), 816, rank.clock.now))

    rank.clock.at(0.002, ask)
    rank.play([(0.0, shared, 1), (0.001, alike[0], 1), (0.002, alike[1], 1)])
    assert (rank.reused[1], rank.reused[2]) == (800, 800)
    # Both are in one step: what is ahead and what is its own make no difference to its end.
    assert rank.firsts[2] - 0.002 == pytest.approx(guess[0])


@settings(deadline=None, max_examples=30)
@given(ARRIVALS.filter(lambda rows: len(rows) > 1))
def test_the_oracle_knows_when_a_first_token_comes_if_nothing_else_arrives(
    arrivals: list[Arrival],
) -> None:
    """But for the last step's shape: it packs steps, and takes those that decode now for all steps."""
    rank = Rank(pool(gpu_tokens=64_000, step_tokens=512), watch_coming=True)
    at, tokens, _ = arrivals[-1]
    guess: list[float] = []
    rank.clock.at(
        at,
        lambda: guess.append(first_token_s(rank.engine, hashes(tokens), len(tokens), at)),
    )
    # All ahead are sent before it asks: their events stand before its own at equal times.
    for number, (when, ahead, _) in enumerate(arrivals[:-1]):
        job = Job(number, len(ahead), 1, hashes(ahead))
        rank.clock.at(min(when, at - 1e-9) if at else 0.0, lambda job=job: rank.engine.submit(job))  # type: ignore[misc]
    if not at:
        return
    last = Job(99, len(tokens), 1, hashes(tokens))
    rank.clock.at(at, lambda: rank.engine.submit(last))
    while rank.clock.step():
        pass
    assert rank.firsts[99] - at == pytest.approx(guess[0], rel=0.02, abs=0.012)
