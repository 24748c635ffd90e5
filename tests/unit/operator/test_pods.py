"""What is known of a fleet's engine pods follows every change, and is not found out twice without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from servingfleet_operator import engines
from servingfleet_operator.observed import Pod, Relay
from servingfleet_operator.pods import Observer
from servingfleet_operator.spec import Fleet
from servingfleet_operator.store import keep_pod

from . import pods
from .pods import SETTINGS, selector

OPEN = '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557"}'


def running(name: str = "vllm-0", *, labels: dict[str, str] | None = None, **more: Any) -> Any:
    """A pod as the store keeps it, with its event port open."""
    made = pods.pod("m", f"--kv-events-config={OPEN}")
    made["metadata"] |= {"name": name, "uid": f"u-{name}", "resourceVersion": "1"}
    made["metadata"]["labels"] = labels or {"app": "vllm"}
    made["metadata"] |= more.pop("metadata", {})
    return keep_pod({**made, "status": {"phase": "Running", **more}})


def policy(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "namespace": "serving"}, "spec": {"podSelector": {}, **spec}}


@pytest.fixture
def observer() -> Observer:
    return Observer(SETTINGS, (1, 34))


def seen(
    observer: Observer,
    pod: Any,
    fleet: Fleet,
    policies: Sequence[Any] = (),
    others: Sequence[Fleet] = (),
) -> Pod:
    [found] = observer.look(fleet, [pod], policies, others).pods
    return found


def test_only_pods_that_run_and_are_selected_are_the_fleet_s(observer: Observer) -> None:
    found = observer.look(
        pods.fleet(),
        [
            running("a"),
            running("other", labels={"app": "web"}),
            running("done", phase="Succeeded"),
            running("going", metadata={"deletionTimestamp": "now"}),
        ],
        [],
        [],
    )
    assert [pod.name for pod in found.pods] == ["a"]


def test_a_pod_that_becomes_ready_is_seen_ready(observer: Observer) -> None:
    fleet = pods.fleet()
    assert not seen(observer, running(), fleet).ready
    assert seen(observer, running(conditions=[{"type": "Ready", "status": "True"}]), fleet).ready


def test_a_pod_that_opts_out_is_seen_to(observer: Observer) -> None:
    fleet = pods.fleet()
    assert seen(observer, running(), fleet).relay == Relay.NOT_INJECTED
    labels = {"app": "vllm", "servingfleet.dev/inject": "false"}
    assert seen(observer, running(labels=labels), fleet).relay == Relay.OPTED_OUT


def test_a_policy_that_comes_or_goes_changes_what_stands_open(observer: Observer) -> None:
    fleet, pod = pods.fleet(), running()
    assert seen(observer, pod, fleet).exposed
    assert not seen(observer, pod, fleet, [policy(ingress=[])]).exposed
    assert seen(observer, pod, fleet).exposed


def test_another_fleet_that_selects_the_pod_is_seen_when_it_comes_and_when_it_goes(
    observer: Observer,
) -> None:
    fleet, pod = pods.fleet(), running()
    other = msgspec.structs.replace(fleet, name="other", uid="u-2")
    assert seen(observer, pod, fleet, others=[fleet]).also == ()
    assert seen(observer, pod, fleet, others=[fleet, other]).also == ("fleet other",)
    assert seen(observer, pod, fleet, others=[fleet]).also == ()


def test_a_change_of_the_fleet_changes_what_is_said_of_its_pods(observer: Observer) -> None:
    pod = running()
    assert seen(observer, pod, pods.fleet()).relay == Relay.NOT_INJECTED
    off = msgspec.structs.replace(pods.fleet(relay={"inject": False}), generation=2)
    assert seen(observer, pod, off).relay == Relay.INJECTION_OFF
    moved = pods.fleet({"name": "new", "selector": selector(app="vllm")})
    assert seen(observer, pod, msgspec.structs.replace(moved, generation=3)).pool == "new"


def test_an_upgrade_of_kubernetes_is_taken_in(observer: Observer) -> None:
    fleet, pod = pods.fleet(), running()
    observer.kubernetes = (1, 28)
    assert seen(observer, pod, fleet).relay == Relay.NOT_INJECTABLE
    observer.kubernetes = (1, 34)
    assert seen(observer, pod, fleet).relay == Relay.NOT_INJECTED


def test_a_command_line_is_read_once_however_often_its_pod_changes(
    observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0
    read = engines.read

    def counted(*arguments: Any) -> Any:
        nonlocal reads
        reads += 1
        return read(*arguments)

    monkeypatch.setattr(engines, "read", counted)
    fleet = pods.fleet()
    seen(observer, running(), fleet)
    first = reads
    assert first > 0
    for phase in ("Running", "Pending", "Running"):
        seen(observer, running(phase=phase), fleet)
    assert reads == first
    seen(observer, running("vllm-1"), fleet)
    assert reads == 2 * first


def test_each_pool_s_open_ports_are_closed_by_a_policy_of_its_own(observer: Observer) -> None:
    fleet = pods.fleet(
        {"name": "a", "selector": selector(app="a")}, {"name": "b", "selector": selector(app="b")}
    )
    found = observer.look(
        fleet, [running("x", labels={"app": "a"}), running("y", labels={"app": "b"})], [], [fleet]
    )
    assert [each["metadata"]["name"] for each in found.policies] == [
        "demo-engines-a",
        "demo-engines-b",
    ]


def test_what_belongs_to_a_fleet_that_is_gone_is_forgotten(observer: Observer) -> None:
    seen(observer, running(), pods.fleet())
    observer.keep_only(set())
    assert observer == replace(observer, _looks={})


def test_a_pod_that_is_being_deleted_or_marked_drains_and_a_cordoned_node_says_nothing(
    observer: Observer,
) -> None:
    marked = {"annotations": {"servingfleet.dev/drain": "true"}}
    found = observer.look(
        pods.fleet(),
        [
            running("a"),
            running("marked", metadata=marked),
            running("unmarked", metadata={"annotations": {"servingfleet.dev/drain": "false"}}),
            running("going", metadata={"deletionTimestamp": "now"}),
            running("other", labels={"app": "web"}, metadata={"deletionTimestamp": "now"}),
            running("done", phase="Succeeded", metadata=marked),
        ],
        [],
        [],
    )
    assert found.draining == {
        "u-a": False,
        "u-marked": True,
        "u-unmarked": False,
        "u-going": True,
    }
