"""What the things of a fleet are called. Pure; everybody asks here, so that nobody spells a name twice."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from .settings import OperatorSettings
from .spec import Fleet

GROUP = "servingfleet.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "ServingFleet"
PLURAL = "servingfleets"

CHILDREN_MANAGER = "servingfleet-operator"
STATUS_MANAGER = "servingfleet-status"

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "servingfleet"
NAME_LABEL = "app.kubernetes.io/name"
SCHEDULER = "servingfleet-scheduler"
INSTANCE_LABEL = "app.kubernetes.io/instance"
DRAIN_ANNOTATION = f"{GROUP}/drain"
"""On an engine pod: "true" takes it out of routing."""
DRAINER = "operator"
"""In whose name schedulers are told."""
FLEET_LABEL = f"{GROUP}/fleet"
OPERATOR_LABEL = f"{GROUP}/operator"
INJECT_LABEL = f"{GROUP}/inject"
"""On a pod, "false": this one gets no relay."""
EVENTS_ANNOTATION = f"{GROUP}/events"
"""On a pod: event ports of the engines' ranks, separated by commas."""
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Set by the API server on every namespace, so that nobody can claim another's name."""

RELAY_CONTAINER = "servingfleet-relay"
IDENTITY_VOLUME = "servingfleet-identity"
IDENTITY_PATH = "/var/run/servingfleet"

GRPC_PORT = 7070
METRICS_PORT = 9090

_LABEL_CHARACTERS = 63


def scheduler(fleet: str) -> str:
    """Deployment, ServiceAccount, client Service and their kin."""
    return f"{fleet}-scheduler"


def relays(fleet: str) -> str:
    """The headless Service that relays resolve."""
    return f"{fleet}-relays"


def tls(fleet: str) -> str:
    """The Secret with the scheduler's certificate."""
    return f"{fleet}-tls"


def decision_key(fleet: str) -> str:
    """The Secret that signs decision ids."""
    return f"{fleet}-decision-key"


def client(fleet: str) -> str:
    """The ConfigMap for clients and relays, and the Role that lets an account call."""
    return f"{fleet}-client"


def engines(fleet: str, pool: str) -> str:
    """The NetworkPolicy that closes the event ports of a pool's engines: one selects by one selector only."""
    return f"{fleet}-engines-{pool}"


def server_name(fleet: str, namespace: str) -> str:
    """The name that the scheduler's certificate is checked for, whatever address was dialled."""
    return f"{scheduler(fleet)}.{namespace}.svc"


def certificate_names(fleet: str, namespace: str) -> tuple[str, ...]:
    """All names that the scheduler's certificate carries, the one that is checked first."""
    return tuple(
        f"{service}.{namespace}.svc{domain}"
        for service in (scheduler(fleet), relays(fleet))
        for domain in ("", ".cluster.local")
    )


def endpoint(fleet: str, namespace: str) -> str:
    """host:port for clients."""
    return f"{server_name(fleet, namespace)}:{GRPC_PORT}"


def relays_endpoint(fleet: str, namespace: str) -> str:
    """host:port that relays resolve to every scheduler pod."""
    return f"{relays(fleet)}.{namespace}.svc:{GRPC_PORT}"


def audience(fleet: str, namespace: str) -> str:
    """Audience of the tokens of this fleet's clients."""
    return f"{GROUP}/{namespace}/{fleet}"


def relay_audience(fleet: str, namespace: str) -> str:
    """Audience of its relays' tokens: another, so that no client can pose as a replica. As schedulers derive it."""
    return f"{audience(fleet, namespace)}/relay"


def webhook(fleet: str, namespace: str) -> str:
    """The fleet's entry in the webhook configuration."""
    return f"{fleet}.{namespace}.inject.{GROUP}"


def webhook_path(fleet: str, namespace: str) -> str:
    """Where the API server asks for that fleet's pods."""
    return f"/inject/{namespace}/{fleet}"


def ca_secret(fullname: str, fleet: str, namespace: str) -> str:
    """The Secret, in the operator's namespace, with the key of the fleet's CA."""
    # A hash, since the two names together may be longer than a name can be.
    digest = hashlib.sha256(f"{namespace}/{fleet}".encode()).hexdigest()[:16]
    return f"{fullname}-ca-{digest}"


def label_value(text: str) -> str:
    """The text as a label's value: cut, and told apart by a hash where it had to be."""
    cleaned = re.sub(r"[^-_.A-Za-z0-9]", "_", text).strip("-_.")
    if cleaned == text and len(text) <= _LABEL_CHARACTERS:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{cleaned[: _LABEL_CHARACTERS - 9]}-{digest}".lstrip("-_.")


def scheduler_selector(fleet: str) -> dict[str, str]:
    """Labels of the scheduler pods. Never changes: a Deployment's selector can't."""
    return {NAME_LABEL: SCHEDULER, FLEET_LABEL: fleet}


def labels(fleet: str, settings: OperatorSettings) -> dict[str, str]:
    """Labels of every child."""
    return {
        MANAGED_BY_LABEL: MANAGED_BY,
        NAME_LABEL: SCHEDULER,
        INSTANCE_LABEL: fleet,
        FLEET_LABEL: fleet,
        OPERATOR_LABEL: label_value(settings.instance),
    }


def owner(fleet: Fleet) -> dict[str, Any]:
    """The reference by which garbage collection removes a child with its fleet."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": fleet.name,
        "uid": fleet.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def child(
    fleet: Fleet,
    settings: OperatorSettings,
    api_version: str,
    kind: str,
    name: str,
    **body: Any,
) -> dict[str, Any]:
    """A child of the fleet, ready to apply: identity, labels and owner, then what `body` says."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": fleet.namespace,
            "labels": labels(fleet.name, settings),
            "ownerReferences": [owner(fleet)],
        },
        **body,
    }


def is_owned(resource: Mapping[str, Any], fleet_uid: str) -> bool:
    """The object was made for this very fleet, not by hand, nor for an earlier one of the same name."""
    references = resource.get("metadata", {}).get("ownerReferences") or ()
    return any(each.get("uid") == fleet_uid and each.get("controller") for each in references)
