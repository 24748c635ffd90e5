"""Holds what schedulers say to what the engines' caches really hold.

The position of a scheduler on a rank is what it says itself: the number of the last batch applied. Whatever the engine
did since may have reached it, in part, or not: so each block may count as it was at any moment since. Within that
freedom, which is none at all once everything was told, every bound must hold.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from servingfleet_protos.v1 import common_pb2, routing_pb2
from servingfleet_protos.v1.stream_pb2 import Delta
from servingfleet_scheduler.replicas import HISTORY_LOST, LIVE, Rank, Replica

from .engines import EngineRank
from .history import MODEL, Block, Tokens, canonical, reusable
from .relays import SimulatedRelay
from .schedulers import SimulatedScheduler
from .violations import Violation

CANONICAL_TOKENS = 4

CONFIRMED = Delta.CONFIDENCE_CONFIRMED
UPPER = Delta.CONFIDENCE_UPPER


@dataclass
class Routed:
    """A routed request, as its client knows it."""

    name: str
    salt: str
    prompt: Tokens
    scheduler: SimulatedScheduler
    scheduler_life: int
    decision: str
    prediction: routing_pb2.Prediction
    target: EngineRank
    position: int
    """Record up to which the scheduler had been told; -1: nothing."""
    life: tuple[object, ...]
    """What must be the same for a credit to count still: stream, number and incarnation."""
    at_record: int
    """Record that was the newest when it was routed."""
    credited: set[Block]
    """Blocks of prompts that the scheduler knew to be under way to the same rank."""


def request_of(prompt: Tokens, salt: str) -> routing_pb2.RouteRequest:
    packed = struct.pack(f"<{len(prompt)}I", *prompt)
    return routing_pb2.RouteRequest(
        model=MODEL, prompt=routing_pb2.Prompt(tokens_le32=packed, cache_salt=salt)
    )


def blocks_of(prompt: Tokens, salt: str, block_tokens: int) -> set[Block]:
    """The prompt's full engine blocks."""
    ends = range(block_tokens, len(prompt) + 1, block_tokens)
    return {(salt, prompt[:end]) for end in ends}


@dataclass(frozen=True)
class View:
    """What one scheduler says of one rank now."""

    replica: Replica
    rank: Rank
    position: int
    """-1: it has been told nothing, or no stream speaks."""
    speaking: bool

    @property
    def state(self) -> int:
        return self.replica.state(self.rank)

    @property
    def complete(self) -> bool:
        return self.replica.certain(self.rank)

    @property
    def life(self) -> tuple[object, ...]:
        return (self.replica.number, self.rank.incarnation)


def view_of(scheduler: SimulatedScheduler, relay: SimulatedRelay, rank: int) -> View | None:
    """None: the scheduler knows no such replica."""
    replica = scheduler.scheduler.fleet.get(relay.replica)
    if replica is None or rank not in replica.ranks:
        return None
    known = replica.ranks[rank]
    session = scheduler.scheduler.streams.speaking(relay.replica)
    followed = next(
        (each.followed for each in scheduler.connections if each.session is session), None
    )
    if session is None or followed is None:
        return View(replica, known, -1, speaking=False)
    position = followed.position(rank, known.incarnation, known.engine_seq)
    return View(replica, known, position, speaking=True)


def check_prediction(
    view: View,
    target: EngineRank,
    prediction: routing_pb2.Prediction,
    prompt: Tokens,
    salt: str,
    credited: set[Block],
    where: str,
) -> bool:
    """Raises Violation. True: the scheduler knew all that there was to know, so that it was held to the truth."""
    lower, predicted, upper = prediction.lower, prediction.predicted, prediction.upper
    history = target.history
    size = history.block_tokens
    said = (
        f"{where}: lower {lower}, predicted {predicted}, upper {upper} of {len(prompt)} on "
        f"{target.name}, {common_pb2.StreamState.Name(view.state)}"  # type: ignore[arg-type]
        f"{', complete' if view.complete else ''}, told {view.rank.engine_seq}"
    )
    if not lower <= predicted <= upper <= len(prompt):
        raise Violation("bounds in order", said)
    if not view.speaking:
        if lower:
            raise Violation("nothing counts without a stream", said)
        return False
    surely = reusable(history.throughout(view.position), salt, prompt, size)
    perhaps = history.ever(view.position)
    if upper < surely:
        raise Violation("upper bound", f"{said}; {surely} were there all the time")
    if lower > reusable(perhaps, salt, prompt, size):
        raise Violation("lower bound", f"{said}; at no moment more than was there")
    told_units = bool(view.replica.profile.lanes) or size == CANONICAL_TOKENS
    if told_units and predicted > reusable(perhaps | credited, salt, prompt, size):
        raise Violation("prediction", f"{said}; neither there nor under way")
    told = view.position == history.last and not history.silent()
    if not (told and told_units and view.complete):
        return False
    truth = reusable(history.now, salt, prompt, size)
    clear = reusable(history.now - history.blurred, salt, prompt, size)
    # A canonical block counts only as a whole.
    if size < CANONICAL_TOKENS:
        clear = clear // CANONICAL_TOKENS * CANONICAL_TOKENS
    if not clear <= lower <= truth <= upper or (not credited and predicted > truth):
        raise Violation("all told, all known", f"{said}; {truth} are there, {clear} surely")
    return True


def check_execution(routed: Routed, reused: int) -> None:
    """Raises Violation where the engine reused what the scheduler should have known that it could."""
    history = routed.target.history
    size = history.block_tokens
    known = history.throughout(routed.position) | (routed.credited & history.now)
    explained = min(reused, reusable(known, routed.salt, routed.prompt, size))
    if explained > routed.prediction.upper:
        raise Violation(
            "upper bound at execution",
            f"{routed.name}: upper {routed.prediction.upper}, reused {reused} on "
            f"{routed.target.name}, of which {explained} were known or credited",
        )


def check_rest(
    schedulers: list[SimulatedScheduler], relays: list[SimulatedRelay], whole: set[int]
) -> dict[str, int]:
    """What must hold once everything was told. Returns how many ranks are in which state. Raises Violation.

    `whole`: numbers of the engines of which no batch can be lost for good.
    """
    states: dict[str, int] = {}
    for number, relay in enumerate(relays):
        for rank in relay.engine.ranks:
            views = []
            for scheduler in schedulers:
                view = view_of(scheduler, relay, rank.number)
                if view is None or not view.speaking:
                    raise Violation("every link comes back", f"{scheduler.name} lacks {relay.name}")
                _check_rank(scheduler, view, rank)
                if number in whole and view.state != LIVE:
                    why = view.replica.why(view.rank)
                    raise Violation("what can be replayed is live", f"{rank.name}: {why}")
                views.append(view)
            name = common_pb2.StreamState.Name(views[0].state)  # type: ignore[arg-type]
            name = name.removeprefix("STREAM_STATE_").lower()
            states[name] = states.get(name, 0) + 1
            _check_agreement(views, schedulers, rank)
    for scheduler in schedulers:
        left = len(scheduler.scheduler.credits)
        if left:
            raise Violation("credits end", f"{scheduler.name} has {left} open")
    return states


def _check_rank(scheduler: SimulatedScheduler, view: View, rank: EngineRank) -> None:
    where = (
        f"{scheduler.name} on {rank.name}, "
        f"{common_pb2.StreamState.Name(view.state)} ({view.replica.why(view.rank)}), "  # type: ignore[arg-type]
        f"told {view.rank.engine_seq}"
    )
    if view.state not in (LIVE, HISTORY_LOST):
        raise Violation("streams recover", where)
    if not view.rank.warm:
        raise Violation("snapshots end", where)
    if scheduler.scheduler.fleet.index(MODEL) is None:
        raise Violation("streams recover", f"{where}: no index")
    confirmed, upper = (held(scheduler, view, c) for c in (CONFIRMED, UPPER))
    history = rank.history
    truth = canonical(history.now, history.block_tokens, CANONICAL_TOKENS)
    sure = canonical(history.now - history.blurred, history.block_tokens, CANONICAL_TOKENS)
    wrong = confirmed - truth
    if wrong:
        raise Violation("no wrong credit survives", f"{where}: {_shown(wrong)} are not there")
    if view.state == LIVE:
        missed = (sure - confirmed) | (truth - confirmed - upper)
        if missed:
            raise Violation("nothing is missing", f"{where}: {_shown(missed)} are there")
        if view.position != history.last:
            raise Violation(
                "nothing is missing", f"{where}: {history.records[-1].seq} was published"
            )
    index = scheduler.scheduler.fleet.index(MODEL)
    assert index is not None
    credits = index.credits(view.replica.number, view.rank.number)
    if credits:
        raise Violation("credits end", f"{where}: {credits} count in the index")


def held(scheduler: SimulatedScheduler, view: View, confidence: int) -> set[int]:
    """Canonical hashes that the index has, in any lane."""
    index = scheduler.scheduler.fleet.index(MODEL)
    assert index is not None
    found: set[int] = set()
    for lane in view.replica.profile.lanes:
        packed = index.holdings(view.replica.number, view.rank.number, lane.lane, confidence)
        found.update(struct.unpack(f"<{len(packed) // 8}Q", packed))
    return found


def _check_agreement(
    views: list[View], schedulers: list[SimulatedScheduler], rank: EngineRank
) -> None:
    def said(scheduler: SimulatedScheduler, view: View) -> tuple[object, ...]:
        return (
            view.state,
            view.rank.incarnation,
            view.rank.engine_seq,
            held(scheduler, view, CONFIRMED),
            held(scheduler, view, UPPER),
        )

    first, *others = [said(s, v) for s, v in zip(schedulers, views, strict=True)]
    for other in others:
        if other != first:
            raise Violation("schedulers agree", f"on {rank.name}: {first} and {other}")


def _shown(hashes: set[int]) -> str:
    return ", ".join(f"{each:016x}"[-6:] for each in sorted(hashes)[:6])
