"""What clients ask, and what checks probe with."""

from __future__ import annotations

import random

BLOCK = 16

Prompt = tuple[int, ...]


class Prompts:
    """Conversations that grow, over a few system prompts: prefixes shared widely, and rarely whole blocks."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._systems = [self._tokens(150) for _ in range(3)]
        self._talks: list[Prompt] = []
        self.sent: list[Prompt] = []

    def next(self) -> Prompt:
        """The next turn of some conversation, or the first of a new one."""
        if len(self._talks) < 4 or self._rng.random() < 0.2:
            self._talks.append(self._rng.choice(self._systems))
        turn = self._rng.randrange(len(self._talks))
        prompt = self._talks[turn] + self._tokens(self._rng.randint(20, 90))
        self._talks[turn] = prompt
        if len(prompt) > 900:
            del self._talks[turn]
        self.sent.append(prompt)
        return prompt

    def probes(self, count: int = 8) -> list[Prompt]:
        """Prompts sent, cut, continued, cut at a block's end; one that nobody holds."""
        found = [self._tokens(100)]
        for each in self._rng.sample(self.sent, min(count, len(self.sent))):
            cut = self._rng.randint(1, len(each))
            whole = max(BLOCK, len(each) // BLOCK * BLOCK)
            found += [each, each[:cut], each + self._tokens(25), each[:whole]]
        return found

    def _tokens(self, count: int) -> Prompt:
        return tuple(self._rng.randrange(8, 32_000) for _ in range(count))
