"""What the chart lets whom do: the operator, schedulers, and people."""

from __future__ import annotations

import json

import pytest

from tests.cluster.cluster import Cluster, CommandFailed, temporary_namespace, until
from tests.cluster.releases import FLEETS, Release, a_release, may, patch_as


def test_the_operator_can_do_its_work_everywhere_and_no_more(release: Release) -> None:
    can, own = release.can, release.namespace
    hooks = "mutatingwebhookconfigurations.admissionregistration.k8s.io"
    bindings = "clusterrolebindings.rbac.authorization.k8s.io"
    definitions = "customresourcedefinitions.apiextensions.k8s.io"
    assert can("watch", FLEETS)
    assert can("patch", f"{FLEETS}/status", namespace="default")
    assert can("create", "deployments.apps", namespace="default")
    assert can("get", "secrets", namespace="default", name="chat-tls")
    assert can("patch", bindings, name=f"{release.fullname}-scheduler")
    assert can("patch", hooks, name=f"{release.fullname}-inject")
    assert can("patch", definitions, name=FLEETS)
    assert can("create", "serviceaccounts/token", namespace=own, name=release.fullname)
    assert can("update", "leases.coordination.k8s.io", namespace=own, name=release.fullname)

    assert not can("patch", FLEETS, namespace="default")
    assert not can("list", "secrets", namespace="default")
    assert not can("patch", "pods", namespace="default")
    assert not can("delete", "pods", namespace="default")
    assert not can("create", "pods/exec", namespace="default")
    assert not can("create", "rolebindings.rbac.authorization.k8s.io", namespace="default")
    assert not can("create", bindings)
    assert not can("patch", bindings, name="cluster-admin")
    assert not can("create", hooks)
    assert not can("patch", hooks, name="another")
    assert not can("patch", definitions, name="another")
    assert not can("create", "serviceaccounts/token", namespace=own, name="default")
    assert not can("create", "serviceaccounts/token", namespace="default", name=release.fullname)
    assert not can("create", "tokenreviews.authentication.k8s.io")


def test_a_list_of_namespaces_is_the_end_of_the_operators_rights(
    cluster: Cluster, namespace: str, crd: None
) -> None:
    with (
        temporary_namespace(cluster, f"{namespace}-a") as inside,
        a_release(cluster, namespace, watchNamespaces=[inside]) as release,
    ):
        for verb, resource in (
            ("list", FLEETS),
            ("get", "secrets"),
            ("create", "deployments.apps"),
            ("list", "pods"),
        ):
            assert release.can(verb, resource, namespace=inside), (verb, resource)
            assert not release.can(verb, resource, namespace="default"), (verb, resource)
            assert not release.can(verb, resource), (verb, resource)


def test_pods_are_patched_only_where_upgrades_in_place_are_allowed(
    cluster: Cluster, namespace: str, crd: None
) -> None:
    with a_release(cluster, namespace, relay={"allowInPlaceUpgrade": True}) as release:
        assert release.can("patch", "pods", namespace="default")


def test_the_operator_names_the_schedulers_that_may_review_tokens(release: Release) -> None:
    scheduler = "system:serviceaccount:default:chat-scheduler"
    review = "subjectaccessreviews.authorization.k8s.io"
    assert not may(release.cluster, scheduler, "create", review)
    subject = {"kind": "ServiceAccount", "name": "chat-scheduler", "namespace": "default"}
    patch_as(release, f"clusterrolebinding/{release.fullname}-scheduler", {"subjects": [subject]})
    until(lambda: may(release.cluster, scheduler, "create", review), "the scheduler's right")


def test_the_operator_grants_clients_what_it_has_itself_and_nothing_else(release: Release) -> None:
    def role(resource: str) -> str:
        rule = {
            "apiGroups": ["servingfleet.dev"],
            "resources": [resource],
            "resourceNames": ["chat"],
            "verbs": ["create"],
        }
        metadata = {"name": "chat-client", "namespace": release.namespace}
        return json.dumps(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "Role",
                "metadata": metadata,
                "rules": [rule],
            }
        )

    apply = ("apply", "--server-side", "--dry-run=server", "-f", "-", f"--as={release.account}")
    release.cluster.kubectl(*apply, stdin=role("servingfleets/route"))
    with pytest.raises(CommandFailed, match="attempting to grant"):
        release.cluster.kubectl(*apply, stdin=role("servingfleets/explain"))


def test_viewers_see_fleets_editors_make_them_and_administrators_grant_access(
    release: Release,
) -> None:
    cluster, namespace = release.cluster, release.namespace
    for role in ("view", "edit", "admin"):
        cluster.kubectl(
            *("create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}"),
            *("--namespace", namespace),
        )

    def allowed(user: str, verb: str, subresource: str = "") -> bool:
        return may(cluster, user, verb, f"{FLEETS}{subresource}", namespace=namespace)

    # Aggregation is a controller's work.
    until(lambda: allowed("view", "get"), "fleets in the view role")
    until(lambda: allowed("edit", "create"), "fleets in the edit role")
    until(lambda: allowed("admin", "create", "/route"), "what fleets answer, in the admin role")
    assert not allowed("view", "create")
    assert not allowed("edit", "create", "/route")
    assert not allowed("edit", "create", "/explain")

    cluster.kubectl(
        *("create", "role", "chat-client", "--verb=create", "--resource-name=chat"),
        *(f"--resource={FLEETS}/route", "--namespace", namespace),
    )
    # Nobody can bind a Role that says more than what they have themselves.
    cluster.kubectl(
        *("create", "rolebinding", "gateway", "--role=chat-client", "--namespace", namespace),
        *(f"--serviceaccount={namespace}:default", "--as=admin"),
    )
