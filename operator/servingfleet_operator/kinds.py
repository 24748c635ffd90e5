"""The kinds that the operator touches, and where the API server serves them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import names


class Kind(NamedTuple):
    """A kind of object and its place in the API."""

    api_version: str
    name: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """The API group; empty for the core's."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        """The version within its group."""
        return self.api_version.rpartition("/")[2]

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The path of one object, or of all of a namespace, or of all."""
        parts = ["apis", self.api_version] if "/" in self.api_version else ["api", self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [self.plural, name, subresource]
        return "/" + "/".join(part for part in parts if part)


FLEET = Kind(names.API_VERSION, names.KIND, names.PLURAL)

CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
POD_DISRUPTION_BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
POD_MONITOR = Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")
ROLE = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
SECRET = Kind("v1", "Secret", "secrets")
SERVICE = Kind("v1", "Service", "services")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")

CLUSTER_ROLE_BINDING = Kind(
    "rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False
)
CRD = Kind(
    "apiextensions.k8s.io/v1",
    "CustomResourceDefinition",
    "customresourcedefinitions",
    namespaced=False,
)
EVENT = Kind("events.k8s.io/v1", "Event", "events")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
POD = Kind("v1", "Pod", "pods")
WEBHOOKS = Kind(
    "admissionregistration.k8s.io/v1",
    "MutatingWebhookConfiguration",
    "mutatingwebhookconfigurations",
    namespaced=False,
)

WATCHED_CHILDREN = (
    CONFIG_MAP,
    DEPLOYMENT,
    NETWORK_POLICY,
    POD_DISRUPTION_BUDGET,
    ROLE,
    SERVICE,
    SERVICE_ACCOUNT,
)
"""Children whose drift is seen at once. Secrets are not among them: whoever may watch them reads everybody's; they
are read by name at each reconcile. PodMonitors neither: their definition may be absent."""

CHILDREN = (*WATCHED_CHILDREN, SECRET, POD_MONITOR)

_BY_TYPE = {
    (kind.api_version, kind.name): kind
    for kind in (*CHILDREN, FLEET, CLUSTER_ROLE_BINDING, CRD, EVENT, LEASE, POD, WEBHOOKS)
}


def kind_of(body: Mapping[str, Any]) -> Kind:
    """The kind of an object. Raises KeyError for one that the operator never touches."""
    return _BY_TYPE[body["apiVersion"], body["kind"]]
