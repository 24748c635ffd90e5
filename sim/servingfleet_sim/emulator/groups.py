"""How the layers of a model keep their tokens: all of them, those of a window, or one state; and the blocks for that.

Pure. Behaves like vLLM's managers of one KV cache group each: they share one pool and one size of block, and tell of their
blocks by themselves. What can be reused is the longest beginning on which all groups agree, each under its own rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .pool import NULL_BLOCK, BlockPool
from .sequence import Lane

FULL, WINDOW, STATE = "full_attention", "sliding_window", "mamba"
"""Kinds of groups, as events name them."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same tokens."""

    kind: str = FULL
    window: int = 0
    """Tokens that a layer looks back, its own among them; 0 where there is no such end."""


def layer_group(text: str) -> LayerGroup:
    """KIND, or sliding_window:TOKENS. Raises ValueError."""
    kind, colon, window = text.partition(":")
    if kind == WINDOW and window.isdecimal() and int(window) > 1:
        return LayerGroup(kind, int(window))
    if kind in (FULL, STATE) and not colon:
        return LayerGroup(kind)
    raise ValueError(f"{text!r}; expected {FULL}, {WINDOW}:TOKENS or {STATE}")


class Group:
    """Full attention: every block is kept while its sequence runs, and found while all before it are."""

    def __init__(self, number: int, spec: LayerGroup, size: int, pool: BlockPool) -> None:
        """`size`: tokens in a block."""
        self.number = number
        self.spec = spec
        self._size = size
        self._pool = pool

    def find(self, hashes: Sequence[bytes], most: int) -> list[int]:
        """The blocks of the longest beginning that it could go on from, at most so many; NULL_BLOCK where it needs none."""
        found: list[int] = []
        for digest in hashes[:most]:
            block = self._pool.find(digest, self.number)
            if block is None:
                break
            found.append(block)
        return found

    def most(self, blocks: int, step_tokens: int) -> int:
        """Blocks that a sequence holds at once at most, of one that is so long."""
        return blocks

    def wanted(self, lane: Lane, blocks: int) -> int:
        """New blocks for a running sequence to be so long."""
        return max(0, blocks - len(lane.blocks))

    def wanted_at_first(self, found: Sequence[int], blocks: int, reused: int) -> int:
        """New blocks for a waiting sequence to be so long, and those of the found ones that nobody holds.

        `reused`: tokens that are not computed, found here or loaded.
        """
        skipped = self._skipped(reused)
        missing = max(0, blocks - max(skipped, len(found)))
        return missing + self._unheld(found[skipped:])

    def adopt(self, found: Sequence[int], reused: int) -> Lane:
        """Begins a sequence with what was found."""
        skipped = self._skipped(reused)
        blocks = [NULL_BLOCK] * skipped + list(found[skipped:])
        self._pool.hold(_real(blocks))
        return Lane(blocks, named=len(blocks))

    def grow(self, lane: Lane, blocks: int) -> None:
        """Makes a sequence so long. There must be room."""
        missing = blocks - len(lane.blocks)
        if missing > 0:
            lane.blocks += self._pool.allocate(missing)

    def trim(self, lane: Lane, computed: int) -> None:
        """Gives back what a sequence with so many computed tokens will not look at again."""

    def kept(self, first: int, end: int, boundaries: Iterable[int]) -> Iterator[int]:
        """Places of the blocks, of those from `first` to `end`, that are of use to others.

        `boundaries`: lengths in blocks from which others may go on.
        """
        return iter(range(first, end))

    def release(self, lane: Lane) -> None:
        """Ends a sequence: tails first, so that the heads, which more prompts share, stay longer."""
        self._pool.release(list(_real(reversed(lane.blocks))))

    def name(self, lane: Lane, places: Iterable[int], hashes: Sequence[bytes]) -> list[int]:
        """Caches the blocks at these places, but for those that are not there. Returns the places of those that are."""
        there = [place for place in places if lane.blocks[place] != NULL_BLOCK]
        blocks = [lane.blocks[place] for place in there]
        self._pool.name(blocks, [hashes[place] for place in there], self.number)
        return there

    def begin_step(self) -> None:
        """A step begins."""

    def may_follow(self, digest: bytes) -> bool:
        """Whether another sequence may go on from this block in the step that computes it."""
        return True

    def _skipped(self, computed: int) -> int:
        """Blocks at the beginning that are not looked at any more after so many tokens."""
        return 0

    def _unheld(self, blocks: Sequence[int]) -> int:
        return sum(map(self._pool.is_free, _real(blocks)))


class WindowGroup(Group):
    """Sliding window: only the last blocks before a boundary matter, and only there are they cached."""

    @property
    def needed(self) -> int:
        """Blocks before a boundary that whoever goes on from there looks at."""
        return -(-(self.spec.window - 1) // self._size)

    def find(self, hashes: Sequence[bytes], most: int) -> list[int]:
        most = min(most, len(hashes))
        found = [NULL_BLOCK] * most
        run = 0
        for place in reversed(range(most)):
            block = self._pool.find(hashes[place], self.number)
            if block is None:
                run = 0
                continue
            found[place] = block
            run += 1
            if run >= self.needed:
                return found[: place + run]
        return found[:run]  # shorter than a window, and from the start on

    def most(self, blocks: int, step_tokens: int) -> int:
        held = self.spec.window - 1 + step_tokens
        return min(blocks, -(-min(held, blocks * self._size) // self._size) + 1)

    def trim(self, lane: Lane, computed: int) -> None:
        gone: list[int] = []
        for place in reversed(range(min(self._skipped(computed), len(lane.blocks)))):
            if lane.blocks[place] == NULL_BLOCK:
                break
            gone.append(lane.blocks[place])
            lane.blocks[place] = NULL_BLOCK
        self._pool.release(gone)

    def kept(self, first: int, end: int, boundaries: Iterable[int]) -> Iterator[int]:
        places = {
            place
            for boundary in boundaries
            for place in range(max(first, boundary - self.needed), min(end, boundary))
        }
        return iter(sorted(places))

    def _skipped(self, computed: int) -> int:
        return max(0, computed - self.spec.window + 1) // self._size


class StateGroup(Group):
    """Recurrent layers: a block is the state after its last token, and only the state right at a boundary is of use.

    A sequence holds the state it goes on from and the one it makes; steps end at blocks' ends for them.
    """

    MOST = 2

    def __init__(self, number: int, spec: LayerGroup, size: int, pool: BlockPool) -> None:
        super().__init__(number, spec, size, pool)
        self._fresh: set[bytes] = set()

    def find(self, hashes: Sequence[bytes], most: int) -> list[int]:
        for place in reversed(range(min(most, len(hashes)))):
            block = self._pool.find(hashes[place], self.number)
            if block is not None:
                return [NULL_BLOCK] * place + [block]
        return []

    def most(self, blocks: int, step_tokens: int) -> int:
        return min(blocks, self.MOST)

    def wanted(self, lane: Lane, blocks: int) -> int:
        return min(1, super().wanted(lane, blocks))

    def wanted_at_first(self, found: Sequence[int], blocks: int, reused: int) -> int:
        return min(1, max(0, blocks - len(found))) + self._unheld(found)

    def grow(self, lane: Lane, blocks: int) -> None:
        length = len(lane.blocks)
        if blocks <= length:
            return
        if length:
            lane.state = length - 1
        lane.blocks += [NULL_BLOCK] * (blocks - 1 - length)
        lane.blocks += self._pool.allocate(1)

    def trim(self, lane: Lane, computed: int) -> None:
        end = min(self._skipped(computed), len(lane.blocks))
        gone: list[int] = []
        for place in reversed(range(lane.trimmed, end)):
            if lane.blocks[place] != NULL_BLOCK:
                gone.append(lane.blocks[place])
                lane.blocks[place] = NULL_BLOCK
        lane.trimmed = max(lane.trimmed, end)
        self._pool.release(gone)
        state = lane.state
        if state is None or state >= -(-computed // self._size) - 1:
            return
        if lane.blocks[state] != NULL_BLOCK:
            self._pool.release([lane.blocks[state]])
            lane.blocks[state] = NULL_BLOCK

    def kept(self, first: int, end: int, boundaries: Iterable[int]) -> Iterator[int]:
        return iter(sorted({place - 1 for place in boundaries if first <= place - 1 < end}))

    def name(self, lane: Lane, places: Iterable[int], hashes: Sequence[bytes]) -> list[int]:
        there = super().name(lane, places, hashes)
        self._fresh.update(hashes[place] for place in there)
        return there

    def begin_step(self) -> None:
        self._fresh.clear()

    def may_follow(self, digest: bytes) -> bool:
        return digest not in self._fresh

    def _skipped(self, computed: int) -> int:
        return max(0, computed - 1) // self._size


_KINDS: dict[str, Callable[[int, LayerGroup, int, BlockPool], Group]] = {
    FULL: Group,
    WINDOW: WindowGroup,
    STATE: StateGroup,
}


def make_groups(specs: Sequence[LayerGroup], size: int, pool: BlockPool) -> list[Group]:
    """A group for each spec, numbered in their order, over one pool."""
    return [_KINDS[spec.kind](number, spec, size, pool) for number, spec in enumerate(specs)]


def most_blocks(specs: Sequence[LayerGroup], blocks: int, size: int, step_tokens: int) -> int:
    """Blocks that one sequence of so many takes at most, over all its groups."""
    groups = make_groups(specs, size, BlockPool(2))
    return sum(group.most(blocks, step_tokens) for group in groups)


def longest(
    groups: Sequence[Group], hashes: Sequence[bytes], most: int
) -> tuple[list[list[int]], int]:
    """What each group finds of the longest beginning on which all agree, and the most that one of them alone had.

    Both in blocks. The second is where a group that keeps little should have kept more.
    """
    # Full attention finds the least with the least effort.
    order = sorted(groups, key=lambda group: group.spec.kind != FULL)
    found: list[list[int]] = [[] for _ in groups]
    length, alone = most, 0
    while True:
        current = length
        for group in order:
            found[group.number] = group.find(hashes, current)
            current = len(found[group.number])
            alone = max(alone, current)
        if current >= length:
            return found, alone
        length = current


def _real(blocks: Iterable[int]) -> Iterator[int]:
    return (block for block in blocks if block != NULL_BLOCK)
