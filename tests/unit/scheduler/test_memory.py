from __future__ import annotations

import struct

from servingfleet_scheduler.memory import Memory, blocks_of

R1, R2 = ("r1", 0), ("r2", 0)


def test_what_was_sent_is_held_from_the_first_block_on() -> None:
    memory = Memory(max_ranks=8)
    memory.sent(R1, (1, 2, 3))
    assert memory.held(R1, (1, 2, 9)) == 2
    assert memory.held(R1, (2, 3)) == 2
    assert memory.held(R1, (9, 2, 3)) == 0
    assert memory.held(R2, (1, 2, 3)) == 0


def test_the_blocks_sent_longest_ago_are_forgotten_first_and_tails_before_heads() -> None:
    memory = Memory(max_ranks=8, rank_blocks=4)
    memory.sent(R1, (1, 2, 3))
    memory.sent(R1, (7, 8))
    assert memory.held(R1, (7, 8)) == 2
    assert memory.held(R1, (1, 2, 3)) == 2


def test_the_rank_used_longest_ago_is_forgotten_first() -> None:
    memory = Memory(max_ranks=1)
    memory.sent(R1, (1,))
    memory.sent(R2, (1,))
    assert memory.held(R1, (1,)) == 0
    assert memory.held(R2, (1,)) == 1


def test_of_all_ranks_the_one_used_longest_ago_forgets_first() -> None:
    memory = Memory(max_ranks=8, max_blocks=4)
    memory.sent(R1, (1, 2, 3))
    memory.sent(R2, (1, 2))
    assert (memory.held(R1, (1, 2, 3)), memory.held(R2, (1, 2))) == (2, 2)
    memory.sent(R2, (3, 4, 5))
    assert (memory.held(R1, (1, 2, 3)), memory.held(R2, (3, 4, 5))) == (0, 3)
    memory.sent(R1, (9,))
    assert (memory.held(R1, (9,)), memory.held(R2, (3, 4, 5))) == (1, 3)


def test_packed_hashes_are_read_as_numbers() -> None:
    assert blocks_of(struct.pack("<2Q", 5, 2**64 - 1)) == (5, 2**64 - 1)
