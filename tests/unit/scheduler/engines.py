"""A made-up engine that computes prompts in steps, first come, first served, to learn speeds from."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from servingfleet_scheduler.labels import Sent
from servingfleet_scheduler.learning import Pace
from servingfleet_scheduler.policy.estimate import prefill_seconds
from servingfleet_scheduler.policy.rules import UNKNOWN
from servingfleet_scheduler.policy.speeds import Speeds


class Prompt(NamedTuple):
    """`reused` of `tokens` are cached on the GPU."""

    at: float
    tokens: int
    reused: int


class Served(NamedTuple):
    prompt: Prompt
    first: float


@dataclass
class Engine:
    """Takes `speeds`, times what `factor` says at a moment; `noise` is a step's relative standard deviation."""

    speeds: Speeds
    rng: random.Random
    noise: float = 0.0
    factor: Callable[[float], float] = lambda now: 1.0
    outlier_share: float = 0.0
    """Of steps, that take 5 s more."""

    def serve(self, prompts: list[Prompt]) -> list[Served]:
        """First tokens, in the order in which they come."""
        speeds, budget = self.speeds, self.speeds.step_tokens
        waiting: list[list[float]] = []
        served, now, at = [], 0.0, 0
        while at < len(prompts) or waiting:
            if not waiting:
                now = max(now, prompts[at].at)
            while at < len(prompts) and prompts[at].at <= now:
                waiting.append([at, prompts[at].tokens - prompts[at].reused])
                at += 1
            room, seconds = budget, speeds.step_s
            done = []
            for entry in waiting:
                prompt = prompts[int(entry[0])]
                part = min(room, int(entry[1]))
                before = prompt.tokens - int(entry[1])
                seconds += speeds.token_s * part + speeds.attention_s * part * (before + part / 2)
                entry[1] -= part
                room -= part
                if not entry[1]:
                    done.append(prompt)
                if not room:
                    break
            seconds *= self.factor(now) * self.rng.lognormvariate(0.0, self.noise)
            if self.rng.random() < self.outlier_share:
                seconds += 5.0
            now += seconds
            waiting = [entry for entry in waiting if entry[1]]
            served += [Served(prompt, now) for prompt in done]
        return served


def load(
    rng: random.Random, count: int, speeds: Speeds, share: float, mean_tokens: int = 3000
) -> list[Prompt]:
    """Prompts that keep an engine busy for that share of the time."""
    now, found = 0.0, []
    for _ in range(count):
        tokens = max(64, int(rng.lognormvariate(math.log(mean_tokens), 1.0)))
        reused = int(tokens * rng.choice((0.0, 0.0, 0.5, 0.9))) // 16 * 16
        found.append(Prompt(now, tokens, reused))
        now += rng.expovariate(share / prefill_seconds(speeds, tokens - reused, reused))
    return found


def told(
    pace: Pace, prompts: list[Prompt], served: list[Served], decode_s: float = 2.0
) -> Iterator[float]:
    """Tells a rank all of it in order of time; yields the time of what has just been learned from."""
    events: list[tuple[float, int, str, Prompt]] = []
    numbers = {id(prompt): number for number, prompt in enumerate(prompts)}
    for prompt in prompts:
        events.append((prompt.at, 0, "sent", prompt))
    for prompt, first in served:
        events.append((first, 1, "first", prompt))
        events.append((first + decode_s, 2, "ended", prompt))
    learned = 0
    for at, _, what, prompt in sorted(events, key=lambda each: each[:2]):
        name = str(numbers[id(prompt)])
        if what == "sent":
            tiers = (prompt.reused, 0, 0, 0)
            pace.labels.sent(name, Sent(at, prompt.tokens, tiers))
        elif what == "first":
            pace.labels.first_token(name, at)
        else:
            pace.labels.ended(name, at, prompt.reused)
            pace.learn(UNKNOWN)
            if pace.learned > learned:
                learned = pace.learned
                yield prompt.at
