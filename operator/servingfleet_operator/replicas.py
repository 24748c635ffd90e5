"""How each engine pod stands, from what its manifest tells and what the schedulers say of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from servingfleet_protos.v1 import common_pb2, fleet_pb2

from .observed import Observed, Pod, Relay, SchedulerReport


class State(StrEnum):
    """States in `.status.replicas`, the worst first. The CRD says what each means."""

    QUARANTINED = "Quarantined"
    MISCONFIGURED = "Misconfigured"
    UNPROVEN = "Unproven"
    NO_STREAM = "NoStream"
    NOT_INJECTABLE = Relay.NOT_INJECTABLE
    NOT_INJECTED = Relay.NOT_INJECTED
    OPTED_OUT = Relay.OPTED_OUT
    INJECTION_OFF = Relay.INJECTION_OFF
    STARTING = "Starting"
    RESYNCING = "Resyncing"
    HISTORY_LOST = "HistoryLost"
    UNKNOWN = "Unknown"
    FOLLOWER = "Follower"
    LIVE = "Live"


UNBROKEN = frozenset({State.LIVE, State.HISTORY_LOST})
"""What is held counts: routed by cache."""

YOUNG_S = 30.0
"""Relays look for new schedulers every few seconds, and DNS may be as old again."""

_ORDER = {state: number for number, state in enumerate(State)}
_STREAM = {
    common_pb2.STREAM_STATE_UNSPECIFIED: State.NO_STREAM,
    common_pb2.STREAM_STATE_LIVE: State.LIVE,
    common_pb2.STREAM_STATE_HISTORY_LOST: State.HISTORY_LOST,
    common_pb2.STREAM_STATE_UNPROVEN: State.UNPROVEN,
    common_pb2.STREAM_STATE_RESYNCING: State.RESYNCING,
    common_pb2.STREAM_STATE_QUARANTINED: State.QUARANTINED,
}


@dataclass(frozen=True)
class Replica:
    """One engine pod and how it stands."""

    pod: Pod
    state: State
    reason: str = ""
    """What was seen and what was expected, for people."""
    blocks: int = 0
    """Blocks that a scheduler's index knows of it: ranks, tiers and layer groups added."""


def replicas(observed: Observed) -> list[Replica]:
    """Every engine pod, the worst first, then by name."""
    reports = observed.reports or ()
    said = [{each.replica: each for each in report.replicas.replicas} for report in reports]
    found = [
        _replica(
            pod,
            [
                (report, replicas.get(pod.uid))
                for report, replicas in zip(reports, said, strict=True)
            ],
        )
        for pod in observed.pods
    ]
    return sorted(found, key=lambda each: (_ORDER[each.state], each.pod.name))


def _replica(pod: Pod, said: Iterable[tuple[SchedulerReport, fleet_pb2.Replica | None]]) -> Replica:
    answers = list(said)
    found = _without_drain(pod, answers)
    drainers = {who for _, known in answers if known is not None for who in known.draining_by}
    if not drainers:
        return found
    drained = f"gets no new requests: drained by {', '.join(sorted(drainers))}"
    return replace(found, reason="; ".join(filter(None, (drained, found.reason))))


def _without_drain(
    pod: Pod, answers: list[tuple[SchedulerReport, fleet_pb2.Replica | None]]
) -> Replica:
    blocks = max((_blocks(replica) for _, replica in answers if replica is not None), default=0)
    if not pod.serving:
        return Replica(pod, State.FOLLOWER, "its engine answers in another pod", blocks)
    if pod.relay not in (Relay.INJECTED, Relay.OUTDATED):
        return Replica(pod, State(pod.relay), pod.relay_reason, blocks)
    state, reason = _stream(answers)
    if state == State.LIVE:
        # A stream that is whole proves more than a command line.
        return Replica(pod, state, pod.relay_reason, blocks)
    severe = next((each for each in pod.findings if each.severe), None)
    if severe is not None and state in (State.NO_STREAM, State.UNPROVEN, State.UNKNOWN):
        return Replica(pod, State.MISCONFIGURED, severe.message, blocks)
    if not pod.ready and state in (State.NO_STREAM, State.UNPROVEN):
        return Replica(pod, State.STARTING, reason, blocks)
    return Replica(pod, state, reason, blocks)


def _stream(
    answers: list[tuple[SchedulerReport, fleet_pb2.Replica | None]],
) -> tuple[State, str]:
    """The worst of what any scheduler says of any rank: each of them routes by its own view."""
    if not answers:
        return State.UNKNOWN, "no scheduler answers"
    # One that has just started is reached within seconds, and no news until then where another is.
    reached = [
        (report, replica)
        for report, replica in answers
        if replica is not None or report.reuse.window_s >= YOUNG_S
    ]
    seen: list[tuple[State, str]] = []
    for report, replica in reached or answers:
        if replica is None or not replica.ranks:
            seen.append((State.NO_STREAM, f"its relay has not reached scheduler {report.pod}"))
            continue
        for rank in replica.ranks:
            # A scheduler of a later release may know further states: nothing is assumed of those.
            state = _STREAM.get(rank.state, State.UNPROVEN)
            where = f"rank {rank.rank}: " if len(replica.ranks) > 1 else ""
            seen.append((state, where + rank.reason if rank.reason else ""))
    return min(seen, key=lambda each: (_ORDER[each[0]], each[1]))


def _blocks(replica: fleet_pb2.Replica) -> int:
    return sum(lane.blocks for rank in replica.ranks for lane in rank.lanes)


def indexed_blocks(found: Iterable[Replica]) -> int:
    """Blocks that the index knows, of all replicas."""
    return sum(each.blocks for each in found)


def counted(found: Iterable[Replica]) -> Mapping[str, int]:
    """`all` replicas of which a stream is expected, and how many are `live`."""
    serving = [each for each in found if each.state != State.FOLLOWER]
    return {"all": len(serving), "live": sum(each.state in UNBROKEN for each in serving)}
