"""The rank on which a prompt would see its first token first, by all that the engines know of themselves. Pure.

It knows what every cache holds, what every prompt ahead will leave there, and how long each step takes; not what will
arrive later, nor what will be evicted meanwhile. It is greedy: best for this prompt, not for the next ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from .engine import RankEngine


def fastest(
    engines: Mapping[tuple[str, int], RankEngine], hashes: bytes, prompt: int, now: float
) -> tuple[str, int] | None:
    """Of equal ones the first. None: there is none."""
    best: tuple[float, tuple[str, int]] | None = None
    for key, engine in engines.items():
        seconds = first_token_s(engine, hashes, prompt, now)
        if best is None or seconds < best[0]:
            best = (seconds, key)
    return best[1] if best is not None else None


def first_token_s(engine: RankEngine, hashes: bytes, prompt: int, now: float) -> float:
    """Seconds to the first token of a prompt that is sent there now."""
    ahead = [*engine.prefilling, *engine.loading, *engine.waiting]
    work: list[tuple[int, int]] = []
    for job in ahead:
        new = job.new if job.waits else job.prompt - job.computed
        if new:
            work.append((new, job.prompt - new))
    reused, by_tier = engine.will_reuse(hashes, prompt)
    work.append((max(1, prompt - reused), reused))
    load_s = engine.memory.load_s(by_tier)
    wait_s = engine.until_step_ends(now)
    queue_s = _steps_s(engine, work[:-1])
    own_s = _steps_s(engine, work) - queue_s
    if engine.sglang:
        return wait_s + queue_s + own_s + max(0.0, load_s - engine.pool.overlap * own_s)
    # It is loaded while others are computed, once the engine has come to it.
    return wait_s + queue_s + load_s + own_s


def _steps_s(engine: RankEngine, work: list[tuple[int, int]]) -> float:
    """Seconds of the steps that prefill this work, with those that decode now beside it."""
    tokens = sum(new for new, _ in work)
    if not tokens:
        return 0.0
    speed = engine.speed
    decodes = 0 if engine.sglang else len(engine.decoding)
    steps = -(-tokens // max(1, engine.pool.step_tokens - decodes))
    pairs = sum(new * (held + new / 2) for new, held in work)
    tokens += steps * decodes
    compute = speed.token_s * tokens + speed.pair_s * pairs
    context = 0
    if decodes:
        compute += speed.pair_s * steps * engine.context
        context = engine.context
    compute = max(compute, steps * speed.weights_s)
    return steps * (speed.step_s + speed.context_token_s * context) + compute
