"""What one scheduler is still to be told: numbering, acknowledgement, resending, snapshots.

Pure. Deltas are absolute, so anything may be sent twice, and a snapshot part may overtake older deltas: the last word
on a block is always the newer one. Memory is bounded: who does not keep up gets a snapshot instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from servingfleet_protos.v1.stream_pb2 import (
    EngineLoad,
    RankState,
    RelayCounters,
    RelayMessage,
    Welcome,
)

LIVE_PER_SNAPSHOT_PART = 3
"""Live messages between two parts of a snapshot while both wait: neither starves the other."""


class Phase(Enum):
    """Where a link stands."""

    CLOSED = auto()
    GREETED = auto()
    """Hello is sent, the answer is awaited."""
    OPEN = auto()
    BROKEN = auto()
    """The session can't go on: the edge closes the connection and starts anew."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one link."""

    resend_messages: int
    resend_bytes: int
    waiting_messages: int
    waiting_bytes: int


@dataclass(frozen=True, slots=True)
class Body:
    """A message without its number, shared by all links."""

    message: RelayMessage
    size: int

    @classmethod
    def of(cls, message: RelayMessage) -> Body:
        """Takes the message over: it must not change any more."""
        return cls(message, message.ByteSize())


Snapshot = Generator[list[RelayMessage], None, None]
SnapshotOf = Callable[[int], Snapshot]
"""Starts the snapshot of a rank: Begin, parts that are read when asked for, End. A part may be several messages."""


class Outbox:
    """One link to one scheduler."""

    def __init__(self, limits: Limits, snapshot_of: SnapshotOf) -> None:
        self.phase = Phase.CLOSED
        self.overflows = 0
        self._limits = limits
        self._snapshot_of = snapshot_of
        self._instance = ""
        self._next_seq = 1
        self._window = limits.resend_messages
        self._sent: deque[tuple[int, Body]] = deque()
        self._sent_bytes = 0
        self._resend_from = 1
        """Number of the next message to be written: below `_next_seq` it is a repetition."""
        self._waiting: deque[Body] = deque()
        self._waiting_bytes = 0
        self._profiles = 0
        """Profiles among what waits: a snapshot part that overtakes one may speak of lanes that nobody knows."""
        self._progress: dict[int, RankState] = {}
        self._granted: deque[int] = deque()
        self._snapshot: Snapshot | None = None
        self._part: deque[RelayMessage] = deque()
        """Read together and not yet sent: nothing that changed since may come before."""
        self._since_part = 0
        self._loads: dict[int, EngineLoad] = {}
        self._counters: RelayCounters | None = None
        self._incarnations: dict[int, int] = {}
        self._profile_version = 0

    @property
    def resumable(self) -> bool:
        """A session that a new connection may continue."""
        return bool(self._instance)

    @property
    def unacknowledged(self) -> int:
        """Messages sent and not acknowledged."""
        return len(self._sent)

    def greet(self, incarnations: dict[int, int], profile_version: int) -> tuple[str, int]:
        """A connection is made. Returns the hello's resume_instance and resume_from."""
        # A hello states what is so now; a restart among what is to be resent would come before its own past.
        if self.resumable and incarnations != self._incarnations:
            self._forget_session()
        self.phase = Phase.GREETED
        self._profile_version = profile_version
        if not self.resumable:
            self._incarnations = dict(incarnations)
            return "", 0
        return self._instance, self._sent[0][0] if self._sent else self._next_seq

    def welcome(self, welcome: Welcome, opening: Sequence[RelayMessage]) -> None:
        """The scheduler's answer. `opening`: what a new session begins with."""
        if self.phase is not Phase.GREETED:
            return self.give_up()
        self._window = min(
            welcome.window or self._limits.resend_messages, self._limits.resend_messages
        )
        first = self._sent[0][0] if self._sent else self._next_seq
        if welcome.resumed:
            if not (self.resumable and first <= welcome.expected_seq <= self._next_seq):
                return self.give_up()
            self.acknowledge(welcome.expected_seq - 1)
            self._resend_from = welcome.expected_seq
        else:
            self._forget_session()
            for message in opening:
                self._append(Body.of(message))
        self._instance = welcome.instance_id
        self.phase = Phase.OPEN

    def profile_known(self, version: int) -> bool:
        """Whether the hello of this connection carried this version of the profile."""
        return self._profile_version == version

    def close(self) -> None:
        """The connection is lost: what is not acknowledged is kept."""
        if self.phase is Phase.BROKEN:
            self._forget_session()
        self.phase = Phase.CLOSED

    def give_up(self) -> None:
        """This session can't go on."""
        self._forget_session()
        self.phase = Phase.BROKEN

    def acknowledge(self, seq: int) -> None:
        """Everything up to `seq` has arrived."""
        while self._sent and self._sent[0][0] <= seq:
            _, body = self._sent.popleft()
            self._sent_bytes -= body.size
            if body.message.HasField("rank_state"):
                state = body.message.rank_state
                self._incarnations[state.rank] = state.incarnation

    def grant(self, ranks: Sequence[int]) -> None:
        """The scheduler has room for these snapshots."""
        self._granted.extend(rank for rank in ranks if rank not in self._granted)

    def put(self, body: Body) -> None:
        """One more message, in order. Without a session there is nobody to tell: a snapshot will."""
        if not self.resumable:
            return
        self._append(body)
        if body.message.HasField("rank_state"):
            self._progress.pop(body.message.rank_state.rank, None)
        limits = self._limits
        if (
            len(self._waiting) > limits.waiting_messages
            or self._waiting_bytes > limits.waiting_bytes
        ):
            self.overflows += 1
            connected = self.phase is not Phase.CLOSED
            self._forget_session()
            self.phase = Phase.BROKEN if connected else Phase.CLOSED

    def progress(self, state: RankState) -> None:
        """How far a rank has come: sent once all that is waiting is sent."""
        if self.resumable:
            self._progress[state.rank] = state

    def load(self, load: EngineLoad) -> None:
        """Newest load of a rank."""
        self._loads[load.rank] = load

    def counters(self, counters: RelayCounters) -> None:
        """Newest totals."""
        self._counters = counters

    def take(self, limit: int) -> list[RelayMessage]:
        """The next messages to write, at most `limit`."""
        taken: list[RelayMessage] = []
        if self.phase is not Phase.OPEN:
            return taken
        while self._loads and len(taken) < limit:
            taken.append(RelayMessage(load=self._loads.pop(next(iter(self._loads)))))
        if self._counters is not None and len(taken) < limit:
            taken.append(RelayMessage(counters=self._counters))
            self._counters = None
        if self._resend_from < self._next_seq:
            for seq, body in self._sent:
                if len(taken) >= limit:
                    return taken
                if seq >= self._resend_from:
                    taken.append(_numbered(body, seq))
                    self._resend_from = seq + 1
        while len(taken) < limit and self._has_room():
            following = self._next_body()
            if following is None:
                break
            taken.append(_numbered(following, self._next_seq))
            self._sent.append((self._next_seq, following))
            self._sent_bytes += following.size
            self._next_seq += 1
            self._resend_from = self._next_seq
        return taken

    def _has_room(self) -> bool:
        return len(self._sent) < self._window and self._sent_bytes < self._limits.resend_bytes

    def _next_body(self) -> Body | None:
        if self._part:
            return Body.of(self._part.popleft())
        part_is_due = self._since_part >= LIVE_PER_SNAPSHOT_PART and not self._profiles
        if not self._waiting or part_is_due:
            self._since_part = 0
            self._part.extend(self._next_part())
            if self._part:
                return Body.of(self._part.popleft())
        if self._waiting:
            self._since_part += 1
            body = self._waiting.popleft()
            self._waiting_bytes -= body.size
            self._profiles -= body.message.HasField("profile")
            return body
        if self._progress:
            return Body.of(RelayMessage(rank_state=self._progress.pop(next(iter(self._progress)))))
        return None

    def _next_part(self) -> list[RelayMessage]:
        while True:
            if self._snapshot is None:
                if not self._granted:
                    return []
                self._snapshot = self._snapshot_of(self._granted.popleft())
            part = next(self._snapshot, None)
            if part is not None:
                return part
            self._snapshot = None

    def _append(self, body: Body) -> None:
        self._waiting.append(body)
        self._waiting_bytes += body.size
        self._profiles += body.message.HasField("profile")

    def _forget_session(self) -> None:
        self._instance = ""
        self._next_seq = self._resend_from = 1
        self._sent.clear()
        self._waiting.clear()
        self._sent_bytes = self._waiting_bytes = self._profiles = 0
        self._progress.clear()
        self._granted.clear()
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None
        self._part.clear()
        self._since_part = 0


def _numbered(body: Body, seq: int) -> RelayMessage:
    message = RelayMessage()
    message.CopyFrom(body.message)
    message.seq = seq
    return message
