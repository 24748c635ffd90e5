"""What all schedulers are told of a replica: who speaks, how to read it, what changes; each in its own time.

Pure. Every link, by its name, has an outbox of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from servingfleet_protos.v1.stream_pb2 import (
    Delta,
    EngineLoad,
    Hello,
    RankState,
    RelayCounters,
    RelayMessage,
    Welcome,
)

from .engine import Engine
from .outbox import Body, Limits, Outbox
from .rank import Rank
from .settings import PipelineSettings

PROTOCOL_VERSION = 1


class Schedulers:
    """The links. Unknown ones raise KeyError."""

    def __init__(
        self, settings: PipelineSettings, engine: Engine, ranks: Mapping[int, Rank]
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._ranks = ranks
        self._links: dict[str, Outbox] = {}
        self._limits = Limits(
            settings.resend_window_messages,
            settings.resend_window_bytes,
            settings.outbox_messages,
            settings.outbox_bytes,
        )
        self._profile_version = 0
        self._progress: dict[int, int | None] = {}

    def __getitem__(self, link: str) -> Outbox:
        return self._links[link]

    @property
    def phases(self) -> dict[str, str]:
        """Where each link stands, for people."""
        return {name: link.phase.name.lower() for name, link in self._links.items()}

    @property
    def overflows(self) -> int:
        """Sessions given up because a scheduler fell behind."""
        return sum(link.overflows for link in self._links.values())

    def open(self, link: str, counters: Callable[[], RelayCounters]) -> RelayMessage:
        """A connection is made. Returns the hello to send. `counters`: the totals, for a link that is new."""
        outbox = self._links.get(link)
        if outbox is None:
            outbox = Outbox(self._limits, lambda rank: self._ranks[rank].snapshot())
            self._links[link] = outbox
            outbox.counters(counters())
        incarnations = {rank: s.numbering.incarnation for rank, s in self._ranks.items()}
        instance, first = outbox.greet(incarnations, self._profile_version)
        settings = self._settings
        return RelayMessage(
            hello=Hello(
                protocol_version=PROTOCOL_VERSION,
                replica=settings.replica,
                stream_id=settings.stream_id,
                model=settings.model,
                endpoint=settings.endpoint,
                block_tokens=settings.block_tokens,
                hash_version=settings.hash_version,
                profile=self._engine.profile(),
                ranks=self._states(),
                resume_instance=instance,
                resume_from=first,
                labels=settings.labels,
            )
        )

    def forget(self, link: str) -> None:
        """There is no such scheduler any more. Unknown links are fine."""
        outbox = self._links.pop(link, None)
        if outbox is not None:
            outbox.give_up()

    def welcome(self, link: str, welcome: Welcome) -> None:
        """A scheduler's answer to the hello."""
        outbox = self._links[link]
        outbox.welcome(welcome, self._opening(outbox))

    def tell(self, source: Rank) -> None:
        """Hands what a rank has to say to every link."""
        self.tell_profile()
        for message in source.take():
            self.put(message)
        applied = source.numbering.applied
        if self._progress.get(source.rank) != applied:
            self._progress[source.rank] = applied
            state = source.state()
            for link in self._links.values():
                link.progress(state)

    def tell_profile(self) -> None:
        """How to read the engine, if that has changed."""
        if self._engine.lanes.version != self._profile_version:
            self._profile_version = self._engine.lanes.version
            self.put(self._profile())

    def put(self, message: RelayMessage) -> None:
        """A message for all, in order. It must not change any more."""
        body = Body.of(message)
        for link in self._links.values():
            link.put(body)

    def load(self, load: EngineLoad) -> None:
        """The newest load of a rank."""
        for link in self._links.values():
            link.load(load)

    def counters(self, counters: RelayCounters) -> None:
        """The newest totals."""
        for link in self._links.values():
            link.counters(counters)

    def _opening(self, outbox: Outbox) -> list[RelayMessage]:
        """What a new session begins with; what is held comes as a snapshot, when it is granted."""
        opening = [] if outbox.profile_known(self._profile_version) else [self._profile()]
        for state in self._states():
            # A scheduler that knew this relay may have missed removals: what it has of it counts no more.
            opening += [
                RelayMessage(delta=Delta(rank=state.rank, lane=lane, op=Delta.OP_CLEAR))
                for lane in self._engine.lanes.numbers()
            ]
            opening.append(RelayMessage(rank_state=state))
        return opening

    def _states(self) -> list[RankState]:
        return [source.state() for source in self._ranks.values()]

    def _profile(self) -> RelayMessage:
        return RelayMessage(profile=self._engine.profile())
