"""Steps that only decode, with nothing to prefill between them: their time in closed form. Pure.

With `d` sequences of together `c` tokens of context, step `k` (from 0) takes

    a + max(w, b*d + p*(c + k*d + d/2)) + r*(c + k*d)

which is linear in `k` below and above the step from which computing takes longer than reading the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..emulator.speed import Speed


@dataclass(frozen=True, slots=True)
class Stretch:
    """`steps` steps of `sequences`; `context`: tokens of all of them before the first."""

    speed: Speed
    sequences: int
    context: int
    steps: int

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return self.after(self.steps)

    def after(self, steps: int) -> float:
        """Seconds until so many of them are over."""
        speed, d, c = self.speed, self.sequences, self.context
        triangle = steps * (steps - 1) / 2
        fixed = steps * speed.step_s + speed.context_token_s * (steps * c + d * triangle)
        bound = min(steps, self._bound_steps())
        rest = steps - bound
        first = speed.token_s * d + speed.pair_s * (c + bound * d + d / 2)
        computed = rest * first + speed.pair_s * d * rest * (rest - 1) / 2
        return fixed + bound * speed.weights_s + computed

    def steps_by(self, seconds: float) -> int:
        """The fewest steps, one at least, after which so much time is over; at most all."""
        low, high = 1, self.steps
        while low < high:
            middle = (low + high) // 2
            if self.after(middle) >= seconds:
                high = middle
            else:
                low = middle + 1
        return low

    def cut(self, steps: int) -> Stretch:
        """The first of them."""
        return Stretch(self.speed, self.sequences, self.context, steps)

    def _bound_steps(self) -> int:
        """How many steps, from the first on, take no longer to compute than to read the weights."""
        speed, d = self.speed, self.sequences
        slack = speed.weights_s - speed.token_s * d - speed.pair_s * (self.context + d / 2)
        if slack < 0:
            return 0
        if not speed.pair_s:
            return self.steps
        return math.floor(slack / (speed.pair_s * d)) + 1
