"""SGLang's tree with a tier in the host's memory (HiCache, write_through): what is on the GPU is copied there.

Pure. What is evicted from the GPU stays findable where its copy is complete, and is loaded back for who asks for it. Both
tiers are told of run by run; a copy is told of when it is complete.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

from .events import GPU, Removed
from .radix import Node, RadixTree, Space

CPU_PINNED = "CPU_PINNED"
LOAD_BACK_TOKENS = 10
"""Less is not worth a load."""


class TieredTree(RadixTree):
    """A tree whose runs are on the GPU, in the host's memory, or both."""

    def __init__(self, page: int, host_pages: int, *, pairs: bool = False) -> None:
        super().__init__(page, pairs=pairs)
        self.host_pages = host_pages
        """Room of the host."""
        self.host_size = 0
        """Pages there, complete or under way."""
        self._writing: list[tuple[Node, bool]] = []
        """Runs, and whether the copy holds the run: it does not where a run was cut meanwhile."""

    @property
    def pending(self) -> bool:
        return super().pending or bool(self._writing)

    def find(self, tokens: Sequence[int], space: Space) -> tuple[int, Node]:
        found, node = super().find(tokens, space)
        there, missing = self.resident(node)
        if missing * self.page < LOAD_BACK_TOKENS:
            return found - missing * self.page, there
        return found, node

    def insert(
        self, tokens: Sequence[int], space: Space, *, tail: bool = False
    ) -> tuple[int, Node]:
        place, node = super().insert(tokens, space, tail=tail)
        way: list[Node] = []
        current: Node | None = node
        while current is not None and current.parent is not None:
            way.append(current)
            current = current.parent
        for each in reversed(way):
            if not (each.copied or each.copying or self._copy(each)):
                break  # a run is copied after those above it
        return place, node

    def evict(self, count: int) -> int:
        freed = 0
        for node, push in _least_used(self._nodes(), _leaf_of_gpu):
            if freed >= count:
                break
            freed += len(node.pages)
            self._announce(Removed(tuple(map(node.space.published, node.digests)), GPU))
            node.device = False
            if not node.copied:
                _delete(node)
            push(node.parent)
        self.size -= freed
        return freed

    def finish_writes(self) -> None:
        for node, held in self._writing:
            node.copying, node.copied = False, True
            self._announce(self._stored(node, CPU_PINNED))
            if held:
                self.hold(node, -1)
        self._writing.clear()

    def reset(self) -> None:
        self._writing.clear()
        self.host_size = 0
        super().reset()

    def _copy(self, node: Node) -> bool:
        """Begins to copy a run. False: the host has no room."""
        pages = len(node.pages)
        excess = self.host_size + pages - self.host_pages
        if excess > 0 and self._evict_host(excess) < excess:
            return False
        self.host_size += pages
        node.copying = True
        self.hold(node, 1)
        self._writing.append((node, True))
        return True

    def _evict_host(self, count: int) -> int:
        freed = 0
        for node, push in _least_used(self._nodes(), _leaf_of_host):
            if freed >= count:
                break
            freed += len(node.pages)
            self._announce(Removed(tuple(map(node.space.published, node.digests)), CPU_PINNED))
            _delete(node)
            push(node.parent)
        self.host_size -= freed
        return freed

    def _split(self, node: Node, count: int, now: int) -> Node:
        head = super()._split(node, count, now)
        if node.copying:
            head.copying = True
            at = next(at for at, (each, _) in enumerate(self._writing) if each is node)
            self._writing.insert(at, (head, False))
        return head


def _leaf_of_gpu(node: Node) -> bool:
    children = node.children.values()
    return node.device and not node.holders and not any(each.device for each in children)


def _leaf_of_host(node: Node) -> bool:
    return node.copied and not node.device and not node.holders and not node.children


def _least_used(
    nodes: Iterator[Node], may_go: Callable[[Node], bool]
) -> Iterator[tuple[Node, Callable[[Node | None], None]]]:
    """Those that may go, least used first, and what takes in one that may go since."""
    heap = [(node.used, at, node) for at, node in enumerate(nodes) if may_go(node)]
    heapq.heapify(heap)
    order = itertools.count(len(heap))

    def push(node: Node | None) -> None:
        if node is not None and node.parent is not None and may_go(node):
            heapq.heappush(heap, (node.used, next(order), node))

    while heap:
        yield heapq.heappop(heap)[2], push


def _delete(node: Node) -> None:
    assert node.parent is not None
    del node.parent.children[node.pages[0]]
