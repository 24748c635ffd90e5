"""The chart as it is rendered, and whether the API server takes it.

Rendered manifests are compared with `goldens/`; SERVINGFLEET_UPDATE_GOLDENS=1 writes them anew.
"""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.cluster.cluster import Cluster, CommandFailed, Object, until
from tests.cluster.releases import CHART, CRD

GOLDENS = Path(__file__).parent / "goldens"

DIGEST = "sha256:" + "0" * 64
CASES: dict[str, Object] = {
    "defaults": {},
    "namespaces": {"watchNamespaces": ["team-a", "team-b"], "crds": {"manage": False}},
    "everything": {
        "image": {
            "registry": "registry.example.com/ml/",
            "operator": {"tag": "1.2.3"},
            "relay": {"digest": DIGEST},
            "pullPolicy": "Always",
        },
        "imagePullSecrets": [{"name": "registry"}],
        "allowedImages": ["registry.example.com/ml/*"],
        "relay": {"allowInPlaceUpgrade": True},
        "rbac": {"aggregate": False, "userRoles": False},
        "replicas": 3,
        "logLevel": "debug",
        "serviceAccount": {"name": "operator", "annotations": {"example.com/role": "none"}},
        "podAnnotations": {"example.com/a": "b"},
        "podLabels": {"team": "serving"},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 1,
                        "podAffinityTerm": {
                            "topologyKey": "topology.kubernetes.io/zone",
                            "labelSelector": {"matchLabels": {"team": "serving"}},
                        },
                    }
                ]
            }
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "topology.kubernetes.io/zone",
                "whenUnsatisfiable": "DoNotSchedule",
            }
        ],
        "priorityClassName": "system-cluster-critical",
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "interval": "1m"},
        "networkPolicy": {
            "enabled": True,
            "metricsFrom": [
                {
                    "namespaceSelector": {
                        "matchLabels": {"kubernetes.io/metadata.name": "monitoring"}
                    }
                }
            ],
        },
        "fullnameOverride": "fleets",
    },
}


def rendered(
    cluster: Cluster, values: Object, release: str = "demo", namespace: str = "ops"
) -> str:
    """What `helm template` prints for the values."""
    return cluster.helm(
        *("template", release, str(CHART), "--namespace", namespace),
        # Helm built from its module takes itself for a very old one.
        *("--kube-version", "1.34.0", "--values", "-"),
        stdin=yaml.safe_dump(values),
    )


def objects(manifest: str) -> list[Object]:
    """The objects of a manifest."""
    return [each for each in yaml.safe_load_all(manifest) if each]


def one(found: list[Object], kind: str, name: str = "") -> Object:
    """The only object of that kind (and name)."""
    [match] = [
        each
        for each in found
        if each["kind"] == kind and (not name or each["metadata"]["name"] == name)
    ]
    return match


@pytest.mark.parametrize("case", CASES)
def test_the_chart_passes_lint(cluster: Cluster, case: str) -> None:
    cluster.helm(
        *("lint", "--strict", str(CHART), "--kube-version", "1.34.0", "--values", "-"),
        stdin=yaml.safe_dump(CASES[case]),
    )


@pytest.mark.parametrize("case", CASES)
def test_the_chart_renders_what_was_reviewed(cluster: Cluster, case: str) -> None:
    seen = rendered(cluster, CASES[case])
    golden = GOLDENS / f"{case}.yaml"
    if os.environ.get("SERVINGFLEET_UPDATE_GOLDENS", "") not in ("", "0"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(seen)
    assert seen == golden.read_text(), (
        f"{golden.name} differs; if that is meant, set SERVINGFLEET_UPDATE_GOLDENS=1 and look at the diff"
    )


def test_a_packaged_chart_holds_the_definition_itself(cluster: Cluster, tmp_path: Path) -> None:
    cluster.helm("package", str(CHART), "--destination", str(tmp_path))
    [package] = tmp_path.iterdir()
    with tarfile.open(package) as tar:
        member = tar.extractfile("servingfleet/crds/servingfleet.yaml")
        assert member is not None
        assert member.read() == CRD.read_bytes()


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"replica": 2}, "replica"),
        ({"image": {"operator": {"tags": "1"}}}, "tags"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": "2"}, "replicas"),
        ({"watchNamespaces": "team-a"}, "watchNamespaces"),
        ({"watchNamespaces": ["Team A"]}, "watchNamespaces"),
        ({"image": {"relay": {"digest": "sha256:12"}}}, "digest"),
        ({"image": {"operator": {"tag": 1.2}}}, "tag"),
        ({"logLevel": "loud"}, "logLevel"),
        ({"podMonitor": {"interval": "often"}}, "interval"),
        ({"fullnameOverride": "x" * 53}, "fullnameOverride"),
    ],
)
def test_values_that_make_no_sense_are_refused(
    cluster: Cluster, values: Object, complaint: str
) -> None:
    with pytest.raises(CommandFailed, match=complaint):
        rendered(cluster, values)


def test_values_meant_for_other_charts_are_let_through(cluster: Cluster) -> None:
    assert rendered(cluster, {"global": {"anything": 1}}) == rendered(cluster, {})


def test_a_long_release_name_makes_names_that_kubernetes_takes(cluster: Cluster) -> None:
    found = objects(rendered(cluster, {}, release="x" * 53))
    assert all(len(each["metadata"]["name"]) <= 63 for each in found)


def test_names_that_overlap_with_the_charts_are_not_doubled(cluster: Cluster) -> None:
    found = objects(rendered(cluster, {}, release="servingfleet"))
    assert one(found, "Deployment")["metadata"]["name"] == "servingfleet"


@pytest.mark.parametrize("case", CASES)
def test_the_api_server_takes_every_object(cluster: Cluster, namespace: str, case: str) -> None:
    for each in objects(rendered(cluster, CASES[case], namespace=namespace)):
        if each["kind"] == "PodMonitor":
            continue  # of the Prometheus operator, which is not here
        if each["metadata"].get("namespace", namespace) != namespace:
            each["metadata"]["namespace"] = namespace  # the watched ones of the example
        cluster.kubectl(
            *("create", "--dry-run=server", "--validate=strict", "-f", "-"),
            stdin=json.dumps(each),
        )


def test_the_operator_may_run_where_pods_are_restricted(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl(
        "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted"
    )
    deployment = one(objects(rendered(cluster, {}, namespace=namespace)), "Deployment")
    template = deployment["spec"]["template"]
    # The account that the pod names is not there.
    template["spec"].pop("serviceAccountName")
    until(lambda: cluster.get("serviceaccount", "default", "-n", namespace), "the default account")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "operator", "namespace": namespace},
        "spec": template["spec"],
    }
    cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
