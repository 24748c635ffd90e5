"""Small fleets, prompts and traces for tests of the replay."""

from __future__ import annotations

import math
from collections.abc import Sequence

from servingfleet_sim.emulator.speed import Speed
from servingfleet_sim.replay.fleet import EventsSpec, FleetSpec, PoolSpec, check
from servingfleet_sim.replay.traces import Blocks, Names, Request

BLOCK = 16
SPEED = Speed(
    step_s=0.004,
    weights_s=0.003,
    token_s=1e-4,
    pair_s=1e-6,
    context_token_s=1e-7,
)
NOW = EventsSpec(lag_s=0.0, link_s=0.0)
"""Events and credits arrive at once."""


def pool(
    name: str = "plain",
    *,
    replicas: int = 1,
    ranks: int = 1,
    engine: str = "vllm",
    gpu_tokens: int = 16_000,
    step_tokens: int = 512,
    **more: object,
) -> PoolSpec:
    return PoolSpec(
        name=name,
        replicas=replicas,
        ranks=ranks,
        engine=engine,  # type: ignore[arg-type]
        speed=SPEED,
        gpu_tokens=gpu_tokens,
        step_tokens=step_tokens,
        **more,  # type: ignore[arg-type]
    )


def fleet(*pools: PoolSpec, **more: object) -> FleetSpec:
    made = FleetSpec(pools=pools, **more)  # type: ignore[arg-type]
    check(made)
    return made


def trace(
    rows: Sequence[tuple[float, int, int, str]], *, target_s: float = math.nan
) -> list[Request]:
    """Rows: second, prompt tokens, output tokens, blocks as letters: prompts share as many blocks as they begin with the
    same letters."""
    names = Names("letters")
    numbers: dict[str, int] = {}
    found = []
    for at, prompt, output, letters in rows:
        runs = []
        for end in range(1, len(letters) + 1):
            number = numbers.setdefault(letters[:end], len(numbers))
            runs.append((number, number + 1))
            names.reach(number)
        found.append(Request(at, prompt, output, Blocks(names, tuple(runs)), target_s=target_s))
    return found
