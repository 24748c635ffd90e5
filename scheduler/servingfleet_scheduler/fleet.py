"""Replicas, ranks and what they hold, as known now: one index per model.

Pure. Relay streams (`sessions`) and configuration write it, `route` reads it. What a rank's event stream is worth is
decided in one place, `_publish`: the index is told whether the rank's holdings may be trusted and are complete.
"""

from __future__ import annotations

from collections.abc import Iterator

from servingfleet_core import Index, Match
from servingfleet_core import Profile as CoreProfile
from servingfleet_protos.v1 import common_pb2, stream_pb2

from .backlog import Backlog
from .eviction import Inserted
from .hello import core_profile
from .replicas import HISTORY_LOST, LIVE, NO_RELAY, RESYNCING, Rank, Replica
from .room import Room
from .settings import SchedulerSettings, StaticReplica

HASH_BYTES = 8
MAX_DELTA_HASHES = 65_536
POOL_LABEL = "pool"
"""Label by which a relay names its replica's pool."""

# Credits count where no relay speaks: nothing contradicts them.
_TRUSTED = frozenset({LIVE, HISTORY_LOST, RESYNCING, NO_RELAY})


class TooManyReplicas(Exception):
    """The bound on replicas is reached: raise it, or look for a relay that invents identities."""


class Fleet:
    """All replicas of all models."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._replicas: dict[str, Replica] = {}
        self._indexes: dict[str, Index] = {}
        self._numbers: dict[str, dict[int, Replica]] = {}
        """By model, ascending."""
        self._statics = {each.replica: each for each in settings.static_replicas}
        for static in settings.static_replicas:
            self._add_static(static)

    # Reading

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def get(self, name: str) -> Replica | None:
        return self._replicas.get(name)

    def rank(self, name: str, number: int) -> tuple[Replica, Rank] | None:
        """One rank, with its replica."""
        replica = self._replicas.get(name)
        rank = replica.ranks.get(number) if replica is not None else None
        return None if replica is None or rank is None else (replica, rank)

    def of_model(self, model: str) -> list[Replica]:
        """Its replicas, by name."""
        numbers = self._numbers.get(model, {})
        return sorted(numbers.values(), key=lambda replica: replica.name)

    def key_forms(self, model: str) -> set[bool]:
        """Of its replicas: whether blocks are hashed as pairs of tokens."""
        return {replica.pairs for replica in self._numbers.get(model, {}).values()}

    @property
    def models(self) -> list[str]:
        return sorted(self._indexes)

    def index(self, model: str) -> Index | None:
        return self._indexes.get(model)

    def match(
        self,
        model: str,
        hashes: bytes,
        prompt_tokens: int,
        *,
        pairs: bool | None,
        no_reuse: bool,
        now: float | None = None,
    ) -> list[tuple[Replica, Rank, Match | None]]:
        """What each rank would reuse; no match: nothing. `pairs`: only replicas of that key form; None: all. `now`: for
        how long it was not used."""
        index = self._indexes[model]
        matches = {
            (match.replica, match.rank): match
            for match in index.match(hashes, prompt_tokens, no_reuse=no_reuse, now=now)
        }
        return [
            (replica, rank, matches.get((number, rank.number)))
            for number, replica in self._numbers[model].items()
            if pairs is None or replica.pairs == pairs
            for rank in replica.ranks.values()
        ]

    def idle(
        self, replica: Replica, rank: int, hashes: bytes, now: float
    ) -> list[tuple[int, float | None]]:
        """For how long a rank has not used blocks of a prompt: stretches of blocks, seconds or None."""
        return self._indexes[replica.model].idle(replica.number, rank, hashes, now)

    def predicted(self, replica: Replica, rank: Rank, hashes: bytes, prompt_tokens: int) -> int:
        """Tokens that a rank is predicted to reuse of a prompt, of which only these are known."""
        # The last token is always computed anew, and with it goes the last key that is a pair.
        least = len(hashes) // HASH_BYTES * self._settings.block_tokens
        counted = max(least, prompt_tokens - replica.pairs)
        found = self._indexes[replica.model].match(hashes, counted)
        return sum(
            match.predicted
            for match in found
            if (match.replica, match.rank) == (replica.number, rank.number)
        )

    def warm(self) -> float | None:
        """Share of ranks with a relay whose snapshot is complete; None: no such rank."""
        ranks = [
            replica.connected and rank.warm
            for replica in self
            for rank in replica.ranks.values()
            if rank.state != NO_RELAY
        ]
        return sum(ranks) / len(ranks) if ranks else None

    # Writing: replicas

    def attach(self, hello: stream_pb2.Hello) -> Replica:
        """A relay begins to speak for a replica: what was known of its holdings and credits is gone.

        Requests sent there stay counted. Raises TooManyReplicas; SessionRefused for a profile that can't be read.
        """
        profile = core_profile(hello.profile, block_tokens=self._settings.block_tokens)
        known = self._replicas.get(hello.replica)
        if known is None and len(self._replicas) >= self._settings.max_replicas:
            raise TooManyReplicas
        if known is not None:
            self._remove(known)
        static = self._statics.get(hello.replica)
        replica = self._add(
            hello.replica,
            hello.model,
            profile,
            hello.profile,
            endpoint=hello.endpoint or (static.endpoint if static else ""),
        )
        replica.static = static
        replica.draining_by = known.draining_by if known else set()
        replica.engine = hello.profile.engine
        replica.engine_version = hello.profile.engine_version
        replica.labels = dict(hello.labels)
        replica.speeds = self._settings.speeds_of(replica.labels.get(POOL_LABEL, ""))
        replica.connected = True
        for said in hello.ranks:
            rank = Rank(
                said.rank,
                state=said.state,
                reason=_clip(said.reason),
                incarnation=said.incarnation,
                engine_seq=said.engine_seq if said.HasField("engine_seq") else None,
            )
            before = known.ranks.get(said.rank) if known else None
            if before is not None and known is not None and known.model == hello.model:
                rank.dispatches, rank.backlog = before.dispatches, before.backlog
                rank.room = before.room
                rank.last_dispatch = before.last_dispatch
                rank.pace, rank.traffic = before.pace, before.traffic
                if rank.incarnation == before.incarnation:
                    rank.breaker = before.breaker
            replica.ranks[rank.number] = rank
            self._publish(replica, rank)
        return replica

    def detach(self, replica: Replica, now: float) -> None:
        """Its stream closed: nothing of it is proven until the same stream resumes."""
        replica.connected = False
        replica.away_since = now
        self._publish_all(replica)

    def resume(self, replica: Replica) -> None:
        """The same stream goes on where it broke off."""
        replica.connected = True
        replica.away_since = None
        self._publish_all(replica)

    def set_profile(self, replica: Replica, profile: stream_pb2.Profile) -> None:
        """Raises SessionRefused for a profile that can't be read."""
        core = core_profile(profile, block_tokens=self._settings.block_tokens)
        self._indexes[replica.model].set_profile(replica.number, core)
        replica.describe(profile)
        replica.engine, replica.engine_version = profile.engine, profile.engine_version

    def expire(self, now: float) -> list[str]:
        """Forgets replicas that were away too long; returns their names. Configured ones stay, without a relay."""
        gone = [
            replica
            for replica in self
            if replica.away_since is not None
            and now - replica.away_since > self._settings.replica_ttl_s
        ]
        for replica in gone:
            self._remove(replica)
            if replica.static is not None:
                self._add_static(replica.static).draining_by = replica.draining_by
        return [replica.name for replica in gone]

    # Writing: ranks

    def rank_state(self, replica: Replica, said: stream_pb2.RankState) -> None:
        """The rank is declared, the state known and the incarnation not older: the caller has looked."""
        rank = replica.ranks[said.rank]
        if said.incarnation > rank.incarnation:
            self._restart(replica, rank, said.incarnation)
        rank.state = said.state
        rank.reason = _clip(said.reason)
        rank.engine_seq = said.engine_seq if said.HasField("engine_seq") else None
        self._publish(replica, rank)

    def snapshot_begin(self, replica: Replica, rank: Rank, incarnation: int) -> None:
        """What follows rebuilds the rank from nothing."""
        if incarnation > rank.incarnation:
            self._restart(replica, rank, incarnation)
        self._indexes[replica.model].clear(replica.number, rank.number)
        rank.warm = rank.doubted = False
        self._publish(replica, rank)

    def snapshot_end(self, replica: Replica, rank: Rank) -> None:
        """The rank is complete, unless something of it was lost on the way."""
        rank.warm = not rank.doubted
        self._publish(replica, rank)

    def doubt(self, replica: Replica, rank: Rank) -> None:
        """Something that the relay said of this rank could not be applied: it is incomplete until a new snapshot."""
        rank.warm, rank.doubted = False, True
        self._publish(replica, rank)

    def touch(self, replica: Replica, rank: int, hashes: bytes, tokens: int, at: float) -> None:
        """A declared rank will reuse so many tokens of a prompt then: those behind it in the queue find them fresh."""
        blocks = -(-tokens // self._settings.block_tokens)
        if blocks:
            used = hashes[: blocks * HASH_BYTES]
            self._indexes[replica.model].touch(replica.number, rank, used, at)

    def apply(
        self, replica: Replica, delta: stream_pb2.Delta, now: float | None = None
    ) -> str | None:
        """Applies a delta of a declared rank, or says in a word why not; then nothing has changed."""
        index = self._indexes[replica.model]
        rank = replica.ranks[delta.rank]
        if not rank.warm:
            now = None  # nobody knows since when it holds what a snapshot brings
        size = len(delta.hashes)
        if all(lane.lane != delta.lane for lane in replica.profile.lanes):
            return "unknown_lane"
        if size % HASH_BYTES:
            return "hashes_not_whole"
        if size > MAX_DELTA_HASHES * HASH_BYTES:
            return "too_many_hashes"
        try:
            if delta.op == stream_pb2.Delta.OP_CLEAR:
                if size:
                    return "clear_with_hashes"
                index.clear(replica.number, delta.rank, delta.lane)
            elif delta.op == stream_pb2.Delta.OP_DROP:
                index.drop(replica.number, delta.rank, delta.lane, delta.hashes, now)
            elif delta.op == stream_pb2.Delta.OP_HOLD:
                confidence = delta.confidence or stream_pb2.Delta.CONFIDENCE_CONFIRMED
                new = index.hold(
                    replica.number,
                    delta.rank,
                    delta.lane,
                    confidence,
                    delta.parent,
                    delta.hashes,
                    now,
                )
                if now is not None:
                    self._inserted(rank, delta.lane, new, now)
            else:
                return "unknown_op"
        except ValueError:
            return "core_refused"
        return None

    # Inside

    def _inserted(self, rank: Rank, lane: int, blocks: int, now: float) -> None:
        inserted = rank.inserted.get(lane)
        if inserted is None:
            inserted = rank.inserted[lane] = Inserted(now)
        inserted.add(blocks * self._settings.block_tokens, now)

    def _restart(self, replica: Replica, rank: Rank, incarnation: int) -> None:
        index = self._indexes[replica.model]
        index.clear(replica.number, rank.number)
        index.close_credits(replica.number, rank.number)
        rank.incarnation = incarnation
        rank.engine_seq = None
        rank.inserted.clear()
        rank.load = rank.adapters = rank.breaker = None
        # What was sent to the old life died with it.
        rank.dispatches.clear()
        rank.backlog, rank.room = Backlog(), Room()

    def _publish_all(self, replica: Replica) -> None:
        for rank in replica.ranks.values():
            self._publish(replica, rank)

    def _publish(self, replica: Replica, rank: Rank) -> None:
        state = replica.state(rank)
        self._indexes[replica.model].set_rank(
            replica.number,
            rank.number,
            trusted=state in _TRUSTED,
            complete=state == LIVE and rank.warm,
        )

    def _add(
        self,
        name: str,
        model: str,
        core: CoreProfile,
        profile: stream_pb2.Profile,
        *,
        endpoint: str,
    ) -> Replica:
        index = self._indexes.get(model)
        if index is None:
            index = Index(self._settings.block_tokens, max_entries=self._settings.max_index_entries)
            self._indexes[model] = index
            self._numbers[model] = {}
        replica = Replica(
            name,
            model,
            index.add_replica(core),
            profile,
            endpoint=endpoint,
            speeds=self._settings.speeds,
        )
        self._numbers[model][replica.number] = replica
        self._replicas[name] = replica
        return replica

    def _add_static(self, static: StaticReplica) -> Replica:
        # One plain attention lane, so that credits have somewhere to count.
        profile = stream_pb2.Profile(
            lanes=[
                stream_pb2.Lane(
                    lane=0,
                    tier=common_pb2.TIER_GPU,
                    state_class=common_pb2.STATE_CLASS_ATTENTION,
                    unit_tokens=self._settings.block_tokens,
                )
            ]
        )
        core = core_profile(profile, block_tokens=self._settings.block_tokens)
        replica = self._add(static.replica, static.model, core, profile, endpoint=static.endpoint)
        replica.static = static
        for number in range(static.ranks):
            replica.ranks[number] = Rank(number, reason="no relay has spoken")
            self._publish(replica, replica.ranks[number])
        return replica

    def _remove(self, replica: Replica) -> None:
        self._indexes[replica.model].remove_replica(replica.number)
        del self._replicas[replica.name]
        del self._numbers[replica.model][replica.number]
        if not self._numbers[replica.model]:
            del self._numbers[replica.model], self._indexes[replica.model]


def _clip(reason: str) -> str:
    return reason[:512]
