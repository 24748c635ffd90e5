"""The engine pods of a fleet as its status needs them, and the NetworkPolicies that they make necessary. Pure.

A fleet may have a thousand pods, and is looked at again whenever one of them changes: what was found out about the others
is kept as long as nothing that it rests on was replaced. Bodies and fleets are never changed in place, so that one and the
same object means the same content.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import engines, exposure, injection, names
from .engines import EngineFacts
from .observed import Pod
from .settings import OperatorSettings
from .spec import Fleet, Pool
from .store import Body

ENDED = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True)
class EnginePods:
    """What a fleet's pools select."""

    pods: Sequence[Pod]
    policies: Sequence[Mapping[str, Any]]
    """NetworkPolicies that close event ports, ready to apply."""
    draining: Mapping[str, bool] = field(default_factory=dict)
    """Of each pod that there is, by uid, also of those that are being deleted: whether nothing new should go there."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """What follows from a pod's manifest alone, and a generation of the fleet."""

    manifest: tuple[object, ...]
    pool: Pool
    facts: EngineFacts
    relay: injection.RelayState
    findings: tuple[engines.Finding, ...]


@dataclass(frozen=True, slots=True)
class _Look:
    """What was found out about one pod of the namespace."""

    body: Body
    reading: _Reading | None = None
    """None: the fleet does not select it."""
    pod: Pod | None = None


@dataclass
class _Looks:
    """What was found out about a namespace for one fleet."""

    surroundings: tuple[object, ...] = ()
    """The fleet, the policies and the other fleets that it rests on."""
    pods: dict[str, _Look] = field(default_factory=dict)


@dataclass
class Observer:
    """Looks at engine pods."""

    settings: OperatorSettings
    kubernetes: tuple[int, int]
    """Version of the API server."""
    _looks: dict[str, _Looks] = field(default_factory=dict)

    def look(
        self,
        fleet: Fleet,
        pods: Iterable[Body],
        policies: Sequence[Body],
        others: Sequence[Fleet],
    ) -> EnginePods:
        """pods and policies: all of the fleet's namespace. others: the fleets of that namespace."""
        before = self._looks.get(fleet.uid, _Looks())
        now = _Looks((fleet, self.kubernetes, *policies, *others))
        same = _same(before.surroundings, now.surroundings)
        for pod in pods:
            uid = pod["metadata"]["uid"]
            look = before.pods.get(uid)
            if look is None or not same or look.body is not pod:
                look = self._look(pod, fleet, policies, others, look)
            now.pods[uid] = look
        self._looks[fleet.uid] = now
        found = [
            (each.body, each.reading, each.pod)
            for each in now.pods.values()
            if each.reading is not None and each.pod is not None
        ]
        return EnginePods(
            [pod for _, _, pod in found],
            [
                policy
                for pool in fleet.pools
                if (
                    policy := exposure.policy(
                        fleet,
                        pool,
                        [
                            (body, reading.facts)
                            for body, reading, _ in found
                            if reading.pool is pool
                        ],
                        policies,
                        self.settings,
                    )
                )
                is not None
            ],
            {
                uid: drains(each.body)
                for uid, each in now.pods.items()
                if each.reading is not None
                or (is_deleted(each.body) and injection.pool_of(each.body, fleet) is not None)
            },
        )

    def keep_only(self, uids: Container[str]) -> None:
        """Forgets what was found out for other fleets than these."""
        # A copy in one step: another thread may be looking.
        self._looks = {uid: kept for uid, kept in list(self._looks.items()) if uid in uids}

    def _look(
        self,
        pod: Body,
        fleet: Fleet,
        policies: Sequence[Body],
        others: Sequence[Fleet],
        before: _Look | None,
    ) -> _Look:
        if is_deleted(pod) or pod["status"].get("phase") in ENDED:
            return _Look(pod)
        pool = injection.pool_of(pod, fleet)
        if pool is None:
            return _Look(pod)
        reading = self._read(pod, fleet, pool, before.reading if before is not None else None)
        metadata = pod["metadata"]
        return _Look(
            pod,
            reading,
            Pod(
                name=metadata["name"],
                uid=metadata["uid"],
                pool=pool.name,
                node=pod["spec"].get("nodeName", ""),
                ready=is_ready(pod),
                serving=reading.facts.serving,
                relay=reading.relay.state,
                relay_reason=reading.relay.reason,
                findings=reading.findings,
                exposed=exposure.describe(pod, reading.facts, policies),
                also=injection.also(pod, fleet, others),
            ),
        )

    def _read(self, pod: Body, fleet: Fleet, pool: Pool, before: _Reading | None) -> _Reading:
        metadata = pod["metadata"]
        manifest = (
            fleet.generation,
            self.kubernetes,
            metadata.get("labels"),
            metadata.get("annotations"),
            pod["spec"],
        )
        if before is not None and before.manifest == manifest and before.pool is pool:
            return before
        facts = engines.read(pod, pool)
        return _Reading(
            manifest,
            pool,
            facts,
            injection.state(pod, fleet, pool, self.settings, kubernetes=self.kubernetes),
            engines.findings(facts, fleet),
        )


def is_deleted(pod: Body) -> bool:
    """It has been told to end, and may run for its grace period still."""
    return "deletionTimestamp" in pod["metadata"]


def drains(pod: Body) -> bool:
    """Nothing new should go there: it is being deleted, or somebody has said so.

    A cordoned node says nothing of the pods that run on it: who drains the node deletes them.
    """
    annotations = pod["metadata"].get("annotations") or {}
    return is_deleted(pod) or annotations.get(names.DRAIN_ANNOTATION) == "true"


def is_ready(pod: Body) -> bool:
    """The pod says that it can serve."""
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in pod["status"].get("conditions") or ()
    )


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
