"""Releases of the chart, without anything that runs: `operators` has those whose operator does."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client

from .cluster import Cluster, Object

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "servingfleet"
CRD = ROOT / "crds" / "servingfleet.yaml"
FLEETS = "servingfleets.servingfleet.dev"
"""The resource, as kubectl writes it; the name of its definition, too."""


@dataclass
class Release:
    """An installed release."""

    cluster: Cluster
    name: str
    namespace: str

    @property
    def fullname(self) -> str:
        return f"{self.name}-servingfleet"

    @property
    def account(self) -> str:
        """How the API server knows its operator."""
        return f"system:serviceaccount:{self.namespace}:{self.fullname}"

    def install(self, **values: Any) -> str:
        """`helm install`. Raises CommandFailed."""
        return self._helm("install", values)

    def upgrade(self, *arguments: str, chart: Path = CHART, **values: Any) -> str:
        """`helm upgrade`. Raises CommandFailed."""
        return self._helm("upgrade", values, *arguments, chart=chart)

    def uninstall(self) -> str:
        """`helm uninstall`. Raises CommandFailed."""
        return self.cluster.helm("uninstall", self.name, "--namespace", self.namespace)

    def can(self, verb: str, resource: str, **where: str) -> bool:
        """Whether its operator may do that: see `may`."""
        return may(self.cluster, self.account, verb, resource, **where)

    def _helm(self, verb: str, values: Object, *arguments: str, chart: Path = CHART) -> str:
        return self.cluster.helm(
            *(verb, self.name, str(chart), "--namespace", self.namespace, "--values", "-"),
            *arguments,
            stdin=yaml.safe_dump(values),
        )


def may(
    cluster: Cluster, user: str, verb: str, resource: str, namespace: str = "", name: str = ""
) -> bool:
    """Whether the API server would let the user do that, to RESOURCE[.GROUP][/SUBRESOURCE]; without a namespace: in all."""
    resource, _, subresource = resource.partition("/")
    resource, _, group = resource.partition(".")
    review = client.V1SubjectAccessReview(
        spec=client.V1SubjectAccessReviewSpec(
            user=user,
            resource_attributes=client.V1ResourceAttributes(
                verb=verb,
                group=group,
                resource=resource,
                subresource=subresource,
                namespace=namespace,
                name=name,
            ),
        )
    )
    answer = client.AuthorizationV1Api(cluster.api).create_subject_access_review(review)
    assert answer.status is not None
    return bool(answer.status.allowed)


@contextlib.contextmanager
def a_release(cluster: Cluster, namespace: str, **values: Any) -> Iterator[Release]:
    """A release of a name of its own, uninstalled at the end if it is still there."""
    release = Release(cluster, f"t{secrets.token_hex(3)}", namespace)
    release.install(**values)
    try:
        yield release
    finally:
        cluster.helm("uninstall", release.name, "--namespace", namespace, "--ignore-not-found")


def bring_crd(cluster: Cluster, manifest: str) -> None:
    """As docs/kubernetes.md tells a person to."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=manifest)
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{FLEETS}", "--timeout=30s")


def patch_as(release: Release, target: str, patch: Object) -> None:
    """A merge patch by the release's operator."""
    release.cluster.kubectl(
        *("patch", target, "--type=merge", "--patch", json.dumps(patch)),
        *(f"--as={release.account}", "--field-manager=servingfleet-operator"),
    )


def fleet(name: str) -> Object:
    """The least that a fleet can say."""
    return {
        "apiVersion": "servingfleet.dev/v1alpha1",
        "kind": "ServingFleet",
        "metadata": {"name": name},
        "spec": {
            "model": {"name": "m"},
            "pools": [{"name": "gpu", "selector": {"matchLabels": {"app": "vllm"}}}],
        },
    }
