"""How fast an engine computes and loads, as the estimate needs it.

The defaults describe an 8B model on one H100-class GPU; what matters for a choice is their order of size, and a pool
that differs sets its own (`pools`).
"""

from __future__ import annotations

from dataclasses import dataclass

TIER_NAMES = ("gpu", "host", "disk", "shared")

BYTES_PER_TOKEN = 128 * 1024
"""Of the defaults: key-value state of one token, all layers."""


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """Time to load cached tokens into GPU memory: `fixed_s + tokens * token_s`."""

    fixed_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds that an engine needs. Priors, not measurements of this fleet."""

    step_s: float = 0.040
    """Per request, whatever its length: tokenising, scheduling, one step. Fits of public series gave 40 and 45 ms."""
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
    request_tokens: int = 1024
    """Uncached tokens of a waiting request of which nothing else is known."""
    unproven_s: float = 1.0
    """Price of an engine whose stream broke off: it may be dead, and a failed request must go elsewhere. A dead
    engine has no queue, so that without this it would look best."""


DEFAULTS = Speeds()
