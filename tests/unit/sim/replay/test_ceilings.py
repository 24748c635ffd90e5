"""Tests of `servingfleet_sim.replay.ceilings`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from servingfleet_sim.replay.ceilings import belady, ceilings, endless, greedy, lru, rank_blocks
from servingfleet_sim.replay.fleet import TierSpec
from servingfleet_sim.replay.traces import Request

from .worlds import BLOCK, fleet, pool, trace


def requests(*letters: str) -> list[Request]:
    return trace([(float(at), len(each) * BLOCK + 1, 1, each) for at, each in enumerate(letters)])


def test_an_endless_cache_reuses_whatever_came_before() -> None:
    assert endless(requests("abc", "abd", "x", "abde", "abc")) == [0, 2, 0, 3, 3]


def test_a_cache_that_forgets_what_was_used_longest_ago_thrashes_where_foresight_does_not() -> None:
    going_round = requests("ab", "cd", "ef", "ab", "cd", "ef")
    assert lru(going_round, 4) == [0] * 6
    # Two of the three are kept in turns: 4 places, 6 blocks.
    assert sum(belady(going_round, 4)) == 4


def test_greedy_places_a_prompt_where_most_of_it_lies_until_something_must_be_forgotten() -> None:
    assert greedy(requests("ab", "cd", "ab", "cd"), [2, 2]) == [0, 0, 2, 2]
    # One shared block is not worth the loss of another's three.
    assert greedy(requests("abcd", "axyz", "abcd", "axyz"), [4, 4]) == [0, 0, 4, 4]


def test_a_fleet_holds_what_its_ranks_hold_in_all_tiers() -> None:
    tiers = (TierSpec(tier="host", tokens=100 * BLOCK),)
    spec = fleet(
        pool("a", replicas=2, ranks=2, gpu_tokens=10 * BLOCK, tiers=tiers),
        pool("b", gpu_tokens=7 * BLOCK + 5),
    )
    assert rank_blocks(spec, BLOCK) == [110, 110, 110, 110, 7]


def test_ceilings_are_tokens_of_the_same_requests() -> None:
    spec = fleet(pool("a", replicas=2, gpu_tokens=2 * BLOCK))
    found = ceilings(requests("ab", "cd", "ab", "cd", "ef", "ab"), spec, BLOCK)
    assert found.prompt == 6 * (2 * BLOCK + 1)
    assert (found.u1, found.u2) == (6 * BLOCK, 6 * BLOCK)
    assert found.u3 == 4 * BLOCK


PROMPTS = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=25)


def naive_belady(letters: list[str], capacity: int) -> list[int]:
    """Block by block."""
    held: set[str] = set()
    hits = []
    for at, prompt in enumerate(letters):
        blocks = [prompt[:end] for end in range(1, len(prompt) + 1)]
        hits.append(next((n for n, block in enumerate(blocks) if block not in held), len(blocks)))
        held.update(blocks)

        def needed(block: str, at: int = at) -> tuple[int, int]:
            later = range(at + 1, len(letters))
            following = next((n for n in later if letters[n].startswith(block)), len(letters))
            return (following, len(block))

        while len(held) > capacity:
            held.remove(max(held, key=needed))
    return hits


@given(PROMPTS, st.integers(1, 20))
def test_foresight_is_what_it_is_block_by_block(letters: list[str], capacity: int) -> None:
    assert sum(belady(requests(*letters), capacity)) == sum(naive_belady(letters, capacity))


@given(PROMPTS, st.integers(1, 20), st.integers(1, 20))
def test_no_cache_does_better_than_foresight_nor_foresight_than_one_without_end(
    letters: list[str], one: int, other: int
) -> None:
    found = requests(*letters)
    foresight = sum(belady(found, one + other))
    assert sum(lru(found, one + other)) <= foresight <= sum(endless(found))
    assert sum(greedy(found, [one, other])) <= foresight
