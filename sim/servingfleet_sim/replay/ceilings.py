"""What other placements could have reused of the same requests in the same order (docs/replay.md, U1 to U4). Pure.

None of them knows time: a prompt is in the cache as soon as it has come, and no request waits. The fleet's memory is that
of all its ranks and tiers together; what lies in two tiers of a rank at once is counted as two places, so that no real
fleet reaches these figures.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence

from .cache import ENDLESS, HASH_BYTES, Node, RunCache
from .fleet import FleetSpec
from .results import Ceilings
from .traces import Request

NEVER = 2**31 - 1


def ceilings(requests: Sequence[Request], fleet: FleetSpec, block_tokens: int) -> Ceilings:
    """Of requests in order of arrival."""
    ranks = rank_blocks(fleet, block_tokens)
    pooled = sum(ranks)
    return Ceilings(
        prompt=sum(each.prompt_tokens for each in requests),
        u1=_tokens(requests, block_tokens, endless(requests)),
        u2=_tokens(requests, block_tokens, belady(requests, pooled)),
        u3=_tokens(requests, block_tokens, lru(requests, pooled)),
        u4=_tokens(requests, block_tokens, greedy(requests, ranks)),
    )


def rank_blocks(fleet: FleetSpec, block_tokens: int) -> list[int]:
    """Blocks that each rank can hold, all tiers together."""
    found = []
    for pool in fleet.pools:
        tokens = [pool.gpu_tokens, *(tier.tokens for tier in pool.tiers)]
        blocks = sum(max(1, each // block_tokens) for each in tokens)
        found += [blocks] * (pool.replicas * pool.ranks)
    return found


def endless(requests: Iterable[Request]) -> list[int]:
    """U1: blocks of each request that a request before it had too."""
    return lru(requests, ENDLESS)


def lru(requests: Iterable[Request], capacity: int) -> list[int]:
    """U3: hits, in blocks, of one cache that forgets what was used longest ago."""
    cache = RunCache(capacity)
    hits = []
    for each in requests:
        hashes = each.blocks.packed()
        hits.append(cache.match(hashes))
        cache.put(hashes)
    return hits


def greedy(requests: Iterable[Request], capacities: Sequence[int]) -> list[int]:
    """U4: each goes where most of it is held, less what must be forgotten there for the rest; of equals, where least was
    computed so far.

    Without that price all prompts that begin alike, and be it with one block, would end in one rank's memory.
    """
    caches = [RunCache(capacity) for capacity in capacities]
    computed = [0] * len(caches)
    hits = []
    for each in requests:
        hashes = each.blocks.packed()
        blocks = len(hashes) // HASH_BYTES
        best, order = 0, (-blocks - 1, 0, 0)
        for place, cache in enumerate(caches):
            found = cache.match(hashes)
            forgotten = max(0, blocks - found - (cache.capacity - cache.size))
            order, best = max((order, best), ((found - forgotten, found, -computed[place]), place))
        hits.append(order[1])
        computed[best] += blocks - order[1]
        caches[best].put(hashes)
    return hits


def belady(requests: Sequence[Request], capacity: int) -> list[int]:
    """U2: hits of one cache that forgets what will be needed last. No other can have more.

    Blocks that the same requests have are one item of many blocks, which may be held in part.
    """
    paths, sizes = _items(requests)
    following = _next_uses(paths, len(sizes))
    held = [0] * len(sizes)
    due = [NEVER] * len(sizes)
    heap: list[tuple[int, int, int]] = []
    total = 0
    hits = []
    for path, nexts in zip(paths, following, strict=True):
        hit = 0
        for item in path:
            hit += held[item]
            if held[item] < sizes[item]:
                break
        hits.append(hit)
        for depth, (item, following_use) in enumerate(zip(path, nexts, strict=True)):
            total += sizes[item] - held[item]
            held[item] = sizes[item]
            due[item] = following_use
            # Of those needed at the same time, the ones farther from the root go first: nothing is held without
            # what lies before it.
            heapq.heappush(heap, (-following_use, -depth, item))
        while total > capacity:
            when, depth, item = heap[0]
            if not held[item] or due[item] != -when:
                heapq.heappop(heap)
                continue
            gone = min(held[item], total - capacity)
            held[item] -= gone
            total -= gone
    return hits


def _items(requests: Sequence[Request]) -> tuple[list[array[int]], list[int]]:
    """Each request as the items that make it up, and the blocks of each item."""
    tree = RunCache()
    for each in requests:
        hashes = each.blocks.packed()
        node, found = tree.find(hashes, len(hashes) // HASH_BYTES)
        tree.add(node, hashes[found * HASH_BYTES :])
    numbers: dict[Node, int] = {}
    sizes: list[int] = []
    paths = []
    for each in requests:
        hashes = each.blocks.packed()
        path = array("i")
        end: Node | None = tree.find(hashes, len(hashes) // HASH_BYTES)[0]
        while end is not None and end is not tree.root:
            if end not in numbers:
                numbers[end] = len(sizes)
                sizes.append(len(end.run) // HASH_BYTES)
            path.append(numbers[end])
            end = end.parent
        path.reverse()
        paths.append(path)
    return paths, sizes


def _next_uses(paths: Sequence[array[int]], items: int) -> list[array[int]]:
    """For each item of each path the number of the next request that has it."""
    upcoming = array("i", [NEVER]) * items
    found = []
    for number in range(len(paths) - 1, -1, -1):
        found.append(array("i", (upcoming[item] for item in paths[number])))
        for item in paths[number]:
            upcoming[item] = number
    found.reverse()
    return found


def _tokens(requests: Sequence[Request], block_tokens: int, hits: Sequence[int]) -> int:
    return sum(
        min(each.prompt_tokens, hit * block_tokens)
        for each, hit in zip(requests, hits, strict=True)
    )
