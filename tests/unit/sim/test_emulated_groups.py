"""Groups of layers: what each finds, keeps and gives back, and what they agree on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from servingfleet_sim.emulator.events import Stored
from servingfleet_sim.emulator.groups import (
    FULL,
    STATE,
    WINDOW,
    LayerGroup,
    layer_group,
    longest,
    make_groups,
)
from servingfleet_sim.emulator.pool import NULL_BLOCK, BlockPool
from servingfleet_sim.emulator.scheduler import Scheduler
from servingfleet_sim.emulator.sequence import Asked, Sequence
from servingfleet_sim.emulator.steps import Limits
from servingfleet_sim.processes import running

SIZE = 4
HASHES = [bytes([number]) for number in range(8)]
PATIENCE_S = 30.0


def found(specs: list[LayerGroup], *held: str, most: int = 8) -> tuple[list[list[int]], int]:
    """What groups find of eight blocks, of which each holds those marked in its text."""
    pool = BlockPool(64)
    groups = make_groups(specs, SIZE, pool)
    for group, marks in zip(groups, held, strict=True):
        places = [place for place, mark in enumerate(marks) if mark == "x"]
        pool.name(pool.allocate(len(places)), [HASHES[place] for place in places], group.number)
    return longest(groups, HASHES, most)


@pytest.mark.parametrize(
    ("spec", "held", "length"),
    [
        (LayerGroup(), "xxx.xxxx", 3),
        # A window of 9 tokens: the 8 before a boundary are two blocks.
        (LayerGroup(WINDOW, 9), "xxx.xx.x", 6),
        (LayerGroup(WINDOW, 9), "x.x.x.x.", 1),
        (LayerGroup(WINDOW, 9), "....x...", 0),
        (LayerGroup(STATE), "x...x...", 5),
        (LayerGroup(STATE), "........", 0),
    ],
)
def test_each_kind_goes_on_where_what_it_needs_is_there(
    spec: LayerGroup, held: str, length: int
) -> None:
    ((blocks,), alone) = found([spec], held)
    assert len(blocks) == alone == length


def test_what_is_found_stops_before_the_last_token() -> None:
    assert len(found([LayerGroup(STATE)], "...x...x", most=7)[0][0]) == 4


def test_groups_agree_on_the_longest_length_that_suits_all() -> None:
    specs = [LayerGroup(WINDOW, 9), LayerGroup(), LayerGroup(STATE)]
    blocks, alone = found(specs, "..xx.xx.", "xxxxxxx.", ".x.x..x.")
    # The state and the window would do at seven, too.
    assert [len(each) for each in blocks] == [7, 7, 7]
    blocks, alone = found(specs, "..xx..x.", "xxxxxxx.", ".x.x..x.")
    assert [len(each) for each in blocks] == [4, 4, 4]
    assert alone == 7
    assert blocks[0][:2] == [NULL_BLOCK] * 2
    assert NULL_BLOCK not in blocks[1]


def tokens(number: int, count: int) -> tuple[int, ...]:
    return tuple(range(1000 * number, 1000 * number + count))


def told(scheduler: Scheduler, *prompts: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Group, blocks named and blocks spanned of every store, one prompt after the other."""
    rows: list[tuple[int, int, int]] = []
    for number, prompt in enumerate(prompts):
        scheduler.add(Sequence(number, Asked(prompt, 1)))
        while (step := scheduler.schedule(0.0)) is not None:
            for event in scheduler.complete(step).events:
                if isinstance(event, Stored):
                    rows.append(
                        (event.group, len(event.hashes), len(event.tokens) // event.block_size)
                    )
    return rows


def test_only_where_a_prompt_ends_and_where_prompts_part_is_a_window_kept() -> None:
    scheduler = Scheduler(
        Limits(100, SIZE, 4, 256, groups=(LayerGroup(WINDOW, 9), LayerGroup())), b""
    )
    first = tokens(1, 33)
    second = first[:20] + tokens(2, 21)
    assert told(scheduler, first, second) == [(0, 2, 8), (1, 8, 8), (0, 4, 10), (1, 10, 10)]


def test_recurrent_layers_end_steps_where_their_state_is_kept() -> None:
    scheduler = Scheduler(Limits(100, SIZE, 4, 256, groups=(LayerGroup(STATE), LayerGroup())), b"")
    first = tokens(1, 34)
    second = first[:20] + tokens(2, 21)
    assert told(scheduler, first) == [(0, 1, 8), (1, 8, 8)]
    # A step for what both share, one up to the last block's end, and one for the rest.
    assert told(scheduler, second) == [(0, 1, 5), (1, 5, 5), (0, 1, 5), (1, 5, 5)]
    assert told(scheduler, first[:20] + tokens(3, 3)) == []


def test_a_block_larger_than_a_prompt_leaves_nothing() -> None:
    scheduler = Scheduler(Limits(10, 528, 4, 2048, groups=(LayerGroup(STATE), LayerGroup())), b"")
    assert told(scheduler, tokens(1, 500), tokens(1, 500)) == []


def test_windows_give_back_blocks_while_their_sequence_runs() -> None:
    scheduler = Scheduler(
        Limits(100, SIZE, 4, 16, groups=(LayerGroup(WINDOW, 9), LayerGroup())), b""
    )
    sequence = Sequence(0, Asked(tokens(1, 64), 40))
    scheduler.add(sequence)
    for _ in range(20):
        step = scheduler.schedule(0.0)
        assert step is not None
        scheduler.complete(step)
    window, full = ([block for block in lane.blocks if block] for lane in sequence.lanes)
    assert len(window) <= 4
    assert len(full) == 20


def test_the_longest_sequence_is_what_all_groups_can_hold() -> None:
    assert Limits(101, SIZE).longest == 400
    assert Limits(101, SIZE, groups=(LayerGroup(), LayerGroup(STATE))).longest == 4 * 98
    windowed = Limits(101, SIZE, max_step_tokens=20, groups=(LayerGroup(), LayerGroup(WINDOW, 9)))
    assert windowed.longest == 4 * 92


def test_groups_are_read_as_they_are_written() -> None:
    assert layer_group("full_attention") == LayerGroup(FULL)
    assert layer_group("sliding_window:128") == LayerGroup(WINDOW, 128)
    assert layer_group("mamba") == LayerGroup(STATE)
    for text in ("window", "sliding_window", "sliding_window:1", "mamba:3", "full_attention:16"):
        with pytest.raises(ValueError, match=r"expected full_attention, sliding_window:TOKENS or"):
            layer_group(text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layer-group", "mamba", "--host-blocks", "8"], "mamba has no host tier"),
        (["--layer-group", "mamba", "--engine", "sglang"], "for --engine vllm"),
        (["--layer-group", "window"], "'window'; expected full_attention"),
    ],
)
async def test_what_no_engine_has_is_refused(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    async with running("servingfleet_sim.emulator", arguments, tmp_path / "log") as process:
        assert await asyncio.wait_for(process.child.wait(), PATIENCE_S) == 2
        assert said in (tmp_path / "log").read_text()
