"""Tests of `servingfleet_sim.replay.cache` against a model that keeps every block by itself."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from servingfleet_sim.replay.cache import HASH_BYTES, Node, RunCache

Path = tuple[int, ...]


def packed(path: Path) -> bytes:
    """Hashes that stand for all that lies before them."""
    return b"".join(
        hashlib.blake2b(bytes(path[:end]), digest_size=HASH_BYTES).digest()
        for end in range(1, len(path) + 1)
    )


@dataclass
class Naive:
    """Blocks by the path that leads to them; what was used longest ago goes first, of equals the farthest."""

    capacity: int
    clock: int = 0
    used: dict[Path, int] = field(default_factory=dict)
    pins: dict[Path, int] = field(default_factory=dict)

    def match(self, path: Path) -> int:
        return next((n for n in range(len(path)) if path[: n + 1] not in self.used), len(path))

    def hold(self, path: Path, blocks: int) -> None:
        for end in range(1, blocks + 1):
            self.used.setdefault(path[:end], self.clock)

    def pin(self, path: Path, by: int) -> None:
        for end in range(1, len(path) + 1):
            self.pins[path[:end]] = self.pins.get(path[:end], 0) + by

    def touch(self, path: Path) -> None:
        self.clock += 1
        for end in range(1, self.match(path) + 1):
            self.used[path[:end]] = self.clock

    def evict(self, blocks: int) -> None:
        for _ in range(blocks):
            free = [path for path in self.used if not self.pins.get(path)]
            if free:
                del self.used[min(free, key=lambda path: (self.used[path], -len(path)))]

    def put(self, path: Path) -> None:
        found = self.match(path)
        if found < len(path):
            self.pin(path[:found], 1)
            self.evict(len(self.used) + len(path) - found - self.capacity)
            self.pin(path[:found], -1)
            room = min(len(path) - found, max(0, self.capacity - len(self.used)))
            self.hold(path, found + room)
        self.touch(path)


# Few letters, so that prompts part in many places.
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
ACTIONS = st.sampled_from(["put", "put", "touch", "evict", "pin", "pin", "unpin"])


def blocks_of(cache: RunCache) -> set[bytes]:
    return {
        each.hashes[at : at + HASH_BYTES]
        for each in cache.holdings()
        for at in range(0, len(each.hashes), HASH_BYTES)
    }


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 12), st.lists(st.tuples(ACTIONS, PATHS), min_size=5, max_size=30))
def test_holds_block_by_block_what_a_naive_least_recently_used_cache_holds(
    capacity: int, actions: list[tuple[str, Path]]
) -> None:
    cache, naive = RunCache(capacity), Naive(capacity)
    pinned: list[tuple[Path, Node]] = []
    for action, path in actions:
        hashes = packed(path)
        assert cache.match(hashes) == naive.match(path)
        if action == "put":
            cache.put(hashes)
            naive.put(path)
        elif action == "touch":
            cache.touch(hashes)
            naive.touch(path)
        elif action == "evict":
            cache.evict(len(path))
            naive.evict(len(path))
        elif action == "pin":
            node, found = cache.find(hashes, len(path))
            cache.pin(node)
            naive.pin(path[:found], 1)
            pinned.append((path[:found], node))
        elif pinned:
            there, node = pinned.pop(0)
            cache.unpin(node)
            naive.pin(there, -1)
            naive.touch(there)
        assert cache.size == len(naive.used)
        assert cache.pinned == sum(1 for each in naive.pins.values() if each)
        assert blocks_of(cache) == {packed(each)[-HASH_BYTES:] for each in naive.used}


@given(st.integers(1, 12), st.lists(PATHS))
def test_what_came_and_went_adds_up_to_what_is_held(capacity: int, paths: list[Path]) -> None:
    cache = RunCache(capacity)
    told: set[bytes] = set()
    for path in paths:
        came, went = cache.put(packed(path))
        for held, changes in ((False, went), (True, came)):
            for each in changes:
                blocks = {each.hashes[at : at + 8] for at in range(0, len(each.hashes), 8)}
                told = told | blocks if held else told - blocks
    assert told == blocks_of(cache)


def test_each_run_names_the_block_before_it() -> None:
    cache = RunCache(100)
    cache.put(packed((1, 1, 1, 1)))
    came, _ = cache.put(packed((1, 1, 2, 2)))
    shared = packed((1, 1))
    assert [(each.parent, each.hashes) for each in came] == [
        (shared[-8:], packed((1, 1, 2, 2))[16:])
    ]
    assert {(each.parent, each.hashes) for each in cache.holdings()} == {
        (b"", shared),
        (shared[-8:], packed((1, 1, 1, 1))[16:]),
        (shared[-8:], packed((1, 1, 2, 2))[16:]),
    }
