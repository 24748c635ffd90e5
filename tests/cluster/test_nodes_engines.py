"""Fleets of differently configured engines in real pods: what the operator makes of their command lines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import temporary_namespace
from tests.cluster.fleets import EXAMPLES, OPEN_EVENTS, Fleet, without_hardware
from tests.cluster.systems import System


@pytest.fixture
def fleet(system: System, nodes_namespace: str) -> Fleet:
    """Nothing yet, in a namespace of its own."""
    return Fleet(system.cluster, nodes_namespace, system.images)


@pytest.fixture
def chat(system: System) -> Iterator[Fleet]:
    """The namespace that the examples name."""
    with temporary_namespace(system.cluster, "chat") as namespace:
        yield Fleet(system.cluster, namespace, system.images)


def test_the_example_client_gets_the_example_fleet_s_reuse(chat: Fleet) -> None:
    manifest, client = EXAMPLES / "vllm.yaml", EXAMPLES / "client"
    objects = without_hardware(manifest, chat.images["emulator"])
    fleet, *engines = objects
    chat.apply(fleet)
    chat.await_condition("Ready", "True")
    chat.apply(*engines)
    chat.await_live(2)
    [*others, job] = chat.rendered(client)
    job["spec"]["template"]["spec"]["containers"][0]["image"] = chat.images["scheduler"]
    chat.apply(*others, job)
    chat.cluster.kubectl(
        "wait", "job/ask", "--for=condition=Complete", "--timeout=60s", "-n", "chat"
    )
    first, second = chat.cluster.kubectl("logs", "job/ask", "-n", "chat").splitlines()
    assert "0 tokens predicted, 0 reused, of 200" in first
    assert "192 tokens predicted, 192 reused, of 200" in second


def test_every_rank_of_a_data_parallel_engine_is_a_target(fleet: Fleet) -> None:
    objects = without_hardware(EXAMPLES / "vllm-data-parallel.yaml", fleet.images["emulator"])
    spec, *engines = objects
    fleet.name = spec["metadata"]["name"]
    fleet.apply(spec)
    fleet.await_condition("Ready", "True")
    fleet.apply(*engines)
    fleet.allow_clients()
    fleet.await_live(2)
    counts = fleet.play("--requests=100", "--prompts=16")
    assert counts["finished"] == 100
    assert counts.get("erroneousTokens", 0) == 0
    assert counts["agreedTokens"] > 0


def test_ports_that_an_engine_opens_to_everybody_are_closed_by_a_policy(fleet: Fleet) -> None:
    fleet.create()
    fleet.await_condition("Ready", "True")
    fleet.create_engines(replicas=1, events=OPEN_EVENTS)
    fleet.await_live(1)
    fleet.await_condition("EventsExposed", "False")
    policy = fleet.cluster.get("networkpolicy", f"{fleet.name}-engines-vllm", "-n", fleet.namespace)
    ports = [port for rule in policy["spec"]["ingress"] for port in rule["ports"]]
    allowed = [
        range(port["port"], port["endPort"] + 1) for port in ports if port["protocol"] == "TCP"
    ]
    reachable = {port for port in (5557, 5657, 8000) if any(port in each for each in allowed)}
    assert reachable == {8000}


def test_an_engine_without_events_is_served_and_told_the_flag_that_is_missing(fleet: Fleet) -> None:
    fleet.create()
    fleet.await_condition("Ready", "True")
    fleet.create_engines(replicas=1, events=None)
    found = fleet.await_condition("EnginesConfigured", "False")
    assert "--kv-events-config" in found["message"]
    fleet.cluster.kubectl(
        *("rollout", "status", "deployment/vllm", "-n", fleet.namespace, "--timeout=60s")
    )


def test_an_engine_that_was_there_before_its_fleet_is_told_apart_and_mended_by_a_restart(
    fleet: Fleet,
) -> None:
    fleet.create_engines(replicas=1)
    fleet.create()
    found = fleet.await_condition("RelaysInjected", "False")
    assert fleet.pods()[0]["metadata"]["name"] in found["message"]
    fleet.await_condition("Ready", "True")
    fleet.cluster.kubectl("rollout", "restart", "deployment/vllm", "-n", fleet.namespace)
    fleet.await_live(1)
    fleet.await_condition("RelaysInjected", "True")


def test_engines_outlive_the_operator_and_its_fleet(fleet: Fleet, system: System) -> None:
    fleet.create()
    fleet.await_condition("Ready", "True")
    fleet.create_engines(replicas=1)
    fleet.await_live(1)
    [injected] = fleet.pods()
    system.uninstall()
    try:
        fleet.cluster.kubectl("delete", "servingfleet", fleet.name, "-n", fleet.namespace)
        fleet.await_gone("deployment", f"{fleet.name}-scheduler")
        # The relay has nobody to talk to any more, and the engine is as ready as before.
        [same] = fleet.pods()
        assert same["metadata"]["uid"] == injected["metadata"]["uid"]
        assert all(each["ready"] for each in same["status"]["containerStatuses"])
        fleet.cluster.kubectl("rollout", "restart", "deployment/vllm", "-n", fleet.namespace)
        fleet.cluster.kubectl(
            *("rollout", "status", "deployment/vllm", "-n", fleet.namespace, "--timeout=60s")
        )
        fleet.await_gone("pod", injected["metadata"]["name"])
        [bare] = fleet.pods()
        assert not bare["spec"].get("initContainers")
    finally:
        system.install()
