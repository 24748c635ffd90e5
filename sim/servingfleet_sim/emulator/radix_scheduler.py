"""Batching over one rank's tree of pages, in the order in which SGLang's scheduler does things, or as TensorRT-LLM's.

Pure: time is an argument, nothing is computed. A step either computes prompts or makes one token for every sequence. Pages
enter the tree when they are computed: at the end of each part of a prompt, and of the answer at its end. Admission keeps
room for all the tokens that the running sequences may still make, so that none is ever put back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .hicache import TieredTree
from .radix import Node, RadixTree, Space
from .sequence import Phase, Sequence
from .steps import Counters, Limits, Outcome, Step, Work

DECODE_LOG_INTERVAL = 40
"""Steps of decoding after which an engine that does nothing else publishes: SGLang's default."""


@dataclass(frozen=True, slots=True)
class Habits:
    """In what engines with such a tree differ."""

    pairs: bool = False
    """Keys are pairs of tokens."""
    parts: bool = True
    """What a part of a prompt filled is cached at once, and not with the prompt's last part."""
    tails: bool = False
    """The part of a page that ends a sequence is cached, too."""
    runs: bool = True
    """Least used runs are evicted whole."""
    publish_every: int = DECODE_LOG_INTERVAL


TRTLLM = Habits(parts=False, tails=True, runs=False, publish_every=1)


@dataclass(slots=True)
class _Hold:
    """What a running sequence uses."""

    space: Space
    node: Node
    """The run of the tree that ends its held beginning."""
    shared: int
    """Pages of it in the tree."""
    own: int
    """Pages of it that are not."""
    done: int
    """Tokens whose step has ended."""


class RadixScheduler:
    """One rank: its sequences and its tree."""

    def __init__(self, limits: Limits, habits: Habits = Habits()) -> None:
        self.limits = limits
        self.habits = habits
        self.tree = (
            TieredTree(limits.block_size, limits.host_chunks, pairs=habits.pairs)
            if limits.host_chunks
            else RadixTree(limits.block_size, pairs=habits.pairs, runs=habits.runs)
        )
        self.counters = Counters()
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.loading: list[Sequence] = []
        """Always empty: what the host holds is loaded while it is used."""
        self._page = limits.block_size
        self._holds: dict[int, _Hold] = {}
        self._decoded = 0
        self._prefilled = False

    @property
    def busy(self) -> bool:
        """Whether there is a step to make; one that only publishes is one."""
        return bool(self.running or self.waiting or self.tree.pending)

    @property
    def running_count(self) -> int:
        """Sequences being computed: SGLang's num_running_reqs."""
        return len(self.running)

    @property
    def waiting_count(self) -> int:
        """Sequences that wait to be: SGLang's num_queue_reqs."""
        return len(self.waiting)

    @property
    def usage(self) -> float:
        """Share of the pages that sequences use, 0 to 1."""
        return (self.tree.held + self._own) / self.capacity

    @property
    def capacity(self) -> int:
        """Pages that can be handed out at all: the first is a placeholder, as in vLLM."""
        return self.limits.blocks - 1

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises DoesNotFit."""
        self.limits.check(sequence.prompt_tokens)
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Ends a sequence whose client is gone. What it has computed stays."""
        if sequence.phase is Phase.FINISHED:
            return
        if sequence in self.running:
            self.running.remove(sequence)
            self._finish(sequence)
        else:
            self.waiting.remove(sequence)
            sequence.phase = Phase.FINISHED

    def reset(self, *, running: bool = False, host: bool = False) -> bool:
        """Empties the tree. Refused while there is any sequence, whatever is asked. Told at once."""
        if self.running or self.waiting:
            return False
        self.tree.reset()
        return True

    def schedule(self, now: float, load_s: float = 0.0, load_token_s: float = 0.0) -> Step | None:
        """Chooses what the next step computes and gives it pages; None: there is nothing to do."""
        if not self.busy:
            return None
        step = Step()
        budget = self.limits.max_step_tokens
        for sequence in self.running:
            missing = len(sequence.tokens) - sequence.computed
            if missing > 1 or not sequence.output_tokens:
                budget -= self._compute(step, sequence, self._part(missing, budget))
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_sequences:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            if sequence.host_tokens:
                step.load_s += load_s + load_token_s * sequence.host_tokens
            self.running.append(self.waiting.popleft())
            missing = len(sequence.tokens) - sequence.computed
            budget -= self._compute(step, sequence, self._part(missing, budget))
        self._prefilled = bool(step.work)
        if not step.work:
            for sequence in self.running:
                self._compute(step, sequence, 1)
        return step

    def complete(self, step: Step) -> Outcome:
        """Ends a step: puts pages into the tree, samples tokens, frees what has finished."""
        self.tree.finish_writes()
        sampled = []
        for work in step.work:
            sequence = work.sequence
            if sequence.phase is not Phase.RUNNING:
                continue  # aborted during the step
            self._holds[sequence.number].done = sequence.computed
            complete = sequence.computed >= sequence.prompt_tokens
            if not work.decodes and (complete or self.habits.parts):
                self._insert(sequence)
            if sequence.computed < len(sequence.tokens):
                continue
            token = sequence.next_token()
            sequence.tokens.append(token)
            self.counters.generated_tokens += 1
            sampled.append((sequence, token))
            if (
                sequence.output_tokens >= sequence.asked.max_tokens
                or len(sequence.tokens) >= self.limits.longest
            ):
                self.running.remove(sequence)
                self._finish(sequence)
        if step.work and not self._prefilled:
            self._decoded += 1
        idle = not self.running and not self.waiting
        due = self._prefilled or idle or self._decoded % self.habits.publish_every == 0
        return Outcome(self.tree.take_events() if due else [], sampled)

    @property
    def _own(self) -> int:
        return sum(hold.own for hold in self._holds.values())

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence what is held of it. False: there is no room for the rest."""
        asked = sequence.asked
        # It never looks for the last token, which it must compute to have something to sample from.
        space = Space(asked.adapter, asked.cache_salt)
        found, node = (0, self.tree.find((), space)[1])
        if not asked.prompt_logprobs:
            found, node = self.tree.find(sequence.tokens[:-1], space)
        there, missing = self.tree.resident(node)
        self.tree.hold(there, 1)
        shared = found // self._page
        most = min(len(sequence.tokens) + asked.max_tokens, self.limits.longest)
        wanted = self._pages(most) - shared + missing + sum(map(self._to_come, self.running))
        if wanted > self.capacity - self.tree.held - self._own:
            self.tree.hold(there, -1)
            return False
        if missing:
            self._make_room(missing)
            self.tree.load(node)
            self.tree.hold(node, 1)
            self.tree.hold(there, -1)
        self._holds[sequence.number] = _Hold(space, node, shared, 0, found)
        sequence.phase = Phase.RUNNING
        sequence.computed = found
        if sequence.cached_tokens is None:
            sequence.cached_tokens = found
            sequence.host_tokens = missing * self._page
            self.counters.prompt_tokens += sequence.prompt_tokens
            self.counters.prefix_queries += sequence.prompt_tokens
            self.counters.prefix_hits += found
            self.counters.host_hits += sequence.host_tokens
        return True

    def _to_come(self, sequence: Sequence) -> int:
        """Pages that a running sequence may still need."""
        hold = self._holds[sequence.number]
        most = min(sequence.prompt_tokens + sequence.asked.max_tokens, self.limits.longest)
        return max(0, self._pages(most) - hold.shared - hold.own)

    def _part(self, missing: int, budget: int) -> int:
        """Tokens of a prompt for one step: all, or so many whole pages."""
        return missing if missing <= budget else max(0, budget // self._page * self._page)

    def _compute(self, step: Step, sequence: Sequence, tokens: int) -> int:
        """Adds to the step, on pages for which room was kept. Returns the tokens."""
        if tokens <= 0:
            return 0
        hold = self._holds[sequence.number]
        step.work.append(Work(sequence, tokens, sequence.computed))
        sequence.computed += tokens
        missing = self._pages(sequence.computed) - hold.shared - hold.own
        self._make_room(missing)
        hold.own += missing
        return tokens

    def _make_room(self, pages: int) -> None:
        free = self.capacity - self.tree.size - self._own
        if pages > free:
            self.tree.evict(pages - free)

    def _insert(self, sequence: Sequence, *, tail: bool = False) -> None:
        """Puts what is computed into the tree; where it was there before, the sequence's own copy goes."""
        hold = self._holds[sequence.number]
        tokens = sequence.tokens[: hold.done]
        _, node = self.tree.insert(tokens, hold.space, tail=tail)
        self.tree.hold(node, 1)
        self.tree.hold(hold.node, -1)
        pages = self._pages(len(tokens))
        full = max(0, len(tokens) - self.tree.pairs) // self._page
        hold.node, hold.shared, hold.own = node, full, pages - full

    def _finish(self, sequence: Sequence) -> None:
        sequence.phase = Phase.FINISHED
        self._insert(sequence, tail=self.habits.tails)
        self.tree.hold(self._holds.pop(sequence.number).node, -1)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page)
