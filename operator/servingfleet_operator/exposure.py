"""Whether an engine's event ports stand open to the pod network, and the NetworkPolicy that closes them. Pure.

Events carry the tokens of everybody's prompts. Where the engine offers them on all addresses, a NetworkPolicy must close the
ports. Ours is made only for pods that no other policy restricts: policies add up, so that it would open again whatever another
one closes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import names, selectors
from .engines import EngineFacts
from .settings import OperatorSettings
from .spec import Fleet, Pool

Body = Mapping[str, Any]

LAST_PORT = 65_535
_PROTOCOLS = ("TCP", "UDP", "SCTP")


def open_ports(pod: Body, ports: Iterable[int], policies: Iterable[Body]) -> tuple[int, ...]:
    """The TCP ports of the pod that anybody may reach: any pod of its namespace, of any other, or a range of addresses.

    Peers that a policy names by their labels are somebody's decision, and count as closed. policies: all of the
    namespace. Whether the cluster's network enforces them isn't known here.
    """
    spec = pod.get("spec") or {}
    applying = (
        [] if spec.get("hostNetwork") else [each for each in policies if _isolates(each, pod)]
    )
    if not applying:
        return tuple(sorted(ports))
    rules = [rule for each in applying for rule in (each.get("spec") or {}).get("ingress") or ()]
    return tuple(
        sorted(
            port
            for port in ports
            if any(_admits(rule, port, pod) and _is_wide(rule) for rule in rules)
        )
    )


def describe(pod: Body, facts: EngineFacts, policies: Iterable[Body]) -> str:
    """How the pod's events can be read from outside, and what closes that; "" where they can't."""
    ports = open_ports(pod, facts.exposed, policies)
    if not ports:
        return ""
    listed = ", ".join(map(str, ports))
    if (pod.get("spec") or {}).get("hostNetwork"):
        return (
            f"port {listed} is open to the network, and on the host network no NetworkPolicy closes it: let the "
            f"engine of container {facts.container} use tcp://127.0.0.1 for endpoint and replay_endpoint"
        )
    return (
        f"port {listed} is open to other pods, who can read prompts there: let the engine of container "
        f"{facts.container} use tcp://127.0.0.1 for endpoint and replay_endpoint, or close the port with a NetworkPolicy"
    )


def policy(
    fleet: Fleet,
    pool: Pool,
    engines: Sequence[tuple[Body, EngineFacts]],
    policies: Sequence[Body],
    settings: OperatorSettings,
) -> dict[str, Any] | None:
    """The NetworkPolicy that closes the event ports of a pool's pods and nothing else; None: there should be none.

    engines: the pool's pods. policies: all of the namespace. Without pods what there is stays: the next are the same.
    """
    name = names.engines(fleet.name, pool.name)
    ours = [each for each in policies if _is(each, name, fleet)]
    # Also other fleets' don't count: two that waited for each other would come and go for ever.
    others = [each for each in policies if names.FLEET_LABEL not in selectors.labels_of(each)]
    if not engines and ours:
        return names.child(
            fleet, settings, "networking.k8s.io/v1", "NetworkPolicy", name, spec=ours[0]["spec"]
        )
    closed = {
        port
        for pod, facts in engines
        if not (pod.get("spec") or {}).get("hostNetwork")
        for port in facts.exposed
    }
    if not closed or any(_isolates(each, pod) for each in others for pod, _ in engines):
        return None
    return names.child(
        fleet,
        settings,
        "networking.k8s.io/v1",
        "NetworkPolicy",
        name,
        spec={
            "podSelector": {
                "matchExpressions": [each.manifest() for each in selectors.of_pool(pool.selector)]
            },
            "policyTypes": ["Ingress"],
            # No peers: from everywhere, as it is without any policy.
            "ingress": [{"ports": list(_all_but(closed))}],
        },
    )


def _all_but(closed: Iterable[int]) -> Iterator[dict[str, Any]]:
    start = 1
    for port in (*sorted(set(closed)), LAST_PORT + 1):
        if start < port:
            yield {"protocol": "TCP", "port": start, "endPort": port - 1}
        start = port + 1
    for protocol in _PROTOCOLS[1:]:
        yield {"protocol": protocol, "port": 1, "endPort": LAST_PORT}


def _is(policy: Body, name: str, fleet: Fleet) -> bool:
    return policy["metadata"]["name"] == name and names.is_owned(policy, fleet.uid)


def _isolates(policy: Body, pod: Body) -> bool:
    """The policy selects the pod, for what comes in."""
    spec = policy.get("spec") or {}
    if "Ingress" not in (spec.get("policyTypes") or ("Ingress",)):
        return False
    return selectors.matches(
        selectors.of_manifest(spec.get("podSelector") or {}), selectors.labels_of(pod)
    )


def _admits(rule: Body, port: int, pod: Body) -> bool:
    """The rule is about this TCP port; without ports it is about all."""
    ports = rule.get("ports")
    return not ports or any(_covers(each, port, pod) for each in ports)


def _covers(entry: Body, port: int, pod: Body) -> bool:
    if entry.get("protocol", "TCP") != "TCP":
        return False
    first = entry.get("port")
    if first is None:
        return True
    if isinstance(first, str):
        return port in _named(first, pod)
    return bool(first <= port <= (entry.get("endPort") or first))


def _named(name: str, pod: Body) -> Iterator[int]:
    spec = pod.get("spec") or {}
    for container in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ())):
        for entry in container.get("ports") or ():
            if entry.get("name") == name and entry.get("protocol", "TCP") == "TCP":
                yield entry["containerPort"]


def _is_wide(rule: Body) -> bool:
    """Who may come in isn't named: everybody, all of a namespace, or a range of addresses."""
    peers = rule.get("from")
    return not peers or any(map(_is_wide_peer, peers))


def _is_wide_peer(peer: Body) -> bool:
    block = peer.get("ipBlock")
    if block is not None:
        network = ipaddress.ip_network(block["cidr"], strict=False)
        return network.num_addresses > 1
    if "namespaceSelector" in peer:
        # Whoever has a namespace can label his pods as he likes: only the namespace's own labels keep others out.
        return not selectors.of_manifest(peer["namespaceSelector"] or {})
    return not selectors.of_manifest(peer.get("podSelector") or {})
