"""From an engine's sockets to messages for schedulers: numbering, adapter, mirror, outboxes.

Pure: whoever owns the sockets calls in, with the time, and takes what there is to send. The relay process and
`servingfleet verify` run this very code.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from servingfleet_protos.v1.stream_pb2 import (
    EngineLoad,
    RelayCounters,
    RelayMessage,
    SchedulerMessage,
)

from .adapters.events import Doubt
from .adapters.trtllm_pulled import message_of
from .conformance.canary import Canary, prompt_of
from .conformance.standing import Finding
from .engine import Engine
from .outbox import Phase
from .rank import Rank
from .schedulers import Schedulers
from .settings import PipelineSettings
from .status import RankStatus, Status, status_of

__all__ = ["Pipeline", "RankStatus", "ReplayRequest", "Status"]

MAX_COUNTERS = 128


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """A wish for every batch of a rank from `start_seq` on. It replaces the one before for that rank."""

    rank: int
    start_seq: int
    probe: bool = False
    """Nothing is amiss: asked for after a silence."""


class Pipeline:
    """One replica. Unknown ranks and links raise KeyError; nothing that an engine sends raises."""

    def __init__(self, settings: PipelineSettings, now: float) -> None:
        """Raises ValueError for an engine that nobody wrote an adapter for, or that has no events to pull."""
        self._engine = Engine(settings)
        self.settings = settings
        self.on_output: Callable[[], None] = lambda: None
        """Called whenever there may be something to take."""
        self._totals: Counter[str] = Counter()
        self._ranks = {
            rank: Rank(rank, settings, self._engine.lanes, self._engine.adapter, self._totals)
            for rank in settings.ranks
        }
        self._waiting: set[int] = set()
        """Ranks whose sockets came up before it was known how to read them."""
        self._schedulers = Schedulers(settings, self._engine, self._ranks)
        self._adapters: tuple[str, ...] | None = None
        self._counted = now
        self._wall_s: float | None = None
        """Seconds since 1970, less `now`. None: not known."""
        if not self._engine.known:
            self.engine_unknown("it has not said yet what it is")

    # The engine's sockets.

    def socket_up(self, rank: int, now: float) -> None:
        """The event socket of a rank is connected (again)."""
        source = self._ranks[rank]
        if not self._engine.known:
            # The whole history is asked for when the engine is known.
            self._waiting.add(rank)
            return
        source.run(source.numbering.socket_up(now), now)
        self._spread(source)

    def socket_down(self, rank: int, now: float) -> None:
        """The event socket of a rank is lost."""
        source = self._ranks[rank]
        self._waiting.discard(rank)
        source.numbering.socket_down()
        self._spread(source)

    def live(self, rank: int, frames: Sequence[bytes], now: float) -> None:
        """A message from the subscription, frames as received."""
        source = self._ranks[rank]
        if not self._engine.known:
            self._totals["batches_engine_unknown"] += 1
            return
        source.live(frames, now, None if self._wall_s is None else now + self._wall_s)
        self._spread(source)

    def pulled(self, entries: Iterable[object], now: float) -> None:
        """Entries that the engine answered with, in order: each is a message of its rank under its number."""
        for entry in entries:
            rank, frames = message_of(entry) or (-1, ())
            if rank not in self._ranks:
                self._totals["drop_entry"] += 1
                # Of no rank that we know: it may have been a removal of any.
                doubt = Doubt.STALE if rank < 0 else Doubt.NONE
                for source in self._ranks.values():
                    source.monitor.note(Finding("entry", f"an entry of rank {rank}", doubt))
                    self._spread(source)
                continue
            self.live(rank, frames, now)

    def replayed(self, rank: int, frames: Sequence[bytes], now: float) -> None:
        """A reply to the last replay request of this rank, the end marker included."""
        self._ranks[rank].replayed(frames, now)
        self._spread(self._ranks[rank])

    def replay_failed(self, rank: int, reason: str, now: float) -> None:
        """The last replay request of this rank will not be answered (any more)."""
        source = self._ranks[rank]
        self._totals["replays_failed"] += 1
        source.replay_failed(reason, now)
        self._spread(source)

    def take_replay_requests(self) -> list[ReplayRequest]:
        """Replays to ask the engine for; each is handed out once."""
        wanted = [
            (rank, s.numbering, s.numbering.take_request()) for rank, s in self._ranks.items()
        ]
        return [
            ReplayRequest(rank, start, numbering.probing)
            for rank, numbering, start in wanted
            if start is not None
        ]

    # The engine's HTTP server.

    def load(self, load: EngineLoad, now: float | None = None) -> None:
        """The engine's load, just read. `now`: None says nothing of how its cache is used over time."""
        source = self._ranks.get(load.rank)
        if self._adapters is not None:
            load.adapters[:] = self._adapters
            load.adapters_known = True
        if source is not None and now is not None and load.HasField("kv_usage"):
            source.monitor.usage(load.kv_usage, now)
            self._spread(source)
        self._schedulers.load(load)
        self.on_output()

    def engine_adapters(self, adapters: tuple[str, ...] | None) -> None:
        """The LoRA adapters that the engine has loaded now, told with each load. None: it does not say."""
        self._adapters = adapters

    def engine_found(self, engine: str, version: str, now: float) -> None:
        """The engine's own answer to what it is. Raises ValueError for one that nobody wrote an adapter for, or that has
        no events to pull.

        Chooses the adapter if that was left to the engine; else an answer that contradicts takes the trust away.
        """
        if self._engine.found(engine):
            for source in self._ranks.values():
                source.adopt(self._engine.lanes, self._engine.adapter)
        reads = self._engine.name
        reason = (
            ""
            if reads == engine
            else f"the engine says that it is {engine}, and the relay reads {reads}: restart the relay"
        )
        self.engine_version(version)
        for rank, source in self._ranks.items():
            source.mistrust(reason)
            if rank in self._waiting:
                source.run(source.numbering.socket_up(now), now)
            self._spread(source)
        self._waiting.clear()

    def engine_unknown(self, reason: str) -> None:
        """The engine could not be asked, or its answer fits no adapter. No change if it is known already."""
        if self._engine.known:
            return
        for source in self._ranks.values():
            source.mistrust(f"engine unknown: {reason}")
            self._spread(source)

    def engine_version(self, version: str) -> None:
        """The engine's own version."""
        if self._engine.released(version):
            for source in self._ranks.values():
                source.monitor.release(self._engine.version)
        self._schedulers.tell_profile()

    def engine_started(self, started: float, now: float) -> None:
        """When the engine's process started, in the clock of `now`."""
        for source in self._ranks.values():
            source.run(source.numbering.process_started(started, now), now)
            self._spread(source)

    def engine_progress(self, rank: int, finished: int, computed: int, now: float) -> None:
        """The engine's totals of a rank: requests finished, and prompt tokens that it computed anew."""
        source = self._ranks.get(rank)
        if source is not None:
            source.progress(finished, computed, now)
            self._spread(source)

    def engine_unit(self, tokens: int, *, certain: bool) -> None:
        """Tokens of the engine's block, as it says. `certain`: its events must say so, too."""
        self._engine.lanes.unit(tokens, certain=certain)

    @property
    def unit_tokens(self) -> int:
        """Tokens of the engine's largest block on the GPU. 0: not known yet."""
        return self._engine.lanes.gpu_unit

    def new_canary(self, rng: random.Random, unit_tokens: int = 0) -> Canary:
        """A prompt of our own for the engine as it is known. `unit_tokens`: of its block; 0: as it is known.

        Raises ValueError for blocks that are not known, or too large."""
        unit = unit_tokens or self.unit_tokens
        return Canary(prompt_of(unit, rng), unit, self._engine.adapter.profile)

    def canary(self, rank: int, canary: Canary | None) -> None:
        """From now on, until None is given, the canary sees what the rank publishes."""
        self._ranks[rank].monitor.canary = canary

    def canary_answered(
        self, rank: int, canary: Canary, first: int | None, second: int | None
    ) -> tuple[str, ...]:
        """What the engine reported of its two runs, in cached tokens. Returns what is not as it should be: then the
        stream is quarantined."""
        source = self._ranks[rank]
        source.monitor.canary = None
        finding = canary.finding(first, second)
        self._totals["canaries"] += 1
        if finding is not None:
            source.monitor.odd(finding)
            self._spread(source)
        return canary.differences(first, second)

    def engine_capacity(self, gpu_blocks: int = 0, *, gpu_tokens: int = 0) -> None:
        """Blocks or tokens of the engine's GPU cache."""
        self._engine.lanes.capacity(gpu_blocks=gpu_blocks, gpu_tokens=gpu_tokens)
        self._schedulers.tell_profile()

    def engine_hybrid(self) -> None:
        """The model has layers whose state is evicted unannounced: what is held is an upper bound."""
        if self._engine.lanes.hybrid:
            return
        self._engine.lanes.set_hybrid()
        for source in self._ranks.values():
            source.suspect()
            self._spread(source)

    def tick(self, now: float, wall: float | None = None) -> None:
        """Time passes: deadlines, orphans, totals. `wall`: seconds since 1970."""
        if wall is not None:
            self._wall_s = wall - now
        for source in self._ranks.values():
            source.tick(now)
            self._spread(source)
        if now - self._counted >= self.settings.counters_interval_s:
            self._counted = now
            self._schedulers.counters(self._counters_message())
            self.on_output()

    # The schedulers.

    def open_link(self, link: str, now: float) -> RelayMessage:
        """A connection to a scheduler is made. Returns the hello to send."""
        return self._schedulers.open(link, self._counters_message)

    def close_link(self, link: str) -> None:
        """The connection is lost: what is not acknowledged is kept for the next one."""
        self._schedulers[link].close()

    def forget_link(self, link: str) -> None:
        """There is no such scheduler any more. Unknown links are fine."""
        self._schedulers.forget(link)

    def broken(self, link: str) -> bool:
        """Whether this connection must be closed and made anew: the scheduler fell behind, or broke the protocol."""
        return self._schedulers[link].phase is Phase.BROKEN

    def unacknowledged(self, link: str) -> int:
        """Messages sent over this link and not acknowledged."""
        return self._schedulers[link].unacknowledged

    def receive(self, link: str, message: SchedulerMessage, now: float) -> None:
        """An answer of the scheduler."""
        outbox = self._schedulers[link]
        match message.WhichOneof("body"):
            case "welcome":
                self._schedulers.welcome(link, message.welcome)
            case "ack":
                outbox.acknowledge(message.ack.seq)
            case "grant_snapshot":
                outbox.grant([rank for rank in message.grant_snapshot.ranks if rank in self._ranks])
            case "resync":
                self._totals["resyncs"] += 1
            case "credit_opened":
                self._schedulers.put(RelayMessage(credit_opened=message.credit_opened))
                source = self._ranks.get(message.credit_opened.rank)
                if source is not None:
                    source.dispatched(message.credit_opened, now)
                    self._spread(source)
            case "credit_ended":
                for source in self._ranks.values():
                    source.ended(message.credit_ended, now)
                self._schedulers.put(RelayMessage(credit_ended=message.credit_ended))
            case "prefill_ended":
                self._schedulers.put(RelayMessage(prefill_ended=message.prefill_ended))
            case "outcome":
                source = self._ranks.get(message.outcome.rank)
                if source is not None:
                    source.outcome(message.outcome, now)
                    self._spread(source)
            case _:
                self._totals["drop_unknown_answer"] += 1
        self.on_output()

    def take(self, link: str, limit: int) -> list[RelayMessage]:
        """The next messages to write to the scheduler, at most `limit`, in order."""
        return self._schedulers[link].take(limit)

    # For people, metrics and tests.

    def counters(self) -> dict[str, int]:
        """Totals since the start, by bounded names."""
        totals = Counter(self._totals)
        for source in self._ranks.values():
            totals["replays"] += source.numbering.replays
            totals["gaps"] += source.numbering.gaps
            for name, value in source.holdings.mirror.counts().items():
                totals[f"mirror_{name}"] += value
        totals["outbox_overflows"] = self._schedulers.overflows
        return dict(totals)

    def status(self) -> Status:
        """Everything about the pipeline now."""
        ranks = [status_of(source) for source in self._ranks.values()]
        return Status(
            tuple(ranks),
            tuple(lane.name for lane in self._engine.lanes),
            self._schedulers.phases,
            self.counters(),
            self._engine.name,
        )

    def holdings(self, rank: int, lane: int, confidence: int) -> bytes:
        """Packed canonical hashes that a rank holds in a lane, for checks."""
        return self._ranks[rank].holdings.mirror.holdings(lane, confidence)

    def _spread(self, source: Rank) -> None:
        self._schedulers.tell(source)
        self.on_output()

    def _counters_message(self) -> RelayCounters:
        totals = self.counters()
        memory = totals.pop("mirror_memory_bytes", 0)
        named = sorted(totals.items())[:MAX_COUNTERS]
        return RelayCounters(totals=dict(named), mirror_bytes=memory)
