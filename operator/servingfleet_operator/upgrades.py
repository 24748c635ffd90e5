"""Replaces the relays of running pods in place, where a fleet asks for it: one pod at a time, and no further than the
first that does not come back.

A patch of the image restarts the relay alone. The engine goes on, but its pod is not Ready for the two seconds of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import injection, names
from .observed import Trouble
from .pods import is_ready
from .settings import OperatorSettings
from .spec import Fleet
from .store import Body

SETTLE_S = 10.0
"""The kubelet takes a moment to begin: a pod that is ready right after the patch has only not noticed yet."""
PATIENCE_S = 300.0
LOOK_S = 5.0


@dataclass(frozen=True)
class Step:
    """What to do now."""

    pod: Body | None = None
    """To patch with `patch`; None: nothing."""
    patch: Mapping[str, Any] | None = None
    waiting: bool = False
    """Look again soon."""
    trouble: Trouble | None = None


@dataclass(frozen=True)
class Patched:
    """The pod that was patched last."""

    uid: str
    at: float
    """Monotonic seconds."""
    patch: Mapping[str, Any]
    undone: bool = False
    """It was patched like that before, and somebody put the old image back."""


def step(
    fleet: Fleet,
    pods: Iterable[Body],
    settings: OperatorSettings,
    last: Patched | None,
    now: float,
) -> Step:
    """pods: the fleet's engine pods. last: None if none was patched by this process. Raises ImageNotAllowed."""
    if not fleet.relay.in_place_upgrade:
        return Step()
    running = sorted(
        (pod for pod in pods if pod["status"].get("phase") == "Running"),
        key=lambda pod: str(pod["metadata"]["name"]),
    )
    patches = [(pod, injection.image_patch(pod, fleet, settings)) for pod in running]
    outdated = [(pod, patch) for pod, patch in patches if patch is not None and is_ready(pod)]
    if not outdated:
        return Step()
    for pod, patch in patches:
        was_patched = last is not None and pod["metadata"]["uid"] == last.uid
        if was_patched and patch is not None and last is not None and patch == last.patch:
            age_s = now - last.at
            if age_s < SETTLE_S and not last.undone:
                return Step(waiting=True)
            if age_s < PATIENCE_S:
                return Step(trouble=_undone(pod))
            return Step(pod, patch, trouble=_undone(pod))
        if patch is None and (was_patched or _relay_is_down(pod)):
            age_s = now - last.at if last is not None and was_patched else PATIENCE_S
            if age_s >= PATIENCE_S and not is_ready(pod):
                return Step(trouble=_stuck(pod, outdated))
            if age_s < SETTLE_S or not is_ready(pod):
                return Step(waiting=True)
    pod, patch = outdated[0]
    return Step(pod, patch, waiting=True)


def _relay_is_down(pod: Body) -> bool:
    return any(
        status.get("name") == names.RELAY_CONTAINER and "running" not in (status.get("state") or {})
        for status in pod["status"].get("initContainerStatuses") or ()
    )


def _undone(pod: Body) -> Trouble:
    return Trouble(
        "RelayUpgradeUndone",
        f"pod {pod['metadata']['name']} was given its new relay and does not have it: a policy of the cluster that "
        "rewrites images must let it be, or set spec.relay.inPlaceUpgrade to false",
    )


def _stuck(pod: Body, outdated: Sequence[object]) -> Trouble:
    name = pod["metadata"]["name"]
    return Trouble(
        "RelayUpgradeStuck",
        f"pod {name} is not ready with its new relay, so the other {len(outdated)} keep theirs: "
        f"kubectl logs {name} -c {names.RELAY_CONTAINER} says why",
    )
