"""What is this stream, which invariants hold of it, what would be indexed, and what not? The relay's own code answers.

Pure: messages in, a report out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from servingfleet_relay.adapters.events import Dropped
from servingfleet_relay.adapters.registry import ADAPTERS
from servingfleet_relay.conformance.canary import Canary
from servingfleet_relay.conformance.invariants import TABLE, Action
from servingfleet_relay.conformance.standing import Condition
from servingfleet_relay.pipeline import Pipeline, RankStatus
from servingfleet_relay.settings import LayerGroup, PipelineSettings

from .recordings import Message

MAX_EXAMPLES = 20

Result = Literal["holds", "warning", "failed", "not checked"]
Verdict = Literal["sound", "degraded", "unusable", "silent"]

NOT_SEEN: Mapping[str, str] = {
    "C8": "no replay is asked for",
    "C20": "the size of the engine's cache is not asked for",
    "C21": "the use of the engine's cache is not asked for",
    "C31": "nothing is predicted",
    "C33": "no relay reads it",
    "C34": "the engine's counters are not asked for",
    "C35": "no canary was sent",
}
"""What messages alone don't show."""

JOINED_LATE = "C7"
"""Says when somebody began to listen, and nothing about the engine."""


@dataclass(frozen=True)
class Checked:
    """One invariant. `failures` by rank, reason, count and the first detail; `why` it was not checked."""

    id: str
    checks: str
    result: Result
    failures: tuple[Mapping[str, Any], ...] = ()
    actions: tuple[str, ...] = ()
    """What follows of a failure, in the order in which they follow when it goes on failing."""
    act: str = ""
    """What a person can do."""
    why: str = ""


@dataclass(frozen=True)
class NotIndexed:
    """Something that the stream holds and an index would not, or not for certain."""

    what: str
    why: str
    rightly: bool = False
    """No relay could index it, and the engine did nothing wrong."""


@dataclass(frozen=True)
class StreamReport:
    """All that the messages tell."""

    engine: str
    version: str
    """"": nobody said."""
    messages: int
    kinds: Mapping[str, int]
    """Events by kind."""
    ranks: tuple[RankStatus, ...]
    invariants: tuple[Checked, ...]
    indexed: tuple[str, ...]
    """Tier, state class, group, unit."""
    not_indexed: tuple[NotIndexed, ...]
    examples: tuple[str, ...]
    """The first of each kind of event that was dropped, in words."""
    canary: tuple[str, ...] | None = None
    """What was not as it should be; None: none was sent."""

    @property
    def verdict(self) -> Verdict:
        """sound: a relay would predict from all of it; degraded: an upper bound, or a part; unusable: quarantined."""
        if not self.messages:
            return "silent"
        if any(rank.condition is Condition.QUARANTINED for rank in self.ranks):
            return "unusable"
        failed = any(each.result == "failed" for each in self.invariants)
        left = not all(each.rightly for each in self.not_indexed)
        return "degraded" if failed or left else "sound"


@dataclass
class Checker:
    """A relay without links: hears messages, and says what it made of them. Numbers in tokens."""

    ranks: int
    block_tokens: int
    engine: str = "vllm"
    version: str = ""
    host_unit_tokens: int = 0
    engine_block_tokens: int = 0
    layer_groups: tuple[LayerGroup, ...] = ()
    pulled: bool = False
    """The messages are entries that were pulled; needs `engine_block_tokens`."""
    canary_differs: tuple[str, ...] | None = None
    _messages: int = 0
    _kinds: Counter[str] = field(default_factory=Counter)
    _examples: dict[str, str] = field(default_factory=dict)
    _pipeline: Pipeline | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for an engine without an adapter, or without events to pull where they were pulled."""
        adapter = ADAPTERS.get(self.engine)
        if adapter is None:
            raise ValueError(f"engine {self.engine!r} is not known; known: {', '.join(ADAPTERS)}")
        self._never_run = adapter.profile.never_run
        self._decode = adapter.decode
        if self.pulled:
            if adapter.pulled is None:
                raise ValueError(f"engine {self.engine!r} has no events to pull")
            self._decode = adapter.pulled(self.engine_block_tokens)

    def hear(self, message: Message) -> None:
        """One message, in the order of their arrival."""
        pipeline = self.pipeline(message.time)
        self._messages += 1
        payload = message.frames[-1] if message.frames else b""
        for event in self._decode(payload).events:
            self._kinds[type(event).__name__.lower()] += 1
            if isinstance(event, Dropped) and len(self._examples) < MAX_EXAMPLES:
                where = f"rank {message.rank}, sequence {message.seq}"
                self._examples.setdefault(event.reason, f"{where}: {event.reason}: {event.detail}")
        pipeline.live(message.rank, message.frames, message.time)
        pipeline.tick(message.time)

    def pipeline(self, now: float) -> Pipeline:
        """The relay's. It begins with the first message."""
        if self._pipeline is None:
            settings = PipelineSettings(
                replica="checked",
                model="checked",
                ranks=tuple(range(self.ranks)),
                stream_id="check",
                engine=self.engine,
                engine_version=self.version,
                block_tokens=self.block_tokens,
                engine_block_tokens=self.engine_block_tokens,
                host_unit_tokens=self.host_unit_tokens,
                layer_groups=self.layer_groups,
                pull=self.pulled,
                replay=False,
            )
            self._pipeline = Pipeline(settings, now)
            for rank in settings.ranks:
                self._pipeline.socket_up(rank, now)
        return self._pipeline

    def canary(self, rank: int, canary: Canary, now: float) -> None:
        """From now on it sees what the rank publishes."""
        self.pipeline(now).canary(rank, canary)

    def canary_answered(
        self, rank: int, canary: Canary, first: int | None, second: int | None, now: float
    ) -> None:
        """What the engine reported of its two runs, in cached tokens."""
        self.canary_differs = self.pipeline(now).canary_answered(rank, canary, first, second)

    def report(self) -> StreamReport:
        """What there is to say by now."""
        status = self._pipeline.status() if self._pipeline is not None else None
        ranks = status.ranks if status is not None else ()
        return StreamReport(
            engine=self.engine,
            version=self.version,
            messages=self._messages,
            kinds=dict(sorted(self._kinds.items())),
            ranks=ranks,
            invariants=tuple(self._invariants(ranks)),
            indexed=status.lanes if status is not None else (),
            not_indexed=tuple(
                _not_indexed(ranks, status.totals if status is not None else {}, self._never_run)
            ),
            examples=tuple(self._examples.values()),
            canary=self.canary_differs,
        )

    def _invariants(self, ranks: tuple[RankStatus, ...]) -> Iterable[Checked]:
        for row in TABLE:
            failures = tuple(
                {"rank": r.rank, "reason": f.reason, "count": f.count, "detail": f.detail}
                for r in ranks
                for f in r.failures
                if f.invariant == row.id
            )
            why = NOT_SEEN.get(row.id, "")
            if not self._messages:
                why = "nothing was received"
            elif row.id == "C35" and self.canary_differs is not None:
                why = ""
            if failures:
                mild = row.id == JOINED_LATE or row.actions[0] is Action.WARN
                actions = tuple(action.value for action in row.actions)
                result: Result = "warning" if mild else "failed"
                yield Checked(row.id, row.checks, result, failures, actions, row.act)
            elif why:
                yield Checked(row.id, row.checks, "not checked", why=why)
            else:
                yield Checked(row.id, row.checks, "holds")


def check(messages: Iterable[Message], checker: Checker) -> StreamReport:
    """Everything through a checker."""
    for message in messages:
        checker.hear(message)
    return checker.report()


def _not_indexed(
    ranks: tuple[RankStatus, ...], totals: Mapping[str, int], never_run: str
) -> Iterable[NotIndexed]:
    for rank in ranks:
        failed = {failure.invariant for failure in rank.failures}
        late = rank.state == "history_lost" and (rank.engine_seq is None or failed == {JOINED_LATE})
        if rank.condition is not Condition.LIVE and not late:
            bound = "" if rank.condition is Condition.QUARANTINED else ", but as an upper bound"
            yield NotIndexed(f"rank {rank.rank}{bound}", rank.reason)
        elif never_run and rank.engine_seq is not None:
            yield NotIndexed(f"rank {rank.rank}, but as an upper bound", never_run)
        for name, (condition, reason) in rank.tiers.items():
            bound = "" if condition is Condition.QUARANTINED else ", but as an upper bound"
            yield NotIndexed(f"rank {rank.rank} {name}{bound}", reason)
        opaque = rank.mirror.get("opaque_units", 0)
        if opaque:
            what = f"rank {rank.rank}: {opaque} blocks that no prompt can be matched with"
            why = "they are kept apart by keys that no client can tell"
            yield NotIndexed(what, why, rightly=True)
    for name, total in sorted(totals.items()):
        if name.startswith("drop_") and total:
            yield NotIndexed(f"{total} events", name.removeprefix("drop_"))
