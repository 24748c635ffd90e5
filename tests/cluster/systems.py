"""The operator on a cluster with nodes, installed with the chart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from .cluster import Cluster, Object, temporary_namespace

CHART = Path(__file__).parents[2] / "charts" / "servingfleet"
NAME = "servingfleet"
NAMESPACE = "servingfleet-system"
LABEL = "app.kubernetes.io/name=servingfleet-operator"
START_S = 120


@dataclass(frozen=True)
class System:
    """An installed release, and the images that it runs."""

    cluster: Cluster
    images: Mapping[str, str]
    namespace: str = NAMESPACE

    def install(self) -> None:
        """Installs the chart, or upgrades it, and waits until its operator serves."""
        self.cluster.helm(
            *("upgrade", "--install", NAME, str(CHART), "--namespace", self.namespace),
            *("--values", "-", "--wait", f"--timeout={START_S}s"),
            stdin=yaml.safe_dump(values(self.images)),
        )

    def uninstall(self) -> None:
        self.cluster.helm("uninstall", NAME, "--namespace", self.namespace, "--wait")

    def pods(self) -> list[Object]:
        """The operator's."""
        items = self.cluster.get("pods", "-n", self.namespace, "-l", LABEL)["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def kill(self) -> None:
        """Ends all its replicas without notice."""
        self.cluster.kubectl(
            *("delete", "pods", "-n", self.namespace, "-l", LABEL),
            *("--force", "--grace-period=0", "--wait=false"),
        )


@contextlib.contextmanager
def running_system(cluster: Cluster, images: Mapping[str, str]) -> Iterator[System]:
    """The operator for the length of the block."""
    with temporary_namespace(cluster, NAMESPACE):
        system = System(cluster, images)
        system.install()
        try:
            yield system
        finally:
            system.uninstall()


def values(images: Mapping[str, str]) -> Object:
    """Helm values by which the chart runs these images."""
    named: Object = {"registry": "", "pullPolicy": "IfNotPresent"}
    for process in ("operator", "relay", "scheduler"):
        repository, _, tag = images[process].rpartition(":")
        named[process] = {"repository": repository, "tag": tag}
    return {"image": named}
