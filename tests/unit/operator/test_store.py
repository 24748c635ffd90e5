"""What the watches and the lists say is merged by age, cut down to what is read, and told of only when it matters."""

from __future__ import annotations

from typing import Any

import pytest

from servingfleet_operator.spec import BadSpec
from servingfleet_operator.store import (
    Body,
    Key,
    Store,
    Table,
    keep_child,
    keep_pod,
    key_of,
)

A = Key("ns", "a")


def body(version: int, name: str = "a", namespace: str = "ns", **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "resourceVersion": str(version)}
    return {"metadata": {**metadata, **more.pop("metadata", {})}, **more}


def table() -> Table:
    return Table(lambda before, after: True)


def version_of(found: Body | None) -> str:
    assert found is not None
    return str(found["metadata"]["resourceVersion"])


def test_an_older_state_never_replaces_a_newer_one() -> None:
    known = table()
    assert known.put(body(10))
    assert not known.put(body(9))
    assert not known.put(body(10))
    assert version_of(known.get(A)) == "10"


def test_versions_are_compared_as_numbers() -> None:
    known = table()
    known.put(body(9))
    known.put(body(10))
    assert version_of(known.get(A)) == "10"


def test_a_deletion_is_not_undone_by_a_list_that_began_before_it() -> None:
    known = table()
    known.put(body(5))
    assert known.remove(body(8))
    assert known.replace("", [body(5)], "6") == []
    assert known.get(A) is None


def test_an_object_made_again_survives_the_late_news_of_its_deletion() -> None:
    known = table()
    known.put(body(12))
    assert not known.remove(body(8))
    assert known.get(A) is not None


def test_a_list_removes_what_it_no_longer_holds_and_says_so() -> None:
    known = table()
    known.put(body(1))
    known.put(body(2, "b"))
    steps = known.replace("", [body(2, "b")], "7")
    assert [(key_of(old), new) for old, new in steps if old] == [(A, None)]
    assert [*known] == [Key("ns", "b")]


def test_a_list_leaves_what_was_made_after_it() -> None:
    known = table()
    known.put(body(9))
    assert known.replace("", [], "7") == []
    assert known.get(A) is not None


def test_a_list_of_one_namespace_says_nothing_of_the_others() -> None:
    known = table()
    known.put(body(1))
    known.put(body(1, namespace="other"))
    known.replace("ns", [], "7")
    assert [*known] == [Key("other", "a")]


def test_deletions_are_not_remembered_without_end() -> None:
    known = table()
    for number in range(10_000):
        known.put(body(2 * number + 1, f"a{number}"))
        known.remove(body(2 * number + 2, f"a{number}"))
    assert len(known._graves) < 5_000
    assert len(known) == 0
    assert not known._namespaces


def fleet(version: int, generation: int = 1, **more: Any) -> dict[str, Any]:
    spec = {
        "model": {"name": "m"},
        "pools": [{"name": "p", "selector": {"matchLabels": {"a": "b"}}}],
    }
    metadata = {"uid": "u", "generation": generation, **more.pop("metadata", {})}
    return body(version, "a", spec=more.pop("spec", spec), metadata=metadata, **more)


def test_our_own_status_write_is_no_change_of_the_fleet() -> None:
    store = Store()
    assert store.fleets.put(fleet(1))
    assert not store.fleets.put(fleet(2, status={"observedGeneration": 1}))
    kept = store.fleets.get(A)
    assert kept is not None
    assert kept["status"] == {"observedGeneration": 1}, "it is known all the same"
    assert store.fleets.put(fleet(3, generation=2))


def test_a_fleet_that_is_being_deleted_is_no_fleet_any_more() -> None:
    store = Store()
    store.fleets.put(fleet(1))
    assert store.fleet(A) is not None
    assert store.fleets.put(fleet(2, metadata={"deletionTimestamp": "now"}))
    assert store.fleet(A) is None
    assert store.readable_fleets() == []


def test_a_spec_that_can_t_be_read_concerns_that_fleet_alone() -> None:
    store = Store()
    store.fleets.put(fleet(1, spec={"model": {}}))
    other = fleet(1)
    other["metadata"] |= {"name": "b", "uid": "v"}
    store.fleets.put(other)
    with pytest.raises(BadSpec):
        store.fleet(A)
    assert [each.name for each in store.readable_fleets()] == ["b"]


def test_what_was_read_of_fleets_that_are_gone_is_not_kept() -> None:
    store = Store()
    for number in range(10):
        body = fleet(2 * number + 1)
        body["metadata"]["name"] = f"f{number}"
        store.fleets.put(body)
        assert store.fleet(key_of(body)) is not None
        body["metadata"]["resourceVersion"] = str(2 * number + 2)
        store.fleets.remove(body)
    assert len(store._parsed) <= 1


def test_a_new_generation_is_read_anew() -> None:
    store = Store()
    store.fleets.put(fleet(1, spec={}))
    with pytest.raises(BadSpec):
        store.fleet(A)
    store.fleets.put(fleet(2, generation=2))
    found = store.fleet(A)
    assert found is not None
    assert found.model.name == "m"


def test_a_pod_s_news_that_changes_nothing_kept_is_no_change() -> None:
    store = Store()
    pod = body(1, spec={"containers": [{"name": "e", "image": "i"}]}, status={"phase": "Running"})
    assert store.pods.put(keep_pod(pod))
    quiet = {**pod, "metadata": {**pod["metadata"], "resourceVersion": "2", "managedFields": [1]}}
    assert not store.pods.put(keep_pod(quiet))
    ready = {**quiet, "metadata": {**pod["metadata"], "resourceVersion": "3"}}
    ready["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    assert store.pods.put(keep_pod(ready))


def test_of_a_pod_only_what_is_read_is_kept() -> None:
    pod = body(
        1,
        spec={
            "containers": [
                {"name": "e", "image": "i", "volumeMounts": [1], "env": [{"name": "K"}]}
            ],
            "volumes": [{"name": "big"}, {"name": "servingfleet-identity", "projected": {}}],
            "nodeName": "n",
        },
        status={
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True", "message": "x"}],
        },
        metadata={
            "managedFields": [{"manager": "kubelet"}],
            "annotations": {"servingfleet.dev/events": "5557", "other": "x" * 1000},
            "labels": {"app": "v"},
        },
    )
    assert keep_pod(pod) == {
        "metadata": {
            "name": "a",
            "namespace": "ns",
            "resourceVersion": "1",
            "labels": {"app": "v"},
            "annotations": {"servingfleet.dev/events": "5557"},
        },
        "spec": {
            "nodeName": "n",
            "volumes": [{"name": "servingfleet-identity"}],
            "containers": [{"name": "e", "image": "i", "env": [{"name": "K"}]}],
        },
        "status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }


def test_of_a_child_neither_spec_nor_data_is_kept() -> None:
    child = body(1, data={"key": "value"}, spec={"replicas": 2, "template": {}}, status={"x": 1})
    kept = keep_child(child)
    assert kept["spec"] == {"replicas": 2}
    assert kept["status"] == {"x": 1}
    assert "data" not in kept
