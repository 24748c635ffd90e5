"""The conditions of a fleet: what is well, and what a person should do about the rest. Pure.

A message names the worst pod, what was seen, and the flag, field or command that helps. That of a True condition says
nothing that changes while all is well: each change would be a write, and an event for everyone who watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from servingfleet_core.reports import NotAddable

from . import names, rollout
from .measured import Measured, measured, percentage, span
from .observed import Observed, Pod, Relay
from .replicas import Replica, State, replicas
from .rollout import Rollout
from .spec import Clients

LEAST_JOIN_RATE = 0.5
"""Of fewer decisions joined, the figures speak for a part of the traffic that may be unlike the rest. Some are always
missing: requests still running count as not joined yet."""


class Verdict(NamedTuple):
    """A condition without its dates."""

    status: str
    """True, False or Unknown."""
    reason: str
    message: str


@dataclass(frozen=True)
class View:
    """What was observed, with what follows from it."""

    observed: Observed
    rollout: Rollout
    replicas: Sequence[Replica]
    """The worst first."""
    measured: Measured | None
    """None: no scheduler answers, or their reports can't be added."""
    not_addable: str = ""
    """Why the reports can't be added."""

    @classmethod
    def of(cls, observed: Observed) -> View:
        """Draws the conclusions that several conditions share."""
        fleet = observed.fleet
        found, problem = None, ""
        if observed.reports:
            try:
                found = measured(observed.reports, fleet.model.name, fleet.scheduler.window.seconds)
            except NotAddable as error:
                problem = str(error)
        return cls(
            observed,
            rollout.read(fleet.scheduler.replicas, observed.deployment, observed.scheduler_pods),
            replicas(observed),
            found,
            problem,
        )


def _yes(reason: str, message: str) -> Verdict:
    return Verdict("True", reason, message)


def _no(reason: str, message: str) -> Verdict:
    return Verdict("False", reason, message)


def _unknown(reason: str, message: str) -> Verdict:
    return Verdict("Unknown", reason, message)


def ready(view: View) -> Verdict:
    """The scheduler answers, whatever else is wrong."""
    observed = view.observed
    endpoint = names.endpoint(observed.fleet.name, observed.fleet.namespace)
    if observed.reports:
        return _yes("SchedulerAnswers", f"The scheduler answers at {endpoint}.")
    if view.rollout.ready == 0:
        trouble = view.rollout.trouble
        said = f": {trouble.message}" if trouble else "; it starts"
        return _no("SchedulerNotReady", f"No scheduler pod is ready{said}.")
    if observed.reports is None:
        return _unknown("NotAskedYet", "Scheduler pods are ready and were not asked yet.")
    why = "; ".join(observed.unanswered) or "none could be reached"
    return _no(
        "SchedulerNotAnswering",
        f"Scheduler pods are ready, but don't answer the operator: {why}. Look at their logs, and at what keeps "
        f"the operator's namespace from reaching port {names.GRPC_PORT}.",
    )


def scheduler_available(view: View) -> Verdict:
    """The Deployment has the pods that it promises."""
    found, name = view.rollout, names.scheduler(view.observed.fleet.name)
    trouble = found.trouble
    if not found.available:
        if view.observed.deployment is None:
            return _no(
                "NotCreated", f"Deployment {name} is not there yet; see the condition Reconciled."
            )
        if trouble is not None:
            return _no(trouble.reason, f"Deployment {name}: {trouble.message}.")
        return _no("Starting", f"Deployment {name} has {found.ready} of {found.wanted} pods ready.")
    if found.complete:
        return _yes("Available", f"Deployment {name} is available.")
    if trouble is not None:
        return _yes(
            trouble.reason,
            f"Deployment {name} is available with earlier pods, and its rollout waits: {trouble.message}.",
        )
    return _yes("RollingOut", f"Deployment {name} is available, and rolls out a new revision.")


def reconciled(view: View) -> Verdict:
    """All that the fleet needs was applied."""
    troubles = view.observed.troubles
    if not troubles:
        return _yes("Applied", "Everything that the fleet needs is as its spec says.")
    return _no(troubles[0].reason, "; ".join(each.message for each in troubles) + ".")


def relays_injected(view: View) -> Verdict:
    """Every engine pod has its relay, or was kept from having one on purpose."""
    pods = [pod for pod in view.observed.pods if pod.serving]
    if not pods:
        return _no_pods(view)
    for relay, reason in _MISSING.items():
        worst = [pod for pod in pods if pod.relay == relay]
        if worst:
            first = min(worst, key=lambda pod: pod.name)
            return _no(
                reason,
                f"{len(worst)} of {len(pods)} engine pods, the first {first.name}: {first.relay_reason}.",
            )
    if any(pod.relay == Relay.OPTED_OUT for pod in pods):
        return _yes(
            "Injected",
            f"Every engine pod has its relay, but those labelled {names.INJECT_LABEL}=false.",
        )
    return _yes("Injected", "Every engine pod has its relay.")


_MISSING = {
    Relay.NOT_INJECTABLE: "NotInjectable",
    Relay.NOT_INJECTED: "NotInjected",
    Relay.OUTDATED: "Outdated",
    Relay.INJECTION_OFF: "InjectionOff",
}


def engines_configured(view: View) -> Verdict:
    """Every engine's command line makes it publish events as they are needed."""
    pods = view.observed.pods
    if not pods:
        return _no_pods(view)
    # A stream that is whole proves more than a command line.
    live = {each.pod.uid for each in view.replicas if each.state == State.LIVE}
    doubted = [(pod, each) for pod in pods for each in pod.findings]
    severe = [(pod, each) for pod, each in doubted if each.severe and pod.uid not in live]
    if severe:
        pod, finding = min(severe, key=lambda pair: pair[0].name)
        return _no(finding.code, _named(pod, finding.message, [pod for pod, _ in severe]))
    if doubted:
        pod, finding = min(doubted, key=lambda pair: pair[0].name)
        return _yes(finding.code, f"{pod.name}: {finding.message}.")
    return _yes("Configured", "Every engine publishes its events.")


def streams_conformant(view: View) -> Verdict:
    """Every relay's stream is there, is unbroken or being read again, and means what it should."""
    if not view.observed.reports:
        return _unknown("SchedulerNotAnswering", "No scheduler answers; see the condition Ready.")
    watched = [each for each in view.replicas if each.pod.relay in (Relay.INJECTED, Relay.OUTDATED)]
    if not watched:
        return _unknown("NoRelays", "No engine pod has a relay; see the condition RelaysInjected.")
    worst = watched[0]
    if worst.state not in _BROKEN:
        return _yes("StreamsUnbroken", "Every relay's stream is unbroken, or being read again.")
    reason, advice = _BROKEN[worst.state]
    alike = [each.pod for each in watched if each.state in _BROKEN]
    said = worst.reason or "no reason was given"
    return _no(reason, _named(worst.pod, f"{said}: {advice.format(pod=worst.pod.name)}", alike))


_BROKEN = {
    State.QUARANTINED: (
        "StreamQuarantined",
        "nothing of it counts until the engine restarts; check its version against docs/engines",
    ),
    State.MISCONFIGURED: (
        "EngineMisconfigured",
        "routed by load only; see the condition EnginesConfigured",
    ),
    State.UNPROVEN: (
        "StreamUnproven",
        (
            "routed by load only until the relay has proven where the stream goes on; "
            f"kubectl logs {{pod}} -c {names.RELAY_CONTAINER} says more"
        ),
    ),
    State.NO_STREAM: (
        "StreamMissing",
        f"routed by load only; kubectl logs {{pod}} -c {names.RELAY_CONTAINER} says why",
    ),
}


def measurement_joined(view: View) -> Verdict:
    """Clients report what became of their requests, so that the figures speak for the traffic."""
    found = view.measured
    if view.not_addable:
        return _unknown("SchedulersDiffer", f"The figures can't be added: {view.not_addable}.")
    if found is None:
        return _unknown("SchedulerNotAnswering", "No scheduler answers; see the condition Ready.")
    sums, least = found.sums, max(1, found.min_pairs)
    if not sums.decisions and not sums.pairs:
        return _unknown("NoRequests", f"No request was routed in the last {span(found.window_s)}.")
    rate = found.figures.get("join_rate")
    if rate is not None and rate.HasField("high") and rate.high < LEAST_JOIN_RATE:
        reason, why = _unjoined(found)
        return _no(
            reason,
            f"Only {percentage(rate.value)} of the decisions were joined with an outcome, "
            f"{percentage(LEAST_JOIN_RATE)} are expected: {why}.",
        )
    if sums.pairs < least:
        return _unknown(
            "TooFewPairs",
            f"Figures need {least} decisions joined with their outcome (spec.scheduler.minPairs), and there are "
            f"{sums.pairs} yet.",
        )
    return _yes("OutcomesJoined", "Clients report the outcome of most requests.")


def _unjoined(found: Measured) -> tuple[str, str]:
    """Why most outcomes are missing: the commonest reason that somebody can do something about."""
    known = {reason: count for reason, count in found.set_aside.items() if reason in _SET_ASIDE}
    missing = found.sums.decisions - found.sums.joined
    commonest = max(known, key=lambda reason: (known[reason], reason), default="")
    if commonest and known[commonest] * 2 >= missing:
        return _SET_ASIDE[commonest]
    return _NEVER_REPORTED


_NEVER_REPORTED = (
    "NoOutcomes",
    "clients must call Report with the decision_id when a request has ended",
)
_SET_ASIDE = {
    "expired": _NEVER_REPORTED,
    "prompt_mismatch": (
        "PromptMismatch",
        (
            "the engines count other prompt lengths than clients sent, so clients must use the engines' tokenizer and "
            "chat template (spec.model.tokenizer)"
        ),
    ),
    "missing_counts": (
        "CountsMissing",
        (
            "outcomes come without the tokens reused; start vLLM with --enable-prompt-tokens-details, SGLang with "
            "--enable-cache-report"
        ),
    ),
    "shared_usage": ("UsageShared", "clients report one usage for several prompts"),
    "unknown_decision": (
        "DecisionsUnknown",
        "outcomes carry decision ids of another fleet; clients must report where they asked",
    ),
    "bad_token": ("DecisionsUnknown", "outcomes carry what is no decision id"),
    "ran_elsewhere": (
        "RanElsewhere",
        "requests run on other replicas than were chosen; the gateway must send them where Route says",
    ),
    "late": ("OutcomesLate", "outcomes come later than 15 minutes after the decision"),
    "failed": ("RequestsFail", "most requests fail at the engines"),
    "aborted": ("RequestsAborted", "most requests are aborted"),
}


def events_exposed(view: View) -> Verdict:
    """Prompts' tokens can be read from the pod network. The one condition of which True is bad."""
    pods = view.observed.pods
    if not pods:
        return _no_pods(view)
    exposed = [pod for pod in pods if pod.exposed]
    if exposed:
        first = min(exposed, key=lambda pod: pod.name)
        return _yes("PortsOpen", _named(first, first.exposed, exposed))
    return _no(
        "PortsClosed",
        "Events, which carry the tokens of prompts, stay within each pod, or NetworkPolicies close their ports.",
    )


def transport_secured(view: View) -> Verdict:
    """Connections are encrypted, and callers prove who they are."""
    fleet = view.observed.fleet
    if not fleet.secured:
        return _no(
            "PlainText",
            "spec.access.transport is PlainText: whoever reaches the scheduler can read prompts' tokens and pose as "
            "a replica; set TLS, and restart the engine pods.",
        )
    if fleet.access.clients == Clients.TLS_ONLY:
        return _yes("TLSOnly", "Connections use TLS; Route and Report ask for no token.")
    return _yes("TLS", "Connections use TLS, and callers show a token.")


def pools_disjoint(view: View) -> Verdict:
    """No pod is selected twice."""
    twice = [pod for pod in view.observed.pods if pod.also]
    if twice:
        first = min(twice, key=lambda pod: pod.name)
        return _no(
            "PoolsOverlap",
            _named(
                first,
                f"counts in pool {first.pool} and is also selected by {', '.join(first.also)}: make the selectors "
                "exclude one another",
                twice,
            ),
        )
    return _yes("Disjoint", "No engine pod is selected twice.")


def _no_pods(view: View) -> Verdict:
    pools = ", ".join(
        f"{pool.name} ({','.join(f'{key}={value}' for key, value in pool.selector.match_labels.items())})"
        for pool in view.observed.fleet.pools
    )
    return _unknown("NoEnginePods", f"No pod is selected by the pools: {pools}.")


def _named(pod: Pod, message: str, alike: Iterable[Pod]) -> str:
    others = len({each.uid for each in alike} - {pod.uid})
    more = f" Likewise {others} more." if others else ""
    return f"{pod.name}: {message}.{more}"


CONDITIONS: Mapping[str, Callable[[View], Verdict]] = {
    "Ready": ready,
    "SchedulerAvailable": scheduler_available,
    "Reconciled": reconciled,
    "RelaysInjected": relays_injected,
    "EnginesConfigured": engines_configured,
    "StreamsConformant": streams_conformant,
    "MeasurementJoined": measurement_joined,
    "EventsExposed": events_exposed,
    "TransportSecured": transport_secured,
    "PoolsDisjoint": pools_disjoint,
}
"""In the order in which they are shown."""

BAD_WHEN_TRUE = frozenset({"EventsExposed"})
"""All others are bad when they are False."""
