"""What the relay says of itself, for people, metrics and tests.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from servingfleet_protos.v1.common_pb2 import StreamState, Tier

from .conformance.standing import Condition, Failure
from .rank import Rank


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank, for people, metrics and tests."""

    rank: int
    state: str
    """"live", "history_lost", "unproven", "resyncing" or "quarantined"."""
    reason: str
    incarnation: int
    engine_seq: int | None
    mirror: dict[str, int]
    traits: dict[str, str]
    """How the engine writes its events."""
    condition: Condition = Condition.LIVE
    """What the stream as a whole is good for."""
    tiers: Mapping[str, tuple[Condition, str]] = field(default_factory=dict)
    """Tiers and media that are not as the stream is, with the reason."""
    failures: tuple[Failure, ...] = ()
    """Invariants that failed since the start."""


@dataclass(frozen=True, slots=True)
class Status:
    """The whole pipeline now."""

    ranks: tuple[RankStatus, ...]
    lanes: tuple[str, ...]
    links: dict[str, str]
    """Phase of each link, by its name."""
    totals: dict[str, int]
    engine: str = ""
    """"": not known yet."""


def status_of(source: Rank) -> RankStatus:
    """All about one rank now: it walks the mirror."""
    state = source.state()
    standing = source.monitor.standing
    tiers = {
        Tier.Name(tier).removeprefix("TIER_").lower(): told  # type: ignore[arg-type]
        for tier, told in standing.tiers.items()
    }
    media = {f"medium {name}": (Condition.QUARANTINED, why) for name, why in standing.media.items()}
    return RankStatus(
        source.rank,
        StreamState.Name(state.state).removeprefix("STREAM_STATE_").lower(),
        state.reason,
        state.incarnation,
        source.numbering.applied,
        source.holdings.mirror.counts(),
        source.monitor.fingerprint.describe(),
        source.condition,
        tiers | media,
        source.monitor.failures.all,
    )
