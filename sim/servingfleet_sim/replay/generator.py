"""Made-up load: conversations that share system prompts, turn by turn longer. Pure: the seed decides.

Every conversation begins with one of `prompts` system prompts (some are far more common than others), and each turn's
prompt is all that was said before, the answers included, and something new.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from .traces import Blocks, Names, Request, Trace


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths are tokens, drawn around their mean with a long tail (log-normal, sigma `spread`)."""

    conversations: int = 200
    starts_per_s: float = 1.0
    """Mean rate at which conversations begin."""
    burstiness: float = 1.0
    """Squared coefficient of variation of the time between two beginnings: 1 is Poisson, above comes in bursts."""
    turns: float = 5.0
    """Mean number of turns, geometric."""
    think_s: float = 10.0
    """Mean time from an answer to the next turn, exponential."""
    answer_s: float = 5.0
    """Assumed length of an answer where turns don't wait for it (open loop)."""
    prompts: int = 20
    """System prompts."""
    skew: float = 1.0
    """The k-th most common prompt is used in proportion to 1 / k^skew."""
    system_tokens: float = 2000.0
    turn_tokens: float = 400.0
    answer_tokens: float = 250.0
    spread: float = 0.6
    block_tokens: int = 64
    target_s: float = math.nan
    """Time to first token that every request asks for; nan: none."""
    priorities: int = 1
    """Classes; each conversation is in one of them, 0 up, with equal chance."""


MAX_PROMPT_TOKENS = 1_000_000
"""A conversation that would get longer ends."""


def check(load: Load) -> None:
    """Raises ValueError, naming the first value that can't be."""
    whole = ("conversations", "prompts", "block_tokens", "priorities")
    positive = ("starts_per_s", "burstiness", "system_tokens", "turn_tokens", "answer_tokens")
    for name in (*whole, *positive, "turns"):
        value = getattr(load, name)
        least = 1 if name in (*whole, "turns") else 0
        if not (value >= least and value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; expected {'at least 1' if least else 'above 0'}")
    for name in ("think_s", "answer_s", "skew", "spread"):
        value = getattr(load, name)
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; expected 0 or more")


def generate(load: Load, seed: int) -> Trace:
    """Requests in order of time. Raises ValueError for a load that can't be."""
    check(load)
    rng = random.Random(f"load {seed}")
    names = Names(f"generated {seed}")
    weights = [1 / place**load.skew for place in range(1, load.prompts + 1)]
    systems = []
    block = 0
    for _ in weights:
        tokens = _length(rng, load.system_tokens, load.spread)
        full = tokens // load.block_tokens
        systems.append((tokens, (block, block + full)))
        block += full
    requests: list[Request] = []
    start = 0.0
    for number in range(load.conversations):
        tokens, run = rng.choices(systems, weights)[0]
        conversation = list(_conversation(load, rng, names, number, start, tokens, run, block))
        requests += conversation
        # Its last turn has all its blocks.
        block = max([block, *(end for _, end in conversation[-1].blocks.runs)])
        start += _between(rng, load)
    names.reach(block)
    requests.sort(key=lambda each: each.at)
    return Trace(load.block_tokens, requests)


def _conversation(
    load: Load,
    rng: random.Random,
    names: Names,
    number: int,
    start: float,
    tokens: int,
    system: tuple[int, int],
    block: int,
) -> Iterator[Request]:
    """`tokens`: of its system prompt, whose full blocks are `system`; its own blocks are numbered from `block`."""
    priority = rng.randrange(load.priorities)
    at, think_s = start, 0.0
    while True:
        tokens += _length(rng, load.turn_tokens, load.spread)
        own = tokens // load.block_tokens - (system[1] - system[0])
        runs = [run for run in (system, (block, block + own)) if run[1] > run[0]]
        output = _length(rng, load.answer_tokens, load.spread)
        yield Request(
            at=at,
            prompt_tokens=tokens,
            output_tokens=output,
            blocks=Blocks(names, tuple(runs)),
            session=f"conversation-{number}",
            priority=priority,
            target_s=load.target_s,
            think_s=think_s,
        )
        tokens += output
        if rng.random() < 1 / load.turns or tokens > MAX_PROMPT_TOKENS:
            return
        think_s = rng.expovariate(1 / load.think_s) if load.think_s else 0.0
        at += load.answer_s + think_s


def _length(rng: random.Random, mean: float, spread: float) -> int:
    """Tokens, at least 1, of this mean."""
    return max(1, round(rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)))


def _between(rng: random.Random, load: Load) -> float:
    """Seconds to the next conversation: gamma, of the wanted mean and variation."""
    shape = 1 / load.burstiness
    return rng.gammavariate(shape, 1 / (load.starts_per_s * shape))
