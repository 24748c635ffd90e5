"""Domain values to the protocol's messages. Pure."""

from __future__ import annotations

from servingfleet_core import Index
from servingfleet_protos.v1 import common_pb2, fleet_pb2, routing_pb2

from .candidates import Option, load_age
from .policy.candidate import Estimate, Reuse
from .policy.estimate import prefill_seconds
from .replicas import Rank, Replica

RANK_HEADER = "X-data-parallel-rank"
"""What vLLM's and SGLang's front ends read to place a request on a rank."""

SPEED_TOKENS = 1024
"""Length of the prompt that a rank's speed is told for."""

_TIERS = (
    common_pb2.TIER_GPU,
    common_pb2.TIER_HOST,
    common_pb2.TIER_DISK,
    common_pb2.TIER_SHARED,
)


def target(option: Option) -> common_pb2.Target:
    return common_pb2.Target(replica=option.replica.name, rank=option.rank.number)


def headers(option: Option) -> dict[str, str]:
    """None for an engine of one rank: it has nothing to choose."""
    return {RANK_HEADER: str(option.rank.number)} if len(option.replica.ranks) > 1 else {}


def body(option: Option) -> dict[str, str]:
    """Fields for the request's body, as JSON, that say the same to engines that read no header. None likewise."""
    if len(option.replica.ranks) < 2:
        return {}
    return {name: str(option.rank.number) for name in option.replica.profile.rank_fields}


def prediction(reuse: Reuse) -> routing_pb2.Prediction:
    return routing_pb2.Prediction(
        prompt_tokens=reuse.prompt_tokens,
        predicted=reuse.predicted,
        lower=reuse.lower,
        upper=reuse.upper,
        tiers=[
            routing_pb2.TierTokens(tier=tier, tokens=tokens)
            for tier, tokens in zip(_TIERS, reuse.tiers, strict=True)
            if tokens
        ],
        expected=reuse.expected,
    )


def fallback(option: Option, estimate: Estimate) -> routing_pb2.Fallback:
    return routing_pb2.Fallback(
        target=target(option),
        endpoint=option.replica.endpoint,
        estimated_ttft_s=estimate.seconds,
        prediction=prediction(option.candidate.reuse),
        headers=headers(option),
        body=body(option),
    )


def candidate(
    option: Option, estimate: Estimate, *, chosen: bool, refused: str, others_s: float, now: float
) -> routing_pb2.Candidate:
    return routing_pb2.Candidate(
        target=target(option),
        endpoint=option.replica.endpoint,
        prediction=prediction(option.candidate.reuse),
        terms=[
            routing_pb2.CostTerm(name=term.name, seconds=term.seconds) for term in estimate.terms
        ],
        estimated_ttft_s=estimate.seconds,
        chosen=chosen,
        refused=refused,
        stream_state=option.replica.state(option.rank),
        load_age_s=load_age(option.rank, now),
        dispatched_requests=option.candidate.dispatched_requests,
        estimated_sd_s=estimate.sd_s,
        propensity=0.0 if refused else estimate.propensity,
        others_s=others_s,
    )


def replica(each: Replica, index: Index, now: float) -> fleet_pb2.Replica:
    return fleet_pb2.Replica(
        replica=each.name,
        model=each.model,
        engine=each.engine,
        engine_version=each.engine_version,
        endpoint=each.endpoint,
        ranks=[_rank(each, rank, index, now) for _, rank in sorted(each.ranks.items())],
        connected=each.connected,
        relay_totals=each.relay_totals,
        draining_by=sorted(each.draining_by),
        labels=each.labels,
    )


def prefill_tokens_per_s(rank: Rank) -> float:
    """As learned, of a prompt of SPEED_TOKENS. 0: nothing was learned."""
    pace = rank.pace
    if pace is None or not pace.learned:
        return 0.0
    return SPEED_TOKENS / prefill_seconds(pace.speeds, SPEED_TOKENS, 0)


def _rank(each: Replica, rank: Rank, index: Index, now: float) -> fleet_pb2.Rank:
    lanes = {lane.lane: lane for lane in each.profile.lanes}
    load = rank.load
    return fleet_pb2.Rank(
        rank=rank.number,
        state=each.state(rank),
        reason=each.why(rank),
        incarnation=rank.incarnation,
        engine_seq=rank.engine_seq,
        lanes=[
            fleet_pb2.LaneHolding(
                tier=lanes[number].tier,
                state_class=lanes[number].state_class,
                group=lanes[number].group,
                blocks=blocks,
            )
            for number, blocks in index.held(each.number, rank.number)
            if number in lanes
        ],
        credits=index.credits(each.number, rank.number),
        running_requests=load.running_requests if load else None,
        waiting_requests=load.waiting_requests if load else None,
        load_age_s=load_age(rank, now),
        dispatched_requests=len(rank.dispatches),
        broken_s=rank.breaker.broken_s(now) if rank.breaker else 0.0,
        prefill_tokens_per_s=prefill_tokens_per_s(rank),
        speed_labels=rank.pace.learned if rank.pace else 0,
    )
