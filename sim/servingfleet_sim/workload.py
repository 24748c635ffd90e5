"""A made-up workload: conversations of several turns, many of which begin with the same system prompt.

Pure and seeded: the same settings give the same conversations, token for token. What the engines answer is not in it;
whoever plays it puts the answers between the turns.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

MODEL = "emulated"
"""Served name of the model that conversations are had with, where nothing else is said."""
FIRST_TOKEN = 16
"""Lower ids are left to special tokens."""


@dataclass(frozen=True)
class Shape:
    """What the conversations look like. Tokens are counted, times are seconds."""

    seconds: float = 50.0
    """Conversations begin, and turns are asked, before this."""
    sessions_per_s: float = 2.0
    system_prompts: int = 10
    """Prompts that conversations share; the k-th is chosen 1/k times as often as the first."""
    system_tokens: tuple[int, int] = (1200, 3600)
    """Shortest and longest system prompt."""
    user_tokens: tuple[int, int] = (60, 500)
    """Of one turn's question."""
    answer_tokens: tuple[int, int] = (12, 32)
    turns: float = 4.0
    """Turns of a conversation on average: each is followed by another with the same chance."""
    think_s: float = 4.0
    """From one turn to the next on average, and at least a fifth of it."""
    vocabulary: int = 32_000
    models: tuple[tuple[str, float], ...] = ((MODEL, 1.0),)
    """Served names, and the share of the conversations that each has."""


@dataclass(frozen=True)
class Turn:
    """One question. Its prompt is all that was said before, and `tokens`."""

    at_s: float
    """When it is asked, in seconds from the start: later only where the answer before it comes later."""
    tokens: tuple[int, ...]
    answer_tokens: int


@dataclass(frozen=True)
class Session:
    """One conversation; its first turn begins with the tokens of its system prompt."""

    number: int
    system: int
    turns: tuple[Turn, ...]
    model: str = MODEL


def sessions(shape: Shape, seed: int) -> Iterator[Session]:
    """The conversations in the order in which they begin."""
    systems = list(_systems(shape, seed))
    weights = list(itertools.accumulate(1 / rank for rank in range(1, len(systems) + 1)))
    arrivals = random.Random(f"{seed} arrivals")
    at_s = 0.0
    for number in itertools.count():
        at_s += arrivals.expovariate(shape.sessions_per_s)
        if at_s >= shape.seconds:
            return
        # A generator of its own: a session is the same whatever the others are, and however long the run.
        rng = random.Random(f"{seed} session {number}")
        system = rng.choices(range(len(systems)), cum_weights=weights)[0]
        turns = tuple(_turns(shape, rng, at_s, systems[system]))
        names, shares = zip(*shape.models, strict=True)
        # Of its own, too: what is said does not depend on whom it is said to.
        (model,) = random.Random(f"{seed} model {number}").choices(names, shares)
        yield Session(number, system, turns, model)


def _systems(shape: Shape, seed: int) -> Iterator[tuple[int, ...]]:
    rng = random.Random(f"{seed} systems")
    for _ in range(shape.system_prompts):
        yield _tokens(shape, rng, rng.randint(*shape.system_tokens))


def _turns(
    shape: Shape, rng: random.Random, at_s: float, system: tuple[int, ...]
) -> Iterator[Turn]:
    tokens = system
    while at_s < shape.seconds:
        tokens += _tokens(shape, rng, rng.randint(*shape.user_tokens))
        yield Turn(at_s, tokens, rng.randint(*shape.answer_tokens))
        if rng.random() * shape.turns < 1:
            return
        tokens = ()
        at_s += shape.think_s * (0.2 + rng.expovariate(1 / 0.8))


def _tokens(shape: Shape, rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(FIRST_TOKEN, shape.vocabulary), k=count))
