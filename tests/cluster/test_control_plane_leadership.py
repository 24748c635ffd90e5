"""Two replicas of the operator: one writes, both serve the webhook, and the work goes on whatever becomes of the first."""

from __future__ import annotations

import signal
import socket
import ssl
import time

import pytest

from tests.cluster.cluster import Cluster, until
from tests.cluster.operators import Operators, Replica, await_condition, fleet

LEASE_S = 15.0


@pytest.fixture
def pair(operators: Operators) -> tuple[Replica, Replica]:
    """The leading replica, and another."""
    leader = operators.start_leading()
    other = operators.start()
    until(lambda: other.probe("/readyz")[0] == 200, "the other's webhook")
    return leader, other


def scale(cluster: Cluster, namespace: str, replicas: int) -> None:
    """Changes the fleet, and waits until somebody has followed."""
    cluster.apply(fleet(namespace, scheduler={"replicas": replicas}))
    await_condition(cluster, namespace, "Reconciled", "True")
    found = cluster.get("deployment", "demo-scheduler", "-n", namespace)
    assert found["spec"]["replicas"] == replicas


def test_one_of_two_writes_and_the_other_none_of_it(
    cluster: Cluster, namespace: str, pair: tuple[Replica, Replica]
) -> None:
    leader, other = pair
    scale(cluster, namespace, 1)
    assert leader.leads()
    assert not other.leads()
    assert leader.writes() > 0
    assert other.writes() == 0
    assert not {verb for verb, _ in other.requests()} & {"apply", "create", "patch", "delete"}
    until(
        lambda: other.metrics().get(("fleets", ()), 0) >= 1,
        "the other to know the fleet, so that it can serve its webhook",
    )


def test_both_serve_the_webhook_under_the_authority_that_the_release_published(
    cluster: Cluster, operators: Operators, pair: tuple[Replica, Replica], namespace: str
) -> None:
    secret = f"{operators.fullname}-webhook-tls"
    bundle = cluster.kubectl(
        *("get", "secret", secret, "-n", operators.namespace),
        *("-o", r"go-template={{index .data \"ca.crt\" | base64decode}}".replace("\\", "")),
    )
    context = ssl.create_default_context(cadata=bundle)
    host = f"{operators.fullname}.{operators.namespace}.svc"
    for replica in pair:
        with (
            socket.create_connection(("127.0.0.1", replica.ports[1]), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            assert secured.version() == "TLSv1.3"


def test_a_leader_that_is_told_to_stop_hands_over_at_once_and_ends_in_time(
    cluster: Cluster, namespace: str, pair: tuple[Replica, Replica]
) -> None:
    leader, other = pair
    scale(cluster, namespace, 1)
    began = time.monotonic()
    leader.tell(signal.SIGTERM)
    until(other.leads, "the other to lead", 10.0)
    assert time.monotonic() - began < LEASE_S / 2
    assert leader.process.wait(20) == 0
    assert time.monotonic() - began < 20
    scale(cluster, namespace, 3)


def test_the_webhook_of_a_stopping_replica_still_answers_for_a_moment(
    pair: tuple[Replica, Replica],
) -> None:
    leader, _ = pair
    port = leader.ports[1]
    leader.tell(signal.SIGTERM)
    until(lambda: leader.said("stopping"), "the replica to stop")
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
    assert leader.process.wait(20) == 0


def test_a_leader_that_is_killed_is_replaced_when_its_lease_is_over(
    cluster: Cluster, namespace: str, pair: tuple[Replica, Replica]
) -> None:
    leader, other = pair
    scale(cluster, namespace, 1)
    leader.end(signal.SIGKILL)
    cluster.apply(fleet(namespace, scheduler={"replicas": 3}))
    began = time.monotonic()
    until(other.leads, "the other to lead", LEASE_S + 10)
    assert time.monotonic() - began < LEASE_S + 5
    await_condition(cluster, namespace, "Reconciled", "True")
    found = cluster.get("deployment", "demo-scheduler", "-n", namespace)
    assert found["spec"]["replicas"] == 3


def test_a_leader_that_was_frozen_writes_nothing_when_it_thaws(
    cluster: Cluster, namespace: str, pair: tuple[Replica, Replica]
) -> None:
    leader, other = pair
    scale(cluster, namespace, 1)
    before = leader.writes()
    leader.tell(signal.SIGSTOP)
    until(other.leads, "the other to lead", LEASE_S + 10)
    # Work is waiting for it when it wakes: the fleet has changed, and a child was taken away.
    cluster.apply(fleet(namespace, scheduler={"replicas": 3}))
    cluster.kubectl("delete", "role", "demo-client", "-n", namespace)
    await_condition(cluster, namespace, "Reconciled", "True")
    leader.tell(signal.SIGCONT)
    until(lambda: leader.probe("/healthz")[0], "the thawed replica to answer")
    for _ in range(20):
        assert [leader.leads(), other.leads()] == [False, True]
    until(lambda: leader.said("not leading"), "the thawed replica to notice")
    assert leader.writes() == before
    scale(cluster, namespace, 2)
    assert leader.writes() == before
