"""What a relay is told: frozen, units in the names, reasons beside the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from servingfleet_core import HASH_VERSION

MIB = 1024 * 1024


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind, as the engine groups them."""

    kind: str
    """The engine's word: "full_attention", "sliding_window", "mamba", ..."""
    unit_tokens: int
    """Block of the group on the GPU."""
    window_tokens: int = 0


@dataclass(frozen=True)
class PipelineSettings:
    """From an engine's events to the messages for schedulers."""

    replica: str
    """Pod uid, or an id of one's own outside Kubernetes."""
    model: str
    """As clients name it."""
    ranks: tuple[int, ...]
    stream_id: str
    """Random, one life of this process."""
    engine: str = "vllm"
    """"vllm", "sglang", or "auto": whatever the engine says that it is, and unproven until it has said so."""
    engine_version: str = ""
    endpoint: str = ""
    """host:port where clients reach the engine. Empty: unknown."""
    labels: Mapping[str, str] = field(default_factory=dict)
    hash_version: str = HASH_VERSION
    block_tokens: int = 16
    """Canonical block of the fleet."""
    engine_block_tokens: int = 0
    """The engine's own block. 0: learned from its events."""
    host_unit_tokens: int = 0
    """Chunk of the engine's CPU offload, which its placeholder events don't tell. 0: as the GPU's blocks."""
    layer_groups: tuple[LayerGroup, ...] = ()
    """In the engine's order. (): learned from its events, so that prompts sent before the first are read as if the
    model had full attention only."""
    shared_store: str = ""
    """The store behind the engine's connector that other replicas load from, too, by a name that they all give it.
    Empty: what a connector announces is the replica's own."""
    less_units: int = 0
    """Blocks at the end of a match that the engine computes again: 1 where vLLM drafts with EAGLE."""
    hybrid: bool = False
    """The model has window or recurrent layers: on an engine that does not announce their eviction (SGLang), what is
    held is an upper bound."""
    extra_keys: bool = False
    """Requests carry keys of their own that the events don't tell (SGLang's `extra_key`): an upper bound, too."""
    replay: bool = True
    """The engine has a replay socket."""
    pull: bool = False
    """The engine's events are entries that are pulled over HTTP (TensorRT-LLM); needs `engine_block_tokens`."""
    replay_deadline_s: float = 5.0
    """Longest silence in a replay. An idle vLLM answers within 0.1 s."""
    probe_s: float = 10.0
    """Silence of the engine after which its last batches are asked for: a loss shows only in a later batch."""
    max_held_batches: int = 4096
    """Live batches kept while a replay is under way: a minute of a busy engine."""
    max_held_bytes: int = 64 * MIB
    max_orphans: int = 10_000
    orphan_ttl_s: float = 5.0
    max_units: int = 4_000_000
    """Engine blocks known to the mirror of one rank: 64 million tokens in blocks of 16."""
    resend_window_messages: int = 4096
    """Sent and not acknowledged. Beyond it a link waits."""
    resend_window_bytes: int = 32 * MIB
    outbox_messages: int = 16_384
    """Waiting to be sent to one scheduler. Beyond it its session is given up for a snapshot."""
    outbox_bytes: int = 64 * MIB
    delta_hashes: int = 4096
    """Most hashes in one message: 32 KiB, well below gRPC's limit, and short for the event loop."""
    counters_interval_s: float = 5.0


def units_within(memory_mib: int, ranks: int) -> int:
    """`max_units` of each rank's mirror for a process that has this much memory; 0: as much as it likes.

    Beyond it further stores are dropped, which `upper` tells of. Without it the process would die of its memory, learn
    the same from the engine's replay, and die again.
    """
    usual = PipelineSettings.max_units
    if not memory_mib:
        return usual
    # Measured: 310 bytes a unit, and 545 where the tables have just doubled.
    return min(usual, _room(memory_mib) * 2 // 3 // 550 // ranks)


def messages_within(memory_mib: int, ranks: int) -> int:
    """`receive_high_water_messages` of each rank likewise: an engine sends a replay as fast as it can."""
    usual = RelaySettings.receive_high_water_messages
    if not memory_mib:
        return usual
    # A step of a busy engine stores 200 blocks in 16 KiB. What the engine then drops is asked for again.
    return min(usual, _room(memory_mib) // 3 // (16 * 1024) // ranks)


def _room(memory_mib: int) -> int:
    """Bytes beyond what a process at rest takes."""
    return max(0, memory_mib - 55) * MIB


@dataclass(frozen=True)
class RankSockets:
    """The engine's sockets for one rank."""

    rank: int
    events: str
    """ZeroMQ endpoint, tcp://host:port."""
    replay: str | None
    bind: bool = False
    """Bind the event socket and let the engine connect (vLLM given a concrete address does)."""


@dataclass(frozen=True)
class RelaySettings:
    """The process around the pipeline."""

    sockets: tuple[RankSockets, ...]
    schedulers: tuple[str, ...]
    """host:port each; every address that a name resolves to gets a link."""
    engine_http: str | None = None
    """Base address of the engine's HTTP server. None: no load, nothing learned from it."""
    pull_interval_s: float = 0.25
    """Between two pulls of an engine's events. The engine keeps a bounded number, and drops the oldest."""
    pull_deadline_s: float = 30.0
    """TensorRT-LLM waits up to 2 s for the first entry, and answers when none has come for 2 s. An answer that is given up
    takes its entries with it."""
    max_pull_bytes: int = 40 * MIB
    """Likewise of an answer that is too long. An entry of one block of 32 tokens is 2 KiB: 16,384 of them are 34 MiB."""
    canary: bool = False
    """Send each life of the engine a prompt of our own: what comes of it must be what we think."""
    metrics_port: int | None = None
    """None: no metrics server. 0: any free port."""
    metrics_host: str = "0.0.0.0"
    scheduler_ca_file: Path | None = None
    """PEM certificates of who may vouch for schedulers, read at each dial. None: plain text."""
    scheduler_name: str = ""
    """The name that schedulers' certificates must bear. Empty: the address that is dialled."""
    token_file: Path | None = None
    """Whom the relay speaks for, proven to schedulers. Never without `scheduler_ca_file`."""
    renewal_interval_s: float = 5.0
    """A renewed token reaches the schedulers within this; a kubelet renews with minutes to spare."""
    heartbeat_fd: int | None = None
    """Where a supervisor hears that the event loop turns. None: there is no supervisor."""
    heartbeat_interval_s: float = 5.0
    receive_high_water_messages: int = 20_000
    """Beyond it ZeroMQ drops, which shows as a gap and is replayed."""
    max_message_bytes: int = 8 * MIB
    """ZeroMQ closes the connection of a larger message before it is in memory."""
    tick_s: float = 0.25
    status_interval_s: float = 5.0
    """Age of the relay's own metrics at most: sizes are counted by walking the mirror."""
    scrape_interval_s: float = 1.0
    scrape_deadline_s: float = 2.0
    resolve_interval_s: float = 5.0
    """A scheduler that joined is found within this; the headless service's DNS is cached as long."""
    connect_deadline_s: float = 5.0
    welcome_deadline_s: float = 10.0
    ack_deadline_s: float = 30.0
    """A scheduler that acknowledges nothing for so long is given up and dialled again."""
    leave_deadline_s: float = 0.5
    """For schedulers to answer the end of a stream when the relay ends."""
    reconnect_first_s: float = 0.2
    reconnect_most_s: float = 10.0
    """Backoff between these, doubled each time, with full jitter: a fleet must not return at once."""
    batch_messages: int = 256
    """Messages written to one scheduler before others get their turn."""
