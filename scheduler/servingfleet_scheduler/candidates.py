"""What each known target would reuse of a prompt, and how much work waits there now. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from servingfleet_core import Match
from servingfleet_protos.v1 import routing_pb2

from .backlog import backlog_seconds
from .fleet import Fleet
from .policy.candidate import Candidate, Estimate, Reuse
from .policy.estimate import unknown_request_seconds
from .prompts import PreparedPrompt
from .replicas import LIVE, UNPROVEN, Rank, Replica
from .requests import refusal
from .settings import SchedulerSettings


class Option(NamedTuple):
    """One known rank of the model. `refused`: why the request rules it out; empty: it does not."""

    replica: Replica
    rank: Rank
    candidate: Candidate
    refused: str = ""

    @property
    def key(self) -> tuple[str, int]:
        return (self.replica.name, self.rank.number)


@dataclass(frozen=True, slots=True)
class Considered:
    """A prompt, every known target of its model, and the order of those that the request allows."""

    prompt: PreparedPrompt
    options: dict[tuple[str, int], Option]
    ordered: list[Estimate]
    """Those that the request allows, best first."""

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
) -> list[Option]:
    """Every known rank of the model, also those that the request rules out."""
    found = []
    forms = {replica.pairs for replica in fleet.of_model(prompt.model)}
    view = _View(settings, prompt, now)
    picky = bool(request.only or request.exclude)
    for pairs in sorted(forms):
        # The last token is always computed anew, and with it goes the last key that is a pair.
        unpaired = pairs and prompt.tokens is not None
        matches = fleet.match(
            prompt.model,
            prompt.hashes(pairs),
            prompt.prompt_tokens - unpaired,
            pairs=pairs if len(forms) > 1 else None,
            no_reuse=prompt.no_reuse,
        )
        for replica, rank, match in matches:
            candidate = view.candidate(replica, rank, match)
            refused = refusal(request, replica.name, rank.number) if picky else ""
            found.append(Option(replica, rank, candidate, refused))
    return found


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

    def __init__(self, settings: SchedulerSettings, prompt: PreparedPrompt, now: float) -> None:
        self._settings = settings
        self._now = now
        self._prompt = prompt
        self._named = bool(prompt.adapter or prompt.cache_salt) and not prompt.no_reuse
        self._nothing = Reuse(prompt.prompt_tokens, 0, 0, 0, 0.0)

    def candidate(self, replica: Replica, rank: Rank, match: Match | None) -> Candidate:
        load = rank.load
        if load is not None:
            age = load_age(rank, self._now)
            if age is None or age > self._settings.load_stale_s:
                load = None
        queue_s = 0.0
        if load is not None or rank.dispatches:
            queue_s = backlog_seconds(
                rank.dispatches.values(),
                load,
                self._now,
                token_s=replica.speeds.token_s,
                request_s=unknown_request_seconds(replica.speeds),
            )
        state = replica.state(rank)
        return Candidate(
            replica.name,
            rank.number,
            self._reuse(replica, match),
            queue_s,
            certain=state == LIVE and rank.warm,
            unproven=state == UNPROVEN,
            running_requests=(load.running_requests or 0) if load else 0,
            waiting_requests=(load.waiting_requests or 0) if load else 0,
            dispatched_requests=len(rank.dispatches),
            last_dispatch=rank.last_dispatch,
            speeds=replica.speeds,
        )

    def _reuse(self, replica: Replica, match: Match | None) -> Reuse:
        prompt = self._prompt
        reuse = self._nothing
        if match is not None:
            reuse = Reuse(
                prompt.prompt_tokens,
                match.lower,
                match.predicted,
                match.upper,
                match.predicted,
                match.tiers,
            )
        if self._named and (
            (prompt.adapter and not replica.profile.adapters_separated)
            or (prompt.cache_salt and not replica.profile.salts_separated)
        ):
            # The engine's events don't tell this namespace apart, so that it may hold blocks that nobody can look up.
            return reuse._replace(upper=prompt.prompt_tokens)
        return reuse
