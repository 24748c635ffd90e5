"""The relay in an engine's pod: what is added, whether it is there, and why it isn't. Pure.

A pod that can't have a relay starts without one: nothing here refuses a pod, and what is added must not make the API server
refuse it, the kubelet unable to start it, or its engine less ready. Of what others put into the pod nothing is changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from . import engines, names, selectors
from .engines import EngineFacts
from .images import ImageNotAllowed, relay_image
from .observed import Relay
from .settings import OperatorSettings
from .sidecar import container, identity_volume, scheduler_argument
from .spec import Fleet, Pool

OLDEST_KUBERNETES = (1, 30)
"""As the chart's. Until 1.28 sidecars were off: the relay would be an init container that never ends."""


class Reason(StrEnum):
    """Why a pod has no relay added. Bounded: it is a metric's label."""

    OPTED_OUT = "OptedOut"
    ALREADY_INJECTED = "AlreadyInjected"
    KUBERNETES_TOO_OLD = "KubernetesTooOld"
    NO_ENGINE_CONTAINER = "NoEngineContainer"
    NOT_SERVING = "NotServing"
    NAME_TAKEN = "NameTaken"
    WINDOWS = "Windows"
    STATIC_POD = "StaticPod"
    IMAGE_NOT_ALLOWED = "ImageNotAllowed"


@dataclass(frozen=True)
class NotInjected:
    """The pod stays as it is."""

    reason: Reason
    message: str
    """What was seen, and what to do about it."""


@dataclass(frozen=True)
class RelayState:
    """Whether a pod has its relay, and if not as it should: why, and what to do."""

    state: Relay
    reason: str = ""


def pools_of(pod: Mapping[str, Any], fleet: Fleet) -> tuple[Pool, ...]:
    """Every pool that selects the pod. It belongs to the first."""
    labels = selectors.labels_of(pod)
    return tuple(
        pool for pool in fleet.pools if selectors.matches(selectors.of_pool(pool.selector), labels)
    )


def pool_of(pod: Mapping[str, Any], fleet: Fleet) -> Pool | None:
    """The pool that the pod belongs to."""
    return next(iter(pools_of(pod, fleet)), None)


def also(pod: Mapping[str, Any], fleet: Fleet, others: Iterable[Fleet]) -> tuple[str, ...]:
    """What else selects a pod of the fleet: its further pools, and other fleets of the namespace."""
    return (
        *(f"pool {pool.name}" for pool in pools_of(pod, fleet)[1:]),
        *(
            f"fleet {other.name}"
            for other in others
            if other.uid != fleet.uid
            and other.namespace == fleet.namespace
            and pool_of(pod, other) is not None
        ),
    )


def inject(
    pod: Mapping[str, Any],
    fleet: Fleet,
    pool: Pool,
    settings: OperatorSettings,
    *,
    kubernetes: tuple[int, int] = OLDEST_KUBERNETES,
) -> dict[str, Any] | NotInjected:
    """A copy of the pod with the relay in it, or why it has to stay as it is. kubernetes: version of the API server."""
    facts = engines.read(pod, pool)
    hindrance = _hindrance(pod, pool, facts, kubernetes)
    if hindrance is not None:
        return hindrance
    try:
        relay = container(pod, fleet, pool, facts, settings)
    except ImageNotAllowed as error:
        return NotInjected(Reason.IMAGE_NOT_ALLOWED, str(error))
    patched = copy.deepcopy(dict(pod))
    spec = patched["spec"]
    # Last: what fetches the model, and a mesh's proxy, come first; and an earlier position would delay them by our image.
    spec["initContainers"] = [*(spec.get("initContainers") or ()), relay]
    spec["volumes"] = [*(spec.get("volumes") or ()), identity_volume(fleet)]
    secrets = spec.get("imagePullSecrets") or []
    missing = [
        {"name": name}
        for name in settings.image_pull_secrets
        if name not in (each.get("name") for each in secrets)
    ]
    if missing:
        spec["imagePullSecrets"] = [*secrets, *missing]
    return patched


def state(
    pod: Mapping[str, Any],
    fleet: Fleet,
    pool: Pool,
    settings: OperatorSettings,
    *,
    kubernetes: tuple[int, int] = OLDEST_KUBERNETES,
) -> RelayState:
    """Whether the pod has the relay that it would be given now."""
    relay = _relay_of(pod)
    if relay is None:
        if _opted_out(pod):
            return RelayState(Relay.OPTED_OUT, f"label {names.INJECT_LABEL} is false")
        if not fleet.relay.inject:
            return RelayState(Relay.INJECTION_OFF, "spec.relay.inject is false")
        hindrance = inject(pod, fleet, pool, settings, kubernetes=kubernetes)
        if isinstance(hindrance, NotInjected):
            return RelayState(Relay.NOT_INJECTABLE, hindrance.message)
        return RelayState(
            Relay.NOT_INJECTED, "it predates the fleet or missed the webhook: start it again"
        )
    wanted = scheduler_argument(fleet)
    if wanted not in (relay.get("args") or ()):
        return RelayState(
            Relay.NOT_INJECTED,
            f"its container {names.RELAY_CONTAINER} is not of this fleet: it lacks the argument {wanted}; "
            "let one fleet select the pod, and start it again",
        )
    try:
        expected = container(pod, fleet, pool, engines.read(pod, pool), settings)
    except ImageNotAllowed as error:
        return RelayState(Relay.OUTDATED, str(error))
    if not _holds(relay.get("args"), expected["args"]) or not _has_all(
        relay.get("env") or (), expected["env"]
    ):
        return RelayState(
            Relay.OUTDATED, "its relay was told what the fleet no longer says: start it again"
        )
    if relay.get("image") != expected["image"]:
        remedy = "it is replaced in place" if fleet.relay.in_place_upgrade else "start it again"
        return RelayState(
            Relay.OUTDATED,
            f"its relay is {relay.get('image')}, and would be {expected['image']}: {remedy}",
        )
    return RelayState(Relay.INJECTED)


def image_patch(
    pod: Mapping[str, Any], fleet: Fleet, settings: OperatorSettings
) -> dict[str, Any] | None:
    """The strategic merge patch that brings the relay of a running pod up to date in place; None: nothing to do.

    Only the image can be changed in a pod: what the relay was told stays. Raises ImageNotAllowed.
    """
    relay = _relay_of(pod)
    image = relay_image(fleet, settings)
    if (
        relay is None
        or not fleet.relay.in_place_upgrade
        or scheduler_argument(fleet) not in (relay.get("args") or ())
        or relay.get("image") == image
    ):
        return None
    return {"spec": {"initContainers": [{"name": names.RELAY_CONTAINER, "image": image}]}}


def _hindrance(
    pod: Mapping[str, Any], pool: Pool, facts: EngineFacts, kubernetes: tuple[int, int]
) -> NotInjected | None:
    spec = pod.get("spec") or {}
    if _opted_out(pod):
        return NotInjected(Reason.OPTED_OUT, f"label {names.INJECT_LABEL} is false")
    if _relay_of(pod) is not None:
        return NotInjected(Reason.ALREADY_INJECTED, "it has a relay")
    # (0, 0): it could not be read, which is no reason.
    if (0, 0) < kubernetes < OLDEST_KUBERNETES:
        seen, expected = (".".join(map(str, each)) for each in (kubernetes, OLDEST_KUBERNETES))
        return NotInjected(
            Reason.KUBERNETES_TOO_OLD,
            f"Kubernetes is {seen}; the operator needs {expected} or newer",
        )
    if (spec.get("os") or {}).get("name") == "windows" or (spec.get("nodeSelector") or {}).get(
        "kubernetes.io/os"
    ) == "windows":
        return NotInjected(Reason.WINDOWS, "it runs on Windows, and the relay on Linux only")
    if any(each.get("kind") == "Node" for each in _owners(pod)):
        # The API server refuses one that mentions a token.
        return NotInjected(
            Reason.STATIC_POD,
            "its node made it, not the API server, and it can have no token: run the engine by a Deployment or StatefulSet",
        )
    if not facts.container:
        return NotInjected(
            Reason.NO_ENGINE_CONTAINER,
            f"it has no container {pool.container}: correct container of pool {pool.name}",
        )
    if not facts.serving:
        return NotInjected(
            Reason.NOT_SERVING,
            "it is a further pod of an engine that spans several, and answers no requests: let the pool select "
            "the first only",
        )
    if any(
        each.get("name") == names.RELAY_CONTAINER for each in spec.get("containers") or ()
    ) or any(each.get("name") == names.IDENTITY_VOLUME for each in spec.get("volumes") or ()):
        return NotInjected(
            Reason.NAME_TAKEN,
            f"it has a container {names.RELAY_CONTAINER} or a volume {names.IDENTITY_VOLUME} of its own: rename that",
        )
    return None


def _owners(pod: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return (pod.get("metadata") or {}).get("ownerReferences") or ()


def _relay_of(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    containers = (pod.get("spec") or {}).get("initContainers") or ()
    return next((each for each in containers if each.get("name") == names.RELAY_CONTAINER), None)


def _opted_out(pod: Mapping[str, Any]) -> bool:
    return selectors.labels_of(pod).get(names.INJECT_LABEL) == "false"


def _has_all(actual: Iterable[Mapping[str, Any]], expected: Iterable[Mapping[str, Any]]) -> bool:
    """Every variable is there; others may have added theirs, as a cloud's identity webhook does to all containers."""
    known = {each.get("name"): each for each in actual}
    return all(_holds(known.get(each["name"]), each) for each in expected)


def _holds(actual: Any, expected: Any) -> bool:
    """The actual value is the expected one, with what the API server added."""
    if isinstance(expected, Mapping):
        return isinstance(actual, Mapping) and all(
            _holds(actual.get(key), value) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return (
            isinstance(actual, list)
            and len(actual) == len(expected)
            and all(_holds(*pair) for pair in zip(actual, expected, strict=True))
        )
    return bool(actual == expected)
