"""Emulated models whose layers don't all keep every token: what they publish predicts what they reuse, under eviction.

That they publish what the recorded engines did is held in test_emulator.py; here they live longer than those did.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from servingfleet_sim.emulator.events import Removed, generation
from servingfleet_sim.emulator.groups import STATE, WINDOW, LayerGroup
from servingfleet_sim.emulator.scheduler import Scheduler
from servingfleet_sim.emulator.sequence import Asked, Sequence
from servingfleet_sim.emulator.steps import Limits
from servingfleet_sim.recordings import Message, Recording, Request
from servingfleet_sim.verify import verify

FULL = LayerGroup()
MODELS = {
    "every other layer with a window": Limits(
        90, 16, 4, 256, groups=(LayerGroup(WINDOW, 128), FULL)
    ),
    "a window of one block, after full attention": Limits(
        90, 16, 4, 2048, groups=(FULL, LayerGroup(WINDOW, 17))
    ),
    "a window, and a host tier": Limits(
        90, 16, 4, 256, host_chunks=150, groups=(LayerGroup(WINDOW, 128), FULL)
    ),
    "a window, and a host tier that tells of tokens": Limits(
        90, 16, 4, 256, host_chunks=150, host_described=True, groups=(LayerGroup(WINDOW, 128), FULL)
    ),
    "three of four layers recurrent": Limits(
        80, 32, 4, 256, groups=(*(LayerGroup(STATE),) * 3, FULL)
    ),
    "blocks as large as a state": Limits(16, 528, 4, 2048, groups=(LayerGroup(STATE), FULL)),
}


class Life:
    """One engine that is asked one prompt after the other, and what it told."""

    def __init__(self, limits: Limits) -> None:
        self.scheduler = Scheduler(limits, b"any seed")
        self.messages: list[Message] = []
        self.requests: list[Request] = []
        self.evicted = 0

    def ask(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        """Returns the answer."""
        number = len(self.requests)
        sequence = Sequence(number, Asked(prompt, max_tokens))
        self.scheduler.add(sequence)
        while (step := self.scheduler.schedule(0.0)) is not None:
            self._publish(self.scheduler.complete(step).events, float(number))
        assert sequence.cached_tokens is not None
        asked = Request(
            number, "", number - 0.5, number + 0.5, (prompt,), len(prompt), sequence.cached_tokens
        )
        self.requests.append(asked)
        return tuple(sequence.outputs)

    def _publish(self, events: list, now: float) -> None:  # type: ignore[type-arg]
        if not events:
            return
        self.evicted += sum(isinstance(event, Removed) for event in events)
        payload = generation("0.33.0").encode(events, now, 0)
        seq = len(self.messages).to_bytes(8, "big")
        self.messages.append(Message(now, 0, (b"", seq, payload)))

    def recording(self) -> Recording:
        return Recording("emulated", 1, tuple(self.messages), tuple(self.requests), ())


def talks(rng: random.Random, longest: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Prompts that share beginnings and grow, and how long each is answered."""
    systems = [tokens(rng, rng.randint(longest // 8, longest // 3)) for _ in range(3)]
    said = {number: rng.choice(systems) for number in range(8)}
    for _ in range(120):
        number = rng.randrange(8)
        said[number] += tokens(rng, rng.randint(1, longest // 10))
        if len(said[number]) > longest - 40:
            said[number] = rng.choice(systems)
        yield said[number], rng.randint(1, 40)


def tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(16, 32_000), k=count))


@pytest.mark.parametrize("name", MODELS)
def test_every_reuse_is_predicted_under_eviction(name: str) -> None:
    limits = MODELS[name]
    life = Life(limits)
    for prompt, max_tokens in talks(random.Random(name), limits.longest):
        life.ask(prompt, max_tokens)
    found = verify(life.recording())
    missed = [verdict for verdict in found.verdicts if not verdict.hit]
    assert not missed, [(m.request.number, m.predicted, m.request.cached_tokens) for m in missed]
    assert life.evicted > 100
    reused = [request.cached_tokens for request in life.requests]
    assert 20 < sum(map(bool, reused)) < len(reused)
