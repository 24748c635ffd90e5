"""The GPU caches of one rank: what sequences find, take, fill, tell and give back in all groups of layers.

Pure. The groups share one pool; whatever is asked of it is asked for all of them at once, or not given at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Listed

from .events import Stored
from .groups import Group, longest, make_groups
from .pool import BlockPool
from .sequence import Sequence
from .steps import Limits

Found = Listed[list[int]]
"""Blocks to begin with, by group."""


class Caches:
    """The pool and the groups over it."""

    def __init__(self, limits: Limits) -> None:
        self.pool = BlockPool(limits.blocks)
        self.groups = make_groups(limits.groups, limits.block_size, self.pool)
        self._size = limits.block_size
        self._step_tokens = limits.max_step_tokens

    def begin_step(self) -> None:
        """A step begins."""
        for group in self.groups:
            group.begin_step()

    def find(self, sequence: Sequence) -> Found:
        """What a waiting sequence can begin with, and notes where some group should have kept more."""
        sequence.junction = 0
        if sequence.asked.prompt_logprobs:
            return [[] for _ in self.groups]
        # One token at least is computed, or there would be nothing to sample from.
        most = (len(sequence.tokens) - 1) // self._size
        found, alone = longest(self.groups, sequence.hashes, most)
        hit = len(found[0])
        if alone > hit:
            sequence.junction = alone
        if hit and sequence.asked.report_reused:
            for group in self.groups:
                self._announce(sequence, group, 0, hit, range(hit))
        return found

    def begin(
        self, sequence: Sequence, found: Found, reused: int, target: int, reserved: int
    ) -> bool:
        """Gives a waiting sequence what was found and blocks for `target` tokens. False: there are too few.

        `reused`: tokens found or loaded; `reserved`: blocks that must be left to others.
        """
        hit = len(found[0])
        if hit and not all(each.may_follow(sequence.hashes[hit - 1]) for each in self.groups):
            return False
        # The whole prompt must fit at admission, although only a part is allocated.
        whole, blocks = self._blocks(len(sequence.tokens)), self._blocks(target)
        pairs = list(zip(self.groups, found, strict=True))
        at_once = (
            group.wanted_at_first(each, min(whole, group.most(whole, self._step_tokens)), reused)
            for group, each in pairs
        )
        if sum(at_once) > self.pool.free:
            return False
        now = sum(group.wanted_at_first(each, blocks, reused) for group, each in pairs)
        if now > self.pool.free - reserved:
            return False
        # All are held before any is allocated, which might take another group's.
        sequence.lanes = [group.adopt(each, reused) for group, each in pairs]
        for group, lane in zip(self.groups, sequence.lanes, strict=True):
            group.grow(lane, blocks)
        return True

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Gives a running sequence blocks for `tokens` more tokens. False: there are too few."""
        target = sequence.computed + tokens
        blocks = self._blocks(target)
        lanes = list(zip(self.groups, sequence.lanes, strict=True))
        for group, lane in lanes:
            group.trim(lane, sequence.computed)
        if sum(group.wanted(lane, blocks) for group, lane in lanes) > self.pool.free:
            return False
        for group, lane in lanes:
            group.grow(lane, blocks)
        self.name(sequence, target)
        return True

    def name(self, sequence: Sequence, tokens: int) -> None:
        """Caches and announces the blocks that the first `tokens` tokens fill."""
        full = tokens // self._size
        boundaries = sequence.boundaries(self._size)
        for group, lane in zip(self.groups, sequence.lanes, strict=True):
            first = lane.named
            if full > first:
                kept = group.name(lane, group.kept(first, full, boundaries), sequence.hashes)
                self._announce(sequence, group, first, full, kept)
                lane.named = full

    def missing(self, sequence: Sequence) -> int:
        """Blocks that a sequence which has begun still needs for all its tokens."""
        blocks = self._blocks(len(sequence.tokens))
        lanes = zip(self.groups, sequence.lanes, strict=True)
        return sum(group.wanted(lane, blocks) for group, lane in lanes)

    def release(self, sequence: Sequence) -> None:
        """Ends a sequence, or puts it back."""
        for group, lane in zip(self.groups, sequence.lanes, strict=False):  # none: it waited
            group.release(lane)
        sequence.lanes = []

    def _announce(
        self, sequence: Sequence, group: Group, first: int, end: int, places: Iterable[int]
    ) -> None:
        """Tells of the blocks at these places: with the tokens of all from `first` to `end`, as vLLM does."""
        asked = sequence.asked
        kept = list(places)
        self.pool.announce(
            Stored(
                hashes=tuple(sequence.hashes[place] for place in kept),
                parent=sequence.hashes[first - 1] if first else None,
                tokens=tuple(sequence.tokens[first * self._size : end * self._size]),
                block_size=self._size,
                adapter=asked.adapter,
                adapter_number=asked.adapter_number,
                extra_keys=tuple(sequence.extra_keys(place) for place in kept),
                session=asked.session,
                group=group.number,
                kind=group.spec.kind,
                window=group.spec.window,
            )
        )

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._size)
