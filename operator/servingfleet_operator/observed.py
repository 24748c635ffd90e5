"""What a reconcile saw of one fleet: everything that its status is made of. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from servingfleet_protos.v1 import fleet_pb2

from .engines.facts import Finding
from .spec import Fleet


class Relay(StrEnum):
    """Whether an engine's pod has its relay. The values are states in `.status.replicas`."""

    INJECTED = "Injected"
    OUTDATED = "Outdated"
    """It has one that was told something else than the fleet says now."""
    NOT_INJECTED = "NotInjected"
    OPTED_OUT = "OptedOut"
    INJECTION_OFF = "InjectionOff"
    """spec.relay.inject is false."""
    NOT_INJECTABLE = "NotInjectable"
    """It can't have one, whatever is tried again."""


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One engine pod of the fleet that is neither finished nor being deleted."""

    name: str
    uid: str
    pool: str
    node: str = ""
    ready: bool = False
    serving: bool = True
    """It answers requests: false for further pods of an engine that spans several, of which nothing is expected."""
    relay: Relay = Relay.INJECTED
    relay_reason: str = ""
    """Why it has none, or what is outdated, and what to do."""
    findings: Sequence[Finding] = ()
    """What its engine should be told, the worst first."""
    exposed: str = ""
    """How its events can be read from outside the pod, and what would close it. Empty: they can't."""
    also: Sequence[str] = ()
    """Further pools and fleets that select it, for people: "pool b", "fleet other"."""


@dataclass(frozen=True)
class SchedulerReport:
    """What one scheduler pod answered."""

    pod: str
    replicas: fleet_pb2.ListReplicasResponse
    reuse: fleet_pb2.GetReuseResponse


@dataclass(frozen=True)
class Trouble:
    """Something that kept the fleet from being as its spec says."""

    reason: str
    """CamelCase, for the condition Reconciled."""
    message: str
    """What was seen, what was expected, who should act."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One fleet, as it was found."""

    fleet: Fleet
    deployment: Mapping[str, Any] | None = None
    """The scheduler's Deployment; None: there is none."""
    scheduler_pods: Sequence[Mapping[str, Any]] = ()
    pods: Sequence[Pod] = ()
    reports: Sequence[SchedulerReport] | None = None
    """Of the scheduler pods that answered; None: they were not asked yet."""
    unanswered: Sequence[str] = ()
    """Scheduler pods that did not answer, each with the reason: "demo-scheduler-x: deadline exceeded"."""
    troubles: Sequence[Trouble] = ()
    """Of this reconcile, the worst first; (): all was applied."""
