"""What releases do to a cluster: upgrade, uninstall, and two side by side."""

from __future__ import annotations

import contextlib
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.cluster import operators
from tests.cluster.cluster import Cluster, CommandFailed, temporary_namespace, until
from tests.cluster.releases import (
    CHART,
    CRD,
    FLEETS,
    Release,
    a_release,
    bring_crd,
    fleet,
    patch_as,
)


def described(cluster: Cluster) -> str:
    """The description of the CRD that is served."""
    version = cluster.get("crd", FLEETS)["spec"]["versions"][0]
    text = version["schema"]["openAPIV3Schema"]["description"]
    assert isinstance(text, str)
    return text


def written_by_the_operator(release: Release) -> None:
    """The two objects of the chart that its operator fills in, filled in."""
    patch_as(
        release,
        f"clusterrolebinding/{release.fullname}-scheduler",
        {"subjects": [{"kind": "ServiceAccount", "name": "a", "namespace": "default"}]},
    )
    release.cluster.kubectl(
        *("apply", "--server-side", "--field-manager=servingfleet-operator", "-f", "-"),
        f"--as={release.account}",
        stdin=json.dumps(
            {
                "apiVersion": "admissionregistration.k8s.io/v1",
                "kind": "MutatingWebhookConfiguration",
                "metadata": {"name": f"{release.fullname}-inject"},
                "webhooks": [
                    {
                        "name": "chat.nowhere.inject.servingfleet.dev",
                        "clientConfig": {
                            "service": {
                                "name": release.fullname,
                                "namespace": release.namespace,
                                "path": "/inject/nowhere/chat",
                            }
                        },
                        "rules": [
                            {
                                "apiGroups": [""],
                                "apiVersions": ["v1"],
                                "operations": ["CREATE"],
                                "resources": ["pods"],
                            }
                        ],
                        "namespaceSelector": {
                            "matchLabels": {"kubernetes.io/metadata.name": "nowhere"}
                        },
                        "admissionReviewVersions": ["v1"],
                        "failurePolicy": "Ignore",
                        "sideEffects": "None",
                    }
                ],
            }
        ),
    )


def filled_in(release: Release) -> tuple[int, int]:
    """Subjects of the schedulers' binding, and entries of the webhook configuration."""
    binding = release.cluster.get("clusterrolebinding", f"{release.fullname}-scheduler")
    hooks = release.cluster.get("mutatingwebhookconfiguration", f"{release.fullname}-inject")
    return len(binding.get("subjects", [])), len(hooks.get("webhooks", []))


def test_an_upgrade_keeps_what_the_operator_wrote(release: Release) -> None:
    written_by_the_operator(release)
    release.upgrade(replicas=3, podLabels={"team": "serving"})
    assert filled_in(release) == (1, 1)
    release.cluster.helm("rollback", release.name, "1", "--namespace", release.namespace)
    assert filled_in(release) == (1, 1)


def test_a_changed_definition_comes_with_the_documented_command_and_keeps_fleets(
    release: Release, tmp_path: Path
) -> None:
    cluster, namespace = release.cluster, release.namespace
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(fleet("kept")))
    changed = yaml.safe_load(CRD.read_text())
    schema = changed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["description"] = "of the next release"
    chart = shutil.copytree(CHART, tmp_path / "servingfleet")
    (chart / "crds" / "servingfleet.yaml").write_text(yaml.safe_dump(changed))
    try:
        release.upgrade(chart=chart)
        assert described(cluster) != "of the next release", "Helm updates definitions by now"
        bring_crd(cluster, (chart / "crds" / "servingfleet.yaml").read_text())
        assert described(cluster) == "of the next release"
        assert cluster.get("servingfleet", "kept", "-n", namespace)["spec"]["blockTokens"] == 16
    finally:
        bring_crd(cluster, CRD.read_text())


def test_nothing_of_a_release_stays_behind_but_the_definition_and_the_fleets(
    release: Release,
) -> None:
    cluster, namespace = release.cluster, release.namespace
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(fleet("kept")))
    written_by_the_operator(release)
    release.uninstall()

    left = cluster.get(
        "clusterroles,clusterrolebindings,mutatingwebhookconfigurations,deployments,services,"
        "serviceaccounts,roles,rolebindings,poddisruptionbudgets",
        *("--all-namespaces", "-l", f"app.kubernetes.io/instance={release.name}"),
    )["items"]
    assert [each["metadata"]["name"] for each in left] == []
    assert cluster.get("servingfleet", "kept", "-n", namespace)
    # Nothing that was left behind touches a pod: it is created as if there had never been a fleet.
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "engine", "labels": {"app": "vllm"}},
        "spec": {"containers": [{"name": "engine", "image": "engine"}]},
    }
    seen = cluster.kubectl(
        *("create", "--dry-run=server", "-n", namespace, "-o", "json", "-f", "-"),
        stdin=json.dumps(pod),
    )
    assert "initContainers" not in json.loads(seen)["spec"]


def test_two_releases_stand_side_by_side(cluster: Cluster, namespace: str, crd: None) -> None:
    with (
        temporary_namespace(cluster, f"{namespace}-a") as a,
        temporary_namespace(cluster, f"{namespace}-b") as b,
        a_release(cluster, namespace, watchNamespaces=[a]) as first,
        a_release(cluster, namespace, watchNamespaces=[b]) as second,
    ):
        written_by_the_operator(first)
        assert filled_in(second) == (0, 0)
        for kind, name in (
            ("clusterrolebindings.rbac.authorization.k8s.io", f"{first.fullname}-scheduler"),
            (
                "mutatingwebhookconfigurations.admissionregistration.k8s.io",
                f"{first.fullname}-inject",
            ),
        ):
            assert first.can("patch", kind, name=name)
            assert not second.can("patch", kind, name=name)
        assert second.can("list", "pods", namespace=b)
        assert not second.can("list", "pods", namespace=a)
        second.uninstall()
        assert filled_in(first) == (1, 1)
        assert first.can("list", "pods", namespace=a)


def test_two_operators_serve_the_fleets_of_their_own_namespaces_only(
    cluster: Cluster, namespace: str, crd: None, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        served = {}
        for letter in "ab":
            watched = stack.enter_context(temporary_namespace(cluster, f"{namespace}-{letter}"))
            folder = tmp_path / letter
            folder.mkdir()
            release = stack.enter_context(
                operators.installed(cluster, folder, watchNamespaces=[watched])
            )
            served[watched] = release, release.start_leading(f"--watch-namespace={watched}")
            cluster.apply(operators.fleet(watched))
        for watched, (release, replica) in served.items():
            operators.await_condition(cluster, watched, "Reconciled", "True")
            labels = cluster.get("deployment", "demo-scheduler", "-n", watched)["metadata"][
                "labels"
            ]
            assert labels["servingfleet.dev/operator"] == f"{release.namespace}.{release.name}"
            until(
                partial(subjects, cluster, release.fullname),
                "the scheduler among those that may review tokens",
            )
            assert subjects(cluster, release.fullname) == [f"{watched}/demo-scheduler"]
            assert replica.rights_lacking() == {}


def subjects(cluster: Cluster, fullname: str) -> list[str]:
    """The schedulers that may ask who callers are."""
    binding = cluster.get("clusterrolebinding", f"{fullname}-scheduler")
    return [f"{each['namespace']}/{each['name']}" for each in binding.get("subjects") or ()]


def test_two_releases_of_one_name_need_full_names_of_their_own(
    release: Release, cluster: Cluster, namespace: str
) -> None:
    with temporary_namespace(cluster, f"{namespace}-b") as other:
        twin = Release(cluster, release.name, other)
        with pytest.raises(CommandFailed, match="cannot be imported into the current release"):
            twin.install()
        twin.install(fullnameOverride=f"{release.name}-b")
        twin.uninstall()
    assert filled_in(release) == (0, 0)
