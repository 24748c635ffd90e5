"""One rank of a simulated engine: a queue, steps of bounded size, caches with real eviction. Only the computing is not done.

A step takes as long as `emulator/speed.py` says of its work. Steps are simulated one by one while there is something to
prefill; a stretch of steps that only decode is one event, its length in closed form.

What is simplified: a request reserves the memory of its whole answer when it is admitted (SGLang's rule; vLLM takes it as
it grows and preempts where it must), the answer's own blocks are not kept for others (no trace names them), an engine's
block is as large as the trace's, and what is in GPU memory is copied to the tiers when a prompt is computed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from .cache import HASH_BYTES, RunCache
from .clock import Clock
from .fleet import PoolSpec
from .memory import Change, Job, Memory, Reusable
from .stretch import Stretch


class Client(Protocol):
    """Who sent the jobs."""

    def first_token(self, job: Job) -> None: ...

    def finished(self, job: Job) -> None: ...


@dataclass(slots=True)
class _Step:
    """What a step computes of prompts; `budget`: tokens that it still may."""

    budget: int
    tokens: int = 0
    pairs: float = 0.0
    """Of a token computed and one before it."""
    load_s: float = 0.0
    parts: list[Job] = field(default_factory=list)


class RankEngine:
    """`publish` takes what changed with a step, in order, when the step has ended."""

    def __init__(
        self,
        name: str,
        pool: PoolSpec,
        block_tokens: int,
        clock: Clock,
        client: Client,
        publish: Callable[[list[Change]], None],
        *,
        watch_coming: bool = False,
    ) -> None:
        """`watch_coming`: keep `coming`, for who must know what will be held."""
        self.name = name
        self.pool = pool
        self.speed = pool.truth
        self.sglang = pool.engine == "sglang"
        """It computes prompts before anything else, and loads while it computes."""
        self.memory = Memory(pool, block_tokens)
        self.coming = RunCache(0) if watch_coming else None
        """Blocks of the prompts that wait or are computed: what a prompt that comes now will find, too."""
        self.waiting: deque[Job] = deque()
        self.loading: list[Job] = []
        self.prefilling: list[Job] = []
        self.decoding: list[tuple[int, int, Job]] = []
        """A heap: number of the decode step that ends the request, then order."""
        self.context = 0
        """Tokens of context of all that decode."""
        self.computed_tokens = 0
        self.busy_s = 0.0
        self._decode_steps = 0
        self._link_free = 0.0
        self._clock = clock
        self._client = client
        self._publish = publish
        self._turn = 0
        """Which scheduled end is meant: an earlier one no longer counts."""
        self._stepping = False
        self._step_ends = 0.0
        self._stretch: Stretch | None = None
        self._stretch_began = 0.0
        self._parts: list[Job] = []
        self._decodes_too = False
        self._blocked = False
        """The first that waits has no room until another has ended."""

    # What can be seen from outside

    @property
    def running(self) -> int:
        """Requests being computed."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def queued(self) -> int:
        """Requests that wait to be."""
        return len(self.waiting) + len(self.loading)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that wait and will have to be computed, as far as the cache shows now."""
        reusable = self.memory.reusable
        return sum(job.prompt - reusable(job.hashes, job.prompt).tokens for job in self.waiting)

    def will_reuse(self, hashes: bytes, prompt: int) -> Reusable:
        """Of a prompt that is sent now, when its turn comes: of what the prompts ahead will leave, too. Needs `coming`."""
        found = self.memory.reusable(hashes, prompt)
        assert self.coming is not None
        unit = self.memory.unit
        coming = min(self.coming.match(hashes), (prompt - 1) // unit) * unit
        if coming <= found.tiers[0]:
            return found
        # What is on the GPU by then need not be loaded.
        tiers, reached, end = [coming], coming, found.tiers[0]
        for tokens in found.tiers[1:]:
            end += tokens
            tiers.append(max(0, end - reached))
            reached = max(reached, end)
        return Reusable(reached, tuple(tiers))

    def until_step_ends(self, now: float) -> float:
        """Seconds until a prompt that comes now could be looked at."""
        if not self._stepping:
            return 0.0
        if self._stretch is None:
            return self._step_ends - now
        done = self._stretch.steps_by(now - self._stretch_began)
        return max(0.0, self._stretch_began + self._stretch.after(done) - now)

    # What comes

    def submit(self, job: Job) -> None:
        """Queues a request that fits."""
        if self.coming is not None:
            job.new = job.prompt - self.will_reuse(job.hashes, job.prompt).tokens
            node, found = self.coming.find(job.hashes, len(job.hashes) // HASH_BYTES)
            job.coming = self.coming.add(node, job.hashes[found * HASH_BYTES :])
            self.coming.pin(job.coming)
        self.waiting.append(job)
        self._kick()

    def stop(self) -> list[Job]:
        """The process is gone with all that ran and all it held. Returns what it leaves unfinished."""
        left = [*self.prefilling, *(entry[2] for entry in sorted(self.decoding, key=_order))]
        left += [*self.loading, *self.waiting]
        if self._stepping:
            self.busy_s -= max(0.0, self._step_ends - self._clock.now)
        self._turn += 1
        self._stepping, self._stretch, self._blocked = False, None, False
        self._parts, self._decodes_too = [], False
        self.memory = Memory(self.pool, self.memory.unit)
        if self.coming is not None:
            self.coming = RunCache(0)
        self.waiting.clear()
        self.loading.clear()
        self.prefilling.clear()
        self.decoding.clear()
        self.context = 0
        self._link_free = self._clock.now
        return left

    # Steps

    def _kick(self, loaded: bool = False) -> None:
        """Something may be done that could not before. `loaded`: for a request that has its memory already."""
        if not self._stepping:
            # After all that comes at this very time.
            self._begin(0.0)
        elif self._stretch is not None and (loaded or not self._blocked):
            # The step under way ends, then the new one is looked at.
            done = self._stretch.steps_by(self._clock.now - self._stretch_began)
            if done < self._stretch.steps:
                self._stretch = self._stretch.cut(done)
                ends = self._stretch_began + self._stretch.seconds
                self.busy_s -= self._step_ends - ends
                self._end_at(ends)

    def _schedule(self) -> None:
        decodes = 0 if self.sglang else len(self.decoding)
        step = _Step(self.pool.step_tokens - decodes)
        for job in self.prefilling:
            self._compute(job, step)
        self._admit(step)
        self._parts = step.parts
        self._decodes_too = bool(decodes and step.parts)
        if not step.parts:
            self._decode_only()
            return
        self.computed_tokens += step.tokens
        tokens, pairs, context = step.tokens + decodes, step.pairs, 0
        if decodes:
            pairs += self.context + decodes / 2
            context = self.context
        speed = self.speed
        compute = max(speed.weights_s, speed.token_s * tokens + speed.pair_s * pairs)
        seconds = speed.step_s + compute + speed.context_token_s * context
        if self.sglang:
            seconds += max(0.0, step.load_s - self.pool.overlap * compute)
        self._begin(seconds)

    def _begin(self, seconds: float) -> None:
        self._stepping = True
        self.busy_s += seconds
        self._end_at(self._clock.now + seconds)

    def _end_at(self, time: float) -> None:
        self._turn += 1
        turn = self._turn
        self._step_ends = time
        self._clock.at(time, lambda: self._ended(turn))

    def _decode_only(self) -> None:
        if not self.decoding:
            self._stepping = False
            self._flush()
            return
        steps = self.decoding[0][0] - self._decode_steps
        self._stretch = Stretch(self.speed, len(self.decoding), self.context, steps)
        self._stretch_began = self._clock.now
        self._begin(self._stretch.seconds)

    def _ended(self, turn: int) -> None:
        if turn != self._turn:
            return
        if self._stretch is not None:
            steps, self._stretch = self._stretch.steps, None
            self._decoded(steps)
        else:
            if self._decodes_too:
                self._decoded(1)
            for job in self._parts:
                if self.sglang:
                    self.memory.cover(job)
                if job.computed == job.prompt:
                    self._prefilled(job)
        self._flush()
        self._schedule()

    def _decoded(self, steps: int) -> None:
        self._decode_steps += steps
        self.context += steps * len(self.decoding)
        while self.decoding and self.decoding[0][0] <= self._decode_steps:
            job = heapq.heappop(self.decoding)[2]
            self.context -= job.prompt + job.output - 1
            self._finish(job)

    def _prefilled(self, job: Job) -> None:
        self.prefilling.remove(job)
        job.first_token_at = self._clock.now
        if self.coming is not None and job.coming is not None:
            self.coming.unpin(job.coming)
            self.coming.evict(self.coming.size - self.coming.pinned)
        self.memory.copy(job)
        self._client.first_token(job)
        if job.output <= 1:
            self._finish(job)
        else:
            ends = self._decode_steps + job.output - 1
            heapq.heappush(self.decoding, (ends, job.number, job))
            self.context += job.prompt

    def _finish(self, job: Job) -> None:
        self._blocked = False
        self.memory.release(job)
        self._client.finished(job)

    def _admit(self, step: _Step) -> None:
        """Takes in what waits, in order, while there is budget and room."""
        now = self._clock.now
        for job in [each for each in self.loading if each.loaded_at <= now]:
            if step.budget <= 0:
                return
            self.loading.remove(job)
            self.memory.cover(job)
            self.prefilling.append(job)
            self._compute(job, step)
        self._blocked = False
        while self.waiting and step.budget > 0:
            job = self.waiting[0]
            full = self.running + len(self.loading) >= self.pool.max_sequences
            if full or not self.memory.admit(job):
                self._blocked = True
                break
            self.waiting.popleft()
            job.waits = False
            if job.load_s and not self.sglang:
                # Before its turn, while others are computed. Loads share one link: one after the other.
                begins = max(now, self._link_free)
                self._link_free = job.loaded_at = begins + job.load_s
                self.loading.append(job)
                self._clock.at(job.loaded_at, lambda: self._kick(loaded=True))
            else:
                self.prefilling.append(job)
                step.load_s += job.load_s
                self._compute(job, step)

    def _compute(self, job: Job, step: _Step) -> None:
        """Adds as much of it to the step as there is budget for."""
        take = min(job.prompt - job.computed, step.budget)
        if take <= 0:
            return
        step.pairs += take * (job.computed + take / 2)
        step.tokens += take
        step.budget -= take
        step.parts.append(job)
        job.computed += take
        if not self.sglang:
            # vLLM counts it as cached as soon as it is scheduled, SGLang when it is done.
            self.memory.cover(job)

    def _flush(self) -> None:
        if self.memory.changes:
            changes, self.memory.changes = self.memory.changes, []
            self._publish(changes)


def _order(entry: tuple[int, int, Job]) -> tuple[int, int]:
    return entry[:2]
