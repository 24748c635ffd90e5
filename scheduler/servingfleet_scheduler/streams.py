"""Which relay stream speaks for which replica, and who sends a snapshot when.

Pure. One stream speaks for a replica at a time:
- the same `stream_id` again (a relay that lost its connection) takes over at once, and resumes where it can;
- another `stream_id` takes over when the present stream is closed, or was silent for `takeover_silence_s`; until then
  it is refused (REPLICA_TAKEN) and may try again: a second relay that claims the same identity can't disturb the first;
- a `stream_id` that was superseded never comes back (SUPERSEDED): two relays can't take turns.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.rpc import code_pb2

from servingfleet_protos.v1 import stream_pb2

from .credits import Credits
from .errors import SessionRefused
from .fleet import Fleet, TooManyReplicas
from .hello import check_hello
from .pins import Pins
from .replicas import Rank, Replica
from .settings import SchedulerSettings
from .slots import SnapshotSlots

if TYPE_CHECKING:
    from .sessions import Session

RETIRED_KEPT = 16
COMPARED_EVERY = 8
"""Peers' predictions told for each that is worked out here too: an eighth of a route's look-up for each."""


@dataclass(slots=True)
class Speaker:
    """The stream that speaks, or spoke last, for a replica. `applied`: its last sequence number applied."""

    stream_id: str
    session: Session | None
    applied: int = 0
    heard: float = 0.0
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=RETIRED_KEPT))


@dataclass(slots=True)
class Disagreement:
    """How far this scheduler's predictions are from its peers', of the same prompts on the targets that those chose."""

    difference: int = 0
    """Sum of the absolute differences, tokens."""
    prompt: int = 0
    """Sum of the prompts' tokens."""
    samples: int = 0


class Streams:
    """The registry behind all sessions."""

    def __init__(
        self,
        fleet: Fleet,
        credits: Credits,
        pins: Pins,
        settings: SchedulerSettings,
        instance_id: str,
        over: Callable[[str], bool],
    ) -> None:
        """`over`: whether the outcome of a decision has come."""
        self.fleet = fleet
        self.over = over
        self.credits = credits
        self.pins = pins
        self.settings = settings
        self.instance_id = instance_id
        self.drops: Counter[str] = Counter()
        """Messages that changed nothing, by reason."""
        self.refusals: Counter[str] = Counter()
        """Streams ended, by reason."""
        self.slots: SnapshotSlots[Session] = SnapshotSlots(
            settings.snapshot_slots,
            silence_s=settings.snapshot_silence_s,
            limit_s=settings.snapshot_limit_s,
        )
        self._speakers: dict[str, Speaker] = {}
        # A dict for its order: what happens in a tick must not depend on addresses.
        self._opened: dict[Session, None] = {}
        self.disagreement = Disagreement()
        self._told = 0

    def __iter__(self) -> Iterator[Session]:
        """The sessions that speak for a replica."""
        return (each.session for each in self._speakers.values() if each.session is not None)

    @property
    def open(self) -> int:
        """Streams open, also those that have not said hello yet."""
        return len(self._opened)

    def opened(self, session: Session) -> None:
        self._opened[session] = None

    def speaking(self, replica: str) -> Session | None:
        """The session that speaks for a replica now."""
        speaker = self._speakers.get(replica)
        return speaker.session if speaker else None

    def hello(
        self, session: Session, hello: stream_pb2.Hello, now: float
    ) -> tuple[Replica, Speaker, bool]:
        """Who speaks here, and whether an earlier session goes on. Raises SessionRefused."""
        check_hello(
            hello, block_tokens=self.settings.block_tokens, max_ranks=self.settings.max_ranks
        )
        speaker = self._speakers.get(hello.replica)
        if speaker is not None:
            self._check_turn(speaker, hello, now)
        replica = self.fleet.get(hello.replica)
        if speaker is not None and replica is not None and self._resumes(speaker, hello):
            resumed = True
            self._supersede(speaker)
            self.fleet.resume(replica)
        else:
            resumed = False
            replica = self._attach(hello)
            retired: deque[str] = deque(maxlen=RETIRED_KEPT)
            if speaker is not None:
                self._supersede(speaker)
                retired = speaker.retired
                if speaker.stream_id != hello.stream_id:
                    retired.append(speaker.stream_id)
            speaker = Speaker(hello.stream_id, None, retired=retired)
            self._speakers[hello.replica] = speaker
        speaker.session = session
        speaker.heard = now
        return replica, speaker, resumed

    def closed(self, session: Session, speaker: Speaker | None, now: float) -> None:
        """A stream ended, however."""
        self._opened.pop(session, None)
        self.slots.release(session)
        if speaker is not None and speaker.session is session:
            speaker.session = None
            if session.replica is not None:
                self.fleet.detach(session.replica, now)
        self.grant(now)

    def grant(self, now: float) -> None:
        """Hands out the snapshot slots that are free."""
        for given in self.slots.grants(now):
            given.who.grant(given.ranks)

    def end(self, refusal: SessionRefused) -> None:
        """Ends every stream."""
        for session in list(self._opened):
            session.refuse(refusal)

    def compare(self, replica: Replica, rank: Rank, credit: stream_pb2.CreditOpened) -> None:
        """Holds a peer's prediction to what would be predicted here, before its credit counts; every few of them."""
        self._told += 1
        if self._told % COMPARED_EVERY or not credit.hashes:
            return
        here = self.fleet.predicted(replica, rank, credit.hashes, credit.prompt_tokens)
        said = self.disagreement
        said.difference += abs(here - credit.predicted)
        said.prompt += credit.prompt_tokens
        said.samples += 1

    def tick(self, now: float) -> None:
        """Slots and acknowledgements that are due, replicas that are gone."""
        self.grant(now)
        for session in list(self._opened):
            session.tick(now)
        for name in self.fleet.expire(now):
            self._speakers.pop(name, None)

    def _attach(self, hello: stream_pb2.Hello) -> Replica:
        try:
            return self.fleet.attach(hello)
        except TooManyReplicas:
            raise SessionRefused(
                code_pb2.RESOURCE_EXHAUSTED,
                "TOO_MANY_REPLICAS",
                f"this scheduler knows {self.settings.max_replicas} replicas already",
                retry_s=30.0,
            ) from None

    def _check_turn(self, speaker: Speaker, hello: stream_pb2.Hello, now: float) -> None:
        if hello.stream_id in speaker.retired:
            raise SessionRefused(
                code_pb2.ALREADY_EXISTS,
                "SUPERSEDED",
                f"a newer stream speaks for replica {hello.replica!r}: this relay must end",
            )
        silent = now - speaker.heard
        if (
            speaker.session is not None
            and speaker.stream_id != hello.stream_id
            and silent < self.settings.takeover_silence_s
        ):
            raise SessionRefused(
                code_pb2.ALREADY_EXISTS,
                "REPLICA_TAKEN",
                f"another stream speaks for replica {hello.replica!r} and was heard "
                f"{silent:.1f} s ago: give each relay its own identity, or wait until it is closed",
                retry_s=self.settings.takeover_silence_s,
            )

    def _resumes(self, speaker: Speaker, hello: stream_pb2.Hello) -> bool:
        # Contiguous: the relay can still send the first message that is missing here.
        return (
            speaker.stream_id == hello.stream_id
            and hello.resume_instance == self.instance_id
            and 0 < hello.resume_from <= speaker.applied + 1
        )

    def _supersede(self, speaker: Speaker) -> None:
        session, speaker.session = speaker.session, None
        if session is not None:
            self.slots.release(session)
            session.refuse(
                SessionRefused(
                    code_pb2.ALREADY_EXISTS,
                    "SUPERSEDED",
                    "a newer stream speaks for this replica",
                )
            )
