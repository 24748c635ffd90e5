"""What becomes of a fleet's objects, on a real API server and with the rights of the chart only."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
from cryptography import x509

from tests.cluster.cluster import Cluster, CommandFailed, Object, until
from tests.cluster.operators import (
    SCHEDULER_IMAGE,
    Operators,
    Replica,
    await_condition,
    condition,
    fleet,
)

IDLE_S = 30.0

CHILDREN = {
    ("configmap", "demo-client"),
    ("configmap", "demo-scheduler"),
    ("deployment", "demo-scheduler"),
    ("networkpolicy", "demo-scheduler"),
    ("poddisruptionbudget", "demo-scheduler"),
    ("role", "demo-client"),
    ("secret", "demo-decision-key"),
    ("secret", "demo-tls"),
    ("service", "demo-relays"),
    ("service", "demo-scheduler"),
    ("serviceaccount", "demo-scheduler"),
}


@pytest.fixture
def demo(cluster: Cluster, namespace: str, operator: Replica) -> Object:
    """A fleet that was reconciled, as the API server returned it."""
    cluster.apply(fleet(namespace))
    await_condition(cluster, namespace, "Reconciled", "True")
    return cluster.get("servingfleet", "demo", "-n", namespace)


def named(cluster: Cluster, namespace: str) -> dict[tuple[str, str], Object]:
    """Everything that carries the fleet's label, but for pods and what their controllers make."""
    kinds = ",".join(sorted({kind for kind, _ in CHILDREN}))
    found = cluster.get(kinds, "-n", namespace, "-l", "servingfleet.dev/fleet")["items"]
    return {(each["kind"].lower(), each["metadata"]["name"]): each for each in found}


def version(found: Object) -> str:
    return str(found["metadata"]["resourceVersion"])


def test_a_fleet_gets_what_it_needs_and_nothing_is_refused_to_the_operator(
    cluster: Cluster, namespace: str, operator: Replica, demo: Object
) -> None:
    children = named(cluster, namespace)
    assert set(children) == CHILDREN
    for child in children.values():
        [owner] = child["metadata"]["ownerReferences"]
        assert owner["uid"] == demo["metadata"]["uid"]
        assert owner["controller"]
        assert child["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "servingfleet"
    [container] = children["deployment", "demo-scheduler"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == SCHEDULER_IMAGE
    assert operator.rights_lacking() == {}


def test_the_certificate_is_for_the_service_and_signed_by_the_fleet_s_own_authority(
    cluster: Cluster, namespace: str, operators: Operators, demo: Object
) -> None:
    data = cluster.get("secret", "demo-tls", "-n", namespace)["data"]
    cert = x509.load_pem_x509_certificate(base64.b64decode(data["tls.crt"]))
    bundle = x509.load_pem_x509_certificates(base64.b64decode(data["ca.crt"]))
    cert.verify_directly_issued_by(bundle[0])
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert f"demo-scheduler.{namespace}.svc" in names.get_values_for_type(x509.DNSName)
    published = cluster.get("configmap", "demo-client", "-n", namespace)["data"]["ca.crt"]
    assert published.encode() == base64.b64decode(data["ca.crt"])
    [authority] = cluster.get(
        "secret", "-n", operators.namespace, "-l", f"servingfleet.dev/ca-for-namespace={namespace}"
    )["items"]
    assert "signer.key" in authority["data"]
    everything = cluster.get("secret,configmap", "-n", namespace)["items"]
    assert authority["data"]["signer.key"] not in json.dumps(everything)


def test_a_change_of_the_spec_changes_what_follows_from_it_and_nothing_else(
    cluster: Cluster, namespace: str, demo: Object
) -> None:
    before = named(cluster, namespace)
    cluster.apply(fleet(namespace, scheduler={"replicas": 3, "policy": "least-loaded"}))
    await_condition(cluster, namespace, "Reconciled", "True")
    after = named(cluster, namespace)
    deployment = after["deployment", "demo-scheduler"]["spec"]
    assert deployment["replicas"] == 3
    assert "--policy=least-loaded" in deployment["template"]["spec"]["containers"][0]["args"]
    # A controller keeps the budget's status, and looks at it when the Deployment changes.
    quiet = set(CHILDREN) - {
        ("deployment", "demo-scheduler"),
        ("poddisruptionbudget", "demo-scheduler"),
    }
    assert {key for key in quiet if version(before[key]) != version(after[key])} == set()


def test_a_fleet_in_plain_text_has_no_certificate_and_says_what_that_means(
    cluster: Cluster, namespace: str, demo: Object
) -> None:
    cluster.apply(fleet(namespace, access={"transport": "PlainText", "clients": "None"}))
    await_condition(cluster, namespace, "Reconciled", "True")
    assert ("secret", "demo-tls") not in named(cluster, namespace)
    found = condition(cluster, namespace, "TransportSecured")
    assert found["status"] == "False"
    assert found["reason"] == "PlainText"


def test_a_deleted_fleet_takes_everything_with_it(
    cluster: Cluster, namespace: str, operators: Operators, demo: Object
) -> None:
    def subjects() -> str:
        return cluster.kubectl(
            "get", "clusterrolebinding", f"{operators.fullname}-scheduler", "-o", "json"
        )

    def authorities() -> list[Object]:
        selector = f"servingfleet.dev/ca-for-namespace={namespace}"
        found = cluster.get("secret", "-n", operators.namespace, "-l", selector)["items"]
        assert isinstance(found, list)
        return found

    until(lambda: namespace in subjects(), "the scheduler's right to ask about tokens")
    assert authorities()
    cluster.kubectl("delete", "servingfleet", "demo", "-n", namespace)
    until(lambda: not named(cluster, namespace), "garbage collection of the children")
    until(lambda: namespace not in subjects(), "the scheduler's right to be taken away")
    until(lambda: not authorities(), "the removal of the authority's key")


def test_a_fleet_deleted_at_once_leaves_nothing(
    cluster: Cluster, namespace: str, operator: Replica
) -> None:
    for _ in range(5):
        cluster.apply(fleet(namespace))
        cluster.kubectl("delete", "servingfleet", "demo", "-n", namespace, "--wait=false")
    until(lambda: not named(cluster, namespace), "garbage collection of the children")
    assert operator.process.poll() is None
    assert operator.said("defect in a reconcile") == []


def test_a_fleet_made_anew_gets_children_of_its_own(
    cluster: Cluster, namespace: str, demo: Object
) -> None:
    cluster.kubectl("delete", "servingfleet", "demo", "-n", namespace, "--cascade=orphan")
    cluster.apply(fleet(namespace))
    uid = cluster.get("servingfleet", "demo", "-n", namespace)["metadata"]["uid"]
    assert uid != demo["metadata"]["uid"]

    def owners() -> set[str]:
        return {
            owner["uid"]
            for child in named(cluster, namespace).values()
            for owner in child["metadata"].get("ownerReferences", [])
        }

    until(lambda: owners() == {uid}, "children that belong to the new fleet")


def test_an_object_that_the_operator_did_not_make_is_left_alone_and_told(
    cluster: Cluster, namespace: str, operator: Replica
) -> None:
    cluster.kubectl("create", "configmap", "demo-client", "-n", namespace, "--from-literal=a=b")
    before = cluster.get("configmap", "demo-client", "-n", namespace)
    cluster.apply(fleet(namespace))
    found = await_condition(cluster, namespace, "Reconciled", "False")
    assert found["reason"] == "ForeignObject"
    assert "ConfigMap demo-client" in found["message"]
    assert cluster.get("configmap", "demo-client", "-n", namespace) == before
    assert cluster.get("deployment", "demo-scheduler", "-n", namespace), "the rest is made"
    # Its labels bring it under our eyes, and that alone makes it no more ours.
    cluster.kubectl(
        *("label", "configmap", "demo-client", "-n", namespace),
        "app.kubernetes.io/managed-by=servingfleet",
        "servingfleet.dev/fleet=demo",
    )
    cluster.kubectl("delete", "configmap", "demo-client", "-n", namespace)
    cluster.apply(fleet(namespace, scheduler={"replicas": 1}))
    await_condition(cluster, namespace, "Reconciled", "True")


def test_a_child_that_can_t_become_what_is_wanted_is_told_with_the_remedy(
    cluster: Cluster, namespace: str, operators: Operators, operator: Replica, demo: Object
) -> None:
    operators.clear()
    found = cluster.get("deployment", "demo-scheduler", "-n", namespace)
    cluster.kubectl("delete", "deployment", "demo-scheduler", "-n", namespace)
    found["spec"]["selector"]["matchLabels"]["other"] = "label"
    found["spec"]["template"]["metadata"]["labels"]["other"] = "label"
    kept = {
        key: found["metadata"][key] for key in ("name", "namespace", "labels", "ownerReferences")
    }
    cluster.apply({**found, "metadata": kept, "status": {}})
    operators.start_leading()
    told = await_condition(cluster, namespace, "Reconciled", "False")
    assert told["reason"] == "Invalid"
    assert f"kubectl -n {namespace} delete deployments demo-scheduler" in told["message"]
    cluster.kubectl("delete", "deployment", "demo-scheduler", "-n", namespace)
    await_condition(cluster, namespace, "Reconciled", "True")


def test_an_image_that_is_not_allowed_runs_nothing(
    cluster: Cluster, namespace: str, operator: Replica
) -> None:
    cluster.apply(fleet(namespace, scheduler={"image": "evil.example.com/miner:1"}))
    found = await_condition(cluster, namespace, "Reconciled", "False")
    assert found["reason"] == "ImageNotAllowed"
    with pytest.raises(CommandFailed, match="NotFound"):
        cluster.get("deployment", "demo-scheduler", "-n", namespace)


def test_nothing_is_written_while_nothing_changes(
    cluster: Cluster, namespace: str, operator: Replica, demo: Object
) -> None:
    until(
        lambda: condition(cluster, namespace, "SchedulerAvailable"), "the status to be as it stays"
    )

    def quiet() -> bool:
        before = operator.requests()
        time.sleep(3)
        return not changed(before, operator.requests())

    def changed(before: dict[Any, float], after: dict[Any, float]) -> dict[Any, float]:
        unmoved = {("get", "leases"), ("update", "leases")}
        return {
            key: value - before.get(key, 0)
            for key, value in after.items()
            if value != before.get(key, 0) and key not in unmoved
        }

    until(quiet, "the operator to come to rest")
    before, versions = operator.requests(), named(cluster, namespace)
    time.sleep(IDLE_S)
    seen = changed(before, operator.requests())
    # The heartbeat, and the shared objects once a minute.
    assert sum(seen.values()) <= 12, seen
    assert not any(verb in ("create", "patch", "delete") for verb, _ in seen), seen
    after = named(cluster, namespace)
    assert {key: version(each) for key, each in after.items()} == {
        key: version(each) for key, each in versions.items()
    }


def test_events_tell_what_changed_and_are_not_repeated(
    cluster: Cluster, namespace: str, operator: Replica
) -> None:
    cluster.apply(fleet(namespace, access={"transport": "PlainText", "clients": "None"}))

    def told() -> list[tuple[str, str]]:
        items = cluster.get("events.events.k8s.io", "-n", namespace)["items"]
        return sorted(
            (each["type"], each["reason"])
            for each in items
            if each["regarding"]["kind"] == "ServingFleet"
        )

    until(lambda: ("Warning", "PlainText") in told(), "an Event about plain text")
    for replicas in (3, 2, 3):
        cluster.apply(
            fleet(
                namespace,
                access={"transport": "PlainText", "clients": "None"},
                scheduler={"replicas": replicas},
            )
        )
        await_condition(cluster, namespace, "Reconciled", "True")
    assert told().count(("Warning", "PlainText")) == 1
    assert "PlainText" in cluster.kubectl("describe", "servingfleet", "demo", "-n", namespace)


def test_a_fleet_deleted_while_no_operator_ran_leaves_nothing_behind(
    cluster: Cluster, namespace: str, operators: Operators, operator: Replica, demo: Object
) -> None:
    binding = f"{operators.fullname}-scheduler"

    def subjects() -> str:
        return cluster.kubectl("get", "clusterrolebinding", binding, "-o", "json")

    until(lambda: namespace in subjects(), "the scheduler's right to ask about tokens")
    operators.clear()
    cluster.kubectl("delete", "servingfleet", "demo", "-n", namespace)
    operators.start_leading()
    until(lambda: namespace not in subjects(), "the scheduler's right to be taken away")


def test_many_fleets_are_brought_up_side_by_side(
    cluster: Cluster, namespace: str, operator: Replica
) -> None:
    names = [f"fleet-{number}" for number in range(40)]
    cluster.apply(*(fleet(namespace, name) for name in names))

    def reconciled() -> bool:
        items = cluster.get("servingfleet", "-n", namespace)["items"]
        done = [
            each["metadata"]["name"]
            for each in items
            for found in (each.get("status") or {}).get("conditions", [])
            if found["type"] == "Reconciled" and found["status"] == "True"
        ]
        return sorted(done) == sorted(names)

    until(reconciled, "40 reconciled fleets", 120.0)
    assert operator.rights_lacking() == {}
    assert operator.said("defect in a reconcile") == []
