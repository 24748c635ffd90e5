"""What people do to a fleet's children is put right, on a real API server."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, Object, temporary_namespace, until
from tests.cluster.operators import SCHEDULER_IMAGE, Operators, await_condition, fleet

WATCHED = [
    ("configmap", "demo-client"),
    ("configmap", "demo-scheduler"),
    ("deployment", "demo-scheduler"),
    ("networkpolicy", "demo-scheduler"),
    ("poddisruptionbudget", "demo-scheduler"),
    ("role", "demo-client"),
    ("service", "demo-relays"),
    ("service", "demo-scheduler"),
    ("serviceaccount", "demo-scheduler"),
]


@pytest.fixture(scope="module")
def fleet_namespace(cluster: Cluster, installed_chart: Operators) -> Iterator[str]:
    """Where a fleet is looked after; all tests here change its children, and wait until they are right again."""
    with temporary_namespace(cluster, f"test-{secrets.token_hex(4)}") as name:
        installed_chart.start_leading()
        cluster.apply(fleet(name))
        await_condition(cluster, name, "Reconciled", "True")
        yield name
        installed_chart.clear()


@pytest.mark.parametrize(("kind", "name"), WATCHED)
def test_a_deleted_child_comes_back_at_once(
    cluster: Cluster, fleet_namespace: str, kind: str, name: str
) -> None:
    before = cluster.get(kind, name, "-n", fleet_namespace)["metadata"]["uid"]
    cluster.kubectl("delete", kind, name, "-n", fleet_namespace, "--wait=false")
    until(
        lambda: cluster.get(kind, name, "-n", fleet_namespace)["metadata"]["uid"] != before,
        f"{kind} {name} to be made again",
        5.0,
    )


@pytest.mark.parametrize("name", ["demo-tls", "demo-decision-key"])
def test_a_deleted_secret_comes_back_with_the_next_change_of_the_fleet(
    cluster: Cluster, fleet_namespace: str, name: str
) -> None:
    cluster.kubectl("delete", "secret", name, "-n", fleet_namespace)
    cluster.kubectl("delete", "poddisruptionbudget", "demo-scheduler", "-n", fleet_namespace)
    until(lambda: cluster.get("secret", name, "-n", fleet_namespace), f"Secret {name}", 5.0)


@pytest.mark.parametrize(
    ("kind", "name", "patch", "path"),
    [
        (
            "deployment",
            "demo-scheduler",
            [{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "evil"}],
            "{.spec.template.spec.containers[0].image}",
        ),
        (
            "role",
            "demo-client",
            [{"op": "replace", "path": "/rules/0/resourceNames", "value": ["other"]}],
            "{.rules[0].resourceNames}",
        ),
        (
            "networkpolicy",
            "demo-scheduler",
            [{"op": "replace", "path": "/spec/ingress", "value": [{}]}],
            "{.spec.ingress}",
        ),
        (
            "configmap",
            "demo-client",
            [{"op": "replace", "path": "/data/endpoint", "value": "evil:1"}],
            "{.data.endpoint}",
        ),
        (
            "service",
            "demo-relays",
            [{"op": "remove", "path": "/metadata/labels/app.kubernetes.io~1managed-by"}],
            "{.metadata.labels}",
        ),
        (
            "serviceaccount",
            "demo-scheduler",
            [{"op": "remove", "path": "/metadata/ownerReferences"}],
            "{.metadata.ownerReferences}",
        ),
    ],
)
def test_what_somebody_changed_in_a_child_is_put_right(
    cluster: Cluster,
    fleet_namespace: str,
    kind: str,
    name: str,
    patch: list[Object],
    path: str,
) -> None:
    def seen() -> str:
        return cluster.kubectl("get", kind, name, "-n", fleet_namespace, "-o", f"jsonpath={path}")

    before = seen()
    cluster.kubectl(
        "patch", kind, name, "-n", fleet_namespace, "--type=json", "-p", json.dumps(patch)
    )
    until(lambda: seen() == before, f"{kind} {name} as it was", 5.0)


def test_what_others_add_to_a_child_stays(cluster: Cluster, fleet_namespace: str) -> None:
    cluster.kubectl(
        "annotate", "deployment", "demo-scheduler", "-n", fleet_namespace, "team=serving"
    )
    cluster.kubectl("set", "env", "deployment/demo-scheduler", "-n", fleet_namespace, "TRACE=1")
    image = '[{"op":"replace","path":"/spec/template/spec/containers/0/image","value":"evil"}]'
    cluster.kubectl(
        *(
            "patch",
            "deployment",
            "demo-scheduler",
            "-n",
            fleet_namespace,
            "--type=json",
            "-p",
            image,
        )
    )

    def repaired() -> Object | None:
        found = cluster.get("deployment", "demo-scheduler", "-n", fleet_namespace)
        [container] = found["spec"]["template"]["spec"]["containers"]
        return found if container["image"] == SCHEDULER_IMAGE else None

    found = until(repaired, "the image to be put right", 5.0)
    [container] = found["spec"]["template"]["spec"]["containers"]
    assert {"name": "TRACE", "value": "1"} in container["env"]
    assert found["metadata"]["annotations"]["team"] == "serving"
