"""The cached pages of one rank: a tree of token runs, one copy of each, whose least used leaves go first.

Pure. Behaves like SGLang's RadixCache and its event recorder: what is found or inserted may split a run, which nobody is
told of; what is inserted and was not there is announced page by page under the hash of its place; what is evicted goes by
whole runs. Requests with an adapter, a salt or a key of their own have trees of their own. TensorRT-LLM's reuse tree does
the same with single pages, and keeps the part of a page that ends a sequence.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .events import GPU, Cleared, Event, Removed, Stored

Key = int | tuple[int, int]
"""A token, or with EAGLE a token and the one after it."""

_SALT_TAG = b"sglang-cache-salt-v1\0"
_NAMESPACE_TAG = b"sglang-kv-event-namespace-v1"


@dataclass(frozen=True, slots=True)
class Space:
    """Which tree a request belongs to."""

    adapter: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    """Of the request's own: nothing of it is on the wire."""

    @property
    def seed(self) -> bytes:
        """What stands before the first page."""
        if self.cache_salt is None:
            return b""
        return hashlib.sha256(_SALT_TAG + self.cache_salt.encode()).digest()

    def published(self, digest: bytes) -> bytes:
        """The 8 bytes that name a page in events: with an adapter, of its namespace."""
        if self.adapter is None:
            return digest[:8]
        name = ((self.extra_key or "") + self.adapter).encode()
        length = len(name).to_bytes(8, "little")
        namespace = hashlib.sha256(_NAMESPACE_TAG + b"\x01" + length + name + b"\x00").digest()
        return hashlib.sha256(namespace + digest[:8]).digest()[:8]


@dataclass(eq=False, slots=True)
class Node:
    """A run of pages. The root of a tree has none."""

    space: Space
    parent: Node | None
    pages: list[tuple[Key, ...]] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    children: dict[tuple[Key, ...], Node] = field(default_factory=dict)
    """By their first page."""
    holders: int = 0
    """Sequences that use it, or a run below it."""
    used: int = 0
    """Larger: later."""
    device: bool = True
    """On the GPU; otherwise in the host's copy only."""
    copying: bool = False
    """Its copy to the host is under way."""
    copied: bool = False


class RadixTree:
    """All trees of a rank. Sizes are in pages."""

    def __init__(self, page: int, *, pairs: bool = False, runs: bool = True) -> None:
        """`page`: tokens in a page; `pairs`: keys are pairs of tokens, as with EAGLE; `runs`: they are evicted whole."""
        self.page = page
        self.pairs = pairs
        self._runs = runs
        self.size = 0
        """Pages held."""
        self.held = 0
        """Of them those that some sequence uses, which can't be evicted."""
        self._roots: dict[Space, Node] = {}
        self._clock = itertools.count(1)
        self._events: list[Event] = [Cleared()]

    @property
    def pending(self) -> bool:
        """Whether there are events to take, now or with the next step."""
        return bool(self._events)

    def find(self, tokens: Sequence[int], space: Space) -> tuple[int, Node]:
        """Keys of the longest held beginning, in whole pages, and the run that ends there."""
        node, place = self._walk(self._pages(tokens), space)
        return place * self.page, node

    def insert(
        self, tokens: Sequence[int], space: Space, *, tail: bool = False
    ) -> tuple[int, Node]:
        """Puts every full page where it belongs, and with `tail` the part of one that follows.

        Returns how many pages were there before, and the last run.
        """
        pages = self._pages(tokens)
        if tail and (part := tuple(tokens[len(pages) * self.page :])):
            pages.append(part)
        node, place = self._walk(pages, space)
        self.load(node)
        rest = pages[place:]
        if rest:
            node = self._extend(node, rest)
        return place, node

    def resident(self, node: Node) -> tuple[Node, int]:
        """The last run on the way that is on the GPU, and the pages after it that are not."""
        missing = 0
        while not node.device:
            missing += len(node.pages)
            assert node.parent is not None
            node = node.parent
        return node, missing

    def load(self, node: Node) -> None:
        """This run and those above it are on the GPU from now on."""
        absent = []
        while not node.device:
            absent.append(node)
            assert node.parent is not None
            node = node.parent
        for each in reversed(absent):
            each.device = True
            self.size += len(each.pages)
            self._announce(self._stored(each, GPU))

    def finish_writes(self) -> None:
        """A step has ended: the copies to the host that earlier ones began are complete."""

    def hold(self, node: Node, change: int) -> None:
        """One sequence more, or less, uses this run and those above it."""
        current: Node | None = node
        while current is not None:
            before = bool(current.holders)
            current.holders += change
            self.held += len(current.pages) * (bool(current.holders) - before)
            current = current.parent

    def evict(self, count: int) -> int:
        """Frees at least `count` pages where so many are not in use. Returns how many."""
        heap = [(node.used, at, node) for at, node in enumerate(self._leaves())]
        heapq.heapify(heap)
        order = itertools.count(len(heap))
        freed = 0
        while heap and freed < count:
            _, _, node = heapq.heappop(heap)
            parent = node.parent
            assert parent is not None
            gone = len(node.pages) if self._runs else 1
            freed += gone
            self._announce(Removed(tuple(map(node.space.published, node.digests[-gone:]))))
            if gone < len(node.pages):
                del node.pages[-gone:], node.digests[-gone:]
                heapq.heappush(heap, (node.used, next(order), node))
                continue
            del parent.children[node.pages[0]]
            if parent.parent is not None and not parent.children and not parent.holders:
                heapq.heappush(heap, (parent.used, next(order), parent))
        self.size -= freed
        return freed

    def reset(self) -> None:
        """Forgets everything."""
        self._roots.clear()
        self.size = self.held = 0
        self._announce(Cleared())

    def take_events(self) -> list[Event]:
        """The events since the last call; the first is that of the empty cache."""
        taken, self._events = self._events, []
        return taken

    def _pages(self, tokens: Sequence[int]) -> list[tuple[Key, ...]]:
        keys: list[Key] = list(itertools.pairwise(tokens)) if self.pairs else list(tokens)
        end = len(keys) // self.page * self.page
        return [tuple(keys[at : at + self.page]) for at in range(0, end, self.page)]

    def _walk(self, pages: list[tuple[Key, ...]], space: Space) -> tuple[Node, int]:
        now = next(self._clock)
        node = self._roots.setdefault(space, Node(space, None))
        place = 0
        while place < len(pages) and pages[place] in node.children:
            node = node.children[pages[place]]
            node.used = now
            common = 1
            while (
                common < len(node.pages)
                and place + common < len(pages)
                and node.pages[common] == pages[place + common]
            ):
                common += 1
            place += common
            if common < len(node.pages):
                node = self._split(node, common, now)
                break
        return node, place

    def _split(self, node: Node, count: int, now: int) -> Node:
        """Cuts a run: a new one takes its first pages. Nobody is told."""
        assert node.parent is not None
        head = Node(node.space, node.parent, node.pages[:count], node.digests[:count])
        head.holders, head.used = node.holders, now
        head.device, head.copied = node.device, node.copied
        head.parent = node.parent
        node.parent.children[head.pages[0]] = head
        node.pages, node.digests, node.parent = node.pages[count:], node.digests[count:], head
        head.children[node.pages[0]] = node
        return head

    def _extend(self, parent: Node, pages: list[tuple[Key, ...]]) -> Node:
        space = parent.space
        before = parent.digests[-1] if parent.digests else None
        node = Node(space, parent, pages, list(_chain(pages, before or space.seed)))
        node.used = next(self._clock)
        parent.children[pages[0]] = node
        self.size += len(pages)
        self._announce(self._stored(node, GPU))
        return node

    def _stored(self, node: Node, medium: str) -> Stored:
        space = node.space
        before = node.parent.digests[-1] if node.parent and node.parent.digests else None
        return Stored(
            hashes=tuple(map(space.published, node.digests)),
            parent=None if before is None else space.published(before),
            tokens=tuple(key for page in node.pages for key in page),
            block_size=self.page,
            medium=medium,
            adapter=space.adapter,
            cache_salt=space.cache_salt,
        )

    def _nodes(self) -> Iterator[Node]:
        open_nodes = list(self._roots.values())
        while open_nodes:
            node = open_nodes.pop()
            open_nodes.extend(node.children.values())
            if node.parent is not None:
                yield node

    def _leaves(self) -> Iterator[Node]:
        return (node for node in self._nodes() if not node.children and not node.holders)

    def _announce(self, event: Event) -> None:
        """Adds an event, to the one before it where they tell one thing."""
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed) and isinstance(event, Removed) and last.medium == event.medium:
            self._events[-1] = Removed(last.hashes + event.hashes, last.medium)
        elif (
            isinstance(last, Stored)
            and isinstance(event, Stored)
            and event.parent == last.hashes[-1]
            and (last.medium, last.adapter, last.cache_salt)
            == (event.medium, event.adapter, event.cache_salt)
        ):
            self._events[-1] = Stored(
                last.hashes + event.hashes,
                last.parent,
                last.tokens + event.tokens,
                last.block_size,
                last.medium,
                last.adapter,
                cache_salt=last.cache_salt,
            )
        else:
            self._events.append(event)


def _chain(pages: Sequence[tuple[Key, ...]], before: bytes) -> Iterator[bytes]:
    """Each page's hash: of its tokens, or both tokens of each pair, behind the hash of the page before."""
    for page in pages:
        flat = array("I")
        for key in page:
            flat.extend(key if isinstance(key, tuple) else (key,))
        before = hashlib.sha256(before + flat.tobytes()).digest()
        yield before
