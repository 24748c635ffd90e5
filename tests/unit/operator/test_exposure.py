"""Whether events can be read from the pod network, and the policy that closes them without opening anything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_operator import engines
from servingfleet_operator.exposure import describe, open_ports, policy

from .pods import SETTINGS, fleet, selector
from .test_engines import PRIVATE, vllm

FLEET = fleet()
POOL = FLEET.pools[0]
OPEN = {**PRIVATE, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}


def exposing(**spec: Any) -> dict[str, Any]:
    target = vllm(events=OPEN)
    target["spec"] |= spec
    return target


def users(*ingress: dict[str, Any], select: Any = None, types: Any = None) -> dict[str, Any]:
    """A NetworkPolicy that somebody else made."""
    spec: dict[str, Any] = {"podSelector": select or {}, "ingress": list(ingress)}
    if types is not None:
        spec["policyTypes"] = types
    return {"metadata": {"name": "theirs", "namespace": "serving"}, "spec": spec}


def managed(*targets: dict[str, Any], policies: Any = ()) -> dict[str, Any] | None:
    found = [(each, engines.read(each, POOL)) for each in targets]
    return policy(FLEET, POOL, found, policies, SETTINGS)


def still_open(target: dict[str, Any], *policies: Any) -> tuple[int, ...]:
    return open_ports(target, engines.read(target, POOL).exposed, policies)


def test_without_a_policy_what_the_engine_offers_is_open() -> None:
    assert still_open(exposing()) == (5557, 5657)
    assert still_open(vllm()) == ()


@pytest.mark.parametrize(
    "policy_",
    [
        users(),
        users({"ports": [{"port": 8000}]}),
        users({"ports": [{"port": 8000, "endPort": 8999}]}),
        users({"ports": [{"port": 5557, "protocol": "UDP"}]}),
        users({"ports": [{"protocol": "SCTP"}]}),
        users({"ports": [{"port": "http"}]}),
        users({"from": [{"podSelector": {"matchLabels": {"app": "gateway"}}}]}),
        users({"from": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]}),
        users({"from": [{"ipBlock": {"cidr": "10.1.2.3/32"}}]}),
        users(types=["Ingress", "Egress"]),
        users(
            select={"matchExpressions": [{"key": "app", "operator": "In", "values": ["vllm", "x"]}]}
        ),
    ],
)
def test_a_policy_that_lets_nobody_or_somebody_in_closes_the_ports(policy_: Any) -> None:
    target = exposing()
    target["spec"]["containers"][0]["ports"] = [{"name": "http", "containerPort": 8000}]
    assert still_open(target, policy_) == ()


@pytest.mark.parametrize(
    ("policy_", "ports"),
    [
        (users({}), (5557, 5657)),
        (users({"from": []}), (5557, 5657)),
        (users({"ports": [{"port": 5000, "endPort": 5600}]}), (5557,)),
        (users({"ports": [{"port": "events"}]}), (5557,)),
        (users({"ports": [{}]}), (5557, 5657)),
        (users({"from": [{"podSelector": {}}]}), (5557, 5657)),
        (users({"from": [{"namespaceSelector": {}}]}), (5557, 5657)),
        (
            users(
                {"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"a": "b"}}}]}
            ),
            (5557, 5657),
        ),
        (users({"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}), (5557, 5657)),
        (users({"from": [{"ipBlock": {"cidr": "::/0"}}]}), (5557, 5657)),
        # It says nothing about what comes in, or about other pods.
        (users(types=["Egress"]), (5557, 5657)),
        (users(select={"matchLabels": {"app": "other"}}), (5557, 5657)),
    ],
)
def test_a_policy_that_lets_anybody_in_leaves_the_ports_open(
    policy_: Any, ports: tuple[int, ...]
) -> None:
    target = exposing()
    target["spec"]["containers"][0]["ports"] = [{"name": "events", "containerPort": 5557}]
    assert still_open(target, policy_) == ports


def test_policies_add_up() -> None:
    assert still_open(exposing(), users(), users({"ports": [{"port": 5557}]})) == (5557,)


def test_on_the_host_network_no_policy_closes_anything() -> None:
    target = exposing(hostNetwork=True)
    assert still_open(target, users()) == (5557, 5657)
    facts = engines.read(target, POOL)
    assert "host network no NetworkPolicy" in describe(target, facts, [users()])
    assert managed(target) is None


def test_what_is_open_is_told_with_both_remedies_and_what_is_closed_is_not() -> None:
    target = exposing()
    facts = engines.read(target, POOL)
    text = describe(target, facts, [])
    assert "port 5557, 5657" in text
    assert "tcp://127.0.0.1" in text
    assert "NetworkPolicy" in text
    assert describe(target, facts, [users()]) == ""


def test_the_managed_policy_closes_what_is_open_and_is_the_fleet_s_own() -> None:
    made = managed(exposing(), vllm())
    assert made is not None
    assert still_open(exposing(), made) == ()
    assert made["metadata"]["name"] == "demo-engines-main"
    assert made["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    assert made["spec"] == {
        "podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["vllm"]}]},
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "ports": [
                    {"protocol": "TCP", "port": 1, "endPort": 5556},
                    {"protocol": "TCP", "port": 5558, "endPort": 5656},
                    {"protocol": "TCP", "port": 5658, "endPort": 65535},
                    {"protocol": "UDP", "port": 1, "endPort": 65535},
                    {"protocol": "SCTP", "port": 1, "endPort": 65535},
                ]
            }
        ],
    }


def test_with_the_managed_policy_in_place_it_is_wanted_still() -> None:
    made = managed(exposing())
    assert managed(exposing(), policies=[made]) == made


EDGES = [1, 2, 3, 5556, 5557, 5558, 5559, 65_533, 65_534, 65_535]


@given(closed=st.lists(st.sampled_from(EDGES), min_size=1, unique=True))
def test_every_other_port_stays_as_open_as_without_a_policy(closed: list[int]) -> None:
    target = exposing()
    target["metadata"]["annotations"] = {"servingfleet.dev/events": ",".join(map(str, closed))}
    target["spec"]["containers"][0]["args"] = []
    made = managed(target)
    assert made is not None
    expected = set(EDGES) - set(engines.read(target, POOL).exposed)
    assert set(open_ports(target, EDGES, [made])) == expected
    assert all(each["port"] <= each["endPort"] for each in made["spec"]["ingress"][0]["ports"])


def test_where_somebody_restricts_the_pods_already_nothing_is_opened_by_a_policy_of_ours() -> None:
    assert managed(exposing(), policies=[users()]) is None
    # Even one pod among many.
    special = exposing()
    special["metadata"]["labels"] = {"app": "vllm", "role": "special"}
    theirs = users(select={"matchLabels": {"role": "special"}})
    assert managed(exposing(), special, policies=[theirs]) is None
    assert managed(exposing(), policies=[theirs]) is not None


def test_our_policy_goes_when_somebody_restricts_the_pods_or_the_engine_becomes_private() -> None:
    made = managed(exposing())
    assert managed(exposing(), policies=[made, users()]) is None
    assert managed(vllm(), policies=[made]) is None


def test_a_pool_without_pods_keeps_its_policy_and_gets_none() -> None:
    made = managed(exposing())
    assert managed(policies=[made]) == made
    assert managed() is None


def test_fleets_that_overlap_do_not_wait_for_each_other() -> None:
    made = managed(exposing())
    assert made is not None
    other = {**made, "metadata": {**made["metadata"], "name": "other-engines-main"}}
    other["metadata"]["ownerReferences"] = [{"uid": "u-9", "controller": True}]
    assert managed(exposing(), policies=[other]) == made


def test_every_pool_has_its_own_policy() -> None:
    wanted = fleet(
        {"name": "a", "selector": selector(app="vllm")}, {"name": "b", "selector": selector(b="b")}
    )
    names = {
        policy(wanted, pool, [(exposing(), engines.read(exposing(), pool))], (), SETTINGS)[  # type: ignore[index]
            "metadata"
        ]["name"]
        for pool in wanted.pools
    }
    assert names == {"demo-engines-a", "demo-engines-b"}
