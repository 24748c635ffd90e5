"""What each known target would reuse of a prompt, and how much work waits there now. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from servingfleet_core import Match
from servingfleet_protos.v1 import common_pb2, routing_pb2

from .backlog import backlog_seconds
from .fleet import Fleet
from .policy.candidate import Candidate, Estimate, Reuse
from .policy.estimate import unknown_request_seconds
from .prompts import PreparedPrompt
from .replicas import Rank, Replica
from .requests import refusal
from .settings import SchedulerSettings


@dataclass(frozen=True, slots=True)
class Option:
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
        return [self.option(each) for each in self.ordered]

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
    for pairs in sorted(forms):
        # The last token is always computed anew, and with it goes the last key that is a pair.
        unpaired = pairs and prompt.tokens is not None
        matches = fleet.match(
            prompt.model,
            prompt.hashes(pairs),
            prompt.prompt_tokens - unpaired,
            pairs=pairs,
            no_reuse=prompt.no_reuse,
        )
        for replica, rank, match in matches:
            candidate = _candidate(settings, replica, rank, match, prompt, now)
            refused = refusal(request, replica.name, rank.number)
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


def _candidate(
    settings: SchedulerSettings,
    replica: Replica,
    rank: Rank,
    match: Match,
    prompt: PreparedPrompt,
    now: float,
) -> Candidate:
    age = load_age(rank, now)
    load = rank.load if age is not None and age <= settings.load_stale_s else None
    queue_s = backlog_seconds(
        rank.dispatches.values(),
        load,
        now,
        token_s=settings.speeds.token_s,
        request_s=unknown_request_seconds(settings.speeds),
    )
    return Candidate(
        replica=replica.name,
        rank=rank.number,
        reuse=_reuse(replica, match, prompt),
        queue_s=queue_s,
        certain=replica.certain(rank),
        unproven=replica.state(rank) == common_pb2.STREAM_STATE_UNPROVEN,
        running_requests=(load.running_requests or 0) if load else 0,
        waiting_requests=(load.waiting_requests or 0) if load else 0,
        dispatched_requests=len(rank.dispatches),
        last_dispatch=rank.last_dispatch,
    )


def _reuse(replica: Replica, match: Match, prompt: PreparedPrompt) -> Reuse:
    reuse = Reuse(prompt.prompt_tokens, match.lower, match.predicted, match.upper, match.tiers)
    hidden = (prompt.adapter and not replica.profile.adapters_separated) or (
        prompt.cache_salt and not replica.profile.salts_separated
    )
    if hidden and not prompt.no_reuse:
        # The engine's events don't tell this namespace apart, so that it may hold blocks that nobody can look up.
        return replace(reuse, upper=prompt.prompt_tokens)
    return reuse
