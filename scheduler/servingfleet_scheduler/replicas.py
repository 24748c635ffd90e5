"""One replica and its ranks, as known now. Values only: `fleet` changes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from servingfleet_protos.v1 import common_pb2, stream_pb2

from .backlog import Backlog, Dispatch, Echo, Load
from .breaker import Breaker
from .eviction import Inserted
from .hello import rules_of
from .learning import Pace
from .policy.rules import UNKNOWN, Rules
from .policy.speeds import DEFAULTS, Speeds
from .room import Room
from .settings import StaticReplica
from .traffic import Traffic

LIVE = common_pb2.STREAM_STATE_LIVE
HISTORY_LOST = common_pb2.STREAM_STATE_HISTORY_LOST
RESYNCING = common_pb2.STREAM_STATE_RESYNCING
UNPROVEN = common_pb2.STREAM_STATE_UNPROVEN
NO_RELAY = common_pb2.STREAM_STATE_UNSPECIFIED


class Adapters(NamedTuple):
    """What an engine said at `read_at` that it has loaded, by the names that requests use."""

    names: frozenset[str]
    read_at: float


@dataclass(slots=True)
class Rank:
    """One data-parallel rank. `state` and `reason` are as the relay said last."""

    number: int
    state: common_pb2.StreamState.ValueType = NO_RELAY
    reason: str = ""
    incarnation: int = 0
    engine_seq: int | None = None
    warm: bool = False
    """Its snapshot has ended at this scheduler."""
    doubted: bool = False
    """Something of it could not be applied since its last snapshot began."""
    inserted: dict[int, Inserted] = field(default_factory=dict)
    """What its engine stored of late, by lane."""
    load: Load | None = None
    dispatches: dict[str, Dispatch] = field(default_factory=dict)
    """Sent there by this scheduler and not yet ended, by decision id."""
    backlog: Backlog = field(default_factory=Backlog)
    """Work ahead, of whatever scheduler."""
    room: Room = field(default_factory=Room)
    echo: Echo = field(default_factory=Echo)
    speeds: Speeds | None = None
    """As learned when something was sent there last; None: nothing was."""
    last_dispatch: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    adapters: Adapters | None = None
    """None: its engine does not say."""
    breaker: Breaker | None = None
    """None: nothing has failed there in this life of its engine."""
    pace: Pace | None = None
    """How fast it is, as learned. None: it was never considered."""


@dataclass(slots=True)
class Replica:
    """One engine. `number` is its number in the model's index."""

    name: str
    model: str
    number: int
    profile: stream_pb2.Profile
    endpoint: str = ""
    engine: str = ""
    engine_version: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    draining_by: set[str] = field(default_factory=set)
    """Who drains it; empty: it takes requests."""
    speeds: Speeds = DEFAULTS
    """Of its pool, as the operator says: what learning starts from."""
    rules: Rules = UNKNOWN
    """What its profile says about time."""
    pairs: bool = False
    """Its blocks are hashed as pairs of tokens."""
    gpu_tokens: int = 0
    """That a rank's GPU cache takes. 0: not known."""
    slowest_tier: int = 0
    """Of those that the engine has."""
    slowest_lanes: tuple[tuple[int, int], ...] = ()
    """Of that tier: number, and tokens that it takes."""
    ranks: dict[int, Rank] = field(default_factory=dict)
    connected: bool = False
    """A relay's stream is open."""
    away_since: float | None = None
    """Since when its stream is closed; None: it is open, or there never was one."""
    static: StaticReplica | None = None
    relay_totals: dict[str, int] = field(default_factory=dict)
    relay_mirror_bytes: int = 0

    def __post_init__(self) -> None:
        self.describe(self.profile)

    def describe(self, profile: stream_pb2.Profile) -> None:
        """What the engine says of itself. Every route reads it of every replica: so it is taken apart once."""
        self.profile, self.rules = profile, rules_of(profile)
        self.pairs = profile.key_form == common_pb2.KEY_FORM_PAIR
        lanes = profile.lanes
        gpu = (each.capacity_tokens for each in lanes if each.tier == common_pb2.TIER_GPU)
        self.gpu_tokens = max(gpu, default=0)
        slowest = self.slowest_tier = max((each.tier for each in lanes), default=0)
        self.slowest_lanes = tuple(
            (each.lane, each.capacity_tokens) for each in lanes if each.tier == slowest
        )

    def speeds_of(self, rank: Rank) -> Speeds:
        """Of a rank, as known last."""
        return rank.speeds or self.speeds

    def state(self, rank: Rank) -> common_pb2.StreamState.ValueType:
        """What the rank's stream is worth: a closed stream proves nothing."""
        return UNPROVEN if self.away_since is not None else rank.state

    def why(self, rank: Rank) -> str:
        """The reason for the state, for people."""
        return "relay away" if self.away_since is not None else rank.reason

    def certain(self, rank: Rank) -> bool:
        """The index knows all that this rank holds."""
        return self.state(rank) == LIVE and rank.warm
