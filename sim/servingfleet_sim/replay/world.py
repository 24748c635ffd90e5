"""The schedulers, relays and engines of a run, under one clock. Pure, but for what `Clock` calls."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from servingfleet_core.figures import Sums
from servingfleet_scheduler.service import Scheduler
from servingfleet_scheduler.sessions import Session

from .cache import HASH_BYTES, RunCache
from .clock import Clock
from .engine import Client, RankEngine
from .fleet import FailureSpec, FleetSpec
from .memory import Job
from .options import ORACLE, Options, settings
from .oracle import fastest
from .relay import MODEL, Relay
from .traces import Request

__all__ = ["MODEL", "Clients", "World"]

KEY = b"a key for the ids of a replay"


class Clients(Client, Protocol):
    """Who sent the jobs; hears also of those that died with their engine."""

    def lost(self, job: Job) -> None: ...


class World:
    """Everything but the clients."""

    def __init__(
        self,
        fleet: FleetSpec,
        options: Options,
        seed: int,
        clients: Clients,
        counters: Counter[str],
    ) -> None:
        self.clock = Clock()
        self._clients = clients
        self._options = options
        self.pools = fleet.replicas()
        self._failures = fleet.failures
        self._unit = options.block_tokens
        self._seen = RunCache()
        self._dirty: dict[Session, Relay] = {}
        events = fleet.events
        if options.lag_s is not None:
            events = type(events)(
                lag_s=options.lag_s,
                loss=events.loss,
                replay_s=events.replay_s,
                link_s=events.link_s,
            )
        self.relays: dict[str, Relay] = {}
        self._engines: dict[str, list[RankEngine]] = {}
        self._down: set[str] = set()
        for replica, pool in self.pools.items():
            rng = random.Random(f"relay {seed} {replica}")
            relay = self.relays[replica] = Relay(
                replica,
                pool,
                self._unit,
                events,
                self.clock,
                rng,
                counters,
                tell_tiers=options.tell_tiers,
            )
            self._engines[replica] = []
            for rank in range(pool.ranks):
                engine = RankEngine(
                    f"{replica}/{rank}",
                    pool,
                    self._unit,
                    self.clock,
                    clients,
                    relay.publisher(rank),
                    watch_coming=options.policy == ORACLE,
                )
                relay.add(engine)
                self._engines[replica].append(engine)
        self.engines = [engine for engines in self._engines.values() for engine in engines]
        each = settings(options, fleet)
        self.schedulers = [
            Scheduler(
                each,
                instance_id=f"scheduler-{number}",
                now=0.0,
                rng=random.Random(f"scheduler {seed} {number}"),
                token_key=KEY,
            )
            for number in range(options.schedulers or fleet.schedulers)
        ]
        for relay in self.relays.values():
            for scheduler in self.schedulers:
                session = scheduler.open_session(0.0)
                session.on_output = self._wakes(session, relay)
                relay.attach(session)
        self.pump()

    # Time

    def begin(self, going: Callable[[], bool]) -> None:
        """Starts what happens again and again, while `going`."""

        def every(interval: float, first: float, what: Callable[[], None]) -> None:
            def again() -> None:
                if going():
                    what()
                    self.clock.at(self.clock.now + interval, again, idle=True)

            self.clock.at(first, again, idle=True)

        every(self._options.tick_s, self._options.tick_s, self._tick)
        for place, (replica, relay) in enumerate(self.relays.items()):
            interval = self.pools[replica].load_interval_s
            first = interval * (place + 1) / len(self.relays)
            every(interval, first, partial(self._load, replica, relay))
        for failure in self._failures:
            fail = partial(self._fail, failure)
            self.clock.at(failure.at, fail, idle=True)

    def pump(self) -> None:
        """Relays hear what the schedulers have to say."""
        while self._dirty:
            session, relay = self._dirty.popitem()
            for message in session.take():
                relay.hear(session, message)

    def rest(self) -> None:
        """Nothing is to come: the schedulers look once more at what is due, when the credits of what was served have ended."""
        for scheduler in self.schedulers:
            scheduler.tick(self.clock.now + scheduler.settings.credit_served_s)
        self.pump()

    # What clients do

    def engine(self, replica: str, rank: int) -> RankEngine | None:
        """None: its process is away."""
        return None if replica in self._down else self._engines[replica][rank]

    def too_small(self, request: Request) -> list[str]:
        """Replicas that could never hold it: a gateway knows what each of its models takes."""
        blocks = -(-(request.prompt_tokens + request.output_tokens) // self._unit)
        return [
            replica
            for replica, engines in self._engines.items()
            if engines[0].memory.gpu.capacity < blocks
        ]

    # What is known

    def pool_of(self, replica: str) -> str:
        """Empty for no replica."""
        return self.pools[replica].name if replica else ""

    def seen(self, hashes: bytes, prompt: int) -> int:
        """Tokens of a prompt that any before had too; from now on it is one of those."""
        node, found = self._seen.find(hashes, len(hashes) // HASH_BYTES)
        self._seen.add(node, hashes[found * HASH_BYTES :])
        return min(prompt, found * self._unit)

    def best(self, hashes: bytes, prompt: int) -> int:
        """Longest truly reusable prefix on any rank now, tokens."""
        return max(
            (each.memory.reusable(hashes, prompt).tokens for each in self._up()),
            default=0,
        )

    def oracle(self, hashes: bytes, prompt: int, exclude: Iterable[str]) -> tuple[str, int] | None:
        """The rank that would give the first token first, by its true state. None: no rank is left."""
        gone = self._down | set(exclude)
        return fastest(
            {
                (replica, rank): engine
                for replica, engines in self._engines.items()
                if replica not in gone
                for rank, engine in enumerate(engines)
            },
            hashes,
            prompt,
            self.clock.now,
        )

    def computed(self) -> dict[str, int]:
        """Prompt tokens computed, by replica."""
        return {
            replica: sum(each.computed_tokens for each in engines)
            for replica, engines in self._engines.items()
        }

    def busy(self) -> dict[str, float]:
        """Seconds in steps, by rank."""
        return {each.name: each.busy_s for each in self.engines}

    def sums(self) -> list[Sums]:
        """The ledgers' totals."""
        found = []
        for scheduler in self.schedulers:
            sums = Sums()
            for row in scheduler.ledger.totals.values():
                sums.add(row.sums)
            found.append(sums)
        return found

    # Inside

    def _up(self) -> Iterable[RankEngine]:
        if not self._down:
            return self.engines
        return [
            engine
            for replica, engines in self._engines.items()
            if replica not in self._down
            for engine in engines
        ]

    def _wakes(self, session: Session, relay: Relay) -> Callable[[], None]:
        def wake() -> None:
            self._dirty[session] = relay

        return wake

    def _tick(self) -> None:
        for scheduler in self.schedulers:
            scheduler.tick(self.clock.now)
        self.pump()

    def _load(self, replica: str, relay: Relay) -> None:
        if replica not in self._down:
            relay.load()

    def _fail(self, failure: FailureSpec) -> None:
        replica = failure.replica
        if replica in self._down:
            return
        self._down.add(replica)
        self.relays[replica].stopped()
        left = [job for engine in self._engines[replica] for job in engine.stop()]

        def back() -> None:
            self._down.discard(replica)
            self.relays[replica].started()

        self.clock.at(self.clock.now + failure.for_s, back, idle=True)
        for job in left:
            self._clients.lost(job)
