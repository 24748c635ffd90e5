"""The emulator's blocks and scheduling, under any order of prompts, aborts and resets."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servingfleet_sim.emulator.events import CPU, GPU, Cleared, Event, Removed, Stored
from servingfleet_sim.emulator.groups import STATE, WINDOW, LayerGroup
from servingfleet_sim.emulator.pool import NULL_BLOCK, BlockPool, OutOfBlocks
from servingfleet_sim.emulator.scheduler import Scheduler
from servingfleet_sim.emulator.sequence import Asked, Phase, Sequence
from servingfleet_sim.emulator.steps import DoesNotFit, Limits

SIZE = 4


class Copies:
    """The naive account: how many copies of each hash the events leave in each medium, by group of layers."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, int], Counter[bytes]] = defaultdict(Counter)

    def apply(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Stored():
                    self.held[event.medium, event.group].update(event.hashes)
                case Removed():
                    assert not Counter(event.hashes) - self.held[event.medium, event.group]
                    self.held[event.medium, event.group] -= Counter(event.hashes)
                case Cleared():
                    for medium, group in self.held:
                        if medium == GPU:
                            self.held[medium, group].clear()


def prompts() -> st.SearchStrategy[tuple[int, ...]]:
    # Few tokens and few beginnings, so that prefixes are shared.
    beginning = st.sampled_from([(), (1,) * 6, (1,) * 12, (2,) * 9])
    rest = st.lists(st.integers(5, 7), min_size=1, max_size=14).map(tuple)
    return st.tuples(beginning, rest).map(lambda parts: parts[0] + parts[1])


def asked() -> st.SearchStrategy[Asked]:
    return st.builds(
        Asked,
        prompt=prompts(),
        max_tokens=st.integers(1, 10),
        cache_salt=st.sampled_from([None, "salt"]),
        prompt_logprobs=st.sampled_from([False, False, False, True]),
        vocabulary=st.just(8),
    )


ACTIONS = st.lists(
    st.one_of(
        asked(),
        st.just("step"),
        st.just("step"),
        st.just("reset"),
        st.just("reset running"),
        st.just("abort"),
    ),
    max_size=60,
)
SIZES = {
    "block_size": st.just(SIZE),
    "max_sequences": st.integers(1, 4),
    "max_step_tokens": st.sampled_from([5, 12, 100]),
}
ALIKE = st.builds(
    Limits,
    blocks=st.integers(10, 20),
    host_chunks=st.sampled_from([0, 0, 4, 30]),
    host_chunk_blocks=st.integers(1, 2),
    host_described=st.booleans(),
    **SIZES,
)
HYBRID = st.builds(
    Limits,
    blocks=st.integers(20, 40),
    groups=st.sampled_from(
        [
            (LayerGroup(WINDOW, 6), LayerGroup()),
            (LayerGroup(WINDOW, 9),),
            (LayerGroup(STATE), LayerGroup(STATE), LayerGroup()),
            (LayerGroup(), LayerGroup(WINDOW, 12), LayerGroup(STATE)),
        ]
    ),
    **SIZES,
)
OFFLOADED = st.builds(
    Limits,
    blocks=st.integers(20, 40),
    host_chunks=st.sampled_from([4, 12, 40]),
    host_chunk_blocks=st.integers(1, 2),
    host_described=st.booleans(),
    groups=st.sampled_from(
        [
            (LayerGroup(WINDOW, 6), LayerGroup()),
            (LayerGroup(), LayerGroup(WINDOW, 9), LayerGroup(WINDOW, 17)),
        ]
    ),
    **SIZES,
)
LIMITS = st.one_of(ALIKE, HYBRID, OFFLOADED)


def check(scheduler: Scheduler, copies: Copies) -> None:
    """Everything that must hold between steps, with the events of the last one applied."""
    pool = scheduler.caches.pool
    free = pool.free_order()
    assert len(set(free)) == len(free) == pool.free
    assert NULL_BLOCK not in free
    holding = [*scheduler.running, *scheduler.loading]
    lanes = [lane for sequence in holding for lane in sequence.lanes]
    held = {block for lane in lanes for block in lane.blocks if block != NULL_BLOCK}
    assert held.isdisjoint(free)
    assert len(held) + len(free) == pool.usable
    contents = [pool.content(group.number) for group in scheduler.caches.groups]
    assert sum(sum(content.values()) for content in contents) <= pool.usable
    for number, content in enumerate(contents):
        assert copies.held[GPU, number] == Counter(content)
    if scheduler.host is not None:
        for number, _ in enumerate(contents):
            assert copies.held[CPU, number] == Counter(scheduler.host.content(number))


@settings(max_examples=150, deadline=None)
@given(LIMITS, ACTIONS)
def test_replayed_events_always_equal_the_content_of_the_caches(
    limits: Limits, actions: list[Asked | str]
) -> None:
    scheduler = Scheduler(limits, b"seed")
    copies = Copies()
    sequences: list[Sequence] = []
    for now, action in enumerate([*actions, *["step"] * 400]):
        match action:
            case Asked():
                sequence = Sequence(len(sequences), action)
                if sequence.prompt_tokens < limits.longest:
                    scheduler.add(sequence)
                    sequences.append(sequence)
            case "abort":
                if sequences:
                    scheduler.abort(sequences[-1])
            case "step":
                step = scheduler.schedule(float(now), load_s=1.5)
                if step is not None:
                    assert sum(work.tokens for work in step.work) <= limits.max_step_tokens
                    copies.apply(scheduler.complete(step).events)
                    check(scheduler, copies)
            case _:
                scheduler.reset(running="running" in action)
    assert not scheduler.busy
    assert scheduler.caches.pool.free == scheduler.caches.pool.usable
    for sequence in sequences:
        assert sequence.phase is Phase.FINISHED


def run(scheduler: Scheduler, *wanted: Asked) -> tuple[list[Event], list[Sequence]]:
    """All events and the sequences, once everything has finished."""
    sequences = [Sequence(number, ask) for number, ask in enumerate(wanted)]
    for sequence in sequences:
        scheduler.add(sequence)
    events: list[Event] = []
    while (step := scheduler.schedule(0.0)) is not None:
        events += scheduler.complete(step).events
    return events, sequences


def stored_blocks(events: list[Event]) -> int:
    return sum(len(event.hashes) for event in events if isinstance(event, Stored))


def test_a_fully_cached_prompt_computes_its_last_block_again() -> None:
    scheduler = Scheduler(Limits(16, SIZE), b"")
    wanted = Asked(tuple(range(8)), max_tokens=1)
    run(scheduler, wanted)
    events, (again,) = run(scheduler, wanted)
    assert again.cached_tokens == 4
    assert stored_blocks(events) == 1  # a second copy of the last block


def test_the_last_sampled_token_fills_no_block() -> None:
    events, _ = run(Scheduler(Limits(16, SIZE), b""), Asked((1, 2), max_tokens=2))
    assert stored_blocks(events) == 0
    events, _ = run(Scheduler(Limits(16, SIZE), b""), Asked((1, 2), max_tokens=3))
    assert stored_blocks(events) == 1


def test_another_salt_or_adapter_shares_nothing() -> None:
    scheduler = Scheduler(Limits(16, SIZE), b"")
    prompt = tuple(range(10))
    run(scheduler, Asked(prompt, 1))
    _, (salted,) = run(scheduler, Asked(prompt, 1, cache_salt="s"))
    _, (adapted,) = run(scheduler, Asked(prompt, 1, adapter="a", adapter_number=1))
    _, (plain,) = run(scheduler, Asked(prompt, 1))
    assert [salted.cached_tokens, adapted.cached_tokens, plain.cached_tokens] == [0, 0, 8]


def test_prompt_logprobs_reuse_nothing() -> None:
    scheduler = Scheduler(Limits(16, SIZE), b"")
    run(scheduler, Asked(tuple(range(10)), 1))
    _, (sequence,) = run(scheduler, Asked(tuple(range(10)), 1, prompt_logprobs=True))
    assert sequence.cached_tokens == 0


def test_a_reset_is_refused_while_a_sequence_runs() -> None:
    scheduler = Scheduler(Limits(16, SIZE), b"")
    scheduler.add(Sequence(0, Asked((1, 2, 3), 5)))
    assert scheduler.schedule(0.0) is not None
    assert not scheduler.reset()
    assert scheduler.reset(running=True)


def test_the_clear_of_an_idle_engine_goes_out_with_the_next_events() -> None:
    scheduler = Scheduler(Limits(16, SIZE), b"")
    assert scheduler.reset()
    assert scheduler.schedule(0.0) is None
    events, _ = run(scheduler, Asked(tuple(range(5)), 1))
    assert [type(event) for event in events] == [Cleared, Stored]


def test_a_sequence_that_finds_no_block_takes_those_of_the_youngest() -> None:
    scheduler = Scheduler(Limits(6, SIZE), b"")
    _, (old, young) = run(scheduler, Asked((1,) * 7, 9), Asked((2,) * 7, 9))
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert (old.output_tokens, young.output_tokens) == (9, 9)


def test_a_prompt_longer_than_the_cache_is_refused() -> None:
    with pytest.raises(DoesNotFit, match="has 20 tokens; this model holds 20"):
        Scheduler(Limits(6, SIZE), b"").add(Sequence(0, Asked((1,) * 20)))


def test_a_long_prompt_is_computed_in_chunks() -> None:
    scheduler = Scheduler(Limits(16, SIZE, max_step_tokens=10), b"")
    scheduler.add(Sequence(0, Asked(tuple(range(24)), 1)))
    seen = []
    while (step := scheduler.schedule(0.0)) is not None:
        seen += [(work.tokens, work.context) for work in step.work]
        scheduler.complete(step)
    assert seen == [(10, 0), (10, 10), (4, 20)]


def test_loading_from_the_host_lets_others_compute_meanwhile() -> None:
    scheduler = Scheduler(Limits(8, SIZE, host_chunks=16), b"")
    run(scheduler, Asked((1,) * 20, 1))
    run(scheduler, Asked((2,) * 20, 1))  # pushes all but two blocks of the first out of the GPU
    loading, other = Sequence(7, Asked((1,) * 20, 1)), Sequence(8, Asked((3, 3), 1))
    scheduler.add(loading)
    scheduler.add(other)
    step = scheduler.schedule(10.0, load_s=1.0, load_token_s=0.1)
    assert step is not None
    assert [work.sequence for work in step.work] == [other]
    assert step.load_until == pytest.approx(10.0 + 1.0 + 12 * 0.1)
    scheduler.complete(step)
    step = scheduler.schedule(20.0)
    assert step is not None
    assert [work.sequence for work in step.work] == [loading]
    assert (loading.cached_tokens, loading.host_tokens) == (20, 12)
    assert step.work[0].tokens == 1  # all was found, but the last token must be computed


def with_host(*prompts: tuple[int, ...]) -> Scheduler:
    """7 blocks, none of them cached, and a host tier that holds these prompts."""
    scheduler = Scheduler(Limits(8, SIZE, host_chunks=16), b"")
    for prompt in prompts:
        run(scheduler, Asked(prompt, 1))
    assert scheduler.reset()
    return scheduler


def test_a_chunk_that_is_being_loaded_is_waited_for() -> None:
    scheduler = with_host((1,) * 8)
    same = [Sequence(number, Asked((1,) * 8 + (number,), 1)) for number in (3, 4)]
    for sequence in same:
        scheduler.add(sequence)
    step = scheduler.schedule(0.0, load_s=1.0)
    assert step is not None
    assert [sequence.phase for sequence in same] == [Phase.LOADING, Phase.WAITING]
    scheduler.complete(step)
    step = scheduler.schedule(1.0, load_s=1.0)
    assert step is not None
    assert [work.sequence for work in step.work] == same
    assert [sequence.host_tokens for sequence in same] == [8, 0]


def test_a_chunk_that_is_being_loaded_is_not_evicted() -> None:
    scheduler = Scheduler(Limits(16, SIZE, host_chunks=2), b"")
    run(scheduler, Asked((1,) * 8, 1))
    scheduler.reset()
    scheduler.add(Sequence(1, Asked((1,) * 8, 1)))
    scheduler.add(Sequence(2, Asked((2,) * 8, 1)))
    assert scheduler.host is not None
    held = scheduler.host.content()
    step = scheduler.schedule(0.0, load_s=1.0)
    assert step is not None
    scheduler.complete(step)
    assert scheduler.host.content() == held


def test_a_load_leaves_the_blocks_that_begun_prompts_still_need() -> None:
    scheduler = with_host((1,) * 20, (2,) * 8)
    long, short = Sequence(1, Asked((1,) * 20 + (3,) * 7, 1)), Sequence(2, Asked((2,) * 8, 1))
    scheduler.add(long)
    scheduler.add(short)
    assert scheduler.schedule(0.0, load_s=1.0) is not None
    assert (long.phase, short.phase) == (Phase.LOADING, Phase.WAITING)
    assert scheduler.caches.pool.free == 2


def test_a_prompt_is_admitted_only_where_all_of_it_fits() -> None:
    scheduler = Scheduler(Limits(8, SIZE, max_step_tokens=6), b"")
    scheduler.add(Sequence(0, Asked((1,) * 5, 9)))
    scheduler.add(Sequence(1, Asked((2,) * 24, 1)))
    step = scheduler.schedule(0.0)
    assert step is not None
    scheduler.complete(step)
    assert scheduler.schedule(0.0) is not None
    assert (scheduler.running_count, scheduler.waiting_count) == (1, 1)


def test_an_answer_depends_on_the_prompt_alone() -> None:
    _, (one,) = run(Scheduler(Limits(16, SIZE), b"a"), Asked((1, 2, 3), 6))
    _, (two, other) = run(Scheduler(Limits(9, SIZE), b"b"), Asked((1, 2, 3), 6), Asked((9,), 6))
    assert one.outputs == two.outputs
    assert one.outputs != other.outputs
    assert one.hashes != two.hashes


def test_blocks_without_a_hash_are_handed_out_first() -> None:
    pool = BlockPool(6)
    first, second, third = pool.allocate(3)
    pool.name([first], [b"h"])
    pool.release([third, second, first])
    assert pool.free_order() == (third, second, 4, 5, first)


def test_a_pool_hands_out_no_more_than_it_has() -> None:
    with pytest.raises(OutOfBlocks, match="6 blocks asked for, 5 of 5 free"):
        BlockPool(6).allocate(6)
