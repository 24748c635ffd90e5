"""How the scheduler's Deployment stands, and what keeps its pods from running. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .observed import Trouble

_ADVICE = {
    "ImagePullBackOff": "check the image's name and the pull secrets (Helm values image and imagePullSecrets)",
    "ErrImagePull": "check the image's name and the pull secrets (Helm values image and imagePullSecrets)",
    "InvalidImageName": "correct the image's name",
    "CrashLoopBackOff": "kubectl logs --previous says why it ends",
    "CreateContainerConfigError": "something that it mounts or runs as is not as it should be",
    "RunContainerError": "the node can't start it",
}


@dataclass(frozen=True)
class Rollout:
    """The Deployment in brief."""

    wanted: int
    ready: int
    available: bool
    """As many pods as the Deployment promises are ready, of this revision or the one before."""
    complete: bool
    """All pods are of the newest revision."""
    trouble: Trouble | None = None
    """Why it goes no further, as far as can be seen."""


def read(
    wanted: int, deployment: Mapping[str, Any] | None, pods: Sequence[Mapping[str, Any]]
) -> Rollout:
    """wanted: pods that the fleet asks for; pods: those of the scheduler that there are."""
    if deployment is None:
        return Rollout(wanted, 0, available=False, complete=False)
    status = deployment.get("status") or {}
    generation = (deployment.get("metadata") or {}).get("generation", 0)
    conditions = {each.get("type"): each for each in status.get("conditions") or ()}
    updated = status.get("observedGeneration", 0) >= generation
    return Rollout(
        wanted,
        int(status.get("readyReplicas") or 0),
        available=conditions.get("Available", {}).get("status") == "True",
        complete=updated
        and int(status.get("updatedReplicas") or 0) == wanted == int(status.get("replicas") or 0),
        trouble=next(_troubles(conditions, pods), None),
    )


def _troubles(
    conditions: Mapping[str, Mapping[str, Any]], pods: Sequence[Mapping[str, Any]]
) -> Iterator[Trouble]:
    failure = conditions.get("ReplicaFailure", {})
    if failure.get("status") == "True":
        yield Trouble("PodsRefused", f"its pods are refused: {failure.get('message', '')}")
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        yield from _pod_troubles(pod)
    progress = conditions.get("Progressing", {})
    if progress.get("status") == "False":
        yield Trouble("RolloutStuck", f"its rollout is stuck: {progress.get('message', '')}")


def _pod_troubles(pod: Mapping[str, Any]) -> Iterator[Trouble]:
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason", ""))
        if reason in _ADVICE:
            yield Trouble(reason, f"pod {name} waits in {reason}: {_ADVICE[reason]}")
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield Trouble(
                "Unschedulable", f"pod {name} finds no node: kubectl describe pod {name} says why"
            )
