"""Every number that an operator can set, with its unit and the reason for its default.

The numbers of the estimate live in `policy.speeds`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .access import Keeping
from .breaker import BreakerSettings
from .policy.speeds import DEFAULTS, Speeds


@dataclass(frozen=True, slots=True)
class StaticReplica:
    """A replica that is known without a relay: routed by load and credits until a relay speaks for it."""

    model: str
    replica: str
    endpoint: str = ""
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class AdmissionTarget:
    """What requests of a class are promised. A request is of the class with the highest `priority` that its own reaches."""

    priority: int
    seconds: float
    """To first token."""
    queue_s: float = math.inf
    """Requests of this class go only where no more work than this waits: the room beyond is kept for other classes."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Who is turned away early. Without targets only requests that name a deadline are."""

    targets: tuple[AdmissionTarget, ...] = ()
    z: float = 1.0
    """Standard deviations of the estimate that must still fit: 84% of those admitted are in time. At 0 half of those at the
    edge are late; simulated overload gave 581 late of 2,884 at 0, 81 of 2,879 at 1."""
    reopen_share: float = 0.9
    """Of its limit, until which a class that refused somebody stays closed."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Settings of the scheduler without its ports."""

    block_tokens: int = 16
    """Canonical block size; the whole fleet must share it."""
    policy: str = "cost"
    speeds: Speeds = DEFAULTS
    """Of replicas whose pool has none of its own."""
    pools: Mapping[str, Speeds] = field(default_factory=dict)
    """Speeds by pool: those replicas whose relay names it."""
    learn: bool = True
    """Speeds and corrections are learned from outcomes; False: the priors stay."""
    credit: bool = True
    """What was dispatched is credited before the engine confirms it."""
    price_tiers: bool = True
    """False: a hit in a slower tier is priced like one in GPU memory; for comparison."""
    price_others: bool = True
    """Seconds that later prompts will wait for this one count, too; False: only its own, for comparison."""
    quantile: float = 0.5
    """Where between `lower` and `upper` an uncertain prediction is priced: 0.5 as expected, below more careful."""
    explore_share: float = 0.01
    """Share of decisions that explore among the near ties; the decision says with what probability."""
    admission: AdmissionSettings = AdmissionSettings()
    static_replicas: tuple[StaticReplica, ...] = ()
    breaker: BreakerSettings = field(default_factory=BreakerSettings)

    # Requests
    max_prompt_tokens: int = 1_048_576
    """Longest prompt routed: 4 MiB of tokens, 512 KiB of hashes."""
    decision_ttl_s: float = 900.0
    """An outcome may come this long after its decision; beyond it counts as late. Long enough for a long answer."""
    max_decisions: int = 100_000
    """Open decisions remembered; beyond it the oldest are forgotten (their outcome joins from the id itself)."""
    max_ended: int = 500_000
    """Ended decisions remembered, to tell a second outcome; 16 bytes of fingerprint each."""
    predictions_kept: int = 16
    """Targets per decision whose prediction is kept, for outcomes that ran elsewhere."""
    load_stale_s: float = 10.0
    """Older engine load is ignored: several scrape intervals have failed by then."""
    max_pins: int = 200_000
    """Sessions whose last target is remembered, about 250 bytes each."""
    pin_ttl_s: float = 3600.0
    """A session silent for longer starts anew: an engine that is not idle has evicted it by then."""

    # Credits
    credit_ttl_s: float = 60.0
    """A credit ends by itself: by then the engine has announced the blocks or will not."""
    credit_served_s: float = 2.0
    """Or this long after its request was served, should the relay not say so before: no relay is further behind."""
    max_credits: int = 50_000
    max_credit_blocks: int = 20_000_000
    """Blocks under credit, all credits together: bounds memory when many long prompts are in flight."""

    # Relay streams
    hello_s: float = 10.0
    """A stream that has not said who it is by then is ended."""
    window_messages: int = 4096
    """Unacknowledged messages that a relay may have out."""
    ack_messages: int = 64
    """An acknowledgement goes out at least every so many messages."""
    ack_idle_s: float = 0.2
    """Or this long after the first message not yet acknowledged."""
    snapshot_slots: int = 2
    """Snapshots at once: a snapshot is the heaviest thing a relay sends, and routing goes on meanwhile."""
    snapshot_silence_s: float = 10.0
    """A slot whose relay says nothing for so long is given to the next."""
    snapshot_limit_s: float = 300.0
    """No snapshot holds a slot longer."""
    resync_interval_s: float = 10.0
    """Least time between two resyncs asked of one rank: a relay that keeps sending nonsense can't cause a storm."""
    takeover_silence_s: float = 5.0
    """Another stream may speak for a replica once the present one was silent for so long, or is closed."""
    replica_ttl_s: float = 600.0
    """A replica whose stream is closed is forgotten after this: an autoscaler has removed it by then."""
    max_replicas: int = 4096
    max_ranks: int = 1024
    """Ranks of one replica."""
    max_index_entries: int = 100_000_000
    """(holder, block) pairs of one model's index."""
    outbox_messages: int = 10_000
    """Messages waiting for one relay; beyond it credits are kept from it and counted."""

    # Ledger
    min_pairs: int = 20
    """A figure from fewer pairs is shown as unknown."""
    window_s: float = 3600.0
    """Span of the figures."""
    bucket_s: float = 60.0
    """The window slides by so much."""
    max_ledger_keys: int = 8192
    """(model, replica) pairs told apart; further replicas of a model are counted together."""

    def speeds_of(self, pool: str) -> Speeds:
        """Of a replica in this pool; a pool that nobody described has the defaults."""
        return self.pools.get(pool, self.speeds)


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Whom the scheduler asks who its callers are, and in whose name it serves."""

    fleet: str
    namespace: str
    audience: str
    """Clients' tokens must be made for it."""
    client_tokens: bool = True
    """False: Route and Report need none."""
    keeping: Keeping = field(default_factory=Keeping)
    max_verdicts: int = 4096
    """Of tokens, and of (token, right): a pod each, and its clients; about 1 KiB each."""
    review_s: float = 3.0
    """The API server answers a review in 2 ms; beyond this it is away."""
    review_threads: int = 8
    max_reviews: int = 512
    """Under way or waiting, all tokens together; beyond it callers are told to come again."""
    retry_s: float = 5.0
    """While the API server is away, it is asked for known callers no more often."""
    recheck_s: float = 300.0
    """Open streams are checked again after this: a deleted pod's stream ends within it."""
    renewal_gap_s: float = 1.0
    """Least time between two checks of one stream, however often its relay sends a token."""

    @property
    def relay_audience(self) -> str:
        """Relays' tokens must be made for it: else a client that was broken into could pose as a replica."""
        return f"{self.audience}/relay"


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """How a scheduler reaches the others of its fleet, with reports of their decisions."""

    ca_file: Path | None = None
    """Who signs their certificates; read again when it changes. None: plain text."""
    server_name: str = ""
    """Name in their certificates. Empty: their address."""
    timeout_s: float = 2.0


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Ports and limits of the process."""

    listen: str = "127.0.0.1:7070"
    http_host: str = "127.0.0.1"
    http_port: int = 0
    """0: any free port; it is in the log line "listening"."""
    max_message_bytes: int = 16 * 1024 * 1024
    """Takes a prompt of a million tokens, also as repeated integers (at most 5 bytes each)."""
    drain_s: float = 5.0
    """Seconds that calls in flight get after SIGTERM."""
    tick_s: float = 0.1
    token_key: bytes = b""
    """Key of the decision ids, shared by the schedulers of a fleet. Empty: random, so that only this process can
    join its own decisions."""
    tls_files: tuple[Path, Path] | None = None
    """Certificate chain and key, PEM; read again at each handshake. None: plain text."""
    access: AccessSettings | None = None
    """None: everyone may do everything."""
    advertise: str = ""
    """host or host:port where the fleet's other schedulers reach this one. Empty: nowhere."""
    peers: PeerSettings = field(default_factory=PeerSettings)
