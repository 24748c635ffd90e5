"""A change concerns the fleets that it can matter to, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from servingfleet_operator import changes, names
from servingfleet_operator.kinds import NETWORK_POLICY, POD
from servingfleet_operator.store import Key, Store

from .pods import selector


def body(name: str, namespace: str = "serving", **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace, "resourceVersion": "1", **metadata}}


@pytest.fixture
def store() -> Store:
    """Fleets a and b in serving, c elsewhere; each selects the pods labelled with its name."""
    made = Store()
    for namespace, name in (("serving", "a"), ("serving", "b"), ("elsewhere", "c")):
        spec = {
            "model": {"name": "m"},
            "pools": [{"name": "p", "selector": selector(app=name)}],
        }
        made.fleets.put({**body(name, namespace, uid=name, generation=1), "spec": spec})
    return made


def test_a_fleet_concerns_itself_and_its_neighbours(store: Store) -> None:
    found = changes.by_fleet(store, None, body("new"))
    assert found == {Key("serving", name) for name in ("new", "a", "b")}


def test_a_child_concerns_the_fleet_that_its_label_names_or_named() -> None:
    one = body("x", labels={names.FLEET_LABEL: "a"})
    other = body("x", labels={names.FLEET_LABEL: "b"})
    assert changes.by_child(one, other) == {Key("serving", "a"), Key("serving", "b")}
    assert changes.by_child(one, body("x")) == {Key("serving", "a")}
    assert changes.by_child(None, body("x")) == set()


def test_a_pod_concerns_the_fleets_that_select_it_or_did(store: Store) -> None:
    pod, moved = body("p", labels={"app": "a"}), body("p", labels={"app": "b"})
    assert changes.around(store, POD, None, pod) == {Key("serving", "a")}
    assert changes.around(store, POD, pod, moved) == {Key("serving", "a"), Key("serving", "b")}
    assert changes.around(store, POD, None, body("p", labels={"app": "c"})) == set()


def test_a_scheduler_s_pod_concerns_its_fleet(store: Store) -> None:
    pod = body("p", labels={names.FLEET_LABEL: "b"})
    assert changes.around(store, POD, None, pod) == {Key("serving", "b")}


def test_a_network_policy_concerns_every_fleet_of_its_namespace(store: Store) -> None:
    found = changes.around(store, NETWORK_POLICY, None, body("any"))
    assert found == {Key("serving", "a"), Key("serving", "b")}


def test_only_a_controller_s_status_raises_no_suspicion() -> None:
    before = body("x", generation=1, labels={})
    assert changes.is_of_status(before, {**body("x", generation=1, labels={}), "status": {}})
    assert not changes.is_of_status(before, body("x", generation=2, labels={}))
    assert not changes.is_of_status(before, body("x", generation=1))
    assert not changes.is_of_status(before, None)
    without = body("x", resourceVersion="2")
    assert not changes.is_of_status(body("x"), without), "it may be its content"
