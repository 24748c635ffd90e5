"""The blocks of one rank's GPU cache: who holds them, under which hash, and which goes next.

Pure. Behaves like vLLM's BlockPool, which is simpler than it looks: a cached block that nobody holds stays in the
free queue under its hash until it is handed out again, and only then is it gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from .events import Cleared, Event, Removed

NULL_BLOCK = 0
"""Never handed out: vLLM keeps one block as a placeholder."""

_Key = tuple[bytes, int]
"""A hash, and the group of layers whose block it names."""


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free: the caller must look before it asks."""


class BlockPool:
    """Physical blocks 1 to `blocks - 1`, and the hashes that some of them hold.

    Events collect until `take_events`: one a copy, so that a hash may be stored twice and removed once while the other
    copy can still be reused.
    """

    def __init__(self, blocks: int) -> None:
        if blocks < 2:
            raise ValueError(f"{blocks} blocks: one is never used, so at least 2 are needed")
        self.blocks = blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._holders = [0] * blocks
        self._hash_of: list[_Key | None] = [None] * blocks
        # The copies of a hash in the order in which they were stored: the first is the one reused.
        self._copies: dict[_Key, dict[int, None]] = {}
        self._events: list[Event] = []

    @property
    def usable(self) -> int:
        """Blocks that can be handed out at all."""
        return self.blocks - 1

    @property
    def free(self) -> int:
        """Blocks that nobody holds, cached or not."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that somebody holds, 0 to 1."""
        return 1 - self.free / self.usable

    def content(self, group: int = 0) -> dict[bytes, int]:
        """Every hash that a group of layers has cached, and its number of copies."""
        return {digest: len(found) for (digest, of), found in self._copies.items() if of == group}

    def free_order(self) -> tuple[int, ...]:
        """The free blocks, the one handed out next first."""
        return tuple(self._free)

    def find(self, digest: bytes, group: int = 0) -> int | None:
        """A block that holds this hash for a group of layers, or None."""
        copies = self._copies.get((digest, group))
        return None if copies is None else next(iter(copies))

    def is_free(self, block: int) -> bool:
        """Whether nobody holds the block, so that holding it uses up a free one."""
        return block in self._free

    def hold(self, blocks: Iterable[int]) -> None:
        """Another sequence uses these blocks: they are out of reach of `allocate`."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def allocate(self, count: int) -> list[int]:
        """The `count` blocks longest free; what they held is removed. Raises OutOfBlocks."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} of {self.usable} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            forgotten = self._forget(block)
            if forgotten is not None:
                digest, group = forgotten
                self._events.append(Removed((digest,), group=group))
            self._holders[block] = 1
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """A sequence no longer uses these blocks, given in the order in which they may go.

        Blocks without a hash are of no use to anyone and go first.
        """
        cached: list[int] = []
        blank: list[int] = []
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block] == 0:
                (blank if self._hash_of[block] is None else cached).append(block)
        for block in reversed(blank):
            self._free[block] = None
            self._free.move_to_end(block, last=False)
        for block in cached:
            self._free[block] = None

    def name(self, blocks: Sequence[int], hashes: Sequence[bytes], group: int = 0) -> None:
        """Puts full blocks under their hashes. The event is the caller's: it knows the tokens."""
        for block, digest in zip(blocks, hashes, strict=True):
            self._hash_of[block] = digest, group
            self._copies.setdefault((digest, group), {})[block] = None

    def announce(self, event: Event) -> None:
        """Adds an event behind those that the pool has made."""
        self._events.append(event)

    def reset(self) -> bool:
        """Forgets every hash. Refused, with False, while anybody holds a block. The free order stays."""
        if len(self._free) != self.usable:
            return False
        self._hash_of = [None] * self.blocks
        self._copies.clear()
        self._events.append(Cleared())
        return True

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        taken, self._events = self._events, []
        return taken

    def _forget(self, block: int) -> _Key | None:
        key = self._hash_of[block]
        if key is None:
            return None
        self._hash_of[block] = None
        copies = self._copies[key]
        del copies[block]
        if not copies:
            del self._copies[key]
        return key
