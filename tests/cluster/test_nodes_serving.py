"""A fleet in real pods: relays in its engines, two schedulers, clients that route, send and report.

One fleet for all tests here; each leaves it with two engines and two schedulers that are well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import temporary_namespace, until
from tests.cluster.fleets import CHANGE_S, Fleet
from tests.cluster.systems import System

RELAY = "servingfleet-relay"
OUTAGE_S = 30.0


@pytest.fixture(scope="module")
def fleet(system: System) -> Iterator[Fleet]:
    """Two engines with their relays, in a namespace that allows nothing but restricted pods."""
    with temporary_namespace(system.cluster, "serving") as namespace:
        label = "pod-security.kubernetes.io/enforce=restricted"
        system.cluster.kubectl("label", "namespace", namespace, label)
        made = Fleet(system.cluster, namespace, system.images)
        made.create()
        made.await_condition("Ready", "True")
        made.create_engines()
        made.allow_clients()
        made.await_live(2)
        made.await_schedulers("2/2")
        yield made


@pytest.fixture(autouse=True)
def well(fleet: Fleet) -> None:
    """What the test before broke has been mended."""
    fleet.await_schedulers("2/2")
    fleet.await_live(2)


def test_every_condition_of_a_fleet_that_is_well_says_so(fleet: Fleet) -> None:
    for kind in (
        "Ready",
        "Reconciled",
        "SchedulerAvailable",
        "RelaysInjected",
        "EnginesConfigured",
        "StreamsConformant",
        "TransportSecured",
        "PoolsDisjoint",
    ):
        fleet.await_condition(kind, "True")
    fleet.await_condition("EventsExposed", "False")


def test_the_figures_are_what_the_clients_saw(fleet: Fleet) -> None:
    before = fleet.status().get("reuse", {})
    counts = fleet.play("--seed=1", "--requests=120")
    assert counts["finished"] == 120
    assert len(counts["endpoints"]) == 2
    # Reports went over connections of their own: some reached the scheduler that had not decided.
    assert counts["report DISPOSITION_JOINED"] == 120
    assert counts["reusedTokens"] > counts["promptTokens"] / 2

    def told() -> bool:
        reuse = fleet.status()["reuse"]
        keys = ("promptTokens", "reusedTokens", "predictedTokens", "agreedTokens")
        added = {key: reuse[key] - before.get(key, 0) for key in keys}
        assert added == {key: counts[key] for key in keys}
        assert reuse["pairs"] - before.get("pairs", 0) == 120
        return True

    until(told, "the clients' own sums in the status", CHANGE_S)
    fleet.await_condition("MeasurementJoined", "True")
    assert fleet.status()["reuse"]["reusedFraction"].endswith("%")


def test_only_an_account_with_the_role_is_routed(fleet: Fleet) -> None:
    stranger = fleet.start_client("--requests=1", account="stranger")
    other = fleet.start_client("--requests=1", audience="servingfleet.dev/serving/other")
    assert stranger.await_end() == "Failed"
    assert "PERMISSION_DENIED" in stranger.log()
    assert other.await_end() == "Failed"
    assert "UNAUTHENTICATED" in other.log()


def test_a_deleted_engine_is_replaced_and_no_request_is_lost(fleet: Fleet) -> None:
    gone = fleet.pods()[0]["metadata"]["name"]
    client = fleet.start_client("--seed=2", "--requests=200", "--every=0.1")
    client.await_start()
    fleet.cluster.kubectl("delete", "pod", gone, "-n", fleet.namespace, "--wait=false")
    counts = client.counts()
    assert counts["finished"] == 200
    fleet.await_live(2)
    assert gone not in {replica["name"] for replica in fleet.status()["replicas"]}


def test_an_engine_that_restarts_in_place_keeps_its_relay_and_gets_no_credit_for_what_it_lost(
    fleet: Fleet,
) -> None:
    pod = fleet.pods()[0]
    name = pod["metadata"]["name"]
    fleet.play("--seed=3", "--requests=40")
    end = "import os; os.kill(1, 15)"
    fleet.cluster.kubectl(
        "exec", name, "-n", fleet.namespace, "-c", "engine", "--", "python", "-c", end
    )
    until(lambda: _restarts(fleet, name, "engine") == 1, "the engine's restart")
    until(lambda: _ready(fleet, name), "the engine's readiness")
    fleet.await_live(2)
    assert _restarts(fleet, name, RELAY) == 0
    counts = fleet.play("--seed=3", "--requests=40")
    assert counts["finished"] == 40
    assert counts.get("erroneousTokens", 0) == 0


def test_engines_come_and_go_with_their_deployment(fleet: Fleet) -> None:
    for replicas in (3, 1, 2):
        fleet.cluster.kubectl(
            "scale", "deployment/vllm", f"--replicas={replicas}", "-n", fleet.namespace
        )
        fleet.await_live(replicas)


def test_a_killed_scheduler_costs_no_request_and_its_successor_learns_what_it_knew(
    fleet: Fleet,
) -> None:
    client = fleet.start_client("--seed=4", "--requests=200", "--every=0.1")
    client.await_start()
    gone = fleet.schedulers()[0]["metadata"]["name"]
    fleet.cluster.kubectl(
        *("delete", "pod", gone, "-n", fleet.namespace),
        *("--force", "--grace-period=0", "--wait=false"),
    )
    counts = client.counts()
    assert counts["finished"] == 200
    fleet.await_schedulers("2/2")
    assert gone not in {pod["metadata"]["name"] for pod in fleet.schedulers()}
    # What the engines hold is not asked again: a scheduler without an index would predict nothing.
    again = fleet.play("--seed=4", "--requests=60", "--workers=6")
    assert again["predictedTokens"] >= 0.9 * again["reusedTokens"]


def test_a_killed_operator_is_missed_by_nobody_and_goes_on_where_it_was(
    fleet: Fleet, system: System
) -> None:
    before = {pod["metadata"]["uid"] for pod in (*fleet.pods(), *fleet.schedulers())}
    client = fleet.start_client("--seed=5", "--requests=100", "--every=0.1")
    client.await_start()
    killed = {pod["metadata"]["name"] for pod in system.pods()}
    assert len(killed) == 2
    seen = fleet.status()["observedAt"]
    system.kill()
    assert client.counts()["finished"] == 100
    until(lambda: fleet.status()["observedAt"] > seen, "a newer status", CHANGE_S)
    assert killed.isdisjoint(pod["metadata"]["name"] for pod in system.pods())
    fleet.await_condition("Ready", "True")
    assert {pod["metadata"]["uid"] for pod in (*fleet.pods(), *fleet.schedulers())} == before


def test_half_a_minute_without_the_api_server_costs_no_request(fleet: Fleet) -> None:
    client = fleet.start_client("--seed=6", "--requests=300", "--every=0.15")
    client.await_start()
    seen = fleet.status()["observedAt"]
    fleet.cluster.stop_api_server()
    back = time.monotonic() + OUTAGE_S
    until(lambda: time.monotonic() > back, "the end of the outage", 2 * OUTAGE_S)
    fleet.cluster.start_api_server()
    counts = client.counts()
    assert counts["finished"] == 300
    until(lambda: fleet.status()["observedAt"] > seen, "a newer status", CHANGE_S)
    fleet.await_condition("Ready", "True")
    # The webhook and the controllers are back as well.
    fleet.cluster.kubectl("rollout", "restart", "deployment/vllm", "-n", fleet.namespace)
    fleet.await_condition("RelaysInjected", "True")
    fleet.await_live(2)


def _restarts(fleet: Fleet, pod: str, container: str) -> int:
    status = fleet.cluster.get("pod", pod, "-n", fleet.namespace)["status"]
    every = [*status.get("initContainerStatuses", ()), *status["containerStatuses"]]
    return next(int(each["restartCount"]) for each in every if each["name"] == container)


def _ready(fleet: Fleet, pod: str) -> bool:
    status = fleet.cluster.get("pod", pod, "-n", fleet.namespace)["status"]
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status["conditions"])
