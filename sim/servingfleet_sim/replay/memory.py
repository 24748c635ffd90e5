"""What one rank of an engine holds: GPU blocks, its tiers behind them, and the room its requests have reserved. Pure.

A request reserves room for its whole prompt and answer when it is admitted. Its prompt's blocks pass from the reserved into
the cache as they are computed or loaded, where others find them; its answer's blocks are nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .cache import HASH_BYTES, Held, Node, RunCache
from .fleet import PoolSpec, token_s

GPU_LANE = 0
"""Lanes beyond are the tiers, in their order."""


class Change(NamedTuple):
    """Blocks that came into a lane, or went."""

    lane: int
    held: bool
    what: Held


class Reusable(NamedTuple):
    """Tokens: all, and by tier from the GPU on."""

    tokens: int
    tiers: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Job:
    """A request at an engine. Counts are tokens, times seconds of the run."""

    number: int
    prompt: int
    output: int
    hashes: bytes
    reused: int = 0
    """What the engine reports."""
    reused_tiers: tuple[int, ...] = ()
    computed: int = 0
    """Of the prompt, what was reused included."""
    load_s: float = 0.0
    """What loading takes of what lies beyond the GPU."""
    loaded_at: float = 0.0
    first_token_at: float = -1.0
    waits: bool = True
    new: int = 0
    """Tokens that it was seen to need computed when it came (only where `coming` is watched)."""
    private: int = 0
    """Blocks reserved for it that are not in the cache."""
    covered: int = 0
    """Of its first blocks, those that are."""
    node: Node | None = None
    """Where they end."""
    coming: Node | None = None


class Memory:
    """Of one rank. What changes is noted in `changes`, in order."""

    def __init__(self, pool: PoolSpec, unit: int) -> None:
        """`unit`: tokens of a block."""
        self.pool = pool
        self.unit = unit
        self.gpu = RunCache(max(1, pool.gpu_tokens // unit))
        self.tiers = [RunCache(max(1, each.tokens // unit)) for each in pool.tiers]
        self.changes: list[Change] = []
        self.private = 0
        """Blocks reserved and not in the cache."""

    @property
    def usage(self) -> float:
        """Share of the GPU blocks that requests hold."""
        return min(1.0, (self.gpu.pinned + self.private) / self.gpu.capacity)

    @property
    def lanes(self) -> list[RunCache]:
        """By lane."""
        return [self.gpu, *self.tiers]

    def reusable(self, hashes: bytes, prompt: int) -> Reusable:
        """Of a prompt that would be admitted now."""
        unit = self.unit
        # One token at least is computed; what vLLM loads from beyond the GPU may cover the prompt whole.
        most = (prompt - 1) // unit
        beyond = most if self.pool.engine == "sglang" else prompt // unit
        reached = min(self.gpu.match(hashes), most)
        by_tier = [reached * unit]
        for tier in self.tiers:
            found = min(tier.match(hashes), beyond)
            by_tier.append(max(0, found - reached) * unit)
            reached = max(reached, found)
        return Reusable(reached * unit, tuple(by_tier))

    def load_s(self, tiers: tuple[int, ...]) -> float:
        """Seconds to bring what lies beyond the GPU there."""
        seconds = 0.0
        for spec, tokens in zip(self.pool.tiers, tiers[1:], strict=True):
            if tokens:
                seconds += spec.latency_s + token_s(self.pool, spec) * tokens
        return seconds

    def admit(self, job: Job) -> bool:
        """Gives it all the room it will need. False: there is too little now."""
        found = self.reusable(job.hashes, job.prompt)
        node, blocks = self.gpu.find(job.hashes, found.tiers[0] // self.unit)
        self.gpu.pin(node)
        wanted = self._blocks(job.prompt + job.output) - blocks
        if wanted > self.gpu.capacity - self.private - self.gpu.pinned:
            self.gpu.unpin(node, used=False)
            return False
        short = wanted - (self.gpu.capacity - self.private - self.gpu.size)
        self.changes += [Change(GPU_LANE, False, each) for each in self.gpu.evict(short)]
        self.private += wanted
        job.private, job.covered, job.node = wanted, blocks, node
        job.reused, job.reused_tiers = found
        job.computed = min(found.tokens, job.prompt - 1)
        job.load_s = self.load_s(found.tiers)
        return True

    def cover(self, job: Job) -> None:
        """What is computed of it, or loaded, is in the cache now."""
        full = len(job.hashes) // HASH_BYTES
        blocks = min(max(job.computed, job.reused) // self.unit, full)
        if blocks <= job.covered:
            return
        assert job.node is not None
        node, found = self.gpu.find(job.hashes, blocks)
        fresh = job.hashes[found * HASH_BYTES : blocks * HASH_BYTES]
        end = self.gpu.add(node, fresh)
        self.gpu.pin(end, job.node)
        job.node = end
        # Where another has computed the same meanwhile, its copy is shared.
        self.private -= blocks - job.covered
        job.private -= blocks - job.covered
        job.covered = blocks
        if fresh:
            self.changes.append(Change(GPU_LANE, True, Held(node.last, fresh)))

    def copy(self, job: Job) -> None:
        """Its prompt is computed: the tiers have it too."""
        for lane, tier in enumerate(self.tiers, GPU_LANE + 1):
            came, went = tier.put(job.hashes)
            self.changes += [Change(lane, False, each) for each in went]
            self.changes += [Change(lane, True, each) for each in came]

    def release(self, job: Job) -> None:
        """It has ended: what it used was used now."""
        assert job.node is not None
        self.gpu.unpin(job.node)
        self.private -= job.private
        for tier in self.tiers:
            tier.touch(job.hashes)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.unit)
