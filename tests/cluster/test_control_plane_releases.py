"""Several operators in one cluster, and one that may look after a few namespaces only."""

from __future__ import annotations

import secrets
from pathlib import Path

from tests.cluster.cluster import Cluster, temporary_namespace, until
from tests.cluster.operators import Operators, Replica, await_condition, fleet, installed


def test_an_operator_of_one_namespace_has_no_rights_elsewhere_and_needs_none(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    with (
        installed(cluster, tmp_path, watchNamespaces=[namespace]) as release,
        temporary_namespace(cluster, f"test-{secrets.token_hex(4)}") as other,
    ):
        cluster.apply(fleet(namespace), fleet(other))
        operator = release.start_leading(f"--watch-namespace={namespace}")
        await_condition(cluster, namespace, "Reconciled", "True")
        cluster.kubectl("delete", "role", "demo-client", "-n", namespace)
        until(lambda: cluster.get("role", "demo-client", "-n", namespace), "the Role", 10.0)
        assert "status" not in cluster.get("servingfleet", "demo", "-n", other)
        assert operator.rights_lacking() == {}


def test_two_operators_side_by_side_each_look_after_their_own(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    with (
        temporary_namespace(cluster, f"test-{secrets.token_hex(4)}") as other,
        installed(cluster, tmp_path / "one", watchNamespaces=[namespace]) as one,
        installed(cluster, tmp_path / "two", watchNamespaces=[other]) as two,
    ):
        one.start_leading(f"--watch-namespace={namespace}")
        two.start_leading(f"--watch-namespace={other}")
        cluster.apply(fleet(namespace), fleet(other))
        for release, place in ((one, namespace), (two, other)):
            await_condition(cluster, place, "Reconciled", "True")
            found = cluster.get("deployment", "demo-scheduler", "-n", place)
            instance = found["metadata"]["labels"]["servingfleet.dev/operator"]
            assert instance == f"{release.namespace}.{release.name}"
            until(
                lambda release=release, place=place: askers(cluster, release) == [place],  # type: ignore[misc]
                "the scheduler's right to ask about tokens",
            )


def askers(cluster: Cluster, release: Operators) -> list[str]:
    """Namespaces whose schedulers may ask the API server about tokens."""
    found = cluster.get("clusterrolebinding", f"{release.fullname}-scheduler")
    return [each["namespace"] for each in found.get("subjects") or ()]


def test_of_two_operators_that_both_watch_a_fleet_one_keeps_off(
    cluster: Cluster, namespace: str, operator: Replica, tmp_path: Path
) -> None:
    cluster.apply(fleet(namespace))
    await_condition(cluster, namespace, "Reconciled", "True")
    with installed(cluster, tmp_path) as release:
        second = release.start_leading()
        told = until(
            lambda: second.said("fleet is another operator's"), "the second to say why it keeps off"
        )
        assert "limit one of them" in told[0]["error"]
        cluster.apply(fleet(namespace, scheduler={"replicas": 3}))
        await_condition(cluster, namespace, "Reconciled", "True")
        before = cluster.get("servingfleet", "demo", "-n", namespace)["metadata"]
        managers = {each["manager"] for each in _fields(cluster, namespace)}
        assert "servingfleet-status" in managers
        mine = [key for key in second.metrics() if key[0] == "applies_total"]
        assert {key[1][0] for key in mine} <= {
            "ClusterRoleBinding",
            "MutatingWebhookConfiguration",
        }
        assert cluster.get("servingfleet", "demo", "-n", namespace)["metadata"] == before


def _fields(cluster: Cluster, namespace: str) -> list[dict[str, str]]:
    found = cluster.get("servingfleet", "demo", "-n", namespace, "--show-managed-fields")
    fields = found["metadata"]["managedFields"]
    assert isinstance(fields, list)
    return fields


def test_a_fleet_changes_hands_when_its_operator_is_replaced(
    cluster: Cluster, namespace: str, operators: Operators, operator: Replica, tmp_path: Path
) -> None:
    cluster.apply(fleet(namespace))
    await_condition(cluster, namespace, "Reconciled", "True")
    operators.clear()
    with installed(cluster, tmp_path) as release:
        second = release.start_leading()
        until(lambda: second.said("fleet is another operator's"), "the second to say why")
        # What the message tells a person to do.
        cluster.kubectl(
            *("label", "-n", namespace, "-l", "servingfleet.dev/fleet=demo"),
            "configmap,deployment,networkpolicy,poddisruptionbudget,role,secret,service,serviceaccount",
            "servingfleet.dev/operator-",
        )
        cluster.apply(fleet(namespace, scheduler={"replicas": 3}))
        await_condition(cluster, namespace, "Reconciled", "True")
        found = cluster.get("deployment", "demo-scheduler", "-n", namespace)
        assert found["spec"]["replicas"] == 3
        assert found["metadata"]["labels"]["servingfleet.dev/operator"] == (
            f"{release.namespace}.{release.name}"
        )
