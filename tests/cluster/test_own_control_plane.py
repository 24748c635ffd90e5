"""The control plane itself: what the other tests take for granted."""

from __future__ import annotations

import pytest
from kubernetes import client

from tests.cluster.cluster import Cluster, CommandFailed, until


def test_a_namespace_gets_its_service_account(cluster: Cluster, namespace: str) -> None:
    core = client.CoreV1Api(cluster.api)
    until(
        lambda: core.list_namespaced_service_account(namespace).items,
        "the namespace's ServiceAccount",
    )


def test_what_was_applied_survives_a_stop_of_the_api_server(
    cluster: Cluster, namespace: str
) -> None:
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "kept", "namespace": namespace},
            "data": {"a": "b"},
        }
    )
    cluster.stop_api_server()
    try:
        with pytest.raises(CommandFailed, match="refused"):
            cluster.kubectl("get", "namespaces")
    finally:
        cluster.start_api_server()
    assert cluster.get("configmap", "kept", "-n", namespace)["data"] == {"a": "b"}
