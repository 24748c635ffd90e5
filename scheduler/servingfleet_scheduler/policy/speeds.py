"""How fast an engine computes and loads, as the estimate needs it.

The defaults describe an 8B model on one H100-class GPU; what matters for a choice is their order of size, and a pool
that differs sets its own (`pools`). They are what learning starts from (`learning`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

TIER_NAMES = ("gpu", "host", "disk", "shared")

BYTES_PER_TOKEN = 128 * 1024
"""Of the defaults: key-value state of one token, all layers."""

PRIOR_SHARE = 0.5
"""Standard deviation of a speed that nobody has measured here, as a share of it. Efficiencies of public series lie between
0.4 and 0.85 of the peak where the defaults take 0.55, and the peak itself is the operator's word."""

NOISE_SHARE = 0.1
"""Standard deviation of a first token's seconds around a right estimate, as a share, until it is measured."""


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """Time to load cached tokens into GPU memory: `fixed_s + tokens * token_s`."""

    fixed_s: float
    token_s: float
    sd_share: float = PRIOR_SHARE
    """Standard deviation of `token_s`, as a share of it."""

    def seconds(self, tokens: float) -> float:
        return self.fixed_s + self.token_s * tokens if tokens > 0 else 0.0


class Covariance(NamedTuple):
    """Of step_s, token_s and attention_s: how far each may be off, and which of them together."""

    step_step: float
    step_token: float
    step_attention: float
    token_token: float
    token_attention: float
    attention_attention: float

    def variance(self, steps: float, tokens: float, pairs: float) -> float:
        """Of `step_s * steps + token_s * tokens + attention_s * pairs`, in square seconds."""
        return (
            steps * steps * self.step_step
            + tokens * tokens * self.token_token
            + pairs * pairs * self.attention_attention
            + 2.0
            * (
                steps * tokens * self.step_token
                + steps * pairs * self.step_attention
                + tokens * pairs * self.token_attention
            )
        )


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds that an engine needs. Priors, or what outcomes have made of them."""

    step_s: float = 0.040
    """Per step of the engine, whatever its length: tokenising, scheduling, launching. Fits of public series gave 40 and
    45 ms."""
    token_s: float = 5e-5
    """Per computed token: 20,000 tokens a second; public series lie between 8,000 and 50,000."""
    attention_s: float = 1.7e-9
    """Per pair of computed and attended token: equals the linear part at about 30,000 tokens of context."""
    host: TierSpeed = TierSpeed(fixed_s=0.003, token_s=3.3e-6)
    """128 KiB a token over PCIe 5 at 40 GB/s."""
    disk: TierSpeed = TierSpeed(fixed_s=0.008, token_s=2.6e-5)
    """The same from local NVMe at 5 GB/s."""
    shared: TierSpeed = TierSpeed(fixed_s=0.008, token_s=1.6e-5)
    """The same from a shared store at 8 GB/s a node."""
    step_tokens: int = 8192
    """Tokens that one step computes at most: vLLM's default for servers on GPUs of 70 GiB and more, SGLang's chunk
    below 90 GB."""
    drag_share: float = 0.1
    """Share by which a step with running decodes takes longer at a full cache: an 8B model on H100 reads 52 GB of
    key-value state (400,000 tokens) in 9% of the time of 8,192 prompt tokens."""
    request_tokens: int = 1024
    """Uncached tokens of a waiting request of which nothing else is known."""
    unproven_s: float = 1.0
    """Price of an engine whose stream broke off: it may be dead, and a failed request must go elsewhere. A dead
    engine has no queue, so that without this it would look best."""
    covariance: Covariance | None = None
    """None: nothing was learned, all is uncertain by PRIOR_SHARE."""
    noise_share: float = NOISE_SHARE
    assumed: bool = False
    """Nobody has said how fast it is, and nothing was learned yet."""

    def steps(self, tokens: float) -> int:
        """Of the engine, to compute so many tokens: one at least."""
        return max(1, math.ceil(tokens / self.step_tokens))

    def scaled(self, factor: float) -> Speeds:
        """An engine that takes `factor` times as long for all."""
        # Written out: `replace` takes three times as long.
        return Speeds(
            self.step_s * factor,
            self.token_s * factor,
            self.attention_s * factor,
            _scaled(self.host, factor),
            _scaled(self.disk, factor),
            _scaled(self.shared, factor),
            self.step_tokens,
            self.drag_share,
            self.request_tokens,
            self.unproven_s,
            self.covariance,
            self.noise_share,
            self.assumed,
        )


def _scaled(tier: TierSpeed, factor: float) -> TierSpeed:
    return TierSpeed(tier.fixed_s * factor, tier.token_s * factor, tier.sd_share)


DEFAULTS = Speeds(assumed=True)
