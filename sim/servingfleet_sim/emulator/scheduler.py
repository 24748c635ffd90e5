"""Continuous batching over one rank's block pool, in the order in which vLLM's scheduler does things.

Pure: time is an argument, nothing is computed. A step is `schedule`, the time that it takes, then `complete`. Running
sequences come first, then waiting ones in order of arrival; full blocks are announced when they are scheduled; a
sequence that finds no block takes those of the youngest.
"""

from __future__ import annotations

from collections import deque

from .caches import Caches
from .groups import STATE
from .host import HostTier
from .sequence import Phase, Sequence
from .steps import Counters, Limits, Outcome, Step, Work


class Scheduler:
    """One rank: its sequences and its caches."""

    def __init__(self, limits: Limits, hash_seed: bytes) -> None:
        states = any(spec.kind == STATE for spec in limits.groups)
        if states and limits.host_chunks:
            raise ValueError("a host tier keeps no states of recurrent layers")
        self.limits = limits
        self.caches = Caches(limits)
        self.host = (
            HostTier(
                limits.host_chunks,
                limits.host_chunk_blocks,
                limits.block_size,
                self.caches.groups,
                described=limits.host_described,
            )
            if limits.host_chunks
            else None
        )
        self.counters = Counters()
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.loading: list[Sequence] = []
        self._hash_seed = hash_seed
        self._states = states

    @property
    def busy(self) -> bool:
        """Whether there is a step to make."""
        copying = self.host is not None and self.host.writing
        return bool(self.running or self.waiting or self.loading or copying)

    @property
    def running_count(self) -> int:
        """Sequences being computed: vLLM's num_requests_running."""
        return len(self.running)

    @property
    def waiting_count(self) -> int:
        """Sequences that wait to be: vLLM's num_requests_waiting."""
        return len(self.waiting) + len(self.loading)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that somebody holds, 0 to 1."""
        return self.caches.pool.usage

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises DoesNotFit."""
        self.limits.check(sequence.prompt_tokens)
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Ends a sequence whose client is gone. What it announced stays announced."""
        if sequence.phase is Phase.FINISHED:
            return
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.loading:
            self.loading.remove(sequence)
            assert self.host is not None
            self.host.unpin(sequence)
        else:
            self.waiting.remove(sequence)
        self._finish(sequence)

    def reset(self, *, running: bool = False, host: bool = False) -> bool:
        """Empties the GPU cache, and with `host` the host tier. True: done.

        Refused while sequences hold blocks, unless `running`: then they start again from their first token. The event
        goes out with the next step that has one.
        """
        if running:
            while self.running:
                self._preempt(self.running.pop())
        done = self.caches.pool.reset()
        if done and host and self.host is not None:
            self.host.reset()
        return done

    def schedule(self, now: float, load_s: float = 0.0, load_token_s: float = 0.0) -> Step | None:
        """Chooses what the next step computes and gives it blocks; None: there is nothing to do.

        A load from the host tier takes `load_s` and `load_token_s` for each token.
        """
        if not self.busy:
            return None
        step = Step()
        self.caches.begin_step()
        budget, preempted = self._schedule_running(step)
        if not preempted:
            self._schedule_waiting(step, budget, now, load_s, load_token_s)
        coming = (sequence.loaded_at for sequence in self.loading if sequence.loaded_at > now)
        step.load_until = min(coming, default=None)
        if self.host is not None:
            for work in step.work:
                self.host.offer(work.sequence, work.sequence.computed)
            self.host.settle()
        return step

    def complete(self, step: Step) -> Outcome:
        """Ends a step: samples tokens, frees what has finished, takes the events."""
        if self.host is not None:
            self.host.finish_writes()
        sampled = []
        for work in step.work:
            sequence = work.sequence
            if sequence.phase is not Phase.RUNNING:
                continue  # aborted during the step
            if sequence.computed < len(sequence.tokens):
                continue
            token = sequence.next_token()
            sequence.tokens.append(token)
            sequence.hash_blocks(self.limits.block_size, self._hash_seed)
            self.counters.generated_tokens += 1
            sampled.append((sequence, token))
            if (
                sequence.output_tokens >= sequence.asked.max_tokens
                or len(sequence.tokens) >= self.limits.longest
            ):
                self.running.remove(sequence)
                self._finish(sequence)
        events = self.caches.pool.take_events()
        if self.host is not None:
            # Within a batch vLLM puts the connector's events behind the GPU's.
            events.extend(self.host.take_events())
        return Outcome(events, sampled)

    def _schedule_running(self, step: Step) -> tuple[int, bool]:
        budget = self.limits.max_step_tokens
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            tokens = self._part(sequence, sequence.computed, budget)
            if not tokens:
                index += 1
                continue
            while not self.caches.grow(sequence, tokens):
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is sequence:
                    return budget, True
            self._compute(step, sequence, tokens)
            budget -= tokens
            index += 1
        return budget, preempted

    def _schedule_waiting(
        self, step: Step, budget: int, now: float, load_s: float, load_token_s: float
    ) -> None:
        # Sequences that hold blocks go first: what they loaded would otherwise be stuck.
        for sequence in [other for other in self.loading if other.loaded_at <= now]:
            if budget <= 0 or len(self.running) >= self.limits.max_sequences:
                return
            self._loaded(sequence)
            tokens = min(len(sequence.tokens) - sequence.computed, budget)
            if not self.caches.grow(sequence, tokens):
                return  # it keeps what it loaded, and tries again with the next step
            self.loading.remove(sequence)
            self._run(step, sequence, tokens)
            budget -= tokens
        passed: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_sequences:
            sequence = self.waiting[0]
            admitted = self._admit(sequence, budget, now, load_s, load_token_s)
            if admitted is None:
                passed.append(self.waiting.popleft())
                continue
            if not admitted:
                break
            self.waiting.popleft()
            if sequence.phase is Phase.LOADING:
                self.loading.append(sequence)
            else:
                tokens = self._part(sequence, sequence.computed, budget)
                self._run(step, sequence, tokens)
                budget -= tokens
        self.waiting.extendleft(reversed(passed))

    def _admit(
        self, sequence: Sequence, budget: int, now: float, load_s: float, load_token_s: float
    ) -> bool | None:
        """Gives a waiting sequence its blocks: True; False: none to give; None: let others go first."""
        sequence.hash_blocks(self.limits.block_size, self._hash_seed)
        found = self.caches.find(sequence)
        local = len(found[0]) * self.limits.block_size
        external = 0
        if self.host is not None:
            beyond = self.host.match(sequence, local)
            if beyond is None:
                return None
            external = beyond
        reused = local + external
        if external:
            target, reserved = reused, self._reserved()
        else:
            tokens = self._part(sequence, reused, budget)
            if not tokens:
                return False
            target, reserved = reused + tokens, 0
        if not self.caches.begin(sequence, found, reused, target, reserved):
            return False
        sequence.computed = reused
        sequence.chunks.clear()
        self._count(sequence, local, external)
        if external:
            assert self.host is not None
            sequence.phase = Phase.LOADING
            sequence.loaded_at = now + load_s + load_token_s * external
            self.host.pin(sequence, local, reused)
        else:
            self.caches.name(sequence, target)
        return True

    def _loaded(self, sequence: Sequence) -> None:
        """The host tier has filled its blocks: they are cached now, and it may compute the rest."""
        assert self.host is not None
        self.host.unpin(sequence)
        self.caches.name(sequence, sequence.computed)
        # Still LOADING until there is a block for its next token.
        if sequence.computed == len(sequence.tokens):
            sequence.computed -= 1  # the last token must be computed for the next one

    def _run(self, step: Step, sequence: Sequence, tokens: int) -> None:
        sequence.phase = Phase.RUNNING
        self.running.append(sequence)
        self._compute(step, sequence, tokens)

    def _compute(self, step: Step, sequence: Sequence, tokens: int) -> None:
        step.work.append(Work(sequence, tokens, sequence.computed))
        sequence.computed += tokens

    def _part(self, sequence: Sequence, start: int, budget: int) -> int:
        """Tokens of a sequence for one step from there on: all, or what the budget allows.

        Recurrent layers leave a state where a step ends. So it ends at a block's end, at the last from which another
        prompt may go on, and at a beginning that others share. 0: not in this step.
        """
        tokens = min(len(sequence.tokens) - start, budget)
        prompt_end = max(sequence.prompt_tokens, len(sequence.tokens) - 1)
        if not self._states or start >= prompt_end:
            return tokens
        size = self.limits.block_size
        end = start + tokens
        if end < prompt_end:
            aligned = end // size * size
            if aligned > start or size <= self.limits.max_step_tokens:
                end = aligned
        junction = sequence.junction * size
        stops = (
            (start // size + 1) * size if start % size else 0,
            (len(sequence.tokens) - 1) // size * size,
            start + (junction - start) // size * size if start < junction < end else 0,
        )
        end = min((stop for stop in stops if start < stop < end), default=end)
        return max(0, end - start)

    def _preempt(self, sequence: Sequence) -> None:
        self.caches.release(sequence)
        sequence.computed = 0
        sequence.phase = Phase.WAITING
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(sequence)

    def _finish(self, sequence: Sequence) -> None:
        sequence.phase = Phase.FINISHED
        if self.host is not None:
            self.host.used(sequence)
        self.caches.release(sequence)

    def _reserved(self) -> int:
        """Blocks that prompts already begun still need: a load must leave them."""
        begun = [*self.loading, *(s for s in self.running if s.computed < len(s.tokens))]
        return sum(map(self.caches.missing, begun))

    def _count(self, sequence: Sequence, local: int, external: int) -> None:
        if sequence.preemptions:
            return  # what is reported is the reuse of the first admission
        sequence.cached_tokens = local + external
        sequence.host_tokens = external
        self.counters.prompt_tokens += sequence.prompt_tokens
        if sequence.asked.prompt_logprobs:
            return
        self.counters.prefix_queries += len(sequence.tokens)
        self.counters.prefix_hits += local
        if self.host is not None:
            self.counters.host_queries += len(sequence.tokens) - local
            self.counters.host_hits += external
