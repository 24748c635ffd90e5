"""What will happen to a simulated fleet: its parts, and the steps of one schedule. All drawn from the seed.

Pure. A script is data, so that a failing one can be printed, cut down and kept as a test.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from enum import StrEnum


class Kind(StrEnum):
    """What a step does."""

    REQUEST = "routed request"
    """Routed by a scheduler, pinned or not."""
    LOCAL = "local request"
    """Sent to an engine without asking anybody."""
    ABORT = "abort"
    """The client of the oldest request in flight goes away."""
    RESET = "cache reset"
    """The engine forgets its cache, and says so with its next step only."""
    RESTART_ENGINE = "engine restart"
    """In place: same address, numbers from 0. `amount` batches are published before anyone listens."""
    FLAP = "event socket flap"
    """The relay's subscription breaks and comes back; what is published meanwhile is lost."""
    LOSE = "lost batches"
    """The next `amount` batches miss the subscription; the ring has them."""
    HOLE = "unsent batches"
    """The next `amount` batches are neither sent nor in the ring, as after an encoding failure."""
    LOSE_REPLIES = "lost replay replies"
    """The next `amount` replies of a replay are lost, perhaps its end."""
    MUTE_REPLAY = "mute replay"
    """The replay socket answers nothing for `span`."""
    RESTART_RELAY = "relay restart"
    """Same replica, new stream id."""
    RESTART_SCHEDULER = "scheduler restart"
    """New instance id, empty index."""
    BREAK = "broken link"
    """What is under way is lost; both sides notice in their own time."""
    FORGET = "forgotten link"
    """The scheduler's address no longer resolves, and does again after `span`."""
    SLOW = "slow link"
    """Each message takes longer for `span`."""
    STALL = "scheduler stall"
    """The scheduler reads nothing for `span`."""
    JUMP_RELAY = "relay clock jump"
    JUMP_SCHEDULER = "scheduler clock jump"


TRAFFIC = (Kind.REQUEST, Kind.LOCAL, Kind.ABORT)
LOSING = frozenset({Kind.HOLE, Kind.LOSE_REPLIES, Kind.MUTE_REPLAY, Kind.JUMP_RELAY})
"""Without these a relay can have every batch, now or later: an engine whose ring holds all stays live."""
WHOLE_RING = 1000
FAULTS = tuple(kind for kind in Kind if kind not in TRAFFIC)


@dataclass(frozen=True)
class Engine:
    """One simulated engine and its relay."""

    ranks: int = 1
    blocks: int = 16
    """GPU blocks, of which one is never used: small, so that they are evicted."""
    block_tokens: int = 4
    ring: int = WHOLE_RING
    """Batches kept for replay."""
    replay: bool = True
    version: str = "0.33.0"
    wide_hashes: bool = False
    """32-byte hashes in the events."""
    new_seed: bool = False
    """Each process hashes differently."""


@dataclass(frozen=True)
class Step:
    """One thing that happens. What a field means depends on the kind."""

    at: float
    """Seconds since the start."""
    kind: Kind
    engine: int = 0
    rank: int = 0
    scheduler: int = 0
    amount: int = 0
    span: float = 0.0
    prompt: tuple[int, int, int] = (0, 0, 0)
    """(family, tokens shared with it, tokens of its own)."""
    outputs: int = 1
    pinned: bool = False
    """To `engine` and `rank`."""
    flag: bool = False
    """A salted prompt; a local one that has reused blocks announced again; a reset that stops what runs; batches
    before a restarted engine's relay listens: by kind."""
    own: int = 0
    """Names the prompt's own tokens."""

    def __str__(self) -> str:
        said = [f"{self.at:6.2f} s  {self.kind}"]
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                shown = f"{value:.2f}" if isinstance(value, float) else value
                said.append(f"{field.name}={shown}")
        return " ".join(said)


@dataclass(frozen=True)
class Script:
    """A whole schedule. `seed` draws the delays; the rest is here."""

    seed: int
    engines: tuple[Engine, ...]
    steps: tuple[Step, ...]
    slots: int = 1
    window: int = 32
    """Messages that a link may have unacknowledged."""
    outbox: int = 64
    """Messages that may wait at a relay for one scheduler."""
    delta_hashes: int = 8
    delay_s: float = 0.05
    """Usual delay of a message, at most."""

    def without(self, start: int, end: int) -> Script:
        """The same with fewer steps."""
        return replace(self, steps=self.steps[:start] + self.steps[end:])

    def __str__(self) -> str:
        settings = (
            f"seed {self.seed}: {self.slots} snapshot slots, window {self.window}, outbox "
            f"{self.outbox}, {self.delta_hashes} hashes a delta, delays to {self.delay_s} s"
        )
        lines = [settings]
        lines += [f"  engine {number}: {engine}" for number, engine in enumerate(self.engines)]
        lines += [f"  {step}" for step in self.steps]
        return "\n".join(lines)


SPAN_S = 8.0
"""Seconds of a schedule in which steps happen."""

VERSIONS = ("0.33.0", "0.33.0", "0.25.0", "0.19.0", "0.10.2")


def draw(seed: int) -> Script:
    """The script of a seed."""
    rng = random.Random(seed)
    engines = tuple(_engine(rng) for _ in range(rng.choice((1, 1, 2, 2, 3))))
    # Not every kind of trouble in every schedule: what hides behind another trouble must show, too.
    share = rng.choice((0.12, 0.12, 0.4))
    kinds = [kind for kind in FAULTS if rng.random() < share]
    steps = [_traffic(rng, engines) for _ in range(rng.randint(6, 24))]
    if kinds:
        steps += [_fault(rng, engines, rng.choice(kinds)) for _ in range(rng.randint(1, 10))]
    steps.sort(key=lambda step: step.at)
    return Script(
        seed,
        engines,
        tuple(steps),
        slots=rng.choice((1, 1, 2)),
        window=rng.choice((4, 16, 64)),
        outbox=rng.choice((12, 40, 200)),
        delta_hashes=rng.choice((1, 3, 64)),
        delay_s=rng.choice((0.01, 0.1, 0.5)),
    )


def _engine(rng: random.Random) -> Engine:
    return Engine(
        ranks=rng.choice((1, 1, 2)),
        blocks=rng.choice((8, 14, 40)),
        block_tokens=rng.choice((4, 4, 4, 8, 2)),
        ring=rng.choice((2, 6, WHOLE_RING, WHOLE_RING)),
        replay=rng.random() < 0.8,
        version=rng.choice(VERSIONS),
        wide_hashes=rng.random() < 0.3,
        new_seed=rng.random() < 0.5,
    )


def _traffic(rng: random.Random, engines: tuple[Engine, ...]) -> Step:
    draw = rng.random()
    kind = Kind.REQUEST if draw < 0.7 else Kind.LOCAL if draw < 0.93 else Kind.ABORT
    engine = rng.randrange(len(engines))
    return Step(
        at=_time(rng),
        kind=kind,
        engine=engine,
        rank=rng.randrange(engines[engine].ranks),
        scheduler=rng.randrange(2),
        prompt=(rng.randrange(3), rng.randint(0, 20), rng.randint(1, 12)),
        outputs=rng.choice((1, 1, 3, 9)),
        pinned=rng.random() < 0.6,
        flag=rng.random() < 0.15,
        own=rng.randrange(4),
    )


def _fault(rng: random.Random, engines: tuple[Engine, ...], kind: Kind) -> Step:
    engine = rng.randrange(len(engines))
    return Step(
        at=_time(rng),
        kind=kind,
        engine=engine,
        rank=rng.randrange(engines[engine].ranks),
        scheduler=rng.randrange(2),
        amount=rng.choice((1, 1, 2, 5)),
        span=round(rng.choice((0.1, 0.5, 2.0, 5.0)) * rng.uniform(0.5, 1.5), 2),
        flag=rng.random() < 0.5,
        own=rng.randrange(1000),
    )


def _time(rng: random.Random) -> float:
    return round(rng.uniform(0.0, SPAN_S), 2)
