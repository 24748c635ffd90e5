"""One relay's stream: checks order and identity, applies what it says, answers.

Pure: the edge feeds `receive`, sends what `take` returns, and is called back when there is more to send. What breaks the
protocol ends the stream (SessionRefused); what only spoils one message is dropped and counted, and the rank it was
about is asked for again.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from google.rpc import code_pb2

from servingfleet_protos.v1 import stream_pb2

from .backlog import Dispatch, Load
from .errors import Refused, SessionRefused
from .fleet import HASH_BYTES, MAX_DELTA_HASHES
from .hello import known_state, lanes_agree, malformed
from .replicas import Adapters, Rank, Replica
from .streams import Speaker, Streams

UNSEQUENCED = frozenset({"load", "counters", "credential"})
MAX_DECISION_ID_BYTES = 1024
MAX_ORIGIN_BYTES = 64
MAX_CREDIT_S = 3600.0
MAX_COUNTERS = 128
MAX_ADAPTERS = 1024
MAX_ADAPTER_BYTES = 512
_COUNTER = re.compile(r"[a-z][a-z0-9_]{0,63}")


class Session:
    """One stream, from its hello to its end."""

    def __init__(self, streams: Streams, now: float, only_replica: str | None = None) -> None:
        """`only_replica`: the one that the relay has proven to be; None: it may speak for any."""
        self.replica: Replica | None = None
        self.refused: Refused | None = None
        """Set when the stream must end; the edge closes it with this error."""
        self.on_output: Callable[[], None] = lambda: None
        """Called when there is something to take, or the stream must end."""
        self._streams = streams
        self._only_replica = only_replica
        self._speaker: Speaker | None = None
        self._resumed = False
        self._outbox: deque[stream_pb2.SchedulerMessage] = deque()
        self._acked = 0
        self._ack_since: float | None = None
        """Since when something applied waits for its acknowledgement."""
        self._ack_due = False
        self._opened = now
        self._resync_wanted: dict[int, str] = {}
        self._resync_sent: dict[int, float] = {}
        streams.opened(self)

    # The edge's side

    def receive(self, message: stream_pb2.RelayMessage, now: float) -> None:
        """Raises SessionRefused if the stream can't go on; then `close` it."""
        if self.refused is not None:
            raise self.refused
        try:
            self._receive(message, now)
        except Refused as refusal:
            self.refuse(refusal)
            raise

    def take(self) -> list[stream_pb2.SchedulerMessage]:
        """What is to be sent now, in order; the acknowledgement last."""
        messages = list(self._outbox)
        self._outbox.clear()
        if self._speaker is not None and self._ack_due:
            self._acked = self._speaker.applied
            self._ack_since, self._ack_due = None, False
            messages.append(
                stream_pb2.SchedulerMessage(ack=stream_pb2.Ack(seq=self._speaker.applied))
            )
        return messages

    def close(self, now: float) -> None:
        """The connection is gone: the ranks prove nothing until it resumes."""
        self._streams.closed(self, self._speaker, now)

    # The streams' side

    def refuse(self, refusal: Refused) -> None:
        """Ends the stream."""
        if self.refused is None:
            self.refused = refusal
            self._streams.refusals[refusal.reason] += 1
            self.on_output()

    def grant(self, ranks: Iterable[int]) -> None:
        """A snapshot slot is this stream's."""
        self._send(
            stream_pb2.SchedulerMessage(grant_snapshot=stream_pb2.GrantSnapshot(ranks=ranks))
        )

    def send_credit(self, message: stream_pb2.SchedulerMessage) -> None:
        """Credits for the relay's other schedulers, and outcomes for itself. Kept from a relay that does not read:
        counted."""
        if len(self._outbox) >= self._streams.settings.outbox_messages:
            self._streams.drops["outbox_full"] += 1
        else:
            self._send(message)

    def tick(self, now: float) -> None:
        """Acknowledges, and asks again, what has waited long enough."""
        settings = self._streams.settings
        if self._speaker is None:
            if self.refused is None and now - self._opened > settings.hello_s:
                self.refuse(malformed("HELLO_EXPECTED", f"no hello within {settings.hello_s} s"))
            return
        if self._ack_since is not None and now - self._ack_since >= settings.ack_idle_s:
            self._ack_now()
        self._send_resyncs(now)

    # Inside

    def _receive(self, message: stream_pb2.RelayMessage, now: float) -> None:
        body = message.WhichOneof("body")
        if self._speaker is None or self.replica is None:
            if body != "hello":
                raise malformed("HELLO_EXPECTED", f"the first message is {body}, not hello")
            self._hello(message.hello, now)
            return
        self._speaker.heard = now
        self._streams.slots.heard(self, now)
        if body == "hello":
            raise malformed("HELLO_REPEATED", "a second hello: a stream speaks for one replica")
        if body in UNSEQUENCED:
            if message.seq:
                raise malformed("SEQ_UNEXPECTED", f"{body} has number {message.seq}, expected 0")
        elif not self._in_order(message.seq):
            return
        if body is None:
            # A kind of message that a later release added.
            self._drop("unknown_body")
        else:
            getattr(self, f"_on_{body}")(self.replica, getattr(message, body), now)
        if message.seq:
            # Last, so that a message that ends the stream is not taken for applied.
            self._applied(message.seq, now)

    def _hello(self, hello: stream_pb2.Hello, now: float) -> None:
        streams = self._streams
        if self._only_replica not in (None, hello.replica):
            # Before anything of the true one is touched.
            raise SessionRefused(
                code_pb2.PERMISSION_DENIED,
                "OTHER_REPLICA",
                f"the token is of pod {self._only_replica}, the hello speaks for replica "
                f"{hello.replica!r}: a relay speaks for its own pod, by its uid",
            )
        self.replica, self._speaker, self._resumed = streams.hello(self, hello, now)
        self._acked = self._speaker.applied
        self._send(
            stream_pb2.SchedulerMessage(
                welcome=stream_pb2.Welcome(
                    instance_id=streams.instance_id,
                    resumed=self._resumed,
                    expected_seq=self._speaker.applied + 1,
                    window=streams.settings.window_messages,
                )
            )
        )
        # Also when resumed: a grant may have been lost with the connection.
        cold = [rank.number for rank in self.replica.ranks.values() if not rank.warm]
        streams.slots.request(self, cold)
        streams.grant(now)

    def _in_order(self, seq: int) -> bool:
        """False: applied before the connection broke, and sent again. Raises SessionRefused for a gap."""
        assert self._speaker is not None
        applied = self._speaker.applied
        if seq == applied + 1:
            return True
        if 0 < seq <= applied and self._resumed:
            self._drop("resent")
            return False
        raise SessionRefused(
            code_pb2.ABORTED,
            "OUT_OF_ORDER",
            f"message {seq} after {applied}, expected {applied + 1}: reconnect and resume",
            metadata={"expected": str(applied + 1), "got": str(seq)},
        )

    def _applied(self, seq: int, now: float) -> None:
        assert self._speaker is not None
        self._speaker.applied = seq
        if self._ack_since is None:
            self._ack_since = now
        if seq - self._acked >= self._streams.settings.ack_messages:
            self._ack_now()

    def _on_profile(self, replica: Replica, profile: stream_pb2.Profile, now: float) -> None:
        if not lanes_agree(replica.profile, profile):
            raise malformed("LANE_CHANGED", "a lane changed its tier, state class or group")
        self._streams.fleet.set_profile(replica, profile)

    def _on_rank_state(self, replica: Replica, said: stream_pb2.RankState, now: float) -> None:
        rank = self._rank(replica, said.rank)
        if rank is None:
            return
        if said.incarnation < rank.incarnation:
            self._drop("incarnation_back")
        elif not known_state(said.state):
            self._drop("unknown_state")
        else:
            self._streams.fleet.rank_state(replica, said)

    def _on_snapshot_begin(
        self, replica: Replica, begin: stream_pb2.SnapshotBegin, now: float
    ) -> None:
        rank = self._rank(replica, begin.rank)
        if rank is None:
            return
        if begin.incarnation < rank.incarnation:
            self._drop("incarnation_back")
            return
        if not self._streams.slots.granted(self, rank.number):
            # Its slot ran out, or it never asked. What it says is true all the same.
            self._streams.drops["snapshot_without_slot"] += 1
        self._streams.fleet.snapshot_begin(replica, rank, begin.incarnation)

    def _on_snapshot_end(self, replica: Replica, end: stream_pb2.SnapshotEnd, now: float) -> None:
        rank = self._rank(replica, end.rank)
        if rank is None:
            return
        self._streams.fleet.snapshot_end(replica, rank)
        self._streams.slots.done(self, rank.number)
        self._streams.grant(now)

    def _on_delta(self, replica: Replica, delta: stream_pb2.Delta, now: float) -> None:
        rank = self._rank(replica, delta.rank)
        if rank is None:
            return
        refused = self._streams.fleet.apply(replica, delta, now)
        if refused is not None:
            self._drop(refused)
            self._doubt(replica, rank, refused, now)

    def _on_credit_opened(
        self, replica: Replica, credit: stream_pb2.CreditOpened, now: float
    ) -> None:
        rank = self._rank(replica, credit.rank)
        if rank is None:
            return
        if credit.origin == self._streams.instance_id:
            sent = rank.dispatches.get(credit.decision_id)
            if sent is not None:
                rank.echo.heard(now - sent.at)
            return
        size = len(credit.hashes)
        blocks = size // HASH_BYTES
        if (
            not 0 < len(credit.decision_id) <= MAX_DECISION_ID_BYTES
            or not 0 < len(credit.origin) <= MAX_ORIGIN_BYTES
            or size % HASH_BYTES
            or blocks > MAX_DELTA_HASHES
            or blocks * self._streams.settings.block_tokens > credit.prompt_tokens
            or not 0.0 < credit.expires_s <= MAX_CREDIT_S
            or not 0.0 <= credit.work_s <= MAX_CREDIT_S
            or credit.predicted > credit.prompt_tokens
        ):
            self._drop("bad_credit")
            return
        if self._streams.over(credit.decision_id):
            return  # its outcome was reported here before the word of its dispatch came
        self._streams.pins.note(credit.session, replica.name, rank.number, now)
        if credit.HasField("predicted"):
            self._streams.compare(replica, rank, credit)
        ahead = rank.backlog.ahead(now, stale_s=self._streams.settings.load_stale_s)
        due = now + ahead.seconds
        self._streams.fleet.touch(replica, rank.number, credit.hashes, credit.predicted, due)
        self._streams.credits.open(
            credit.decision_id,
            replica,
            rank.number,
            credit.hashes,
            credit.prompt_tokens,
            expires=now + credit.expires_s,
            due=due,
            origin=credit.origin,
        )
        if credit.work_s:
            tokens = credit.prompt_tokens - credit.predicted
            # Its word took about as long as that of an own one takes to come back.
            dispatch = Dispatch(now - rank.echo.smoothed_s, credit.work_s, tokens=tokens)
            rank.backlog.sent(credit.decision_id, dispatch, replica.speeds_of(rank))
            rank.traffic.sent(now, credit.work_s)
            rank.room.sent(credit.decision_id, dispatch.at, credit.prompt_tokens)
            if rank.pace is not None and self._streams.settings.learn:
                rank.pace.labels.peer_sent(
                    credit.decision_id,
                    dispatch.at,
                    credit.prompt_tokens,
                    credit.predicted,
                    rank.incarnation,
                )

    def _on_prefill_ended(
        self, replica: Replica, prefill: stream_pb2.PrefillEnded, now: float
    ) -> None:
        own = prefill.origin == self._streams.instance_id
        for rank in replica.ranks.values():
            sent = rank.dispatches.get(prefill.decision_id)
            if own == (sent is None):
                continue  # a relay speaks of others' only under their own name
            if sent is not None:
                # The first token was reported to another scheduler, or this is its echo.
                rank.dispatches[prefill.decision_id] = replace(sent, first_token=True)
            elif rank.pace is not None:
                rank.pace.labels.peer_first(prefill.decision_id, now - rank.echo.smoothed_s)
            rank.backlog.started(prefill.decision_id, replica.speeds_of(rank), now)

    def _on_credit_ended(
        self, replica: Replica, credit: stream_pb2.CreditEnded, now: float
    ) -> None:
        own = credit.origin == self._streams.instance_id
        known = self._streams.credits.get(credit.decision_id)
        # A relay may end what stands on its own replica, and only under the name that opened it.
        origin = "" if own else credit.origin
        if known is not None and (known.replica, known.origin) != (replica.name, origin):
            self._drop("unknown_credit")
            return
        waited = False
        for rank in replica.ranks.values():
            if own == (credit.decision_id in rank.dispatches):
                # The outcome was reported to another scheduler: nothing waits there for this one any more.
                rank.dispatches.pop(credit.decision_id, None)
                if rank.pace is not None:
                    rank.pace.labels.lost(credit.decision_id, now)
                waited = rank.backlog.withdrawn(credit.decision_id, now) or waited
                rank.room.ended(credit.decision_id)
        if known is not None:
            self._streams.credits.end(credit.decision_id)
        elif not (waited or own or self._streams.over(credit.decision_id)):
            self._drop("unknown_credit")  # not the echo of what was ended here

    def _on_load(self, replica: Replica, load: stream_pb2.EngineLoad, now: float) -> None:
        rank = self._rank(replica, load.rank)
        if rank is None:
            return
        if not 0.0 <= load.age_s < math.inf or not 0.0 <= load.kv_usage <= 1.0:
            self._drop("bad_load")
            return
        if len(load.adapters) > MAX_ADAPTERS or any(
            len(name.encode()) > MAX_ADAPTER_BYTES for name in load.adapters
        ):
            self._drop("bad_adapters")
            return
        if load.adapters_known:
            before = rank.adapters
            known = frozenset(load.adapters)
            # The same object again: a thousand ranks must not hold a thousand lists.
            if before is not None and before.names == known:
                known = before.names
            rank.adapters = Adapters(known, now - load.age_s)
        rank.load = Load(
            # Its word took half as long as that of a dispatch takes to come back.
            read_at=now - load.age_s - rank.echo.smoothed_s / 2,
            running_requests=load.running_requests if load.HasField("running_requests") else None,
            waiting_requests=load.waiting_requests if load.HasField("waiting_requests") else None,
            waiting_tokens=load.waiting_tokens if load.HasField("waiting_tokens") else None,
            kv_usage=load.kv_usage if load.HasField("kv_usage") else None,
        )
        rank.backlog.report(rank.load, replica.speeds_of(rank), rank.echo.deviation_s)
        rank.room.report(rank.load, rank.echo.deviation_s)

    def _on_counters(
        self, replica: Replica, counters: stream_pb2.RelayCounters, now: float
    ) -> None:
        totals = dict(counters.totals)
        if len(totals) > MAX_COUNTERS or not all(_COUNTER.fullmatch(name) for name in totals):
            self._drop("bad_counters")
            return
        replica.relay_totals = totals
        replica.relay_mirror_bytes = counters.mirror_bytes

    def _on_credential(
        self, replica: Replica, credential: stream_pb2.Credential, now: float
    ) -> None:
        """The edge has looked at it, where anybody does."""

    def _rank(self, replica: Replica, number: int) -> Rank | None:
        rank = replica.ranks.get(number)
        if rank is None:
            self._drop("unknown_rank")
        return rank

    def _doubt(self, replica: Replica, rank: Rank, reason: str, now: float) -> None:
        self._streams.fleet.doubt(replica, rank)
        self._resync_wanted[rank.number] = reason
        self._send_resyncs(now)

    def _send_resyncs(self, now: float) -> None:
        for number, reason in list(self._resync_wanted.items()):
            last = self._resync_sent.get(number, -math.inf)
            if now - last < self._streams.settings.resync_interval_s:
                continue
            self._resync_sent[number] = now
            del self._resync_wanted[number]
            self._send(
                stream_pb2.SchedulerMessage(resync=stream_pb2.Resync(rank=number, reason=reason))
            )
            self._streams.slots.request(self, [number], again=True)
            self._streams.grant(now)

    def _drop(self, reason: str) -> None:
        self._streams.drops[reason] += 1

    def _ack_now(self) -> None:
        self._ack_due = True
        self.on_output()

    def _send(self, message: stream_pb2.SchedulerMessage) -> None:
        self._outbox.append(message)
        self.on_output()
