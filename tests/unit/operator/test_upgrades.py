"""Relays are replaced in place one pod at a time, and no further than the first that does not come back."""

from __future__ import annotations

from typing import Any

import pytest

from servingfleet_operator.injection import inject
from servingfleet_operator.names import RELAY_CONTAINER
from servingfleet_operator.spec import Fleet
from servingfleet_operator.upgrades import PATIENCE_S, SETTLE_S, Patched, step

from . import pods

NEW = "registry.example/relay:2"
PATCH = {"spec": {"initContainers": [{"name": RELAY_CONTAINER, "image": NEW}]}}


def a_fleet(*, in_place: bool = True, image: str = NEW) -> Fleet:
    return pods.fleet(relay={"inPlaceUpgrade": in_place, "image": image})


def a_pod(name: str, image: str, *, ready: bool = True, relay_runs: bool = True) -> dict[str, Any]:
    """An injected pod whose relay has that image."""
    fleet = a_fleet(image=image)
    made = inject(pods.pod(), fleet, fleet.pools[0], pods.SETTINGS)
    assert isinstance(made, dict)
    made["metadata"] |= {"name": name, "uid": f"u-{name}"}
    state: dict[str, Any] = {"running": {}} if relay_runs else {"waiting": {}}
    made["status"] = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        "initContainerStatuses": [{"name": RELAY_CONTAINER, "state": state}],
    }
    return made


OLD = "registry.example/relay:1"


def test_nothing_is_replaced_unless_the_fleet_asks_for_it() -> None:
    found = step(a_fleet(in_place=False), [a_pod("a", OLD)], pods.SETTINGS, None, 0.0)
    assert (found.pod, found.waiting) == (None, False)


def test_the_first_outdated_pod_is_replaced_alone() -> None:
    running = [a_pod("b", OLD), a_pod("a", OLD), a_pod("c", NEW)]
    found = step(a_fleet(), running, pods.SETTINGS, None, 0.0)
    assert found.pod is running[1]
    assert found.patch == PATCH
    assert found.waiting


@pytest.mark.parametrize(
    ("ready", "age_s", "goes_on"),
    [(True, SETTLE_S - 1, False), (True, SETTLE_S, True), (False, SETTLE_S, False)],
)
def test_the_next_waits_until_the_last_is_back(ready: bool, age_s: float, goes_on: bool) -> None:
    running = [a_pod("a", NEW, ready=ready), a_pod("b", OLD)]
    found = step(a_fleet(), running, pods.SETTINGS, Patched("u-a", 100.0, PATCH), 100.0 + age_s)
    assert (found.pod is running[1]) == goes_on
    assert found.waiting


def test_a_pod_that_does_not_come_back_stops_it_and_is_named() -> None:
    running = [a_pod("a", NEW, ready=False), a_pod("b", OLD), a_pod("c", OLD)]
    found = step(a_fleet(), running, pods.SETTINGS, Patched("u-a", 0.0, PATCH), PATIENCE_S)
    assert found.pod is None
    assert found.trouble is not None
    assert found.trouble.reason == "RelayUpgradeStuck"
    assert "pod a" in found.trouble.message
    assert "other 2" in found.trouble.message


def test_a_new_relay_that_is_down_stops_a_replica_that_knows_nothing_of_it_too() -> None:
    running = [a_pod("a", NEW, ready=False, relay_runs=False), a_pod("b", OLD)]
    found = step(a_fleet(), running, pods.SETTINGS, None, 0.0)
    assert found.pod is None
    assert found.trouble is not None


def test_an_engine_that_is_not_ready_by_itself_hinders_nobody() -> None:
    running = [a_pod("a", NEW, ready=False), a_pod("b", OLD)]
    assert step(a_fleet(), running, pods.SETTINGS, None, 0.0).pod is running[1]


def test_a_pod_that_is_not_ready_is_left_alone() -> None:
    found = step(a_fleet(), [a_pod("a", OLD, ready=False)], pods.SETTINGS, None, 0.0)
    assert found.pod is None


def test_a_pod_patched_last_that_is_gone_is_not_waited_for() -> None:
    running = [a_pod("b", OLD)]
    found = step(a_fleet(), running, pods.SETTINGS, Patched("u-a", 0.0, PATCH), 1.0)
    assert found.pod is running[0]


def test_a_patch_that_somebody_undoes_is_told_and_not_sent_again_and_again() -> None:
    running = [a_pod("a", OLD), a_pod("b", OLD)]
    last = Patched("u-a", 0.0, PATCH)
    found = step(a_fleet(), running, pods.SETTINGS, last, SETTLE_S - 1)
    assert (found.pod, found.waiting, found.trouble) == (None, True, None), "the watch may be late"
    found = step(a_fleet(), running, pods.SETTINGS, last, SETTLE_S)
    assert (found.pod, found.waiting) == (None, False)
    assert found.trouble is not None
    assert found.trouble.reason == "RelayUpgradeUndone"
    assert "pod a" in found.trouble.message


def test_a_patch_that_was_undone_is_tried_again_later_and_told_meanwhile() -> None:
    running = [a_pod("a", OLD)]
    found = step(a_fleet(), running, pods.SETTINGS, Patched("u-a", 0.0, PATCH), PATIENCE_S)
    assert found.pod is running[0]
    assert found.trouble is not None
    again = Patched("u-a", PATIENCE_S, PATCH, undone=True)
    found = step(a_fleet(), running, pods.SETTINGS, again, PATIENCE_S + 1)
    assert found.pod is None
    assert found.trouble is not None


def test_another_image_is_no_undone_patch() -> None:
    running = [a_pod("a", OLD)]
    other = {"spec": {"initContainers": [{"name": RELAY_CONTAINER, "image": "earlier"}]}}
    found = step(a_fleet(), running, pods.SETTINGS, Patched("u-a", 0.0, other), 1.0)
    assert found.pod is running[0]
    assert found.trouble is None
