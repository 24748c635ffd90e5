"""What a fleet's namespace should hold, from its spec. Pure: equal arguments give equal bytes.

Each manifest is whole, as server-side apply wants it: a field that is no longer here is taken away. The NetworkPolicy that
closes the engines' ports depends on pods, and is `exposure`'s.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from typing import Any

from . import names
from .deployment import DECISION_KEY, POOLS_FILE, deployment
from .pki import Certificates
from .settings import OperatorSettings
from .spec import Fleet, Pool

CLIENT_SUBRESOURCES = ("servingfleets/report", "servingfleets/route")
"""What a client's account may ask of the fleet: see the scheduler's authorisation."""


def children(
    fleet: Fleet,
    settings: OperatorSettings,
    certificates: Certificates | None,
    decision_key: bytes,
    *,
    pod_monitor: bool,
) -> list[dict[str, Any]]:
    """The manifests, in the order in which they should be applied: what a pod mounts comes before its Deployment.

    certificates: None where the transport is PlainText. decision_key: the fleet's own, made once. pod_monitor: the
    cluster knows that kind. Raises ImageNotAllowed.
    """
    pools = _pools(fleet)
    # Schedulers with different keys could not read each other's decision ids.
    fingerprint = hashlib.sha256(decision_key + pools.encode()).hexdigest()[:16]
    made = [
        _service_account(fleet, settings),
        _config_map(fleet, settings, names.scheduler(fleet.name), {POOLS_FILE: pools}),
        _config_map(fleet, settings, names.client(fleet.name), _for_clients(fleet, certificates)),
        _secret(
            fleet, settings, names.decision_key(fleet.name), "Opaque", {DECISION_KEY: decision_key}
        ),
        _network_policy(fleet, settings),
        _service(fleet, settings),
        _relay_service(fleet, settings),
        _client_role(fleet, settings),
        _disruption_budget(fleet, settings),
        deployment(fleet, settings, fingerprint),
    ]
    if certificates is not None:
        made.insert(
            0,
            _secret(
                fleet,
                settings,
                names.tls(fleet.name),
                "kubernetes.io/tls",
                {
                    "ca.crt": certificates.ca_bundle,
                    "tls.crt": certificates.cert,
                    "tls.key": certificates.key,
                },
            ),
        )
    if pod_monitor and fleet.scheduler.pod_monitor:
        made.append(_pod_monitor(fleet, settings))
    return made


def _service_account(fleet: Fleet, settings: OperatorSettings) -> dict[str, Any]:
    return names.child(
        fleet,
        settings,
        "v1",
        "ServiceAccount",
        names.scheduler(fleet.name),
        # The pods that need its token say so themselves.
        automountServiceAccountToken=False,
    )


def _config_map(
    fleet: Fleet, settings: OperatorSettings, name: str, data: dict[str, str]
) -> dict[str, Any]:
    return names.child(fleet, settings, "v1", "ConfigMap", name, data=data)


def _secret(
    fleet: Fleet, settings: OperatorSettings, name: str, kind: str, data: dict[str, bytes]
) -> dict[str, Any]:
    encoded = {key: b64encode(value).decode() for key, value in data.items()}
    return names.child(fleet, settings, "v1", "Secret", name, type=kind, data=encoded)


def _for_clients(fleet: Fleet, certificates: Certificates | None) -> dict[str, str]:
    data = {
        "endpoint": names.endpoint(fleet.name, fleet.namespace),
        "model": fleet.model.name,
        "tokenizer": fleet.model.tokenizer,
    }
    if certificates is not None:
        data["audience"] = names.audience(fleet.name, fleet.namespace)
        data["ca.crt"] = certificates.ca_bundle.decode()
    return data


def _pools(fleet: Fleet) -> str:
    """The scheduler's --pools-file: pools of which something is known beforehand."""
    described = [_pool(pool) for pool in fleet.pools]
    return json.dumps({"pools": [pool for pool in described if len(pool) > 1]}, indent=1)


def _pool(pool: Pool) -> dict[str, Any]:
    said: dict[str, Any] = {"name": pool.name}
    if pool.speed.prefill_tokens_per_second is not None:
        said["prefill_tokens_per_s"] = pool.speed.prefill_tokens_per_second
    if pool.speed.bytes_per_token is not None:
        said["bytes_per_token"] = float(pool.speed.bytes_per_token.number)
    if pool.speed.step_tokens is not None:
        said["step_tokens"] = pool.speed.step_tokens
    if pool.tiers:
        said["tiers"] = [
            {
                "tier": str(tier.tier),
                "bandwidth_bytes_per_s": float(tier.bandwidth.number),
                **({} if tier.latency is None else {"latency_s": tier.latency.seconds}),
            }
            for tier in pool.tiers
        ]
    return said


def _network_policy(fleet: Fleet, settings: OperatorSettings) -> dict[str, Any]:
    callers = sorted({fleet.namespace, settings.namespace, *fleet.access.namespaces})
    return names.child(
        fleet,
        settings,
        "networking.k8s.io/v1",
        "NetworkPolicy",
        names.scheduler(fleet.name),
        spec={
            "podSelector": {"matchLabels": names.scheduler_selector(fleet.name)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [
                        {"namespaceSelector": {"matchLabels": {names.NAMESPACE_LABEL: namespace}}}
                        for namespace in callers
                    ],
                    "ports": [{"port": names.GRPC_PORT, "protocol": "TCP"}],
                },
                # Metrics hold nothing of prompts, and Prometheus may be anywhere.
                {"ports": [{"port": names.METRICS_PORT, "protocol": "TCP"}]},
            ],
        },
    )


def _service(fleet: Fleet, settings: OperatorSettings) -> dict[str, Any]:
    return names.child(
        fleet,
        settings,
        "v1",
        "Service",
        names.scheduler(fleet.name),
        spec={
            "selector": names.scheduler_selector(fleet.name),
            "ports": [_port("grpc", names.GRPC_PORT), _port("metrics", names.METRICS_PORT)],
        },
    )


def _relay_service(fleet: Fleet, settings: OperatorSettings) -> dict[str, Any]:
    return names.child(
        fleet,
        settings,
        "v1",
        "Service",
        names.relays(fleet.name),
        spec={
            "clusterIP": "None",
            # A scheduler gets its index before it is ready to answer.
            "publishNotReadyAddresses": True,
            "selector": names.scheduler_selector(fleet.name),
            "ports": [_port("grpc", names.GRPC_PORT)],
        },
    )


def _port(name: str, number: int) -> dict[str, Any]:
    return {"name": name, "port": number, "targetPort": name, "protocol": "TCP"}


def _client_role(fleet: Fleet, settings: OperatorSettings) -> dict[str, Any]:
    return names.child(
        fleet,
        settings,
        "rbac.authorization.k8s.io/v1",
        "Role",
        names.client(fleet.name),
        rules=[
            {
                "apiGroups": [names.GROUP],
                "resources": list(CLIENT_SUBRESOURCES),
                "resourceNames": [fleet.name],
                "verbs": ["create"],
            }
        ],
    )


def _disruption_budget(fleet: Fleet, settings: OperatorSettings) -> dict[str, Any]:
    return names.child(
        fleet,
        settings,
        "policy/v1",
        "PodDisruptionBudget",
        names.scheduler(fleet.name),
        spec={
            # Not minAvailable: a fleet with one scheduler must not keep its node from being drained.
            "maxUnavailable": 1,
            "selector": {"matchLabels": names.scheduler_selector(fleet.name)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    )


def _pod_monitor(fleet: Fleet, settings: OperatorSettings) -> dict[str, Any]:
    return names.child(
        fleet,
        settings,
        "monitoring.coreos.com/v1",
        "PodMonitor",
        names.scheduler(fleet.name),
        spec={
            "selector": {"matchLabels": names.scheduler_selector(fleet.name)},
            "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics"}],
        },
    )
