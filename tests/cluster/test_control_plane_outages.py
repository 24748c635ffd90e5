"""The API server goes away, stands still and comes back; the operator is killed: the fleets are right afterwards."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, until
from tests.cluster.operators import Operators, Replica, await_condition, fleet

AWAY_S = 30.0
FROZEN_S = 80.0
"""Longer than a watch may be silent before it is given up."""


@pytest.fixture
def server(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster whose API server is there again after the test, whatever happened in it."""
    cluster.machinery()
    yield cluster
    cluster.thaw_api_server()
    cluster.start_api_server()


def scale(cluster: Cluster, namespace: str, replicas: int) -> None:
    cluster.apply(fleet(namespace, scheduler={"replicas": replicas}))
    await_condition(cluster, namespace, "Reconciled", "True")
    found = cluster.get("deployment", "demo-scheduler", "-n", namespace)
    assert found["spec"]["replicas"] == replicas


def repaired(cluster: Cluster, namespace: str, patience_s: float) -> float:
    """Deletes a child, and returns the seconds until it was back."""
    cluster.kubectl("delete", "role", "demo-client", "-n", namespace)
    began = time.monotonic()
    until(lambda: cluster.get("role", "demo-client", "-n", namespace), "the Role", patience_s)
    return time.monotonic() - began


def test_an_api_server_that_was_away_for_half_a_minute_finds_the_operator_at_work(
    server: Cluster, namespace: str, operator: Replica
) -> None:
    scale(server, namespace, 1)
    server.stop_api_server()
    until(lambda: not operator.leads(), "the operator to stop writing", 20.0)
    assert operator.probe("/healthz")[0] == 200, "nothing is wrong with it"
    assert operator.probe("/readyz")[0] == 200, "it could answer the webhook"
    time.sleep(AWAY_S)
    server.start_api_server()
    until(operator.leads, "the operator to lead again", 20.0)
    assert repaired(server, namespace, 20.0) < 15
    scale(server, namespace, 3)
    assert operator.process.poll() is None
    assert operator.said("defect in a reconcile") == []


def test_what_was_done_while_the_watches_were_broken_is_not_missed(
    server: Cluster, namespace: str, operator: Replica
) -> None:
    scale(server, namespace, 1)
    server.stop_api_server()
    until(lambda: not operator.leads(), "the operator to stop writing", 20.0)
    operator.tell(signal.SIGSTOP)
    try:
        server.start_api_server()
        # The only Role of its kind: a list of what is there says nothing of it.
        server.kubectl("delete", "role", "-A", "-l", "servingfleet.dev/fleet", "--wait=false")
    finally:
        operator.tell(signal.SIGCONT)
    until(lambda: server.get("role", "demo-client", "-n", namespace), "the Role", 30.0)


def test_an_api_server_that_stands_still_is_noticed_and_its_return_too(
    server: Cluster, namespace: str, operator: Replica
) -> None:
    scale(server, namespace, 1)
    server.freeze_api_server()
    until(lambda: not operator.leads(), "the operator to stop writing", 20.0)
    time.sleep(FROZEN_S)
    silence = operator.metrics()["api_silence_seconds", ()]
    assert silence > FROZEN_S / 2, "the operator knows that nobody answers"
    server.thaw_api_server()
    until(operator.leads, "the operator to lead again", 30.0)
    assert repaired(server, namespace, 30.0) < 20
    assert operator.process.poll() is None


def test_an_operator_that_was_killed_finds_what_happened_meanwhile(
    cluster: Cluster, namespace: str, operators: Operators, operator: Replica
) -> None:
    scale(cluster, namespace, 1)
    operator.end(signal.SIGKILL)
    operators.clear()
    cluster.apply(fleet(namespace, scheduler={"replicas": 3}))
    cluster.kubectl("delete", "role,secret", "-n", namespace, "-l", "servingfleet.dev/fleet=demo")
    operators.start_leading()
    await_condition(cluster, namespace, "Reconciled", "True")
    found = cluster.get("deployment", "demo-scheduler", "-n", namespace)
    assert found["spec"]["replicas"] == 3
    assert cluster.get("role", "demo-client", "-n", namespace)
    assert cluster.get("secret", "demo-tls", "-n", namespace)
