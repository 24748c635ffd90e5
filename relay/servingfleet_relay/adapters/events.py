"""What an adapter makes of an engine's bytes: events that mean the same for every engine.

Pure data. Hashes are packed engine hashes, tokens packed little-endian 32-bit ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from servingfleet_protos.v1.stream_pb2 import TierRule

from .claims import Claim, Replayed


class Doubt(IntEnum):
    """What an oddity does to the trust in a rank's stream, mildest first."""

    NONE = 0
    INCOMPLETE = 1
    """A store was lost: what is known still counts, `upper` opens until the next clear."""
    STALE = 2
    """A removal may have been lost: what is held now becomes an upper bound, and `upper` opens."""
    AMBIGUOUS = 3
    """Blocks of several namespaces share hashes: all is an upper bound, and `upper` is open, in this life of the
    engine."""
    UNTRUSTED = 4
    """Read with doubt: nothing counts in `lower` and `predicted` in this life of the engine."""
    QUARANTINED = 5
    """The stream does not mean what we think: nothing is indexed in this life of the engine."""


class Reach(Enum):
    """Who can load what an event speaks of."""

    OWN = "own"
    """This replica."""
    SHAREABLE = "shareable"
    """This replica; and every other that shares its store, if there is one."""
    REMOTE = "remote"
    """Whoever shares the store where it lies. This replica only if it does."""


@dataclass(frozen=True, slots=True)
class Group:
    """The layer group that an event speaks of, as far as the event says."""

    index: int | None = None
    kind: str | None = None
    window_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """How an event was written; constant in a stream, see `conformance`."""

    tag: str
    form: str
    """"map", or "array" with its length: "array 9"."""
    hash_width: int = 0
    """Bytes of the hashes. 0: the event names none."""
    low: bool = False
    """A hash was negative: the engine means signed 64-bit integers."""
    high: bool = False
    """A hash was 2^63 or more: the engine means unsigned 64-bit integers."""
    unknown_fields: tuple[str, ...] = ()
    tells_adapters: bool = True
    """Blocks of different adapters are told apart."""
    tells_salts: bool = True
    """Blocks of different cache salts are told apart."""
    pairs: bool | None = None
    """Keys are pairs of tokens, not tokens. None: the event shows no keys."""
    variant: str = ""
    """Which of several ways to write such an event it is, where they differ in `told`."""
    oddities: tuple[str, ...] = ()
    """What is odd about it and keeps nobody from reading it, in bounded words."""
    told: frozenset[str] | None = None
    """Which of the optional fields that a stream either always or never sends are there. None: none are."""


@dataclass(frozen=True, slots=True)
class Span:
    """The range of a store that leaves out blocks: which of its blocks the hashes name, it does not say."""

    parent: bytes | None
    """Engine hash of the block before the range. None: it begins with the prompt."""
    tokens: bytes
    """Of the whole range."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks now held. A placeholder has no tokens, and tells its unit or not (0)."""

    shape: Shape
    tier: int
    group: Group
    hashes: bytes
    width: int
    parent: bytes | None
    """Engine hash of the block before the first. None: the first is the prompt's first."""
    tokens: bytes
    """One more than the blocks hold where keys are pairs."""
    unit_tokens: int
    adapter: str = ""
    cache_salt: str = ""
    opaque: bool = False
    """Keys went into these hashes that no router can compute."""
    doubtful: bool = False
    """The engine may hold it: counts as an upper bound only."""
    reach: Reach = Reach.OWN
    keys_told: bool = True
    """Whatever enters the hashes beside the tokens is told. Else a block that is known keeps its place."""
    span: Span | None = None
    """Only of a placeholder."""
    computed: bool = False
    """Its blocks were computed: it is no mere report of what was held before."""

    @property
    def count(self) -> int:
        """Blocks that are named."""
        return len(self.hashes) // self.width if self.width else 0

    @property
    def single(self) -> bool:
        """One block."""
        return self.count == 1


@dataclass(frozen=True, slots=True)
class Removed:
    """One copy of each block is gone from this tier."""

    shape: Shape
    tier: int
    group: Group
    hashes: bytes
    width: int
    twice: bool = False
    """The engine named a block twice, where it keeps one copy of each: its hash stands for two."""
    reach: Reach = Reach.OWN
    tier_told: bool = True
    """Else one of several such events, one for each tier that it may have been."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """Something about a medium that nobody knows: never the GPU, and none of the other tiers."""

    shape: Shape
    medium: str
    """As the engine says, cut."""
    stored: bool
    """Else removed."""
    detail: str
    """For people."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """The engine reset its cache."""

    shape: Shape


@dataclass(frozen=True, slots=True)
class Dropped:
    """What could not be used, under a bounded reason."""

    reason: str
    detail: str
    """For people: what was seen and what was expected. Never tokens or salts."""
    doubt: Doubt
    tier: int = 0
    """The only tier that it says anything about. 0: the stream as a whole."""


Event = Stored | Removed | Foreign | Cleared | Dropped


@dataclass(frozen=True, slots=True)
class Batch:
    """One message of the engine. Trouble with the batch itself is a Dropped among the events."""

    events: tuple[Event, ...]
    time_s: float | None = None
    """Wall clock of the engine at publication."""
    rank: int | None = None
    """Data-parallel rank that the batch names. None: it names none."""
    length: int = 0
    """Elements of the batch array: 2 or 3. 0: unreadable."""


@dataclass(frozen=True, slots=True)
class TierTraits:
    """How an engine keeps and reports one tier."""

    multiset: bool
    """Stores and removals count copies; else presence is a flag."""
    whole_prompt: bool
    """A hit may report the whole prompt; else all but its last token."""
    upper_in_predicted: bool
    append_only: bool = False
    """Removals are never announced: what is stored there is an upper bound."""
    stray_removal: Doubt = Doubt.NONE
    """What it says that something is removed that is not held here."""
    root_once: bool = False
    """What is held is not announced again: a prompt's first block that comes twice is of two namespaces."""
    overlap: int = TierRule.OVERLAP_UNSPECIFIED
    """What goes on while a hit is loaded (TierRule.Overlap)."""
    overlap_share: float = 0.0
    """Of that time, what hides a load."""
    always_loads: bool = False
    """A hit is loaded also where computing it again would be faster."""


@dataclass(frozen=True, slots=True)
class Generation:
    """How releases wrote their events, from one on until the next generation."""

    since: tuple[int, ...]
    forms: Mapping[str, str]
    """As `Shape.form`, by tag."""
    batch_length: int = 3


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """What holds for every stream of one engine."""

    engine: str
    tiers: dict[int, TierTraits] = field(default_factory=dict)
    cleared_tiers: frozenset[int] = frozenset()
    """Tiers that Cleared empties; the others become suspect."""
    attention_kinds: frozenset[str | None] = frozenset()
    window_kinds: frozenset[str] = frozenset()
    recurrent_kinds: frozenset[str] = frozenset()
    chunked_kinds: frozenset[str] = frozenset()
    """Layers that look back to the start of a chunk of a size that events don't tell. Read as a window of that size, if
    it is configured: then what is expected is never too much, and more is possible."""
    proves_roots: bool = False
    """The hash of a prompt's first block shows its namespace; one that shows none is opaque."""
    copies_first: bool = False
    """A copy on the host is announced before the GPU's is gone."""
    mixed_steps: bool = False
    """Running decodes take part in the steps that compute prompts; else prompts go first."""
    fixed_unit: bool = False
    """One block size for all: another means another engine or release."""
    adapters_since: tuple[int, ...] = ()
    """First release whose hashes tell adapters apart. (): all that say so."""
    generations: tuple[Generation, ...] = ()
    """Oldest first."""
    recorded: tuple[int, ...] = ()
    """The release beside which it was read and recorded."""
    replayed: Replayed | None = None
    """What became of its recordings' requests."""
    claims: tuple[Claim, ...] = ()
    """What is known of it, feature by feature."""
    rank_fields: tuple[str, ...] = ()
    """Fields of a request's JSON body that take the data-parallel rank, for releases that do not read the header
    X-data-parallel-rank."""
    report_flag: str = ""
    """What makes its answers say what they reused. "": nothing is needed."""
    never_run: str = ""
    """Why nothing of it is ever certain. "": it was read beside a running engine."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """All that is particular to one engine's event stream."""

    profile: EngineProfile
    decode: Callable[[bytes], Batch]
    """Reads the payload of one message; never raises."""
    pulled: Callable[[int], Callable[[bytes], Batch]] | None = None
    """Makes a reader of the entries of one rank that are pulled over HTTP, for blocks of so many tokens. None: there are
    none."""
