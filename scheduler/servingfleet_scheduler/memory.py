"""What this scheduler has sent where, as a guess of what is cached there: for the `approximate` policy, which has no events.

Pure. Bounded: each rank keeps the blocks that were sent there last, as an engine does.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence

from .prompts import HASH_BYTES

RANK_BLOCKS = 65_536
"""Blocks remembered of one rank: a million tokens of 16-token blocks, what a GPU of 80 GB holds of a small model. More
would guess at blocks that are long gone."""
MAX_BLOCKS = 4_000_000
"""Of all ranks together: about half a gigabyte. Beyond it the rank used longest ago forgets first."""


class Memory:
    """The blocks of the prompts sent to each rank, the least recently sent forgotten first."""

    def __init__(
        self, *, max_ranks: int, rank_blocks: int = RANK_BLOCKS, max_blocks: int = MAX_BLOCKS
    ) -> None:
        self._max_ranks = max_ranks
        self._rank_blocks = rank_blocks
        self._max_blocks = max_blocks
        self._blocks = 0
        self._ranks: OrderedDict[tuple[str, int], OrderedDict[int, None]] = OrderedDict()

    def sent(self, target: tuple[str, int], prompt: Sequence[int]) -> None:
        """A prompt of these blocks goes to (replica, rank)."""
        blocks = self._ranks.setdefault(target, OrderedDict())
        self._ranks.move_to_end(target)
        self._blocks -= len(blocks)
        # The tail first: it is what an engine evicts first, too.
        for block in reversed(prompt):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._rank_blocks:
            blocks.popitem(last=False)
        self._blocks += len(blocks)
        while len(self._ranks) > self._max_ranks:
            self._blocks -= len(self._ranks.popitem(last=False)[1])
        while self._blocks > self._max_blocks:
            oldest, known = next(iter(self._ranks.items()))
            known.popitem(last=False)
            self._blocks -= 1
            if not known:
                del self._ranks[oldest]

    def held(self, target: tuple[str, int], prompt: Sequence[int]) -> int:
        """Blocks of the prompt, from its first, that were sent there."""
        blocks = self._ranks.get(target)
        if not blocks:
            return 0
        count = 0
        for block in prompt:
            if block not in blocks:
                break
            count += 1
        return count


def blocks_of(hashes: bytes) -> tuple[int, ...]:
    """Packed hashes as numbers."""
    return struct.unpack(f"<{len(hashes) // HASH_BYTES}Q", hashes)
