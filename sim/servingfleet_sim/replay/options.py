"""What may differ between two replays of one trace on one fleet. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from servingfleet_scheduler.settings import SchedulerSettings

from .fleet import FleetSpec

ORACLE = "oracle"
"""A policy of replays only: perfect information of what every engine holds and has to do (`oracle`)."""


@dataclass(frozen=True, slots=True)
class Options:
    """Of one replay. `policy`, `credit`, `learn`, `price_tiers`, `price_others`, `quantile` and `explore_share` are the
    schedulers' own settings."""

    policy: str = "cost"
    block_tokens: int = 512
    """Of a block of the trace; the schedulers' canonical block."""
    closed_loop: bool = False
    """The next request of a session is sent `think_s` after the one before has ended; else each when the trace says."""
    jitter_s: float = 1.0
    """Each arrival (each session's first, in a closed loop) comes up to so much later, by the seed: one run is chaotic."""
    schedulers: int | None = None
    """They take turns; None: as the fleet file says."""
    lag_s: float | None = None
    """Of cache events; None: as the fleet file says."""
    credit: bool = True
    learn: bool = True
    price_tiers: bool = True
    price_others: bool = True
    tell_tiers: bool = True
    """False: the schedulers hear only of what is in GPU memory."""
    quantile: float = 0.5
    explore_share: float = 0.01
    deadlines: bool = True
    """A request that has a target asks for it, and is turned away where it can't be met; else its target is only
    remembered, for the figures."""
    retries: int = 3
    """In a closed loop, how often a client comes back after it was turned away, when it was told to."""
    attempts: int = 3
    """How often a request is sent until an engine does not fail: the first, and two elsewhere."""
    compare_every: int = 17
    """With several schedulers, every so manieth prompt is asked of all of them. Odd, so that each gets its turn."""
    tick_s: float = 0.5
    """Between two ticks of the schedulers."""


def settings(options: Options, fleet: FleetSpec) -> SchedulerSettings:
    """Of each scheduler."""
    ranks = sum(pool.replicas * pool.ranks for pool in fleet.pools)
    return SchedulerSettings(
        block_tokens=options.block_tokens,
        policy="cost" if options.policy == ORACLE else options.policy,
        pools=fleet.told(),
        credit=options.credit,
        learn=options.learn,
        price_tiers=options.price_tiers,
        price_others=options.price_others,
        quantile=options.quantile,
        explore_share=options.explore_share,
        # All engines are there, and empty, when a run begins.
        snapshot_slots=ranks,
    )
