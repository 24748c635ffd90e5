"""What each known target would reuse of a prompt, and how much work waits there now. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from servingfleet_core import Match
from servingfleet_protos.v1 import routing_pb2

from .constraints import Key, refusals
from .eviction import Tail
from .expectation import Expectations, Stretches
from .fleet import Fleet
from .learner import Learner
from .memory import Memory, blocks_of
from .policy.candidate import Candidate, Estimate, Reuse
from .prompts import PreparedPrompt
from .replicas import LIVE, UNPROVEN, Rank, Replica
from .settings import SchedulerSettings


class Option(NamedTuple):
    """One known rank of the model. `refused`: why it can't be chosen; empty: it can."""

    replica: Replica
    rank: Rank
    candidate: Candidate
    refused: str = ""

    @property
    def key(self) -> Key:
        return (self.replica.name, self.rank.number)


@dataclass(frozen=True, slots=True)
class Considered:
    """A prompt, every known target of its model, and the order of those that may be chosen."""

    prompt: PreparedPrompt
    options: dict[Key, Option]
    ordered: list[Estimate]
    """Those that may be chosen, best first."""
    last_resort: bool = False
    """Requests keep failing on each of them."""
    session: int = 0
    """To which the request belongs, as `pins` names it. 0: none."""
    pinned: Key | None = None
    """The first is where the session went last, as it asked."""

    def option(self, estimate: Estimate) -> Option:
        return self.options[estimate.candidate.replica, estimate.candidate.rank]

    @property
    def allowed(self) -> list[Option]:
        """In no order."""
        return [option for option in self.options.values() if not option.refused]

    @property
    def best(self) -> int:
        """Longest predicted reuse on any target, allowed or not."""
        return max((each.candidate.reuse.predicted for each in self.options.values()), default=0)


def options(
    fleet: Fleet,
    settings: SchedulerSettings,
    request: routing_pb2.RouteRequest,
    prompt: PreparedPrompt,
    now: float,
    learner: Learner,
    expectations: Expectations,
    memory: Memory | None = None,
) -> tuple[list[Option], bool]:
    """Every known rank of the model, also those that can't be chosen; and whether requests fail on all that can.

    `memory`: what to take for cached, instead of what is known to be.
    """
    found: list[Option] = []
    forms = fleet.key_forms(prompt.model)
    view = _View(fleet, settings, prompt, now, learner, expectations, memory)
    for pairs in sorted(forms):
        # The last token is always computed anew, and with it goes the last key that is a pair.
        unpaired = pairs and prompt.tokens is not None
        matches = fleet.match(
            prompt.model,
            prompt.hashes(pairs),
            prompt.prompt_tokens - unpaired,
            pairs=pairs if len(forms) > 1 else None,
            no_reuse=prompt.no_reuse,
            now=now,
        )
        found += [
            Option(replica, rank, view.candidate(replica, rank, match))
            for replica, rank, match in matches
        ]
    refused, last_resort = refusals(
        request, [(each.replica, each.rank) for each in found], now, settings.load_stale_s
    )
    if refused:
        found = [each._replace(refused=refused.get(each.key, "")) for each in found]
    return found, last_resort


def next_best(admitted: Sequence[Estimate], most: int) -> list[Estimate]:
    """At most so many, after the first, to try when it fails.

    The best of each other replica, and only then further ranks of those already named: ranks share a process that
    answers, a pod and a node, and what failed one of them may have failed all.
    """
    if not most:
        return []
    seen = {admitted[0].candidate.replica}
    first: list[Estimate] = []
    again: list[Estimate] = []
    for each in admitted[1:]:
        (again if each.candidate.replica in seen else first).append(each)
        seen.add(each.candidate.replica)
    return (first + again)[:most]


def basis(options: Sequence[Option]) -> routing_pb2.Basis.ValueType:
    """What a choice among these can rest on."""
    if not any(option.replica.connected for option in options):
        return routing_pb2.BASIS_NO_STREAMS
    if all(option.candidate.certain for option in options):
        return routing_pb2.BASIS_INDEX
    return routing_pb2.BASIS_INDEX_PARTIAL


def load_age(rank: Rank, now: float) -> float | None:
    """Seconds since the engine's load was read; None: never."""
    return None if rank.load is None else max(0.0, now - rank.load.read_at)


class _View:
    """One prompt at one moment: what is the same for every target is worked out once."""

    def __init__(
        self,
        fleet: Fleet,
        settings: SchedulerSettings,
        prompt: PreparedPrompt,
        now: float,
        learner: Learner,
        expectations: Expectations,
        memory: Memory | None,
    ) -> None:
        self._fleet = fleet
        self._expectations = expectations
        self._settings = settings
        self._stale_s = settings.load_stale_s
        self._quantile = settings.quantile
        self._now = now
        self._prompt = prompt
        self._named = bool(prompt.adapter or prompt.cache_salt) and not prompt.no_reuse
        self._nothing = Reuse(prompt.prompt_tokens, 0, 0, 0, 0.0)
        self._reuses: dict[Reuse, Reuse] = {}
        """Most targets hold the same, if anything: one object for all, which is priced once."""
        self._learner = learner
        self._memory = memory
        self._blocks: dict[bool, tuple[int, ...]] = {}
        """Of the prompt, by whether keys are pairs."""

    def candidate(self, replica: Replica, rank: Rank, match: Match | None) -> Candidate:
        now, load = self._now, rank.load
        running = waiting = 0
        kv_usage = 0.0
        if load is not None and now - load.read_at <= self._stale_s:
            running, waiting = load.running_requests or 0, load.waiting_requests or 0
            kv_usage = load.kv_usage or 0.0
        queue = rank.backlog.ahead(now, stale_s=self._stale_s)
        if rank.room.crowded:
            memory_s = rank.room.wait_s(
                now, self._prompt.prompt_tokens, replica.gpu_tokens, stale_s=self._stale_s
            )
            queue = queue.at_least(memory_s)
        state = replica.state(rank)
        reuse, tail = self._nothing, None
        if self._memory is not None:
            reuse = self._remembered(self._memory, replica, rank)
        elif match is not None or self._named:
            reuse, tail = self._reuse(replica, rank, match, queue.seconds)
        pace = rank.pace or self._learner.pace(replica, rank)
        factor = pace.factor
        arrivals_per_s, busy, gap_s = rank.traffic.read(now)
        # By position, in the order of the fields: by name it takes four times as long, for every target of every request.
        return Candidate(
            replica.name,
            rank.number,
            reuse,
            queue.seconds,
            state == LIVE and rank.warm and self._memory is None,  # certain
            state == UNPROVEN,
            running,
            waiting,
            len(rank.dispatches),
            tail.gone if tail else 0.0,
            rank.last_dispatch,
            pace.pool.speeds,
            queue.sd_s,
            queue.noise_s,
            kv_usage,
            factor.value,
            factor.sd,
            pace.learned,
            replica.rules,
            tail,
            self._quantile,
            arrivals_per_s,
            busy,
            gap_s,
        )

    def _remembered(self, memory: Memory, replica: Replica, rank: Rank) -> Reuse:
        prompt = self._prompt
        blocks = self._blocks.get(replica.pairs)
        if blocks is None:
            blocks = self._blocks[replica.pairs] = blocks_of(prompt.hashes(replica.pairs))
        held = 0 if prompt.no_reuse else memory.held((replica.name, rank.number), blocks)
        # Engines compute the last token anew, and with it its block.
        size = self._settings.block_tokens
        tokens = min(held * size, (prompt.prompt_tokens - 1) // size * size)
        return Reuse(
            prompt.prompt_tokens, 0, tokens, prompt.prompt_tokens, tokens, (tokens, 0, 0, 0)
        )

    def _reuse(
        self, replica: Replica, rank: Rank, match: Match | None, ahead_s: float
    ) -> tuple[Reuse, Tail | None]:
        """And where it ends."""
        prompt = self._prompt
        reuse, tail = self._nothing, None
        if match is not None:
            expected, tail = self._expected(replica, rank, match, ahead_s)
            reuse = Reuse(
                prompt.prompt_tokens,
                match.lower,
                match.predicted,
                match.upper,
                expected,
                match.tiers,
            )
        if self._named and (
            (prompt.adapter and not replica.profile.adapters_separated)
            or (prompt.cache_salt and not replica.profile.salts_separated)
        ):
            # The engine's events don't tell this namespace apart, so that it may hold blocks that nobody can look up.
            reuse = reuse._replace(upper=prompt.prompt_tokens)
        return self._reuses.setdefault(reuse, reuse), tail

    def _expected(
        self, replica: Replica, rank: Rank, match: Match, ahead_s: float
    ) -> tuple[float, Tail | None]:
        """Tokens to count on, and where they end."""
        expectations, now = self._expectations, self._now
        tail: Tail | None = None
        stretches: Stretches = ()
        if match.tail_tier:
            tail = expectations.tail(replica, rank, match, ahead_s, now)
            if tail is not None and tail.gone > 0.0:
                hashes = self._prompt.hashes(replica.pairs)
                stretches = self._fleet.idle(replica, rank.number, hashes, now)
        return expectations.tokens(
            replica, rank, match, tail, stretches, self._settings.block_tokens, now
        )
