"""The Rust core: canonical hashing, the mirror of one rank, the prefix index. No I/O, no clock.

Hashes travel packed: consecutive little-endian unsigned 64-bit integers in bytes. Tokens travel as consecutive
little-endian unsigned 32-bit integers. Malformed arguments raise ValueError, and change nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Self, final

__all__ = [
    "HASH_VERSION",
    "Delta",
    "Index",
    "Match",
    "Mirror",
    "Profile",
    "Rejected",
    "block_hashes",
    "namespace_root",
]

HASH_VERSION: Final[str]
"""Name of the canonical hash recipe, "sf1" (docs/protocol.md)."""

class Rejected(ValueError):
    """An event that the mirror can't take. `args` is (reason, detail): the reason is a bounded word for counters."""

def namespace_root(model: str, adapter: str = "", cache_salt: str = "", pairs: bool = False) -> int:
    """Hash before the first block: everything that keeps prompts with equal tokens apart."""

def block_hashes(
    root: int,
    tokens: bytes,
    block_tokens: int,
    media: Sequence[tuple[int, bytes]] = (),
    pairs: bool = False,
) -> bytes:
    """Packed hashes of the full blocks of a prompt.

    `media` holds (index of the item's first token, key), ascending; a key enters the block where its item starts.
    With `pairs`, block i covers the pairs that start in it and needs one token more.
    """

@final
class Delta:
    """A change of absolute presence. `op`: 1 hold, 2 drop, 3 clear; `confidence`: 1 confirmed, 2 upper."""

    @property
    def op(self) -> int: ...
    @property
    def lane(self) -> int: ...
    @property
    def confidence(self) -> int: ...
    @property
    def parent(self) -> int:
        """Canonical hash of the block before the first; 0: root or unknown."""
    @property
    def hashes(self) -> bytes: ...

@final
class Mirror:
    """What one rank of one engine holds now, by engine hash, placed in the canonical tree.

    Residency is kept by (lane, engine hash) and placement by engine hash alone, so that an event may name a block
    before or after its place is known. A block of unknown place is an orphan: held, not announced, until its parent
    is placed. Engine hashes are 8 or 32 bytes wide, packed; they never leave the mirror.
    """

    def __new__(
        cls,
        model: str,
        block_tokens: int,
        *,
        max_units: int = 4_000_000,
        max_orphans: int = 10_000,
        orphan_ttl_s: float = 5.0,
        pairs: bool = False,
    ) -> Self:
        """`max_units` bounds engine blocks known (held or only placed); least recently used places go first, and
        beyond that new blocks are rejected as `mirror_full`. `max_orphans` bounds engine blocks that wait."""
    def add_lane(self, lane: int, *, multiset: bool) -> None:
        """`multiset`: each store adds a copy and each removal takes one (vLLM); else presence is a flag (SGLang).

        A store of a multiset lane that starts at the root and names only blocks that are already held is ambiguous
        (other copies, or only a report of a hit): such a copy counts as UPPER, never as confirmed. Where not all that
        was stored before is known (`whole`), so is every copy of a block that is held."""
    def stored(
        self,
        lane: int,
        hashes: bytes,
        width: int,
        parent: bytes | None,
        tokens: bytes,
        unit_tokens: int,
        now: float,
        *,
        adapter: str = "",
        cache_salt: str = "",
        media: Sequence[tuple[int, bytes]] = (),
        opaque: bool = False,
        doubtful: bool = False,
        masked: int = 0,
        untold: bool = False,
        whole: bool = False,
        computed: bool = False,
        places_only: bool = False,
    ) -> list[Delta]:
        """Blocks stored, consecutive after `parent` (None: the root, under `adapter` and `cache_salt`).

        `tokens` holds len(hashes)/width * unit_tokens ids (one more with `pairs`), or none for a placeholder whose
        hashes must be placed already (or become orphans without tokens); where one is placed as the end of such a unit,
        its copies cover the whole unit. `media` is relative to the first token.
        `opaque`: keys that nobody else can compute: held and counted, never matched.
        `doubtful`: the engine may hold them: the copies count as UPPER (in a lane of flags, earlier ones do, too).
        `masked`: so many units lie between `parent` and the first that has a hash; `tokens` begin with theirs. Only of
        whole canonical blocks. How many it is may be a guess: where the parent is unknown, or what is known contradicts,
        the event is a placeholder.
        `untold`: more than the tokens may have entered the hashes. Where one is known already the event is a placeholder.
        `whole`: all that this engine stored before is known.
        `computed`: the blocks were computed, so that it is no mere report of a hit.
        `places_only`: nothing is stored; blocks that are known and wait for their place learn it.
        Raises Rejected: no_hashes, token_count, unit_size (neither multiple nor divisor of the canonical block),
        self_parent, duplicate_in_event, hash_conflict (same engine hash, other place), mirror_full.
        """
    def place(self, hash: bytes) -> tuple[int, int] | None:
        """Hash and number of the canonical blocks up to the end of this engine block. None: its place is unknown, or
        it ends inside a canonical block."""
    def holds(self, lane: int, hash: bytes) -> bool:
        """Whether the lane holds this engine block, surely or perhaps."""
    def copies(self, lane: int) -> tuple[int, int]:
        """Copies held in a lane: certain ones, and those that may be there. Kept, not counted."""
    @property
    def orphans(self) -> int:
        """Blocks that wait for their place now. Kept, not counted."""
    @property
    def removed_unknown(self) -> int:
        """As in `counts`."""
    def removed(self, lane: int, hashes: bytes, width: int) -> list[Delta]:
        """Copies removed. A hash that is not held is counted (`removed_unknown`), the others still apply."""
    def cleared(self, lanes: Sequence[int]) -> list[Delta]:
        """Nothing is held in these lanes. Places stay: a later event may name them."""
    def suspect(self, lanes: Sequence[int]) -> list[Delta]:
        """What these lanes hold counts as UPPER from now on, until it is stored again."""
    def reset(self) -> None:
        """A new engine life: holdings, places and orphans are gone."""
    def expire(self, now: float) -> int:
        """Drops orphans older than the time-to-live; returns how many blocks were dropped."""
    def begin_snapshot(self) -> int:
        """Starts a snapshot, shallow blocks first; returns its number."""
    def next_snapshot(self, snapshot: int, max_hashes: int) -> list[Delta]:
        """The next part, read from the mirror now; an empty list ends and forgets the snapshot."""
    def end_snapshot(self, snapshot: int) -> None:
        """Forgets a snapshot that will not be finished. Unknown numbers are fine."""
    def holdings(self, lane: int, confidence: int) -> bytes:
        """Packed canonical hashes held with this confidence, ascending; opaque ones left out."""
    def counts(self) -> dict[str, int]:
        """Sizes now (units_held, units_placed, orphans, opaque_units, ambiguous_copies, memory_bytes) and totals
        (removed_unknown, orphans_expired, orphans_dropped, places_evicted, clears)."""

@final
class Profile:
    """How to read a replica's holdings (protos: Profile)."""

    def __new__(
        cls,
        lanes: Sequence[tuple[int, int, int, int, int, int, bool]],
        tiers: Sequence[tuple[int, bool, int, bool]],
        *,
        stores: Mapping[int, str] = {},
    ) -> Self:
        """Lanes: (lane, tier, state class, group, window_tokens, unit_tokens, upper_in_predicted), numbers as in the
        protocol's enums. Tiers: (tier, cap is the whole prompt, less_units, extends). A tier without a rule caps at
        prompt - 1, takes nothing off and extends. `stores`: by lane, the store that it shows; what any trusted rank
        tells of a store extends every rank that has a lane of it. Raises ValueError for a unit that neither divides nor is divided
        by the canonical block (checked against the index that uses it), unknown enum numbers, lane numbers >= 64, a
        lane or a tier given twice, a group of two classes or windows."""

@final
class Match:
    """What one rank is expected to reuse of a prompt, in tokens."""

    @property
    def replica(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def lower(self) -> int: ...
    @property
    def predicted(self) -> int: ...
    @property
    def upper(self) -> int: ...
    @property
    def tiers(self) -> tuple[int, int, int, int]:
        """`predicted`, split: gpu, host, disk, shared."""
    @property
    def credited(self) -> int:
        """Part of `predicted` that rests on credits or UPPER blocks: predicted minus what confirmed blocks give."""
    @property
    def tail_tier(self) -> int:
        """The slowest tier (1: gpu) that holds the block where `predicted` ends: with that copy the block is gone.
        What is only credited counts as on the GPU. 0: this rank does not hold it, or no time was given."""
    @property
    def idle_s(self) -> float | None:
        """Seconds since the block was last stored or used there, or one close to it in its prompt; below 0: until it
        will be. None: not known, as for what a snapshot brought."""
    @property
    def turnover_s(self) -> float | None:
        """How long blocks are idle before this rank evicts them from that tier: the median of its last 64 removals.
        None: fewer than 16 were seen."""

@final
class Index:
    """Which replica and rank holds which canonical block, in which lane, for one model."""

    def __new__(cls, block_tokens: int, *, max_entries: int = 100_000_000) -> Self:
        """`max_entries` bounds (holder, block) pairs. Beyond it the runs touched longest ago go, counted in
        `counts()["evicted"]`, and the ranks that held them become incomplete (their `upper` opens)."""
    def add_replica(self, profile: Profile) -> int: ...
    def set_profile(self, replica: int, profile: Profile) -> None: ...
    def remove_replica(self, replica: int) -> None:
        """Holdings, ranks and credits of the replica are gone. Unknown numbers raise KeyError, here and below."""
    def set_rank(self, replica: int, rank: int, *, trusted: bool, complete: bool) -> None:
        """Adds or updates a rank. Not `trusted`: its holdings and credits leave lower and predicted.
        Not trusted or not `complete`: its upper is whatever the engine could report at most."""
    def hold(
        self,
        replica: int,
        rank: int,
        lane: int,
        confidence: int,
        parent: int,
        hashes: bytes,
        now: float | None = None,
    ) -> int:
        """Returns how many blocks were not held with this confidence before. Those not held in the lane at all are used
        at `now`, seconds of any epoch, the same in all calls; None: nobody knows when they were.
        In a GPU attention lane (any GPU lane if there is none) a hold that counts in `predicted` ends credits block by
        block. An undeclared lane or rank raises KeyError."""
    def drop(
        self, replica: int, rank: int, lane: int, hashes: bytes, now: float | None = None
    ) -> int:
        """Returns how many blocks were held. Blocks that no other lane of the rank holds were evicted at `now`; None:
        they were not, or nobody knows when."""
    def touch(self, replica: int, rank: int, hashes: bytes, at: float) -> None:
        """The rank uses what it holds of these blocks, a prompt's from the first on; `at` may be to come."""
    def idle(
        self, replica: int, rank: int, hashes: bytes, now: float
    ) -> list[tuple[int, float | None]]:
        """How long a rank has not used blocks of a prompt, from the first on up to one that it does not hold: stretches
        of blocks, and seconds in the slowest tier that holds them; None: not known."""
    def turnover(self, replica: int, rank: int) -> list[tuple[int, int, float | None]]:
        """(tier, evictions, their median age in seconds as in `Match`), for tiers that evicted since the rank was cleared."""
    def clear(self, replica: int, rank: int, lane: int | None = None) -> int:
        """Drops a lane, or all lanes, of a rank. Returns how many blocks were held."""
    def open_credit(
        self,
        decision: str,
        replica: int,
        rank: int,
        hashes: bytes,
        prompt_tokens: int,
        at: float | None = None,
    ) -> bool:
        """The prompt's blocks will be there soon, and used at `at` (attention lanes: all; window and recurrent lanes: those that end
        before the last token). False: a credit of that name is open already."""
    def close_credit(self, decision: str) -> bool: ...
    def close_credits(self, replica: int, rank: int) -> int:
        """Ends every credit of a rank (a new incarnation)."""
    def match(
        self, hashes: bytes, prompt_tokens: int, *, no_reuse: bool = False, now: float | None = None
    ) -> list[Match]:
        """What ranks would reuse, by (replica, rank). A known rank that is left out can reuse nothing: all its counts
        are zero. `no_reuse`: the request can reuse nothing, so that all are left out.
        Raises ValueError if the prompt has fewer tokens than its hashes cover."""
    def held(self, replica: int, rank: int) -> list[tuple[int, int]]:
        """(lane, blocks held with either confidence), ascending."""
    def holdings(self, replica: int, rank: int, lane: int, confidence: int) -> bytes:
        """Packed hashes held, ascending. For tests and checks: it walks the whole index."""
    def credits(self, replica: int, rank: int) -> int:
        """Credits open on the rank."""
    def counts(self) -> dict[str, int]:
        """entries, blocks, runs, credits, memory_bytes, evicted."""
