"""The admission webhook's side of the API: which pods it is asked about, and how it answers. Pure.

Every answer lets the pod pass. What the API server shouldn't ask about is kept from it by the entry's selectors, so that
nobody else's pods wait for the operator.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonpatch

from . import names, selectors
from .injection import NotInjected, inject, pool_of
from .selectors import Requirement
from .settings import OperatorSettings
from .spec import Fleet, SelectorOperator

API_VERSION = "admission.k8s.io/v1"
TIMEOUT_S = 3
"""What a pod's creation waits for us at most; then it goes on without a relay."""
LONGEST_EXPRESSION = 16_384
"""Characters. The API server takes 100 000, and refuses all fleets' entries for one that has more: then we are asked about
more pods than the pools select, and let the others pass."""

_NOT_INJECTED = (
    f"!has(object.spec.initContainers) || "
    f"!object.spec.initContainers.exists(c, c.name == '{names.RELAY_CONTAINER}')"
)


class BadReview(ValueError):
    """Not a review of a pod's creation: whoever sent it isn't an API server, or asks about other things."""


@dataclass(frozen=True)
class Answer:
    """What the API server is told."""

    body: Mapping[str, Any]
    outcome: str
    """Bounded: Injected, FleetUnknown, NotSelected, InjectionOff, or why it wasn't injected."""
    message: str = ""


def entry(fleet: Fleet, settings: OperatorSettings, bundle: bytes) -> dict[str, Any]:
    """The fleet's item of a MutatingWebhookConfiguration's `webhooks`. bundle: PEM of who vouches for the webhook."""
    pools = [selectors.of_pool(pool.selector) for pool in fleet.pools]
    common = sorted(set(pools[0]).intersection(*pools[1:]))
    conditions = [{"name": "not-injected-yet", "expression": _NOT_INJECTED}]
    expression = _any_of(pools, frozenset(common))
    if any(len(pool) > len(common) for pool in pools) and len(expression) <= LONGEST_EXPRESSION:
        conditions.append({"name": "selected-by-a-pool", "expression": expression})
    wanted = Requirement(names.INJECT_LABEL, SelectorOperator.NOT_IN, ("false",))
    return {
        "name": names.webhook(fleet.name, fleet.namespace),
        "admissionReviewVersions": ["v1"],
        "clientConfig": {
            "caBundle": base64.b64encode(bundle).decode(),
            "service": {
                "name": settings.webhook_service or settings.fullname,
                "namespace": settings.namespace,
                "path": names.webhook_path(fleet.name, fleet.namespace),
                "port": 443,
            },
        },
        "rules": [
            {
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "operations": ["CREATE"],
                "resources": ["pods"],
                "scope": "Namespaced",
            }
        ],
        "namespaceSelector": {
            "matchLabels": {names.NAMESPACE_LABEL: fleet.namespace},
            "matchExpressions": [wanted.manifest()],
        },
        "objectSelector": {"matchExpressions": [each.manifest() for each in (wanted, *common)]},
        "matchConditions": conditions,
        "matchPolicy": "Equivalent",
        # A pod must never wait for us, nor be refused because of us.
        "failurePolicy": "Ignore",
        "timeoutSeconds": TIMEOUT_S,
        # Others may add the engine's container after we looked. A pod that has its relay is not looked at again.
        "reinvocationPolicy": "IfNeeded",
        "sideEffects": "None",
    }


def answer(
    review: object,
    namespace: str,
    name: str,
    fleet_of: Callable[[str, str], Fleet | None],
    settings: OperatorSettings,
    *,
    kubernetes: tuple[int, int],
) -> Answer:
    """The answer to an AdmissionReview about a pod of that namespace, for the fleet of that name. Raises BadReview."""
    request = _request(review)
    pod = request["object"]
    fleet = fleet_of(namespace, name)
    if fleet is None:
        return _allowed(request, "FleetUnknown")
    if request.get("namespace") != namespace:
        return _allowed(request, "NotSelected")
    if not fleet.relay.inject:
        return _allowed(request, "InjectionOff")
    pool = pool_of(pod, fleet)
    if pool is None:
        return _allowed(request, "NotSelected")
    patched = inject(pod, fleet, pool, settings, kubernetes=kubernetes)
    if isinstance(patched, NotInjected):
        return _allowed(request, str(patched.reason), patched.message)
    return _allowed(request, "Injected", patch=jsonpatch.make_patch(pod, patched).patch)


def unchanged(review: object, outcome: str) -> Answer:
    """The pod passes as it is. Raises BadReview."""
    return _allowed(_request(review), outcome)


def _request(review: object) -> Mapping[str, Any]:
    if not isinstance(review, Mapping) or review.get("apiVersion") != API_VERSION:
        raise BadReview(f"expected an AdmissionReview of {API_VERSION}")
    request = review.get("request")
    if not isinstance(request, Mapping) or not isinstance(request.get("uid"), str):
        raise BadReview("the review has no request with a uid")
    pod = request.get("object")
    if not isinstance(pod, Mapping) or pod.get("kind") != "Pod" or "spec" not in pod:
        raise BadReview("the request has no pod as its object")
    return request


def _allowed(
    request: Mapping[str, Any],
    outcome: str,
    message: str = "",
    patch: Sequence[Mapping[str, Any]] = (),
) -> Answer:
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    if patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(patch).encode()).decode()
    body = {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}
    return Answer(body, outcome, message)


def _any_of(pools: Iterable[Sequence[Requirement]], common: frozenset[Requirement]) -> str:
    """CEL for: one of the pools selects the pod. What all require is left to the object selector."""
    alternatives = {
        " && ".join(_expression(each) for each in pool if each not in common) or "true"
        for pool in pools
    }
    return " || ".join(f"({each})" for each in sorted(alternatives))


def _expression(requirement: Requirement) -> str:
    key = json.dumps(requirement.key)
    has = f"(has(object.metadata.labels) && {key} in object.metadata.labels)"
    among = f"object.metadata.labels[{key}] in {json.dumps(requirement.values)}"
    match requirement.operator:
        case SelectorOperator.EXISTS:
            return has
        case SelectorOperator.DOES_NOT_EXIST:
            return f"!{has}"
        case SelectorOperator.NOT_IN:
            return f"(!{has} || !({among}))"
        case _:
            return f"({has} && {among})"
