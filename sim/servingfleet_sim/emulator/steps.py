"""What a rank is made of and what its steps are: sizes, work, outcomes, counters."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from .events import Event
from .groups import LayerGroup, most_blocks
from .sequence import Sequence


class DoesNotFit(ValueError):
    """A prompt that the engine could never hold: the client must shorten it."""


@dataclass(frozen=True)
class Limits:
    """Sizes of one rank."""

    blocks: int = 1024
    """GPU blocks, of which one is never used."""
    block_size: int = 16
    """Tokens in a block."""
    max_sequences: int = 256
    """Sequences in one step."""
    max_step_tokens: int = 8192
    """Tokens computed in one step: longer prompts are computed in chunks. vLLM's default from 70 GiB on."""
    max_model_len: int = 0
    """Tokens of prompt and output together; 0: as many as the blocks hold."""
    host_chunks: int = 0
    """Chunks in the host tier; 0: no host tier."""
    host_chunk_blocks: int = 1
    host_described: bool = False
    """Whether host events hold tokens; False: placeholders, which is vLLM's default."""
    groups: tuple[LayerGroup, ...] = (LayerGroup(),)
    """Of the model's layers. They share the blocks: a sequence takes some for each of them."""

    @cached_property
    def longest(self) -> int:
        """Tokens of prompt and output that a sequence may have."""
        fitting = (
            blocks
            for blocks in range(self.blocks - 1, 0, -1)
            if most_blocks(self.groups, blocks, self.block_size, self.max_step_tokens) < self.blocks
        )
        held = next(fitting, 0) * self.block_size
        return min(self.max_model_len, held) if self.max_model_len else held

    def check(self, prompt_tokens: int) -> None:
        """Raises DoesNotFit for a prompt that the rank could never hold."""
        if not prompt_tokens:
            raise DoesNotFit("the prompt is empty, expected at least 1 token")
        if prompt_tokens + 1 > self.longest:
            raise DoesNotFit(
                f"the prompt has {prompt_tokens} tokens; this model holds {self.longest} "
                "with at least 1 token of output"
            )


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes for one sequence."""

    sequence: Sequence
    tokens: int
    context: int
    """Tokens of it that were computed before."""

    @property
    def decodes(self) -> bool:
        """Whether it only extends the output by one."""
        return self.tokens == 1 and self.context >= self.sequence.prompt_tokens


@dataclass(slots=True)
class Step:
    """One scheduled step. Without work it only waits: for loads, or to announce what was copied."""

    work: list[Work] = field(default_factory=list)
    load_until: float | None = None
    """When the next load ends; None: none is under way."""
    load_s: float = 0.0
    """What loads add to its time where it waits for them itself."""


@dataclass(slots=True)
class Outcome:
    """What a completed step brought."""

    events: list[Event]
    """One batch, in order; empty: nothing is published."""
    sampled: list[tuple[Sequence, int]]
    """A new token of a sequence, which may have finished with it."""


@dataclass(slots=True)
class Counters:
    """Since the start. Tokens, but for the preemptions."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    host_queries: int = 0
    host_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Scheduling(Protocol):
    """What an engine's rank does with prompts and caches; time is an argument."""

    @property
    def counters(self) -> Counters: ...

    @property
    def running_count(self) -> int:
        """Sequences being computed."""
        ...

    @property
    def waiting_count(self) -> int:
        """Sequences that wait to be."""
        ...

    @property
    def usage(self) -> float:
        """Share of the GPU cache that sequences hold, 0 to 1."""
        ...

    @property
    def loading(self) -> Listed[Sequence]:
        """Sequences that hold blocks which a host tier is filling."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises DoesNotFit."""
        ...

    def abort(self, sequence: Sequence) -> None:
        """Ends a sequence whose client is gone."""
        ...

    def reset(self, *, running: bool = False, host: bool = False) -> bool:
        """Empties the caches. False: refused."""
        ...

    def schedule(self, now: float, load_s: float = 0.0, load_token_s: float = 0.0) -> Step | None:
        """What the next step computes; None: there is nothing to do."""
        ...

    def complete(self, step: Step) -> Outcome:
        """Ends the step."""
        ...
