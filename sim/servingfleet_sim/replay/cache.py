"""What one tier of one rank holds of prompts: runs of blocks in a tree, least recently used first out, ends before heads.

Pure. A prompt is its packed block hashes (8 bytes each), and each hash stands for all that lies before it, so that what
is held of prompts is a tree. Blocks that prompts share from end to end are one run, whatever their number: what a prompt
of thousands of blocks costs depends on where prompts part, not on its length.

A block that some prompt uses is pinned with all before it, and is not evicted. What is not pinned goes in the order in
which it was used last; of equals those farther from the root go first, as in vLLM's queue of free blocks and in SGLang's
tree.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Iterator
from typing import NamedTuple

HASH_BYTES = 8
ENDLESS = sys.maxsize
"""Capacity of a cache that forgets nothing."""


class Held(NamedTuple):
    """Consecutive blocks of one prompt that came or went. `parent`: packed hash before the first; empty: the root."""

    parent: bytes
    hashes: bytes


class Node:
    """A run of blocks."""

    __slots__ = ("children", "parent", "pins", "run", "used")

    def __init__(self, parent: Node | None, run: bytes, used: int) -> None:
        self.parent = parent
        self.run = run
        self.used = used
        self.pins = 0
        self.children: dict[bytes, Node] = {}

    @property
    def last(self) -> bytes:
        """Packed hash of its last block; empty: it is the root."""
        return self.run[-HASH_BYTES:]


class RunCache:
    """At most `capacity` blocks, but for what is pinned. `size` and `pinned` are blocks."""

    def __init__(self, capacity: int = ENDLESS) -> None:
        self.capacity = capacity
        self.size = 0
        self.pinned = 0
        self.root = Node(None, b"", 0)
        self._clock = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._order = itertools.count()

    def match(self, hashes: bytes) -> int:
        """Blocks of this prompt held from its first on. Changes nothing."""
        children = self.root.children
        at, end = 0, len(hashes)
        while at < end:
            node = children.get(hashes[at : at + HASH_BYTES])
            if node is None:
                break
            run = node.run
            if not hashes.startswith(run, at):
                at += _common(hashes, at, run)
                break
            at += len(run)
            children = node.children
        return at // HASH_BYTES

    def find(self, hashes: bytes, blocks: int) -> tuple[Node, int]:
        """The node that ends with the last held one of the prompt's first `blocks` blocks, and how many these are.

        A run that holds more is cut there.
        """
        node = self.root
        at, end = 0, min(len(hashes), blocks * HASH_BYTES)
        while at < end:
            child = node.children.get(hashes[at : at + HASH_BYTES])
            if child is None:
                break
            run = child.run
            if at + len(run) <= end and hashes.startswith(run, at):
                at += len(run)
                node = child
                continue
            same = min(_common(hashes, at, run), end - at)
            return self._cut(child, same), (at + same) // HASH_BYTES
        return node, at // HASH_BYTES

    def add(self, node: Node, hashes: bytes) -> Node:
        """Holds these blocks behind `node`, where `find` has ended. Makes no room."""
        if not hashes:
            return node
        added = Node(node, hashes, self._clock)
        node.children[hashes[:HASH_BYTES]] = added
        self.size += len(hashes) // HASH_BYTES
        self._offer(added)
        return added

    def pin(self, node: Node, upto: Node | None = None) -> None:
        """Keeps all blocks up to the end of `node`; those up to the end of `upto` are kept by this caller already."""
        each: Node | None = node
        while each is not None and each is not upto and each is not self.root:
            if not each.pins:
                self.pinned += len(each.run) // HASH_BYTES
            each.pins += 1
            each = each.parent

    def unpin(self, node: Node, *, used: bool = True) -> None:
        """Ends a pin that reached from the root to `node`. `used`: just now."""
        self._clock += used
        each: Node | None = node
        while each is not None and each is not self.root:
            each.pins -= 1
            if used:
                each.used = self._clock
            if not each.pins:
                self.pinned -= len(each.run) // HASH_BYTES
                self._offer(each)
            each = each.parent

    def evict(self, blocks: int) -> list[Held]:
        """Lets go of so many blocks, or of all that may go."""
        gone: list[Held] = []
        while blocks > 0 and self._heap:
            used, _, node = self._heap[0]
            if node.used != used or not self._may_go(node):
                heapq.heappop(self._heap)
                continue
            parent = node.parent
            assert parent is not None
            size = len(node.run) // HASH_BYTES
            if size > blocks:
                cut = len(node.run) - blocks * HASH_BYTES
                gone.append(Held(node.run[cut - HASH_BYTES : cut], node.run[cut:]))
                node.run = node.run[:cut]
                size = blocks
            else:
                heapq.heappop(self._heap)
                gone.append(Held(parent.last, node.run))
                del parent.children[node.run[:HASH_BYTES]]
                node.parent = None
                self._offer(parent)
            self.size -= size
            blocks -= size
        return gone

    def put(self, hashes: bytes) -> tuple[list[Held], list[Held]]:
        """Holds as much of a prompt as there is room for; all of it that is held is used now. Returns what came, what went."""
        node, found = self.find(hashes, len(hashes) // HASH_BYTES)
        if found * HASH_BYTES == len(hashes):
            self._touch(node)
            return [], []
        self.pin(node)
        wanted = len(hashes) // HASH_BYTES - found
        gone = self.evict(self.size + wanted - self.capacity)
        room = min(wanted, max(0, self.capacity - self.size))
        fresh = hashes[found * HASH_BYTES : (found + room) * HASH_BYTES]
        end = self.add(node, fresh)
        self.pin(end, node)
        self.unpin(end)
        return ([Held(node.last, fresh)] if fresh else []), gone

    def touch(self, hashes: bytes) -> None:
        """What is held of this prompt is used now."""
        self._touch(self.find(hashes, len(hashes) // HASH_BYTES)[0])

    def holdings(self) -> Iterator[Held]:
        """All that is held, parents first."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            for child in node.children.values():
                yield Held(node.last, child.run)
                waiting.append(child)

    def _touch(self, node: Node) -> None:
        self._clock += 1
        each: Node | None = node
        while each is not None and each is not self.root:
            each.used = self._clock
            each = each.parent
        self._offer(node)

    def _cut(self, node: Node, size: int) -> Node:
        """Parts a run after `size` bytes; returns its head. The node itself stays its end: what pins it, pins both."""
        assert node.parent is not None
        head = Node(node.parent, node.run[:size], node.used)
        head.pins = node.pins
        node.parent.children[head.run[:HASH_BYTES]] = head
        head.children[node.run[size : size + HASH_BYTES]] = node
        node.run = node.run[size:]
        node.parent = head
        return head

    def _may_go(self, node: Node) -> bool:
        return not node.pins and not node.children and node.parent is not None

    def _offer(self, node: Node) -> None:
        if not self._may_go(node) or self.capacity == ENDLESS:
            return
        if len(self._heap) > 4096 and len(self._heap) > self.size:
            # More entries than blocks: most speak of what was used since, or is gone.
            self._heap = [e for e in self._heap if e[2].used == e[0] and self._may_go(e[2])]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (node.used, next(self._order), node))


def _common(hashes: bytes, at: int, run: bytes) -> int:
    """Bytes of whole blocks that `run` and the prompt from `at` on have in common."""
    low, high = 0, min(len(run), len(hashes) - at) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if hashes.startswith(run[: middle * HASH_BYTES], at):
            low = middle
        else:
            high = middle - 1
    return low * HASH_BYTES
