"""How long a step takes on a GPU that is not there.

The formulas of prefill and decode, with `n` tokens to compute and `h` tokens of context each:

    step = a + max(w, b * sum(n) + c * sum(n * (h + n / 2))) + d * (context of the sequences that decode)

`a` is the engine's own cost of a step; `w` the time to read the weights, below which no step falls, so that small
steps are bound by memory; `b` and `c` the matrix and attention work; `d` the reading of keys and values by decodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .steps import Work


@dataclass(frozen=True)
class Speed:
    """Coefficients in seconds."""

    step_s: float
    """a: scheduling, launching, sampling, once a step."""
    weights_s: float
    """w: reading the weights once."""
    token_s: float
    """b: for each token computed."""
    pair_s: float
    """c: for each pair of a computed token and one before it."""
    context_token_s: float
    """d: for each token of context of a sequence that decodes."""
    load_s: float = 0.003
    """Before a load from the host tier moves its first byte."""
    load_token_s: float = 3.3e-6
    """For each token loaded from the host tier."""

    def step(self, work: Iterable[Work]) -> float:
        """Seconds that a step with this work takes."""
        tokens = 0
        pairs = 0.0
        context = 0
        for part in work:
            tokens += part.tokens
            pairs += part.tokens * (part.context + part.tokens / 2)
            if part.decodes:
                context += part.context
        if not tokens:
            return 0.0
        compute = max(self.weights_s, self.token_s * tokens + self.pair_s * pairs)
        return self.step_s + compute + self.context_token_s * context

    def scaled(self, factor: float) -> Speed:
        """The same GPU, `factor` times as fast in everything."""
        return Speed(
            self.step_s / factor,
            self.weights_s / factor,
            self.token_s / factor,
            self.pair_s / factor,
            self.context_token_s / factor,
            self.load_s / factor,
            self.load_token_s / factor,
        )


INSTANT = Speed(0, 0, 0, 0, 0, 0, 0)

# An 8B model in 16 bits on one GPU: b from 12 to 89 thousand tokens a second end to end, c from peak FLOP/s at half
# efficiency, w = 16 GB and d = 128 KiB a token over the memory bandwidth, loads over PCIe.
GPUS: Mapping[str, Speed] = MappingProxyType(
    {
        "b200": Speed(0.004, 0.0020, 11e-6, 0.47e-9, 20e-9, 0.003, 3.3e-6),
        "h100": Speed(0.005, 0.0048, 26e-6, 1.06e-9, 49e-9, 0.003, 3.3e-6),
        "a100": Speed(0.006, 0.0078, 71e-6, 3.4e-9, 80e-9, 0.003, 7.3e-6),
        "l40s": Speed(0.006, 0.0185, 83e-6, 2.9e-9, 190e-9, 0.003, 7.3e-6),
        "instant": INSTANT,
    }
)
