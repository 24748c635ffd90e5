"""A relay between one simulated engine and all schedulers: real messages, simulated transport.

What an engine's step changed reaches the schedulers `lag_s` later, in order. A batch that was lost is missed when the next
one comes: the rank is then resyncing until the engine has sent again what was missed, and what came meanwhile waits.
What a scheduler says of its dispatches goes to all schedulers, in order with the engine's events.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from google.protobuf.message import Message

from servingfleet_core import HASH_VERSION
from servingfleet_protos.v1 import common_pb2, stream_pb2
from servingfleet_scheduler.sessions import Session

from .clock import Clock
from .engine import RankEngine
from .fleet import EventsSpec, PoolSpec
from .memory import Change

MODEL = "replayed"
POOL_LABEL = "pool"
ECHOED = frozenset({"credit_opened", "credit_ended", "prefill_ended"})
_TIERS = {"host": common_pb2.TIER_HOST, "disk": common_pb2.TIER_DISK}


@dataclass
class _Rank:
    """What the relay knows of one rank's event stream."""

    engine: RankEngine
    published: int = 0
    """Batches the engine has sent in this life."""
    expected: int = 0
    """Number of the next one to apply."""
    lost: dict[int, list[Change]] = field(default_factory=dict)
    held: dict[int, list[Change]] = field(default_factory=dict)
    replaying: bool = False
    life: int = 1


class Relay:
    """One replica's. `attach` it to a session of each scheduler, then let the clock run."""

    def __init__(
        self,
        replica: str,
        pool: PoolSpec,
        block_tokens: int,
        events: EventsSpec,
        clock: Clock,
        rng: random.Random,
        counters: Counter[str],
        *,
        tell_tiers: bool,
    ) -> None:
        """`tell_tiers`: False: the schedulers hear of GPU memory only."""
        self.replica = replica
        self._pool = pool
        self._block_tokens = block_tokens
        self._events = events
        self._clock = clock
        self._rng = rng
        self._counters = counters
        self._lanes = 1 + (len(pool.tiers) if tell_tiers else 0)
        self._ranks: list[_Rank] = []
        self._sessions: list[Session] = []
        self._seqs: list[int] = []

    # The engine's side

    def add(self, engine: RankEngine) -> None:
        """The next rank."""
        self._ranks.append(_Rank(engine))

    def publisher(self, rank: int) -> Callable[[list[Change]], None]:
        """Takes the batches of one rank."""
        return lambda changes: self._published(self._ranks[rank], changes)

    def stopped(self) -> None:
        """The engine's process is gone: its sockets close."""
        for number, rank in enumerate(self._ranks):
            rank.life += 1
            rank.published = rank.expected = 0
            rank.lost.clear()
            rank.held.clear()
            rank.replaying = False
            self._state(number, rank.life - 1, common_pb2.STREAM_STATE_UNPROVEN)

    def started(self) -> None:
        """A new process serves, with nothing in its caches."""
        for number, rank in enumerate(self._ranks):
            self._state(number, rank.life, common_pb2.STREAM_STATE_LIVE)

    # The schedulers' side

    def attach(self, session: Session) -> None:
        """Says hello on a new session."""
        self._sessions.append(session)
        self._seqs.append(0)
        hello = stream_pb2.Hello(
            protocol_version=1,
            replica=self.replica,
            stream_id=f"{self.replica}-{len(self._sessions)}",
            model=MODEL,
            block_tokens=self._block_tokens,
            hash_version=HASH_VERSION,
            profile=self._profile(),
            ranks=[
                stream_pb2.RankState(
                    rank=number, incarnation=rank.life, state=common_pb2.STREAM_STATE_LIVE
                )
                for number, rank in enumerate(self._ranks)
            ],
            labels={POOL_LABEL: self._pool.name},
        )
        session.receive(stream_pb2.RelayMessage(hello=hello), self._clock.now)

    def hear(self, session: Session, message: stream_pb2.SchedulerMessage) -> None:
        """What a scheduler says on a session."""
        body = message.WhichOneof("body")
        if body == "grant_snapshot":
            number = self._sessions.index(session)
            for rank in message.grant_snapshot.ranks:
                self._snapshot(number, rank)
        elif body in ECHOED:
            said = getattr(message, body)
            self._later(2 * self._events.link_s, lambda: self._tell(body, said))

    def load(self) -> None:
        """Reads every rank's load and tells it."""
        for number, rank in enumerate(self._ranks):
            engine = rank.engine
            load = stream_pb2.EngineLoad(
                rank=number,
                running_requests=engine.running,
                waiting_requests=engine.queued,
                kv_usage=engine.memory.usage,
            )
            if engine.sglang:
                # vLLM's metrics don't tell it.
                load.waiting_tokens = engine.waiting_tokens
            message = stream_pb2.RelayMessage(load=load)
            arrives = self._clock.now + self._events.link_s
            self._clock.at(arrives, partial(self._unsequenced, message), idle=True)

    # Inside

    def _published(self, rank: _Rank, changes: list[Change]) -> None:
        told = [each for each in changes if each.lane < self._lanes]
        if not told:
            return
        number, rank.published = rank.published, rank.published + 1
        if self._events.loss and self._rng.random() < self._events.loss:
            self._counters["event_batches_lost"] += 1
            rank.lost[number] = told
            return
        life = rank.life
        self._later(self._events.lag_s, lambda: self._arrived(rank, life, number, told))

    def _arrived(self, rank: _Rank, life: int, number: int, changes: list[Change]) -> None:
        if rank.life != life:
            return
        if number == rank.expected and not rank.replaying:
            rank.expected += 1
            self._apply(rank, changes)
            return
        rank.held[number] = changes
        if not rank.replaying:
            rank.replaying = True
            self._counters["event_replays"] += 1
            place = self._ranks.index(rank)
            self._state_now(place, life, common_pb2.STREAM_STATE_RESYNCING, "batches were lost")
            self._later(self._events.replay_s, lambda: self._replayed(rank, life))

    def _replayed(self, rank: _Rank, life: int) -> None:
        """The engine has sent again all that was missed up to now."""
        if rank.life != life:
            return
        last = max(rank.held)
        for number in range(rank.expected, last + 1):
            batch = rank.held.pop(number, None) or rank.lost.pop(number)
            self._apply(rank, batch)
        rank.expected = last + 1
        rank.replaying = False
        self._state_now(self._ranks.index(rank), life, common_pb2.STREAM_STATE_LIVE)

    def _apply(self, rank: _Rank, changes: Iterable[Change]) -> None:
        place = self._ranks.index(rank)
        for lane, held, (parent, hashes) in changes:
            self._tell("delta", _delta(place, lane, held, parent, hashes))

    def _snapshot(self, session: int, rank: int) -> None:
        """All that the engine holds now, behind the events that are on their way."""
        engine = self._ranks[rank].engine
        life = self._ranks[rank].life
        deltas = [
            _delta(rank, lane, True, each.parent, each.hashes)
            for lane, cache in enumerate(engine.memory.lanes[: self._lanes])
            for each in cache.holdings()
        ]

        def send() -> None:
            begin = stream_pb2.SnapshotBegin(rank=rank, incarnation=life)
            self._to(session, "snapshot_begin", begin)
            for each in deltas:
                self._to(session, "delta", each)
            self._to(session, "snapshot_end", stream_pb2.SnapshotEnd(rank=rank))

        if self._ranks[rank].published:
            self._later(self._events.lag_s, send)
        else:
            send()  # nothing is on its way that could come after

    def _state(self, rank: int, life: int, state: common_pb2.StreamState.ValueType) -> None:
        self._later(self._events.lag_s, lambda: self._state_now(rank, life, state))

    def _state_now(
        self, rank: int, life: int, state: common_pb2.StreamState.ValueType, reason: str = ""
    ) -> None:
        said = stream_pb2.RankState(rank=rank, incarnation=life, state=state, reason=reason)
        self._tell("rank_state", said)

    def _tell(self, body: str, said: Message) -> None:
        for session in range(len(self._sessions)):
            self._to(session, body, said)

    def _to(self, session: int, body: str, said: Message) -> None:
        self._seqs[session] += 1
        message = stream_pb2.RelayMessage(seq=self._seqs[session])
        getattr(message, body).CopyFrom(said)
        self._sessions[session].receive(message, self._clock.now)

    def _unsequenced(self, message: stream_pb2.RelayMessage) -> None:
        for session in self._sessions:
            session.receive(message, self._clock.now)

    def _later(self, delay: float, what: Callable[[], None]) -> None:
        self._clock.at(self._clock.now + delay, what)

    def _profile(self) -> stream_pb2.Profile:
        tiers = [common_pb2.TIER_GPU, *(_TIERS[each.tier] for each in self._pool.tiers)]
        tiers = tiers[: self._lanes]
        vllm = self._pool.engine == "vllm"
        rule = stream_pb2.TierRule
        return stream_pb2.Profile(
            lanes=[
                stream_pb2.Lane(
                    lane=lane,
                    tier=tier,
                    state_class=common_pb2.STATE_CLASS_ATTENTION,
                    unit_tokens=self._block_tokens,
                    capacity_tokens=self._capacity(lane),
                )
                for lane, tier in enumerate(tiers)
            ],
            tiers=[
                rule(
                    tier=tier,
                    # What vLLM's connector loads may be the whole prompt.
                    cap=rule.CAP_PROMPT
                    if vllm and tier != common_pb2.TIER_GPU
                    else rule.CAP_PROMPT_MINUS_ONE,
                    extends=True,
                    # As the relays' adapters have it.
                    overlap=rule.OVERLAP_QUEUE if vllm else rule.OVERLAP_COMPUTE,
                    overlap_share=0.5,
                    always_loads=True,
                )
                for tier in tiers
            ],
            engine=self._pool.engine,
            mixed_steps=vllm,
            adapters_separated=True,
            salts_separated=True,
        )

    def _capacity(self, lane: int) -> int:
        tokens: Sequence[int] = [self._pool.gpu_tokens, *(each.tokens for each in self._pool.tiers)]
        return tokens[lane]


def _delta(rank: int, lane: int, held: bool, parent: bytes, hashes: bytes) -> stream_pb2.Delta:
    return stream_pb2.Delta(
        rank=rank,
        lane=lane,
        op=stream_pb2.Delta.OP_HOLD if held else stream_pb2.Delta.OP_DROP,
        confidence=stream_pb2.Delta.CONFIDENCE_CONFIRMED,
        parent=int.from_bytes(parent, "little"),
        hashes=hashes,
    )
