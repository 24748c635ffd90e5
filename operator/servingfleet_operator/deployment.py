"""The scheduler's Deployment, from a fleet's spec. Pure.

Only fields that the operator means are here: what the API server fills in, and what others add (annotations of `kubectl
rollout restart`, a mesh's containers), stays theirs. The pods fit the Pod Security Standard "restricted".
"""

from __future__ import annotations

from typing import Any

from . import names
from .images import scheduler_image
from .settings import OperatorSettings
from .spec import Access, AdmissionTarget, Clients, Fleet, Scheduler, Toleration

CONFIG_ANNOTATION = f"{names.GROUP}/config"
"""On the pods: fingerprint of the configuration that they read at their start only."""

CONFIG_PATH = "/etc/servingfleet/config"
DECISION_KEY_PATH = "/etc/servingfleet/decision-key"
TLS_PATH = "/etc/servingfleet/tls"
POOLS_FILE = "pools.json"
DECISION_KEY = "key"

DRAIN_S = 10
"""Seconds for calls in flight: the longest Route is far below, a Report that is forwarded has 5 s."""
LEAVE_S = 5
"""Seconds between leaving the Services and the signal to stop: every node has taken the address out by then, so that no
call is sent to a socket that is closed."""
REVISIONS = 3


def deployment(fleet: Fleet, settings: OperatorSettings, fingerprint: str) -> dict[str, Any]:
    """`fingerprint`: of what the pods read at their start, so that a change of it rolls them.

    Certificates are not in it: they are read again at each handshake, and their rotation must end no stream. Raises
    ImageNotAllowed.
    """
    return names.child(
        fleet,
        settings,
        "apps/v1",
        "Deployment",
        names.scheduler(fleet.name),
        spec={
            "replicas": fleet.scheduler.replicas,
            "revisionHistoryLimit": REVISIONS,
            # A new pod first: relays send it its index while the old ones still answer.
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
            },
            "selector": {"matchLabels": names.scheduler_selector(fleet.name)},
            "template": {
                "metadata": {
                    "labels": {
                        **names.labels(fleet.name, settings),
                        names.INJECT_LABEL: "false",
                    },
                    "annotations": {CONFIG_ANNOTATION: fingerprint},
                },
                "spec": _pod(fleet, settings),
            },
        },
    )


def _pod(fleet: Fleet, settings: OperatorSettings) -> dict[str, Any]:
    scheduler = fleet.scheduler
    pod: dict[str, Any] = {
        "serviceAccountName": names.scheduler(fleet.name),
        # Its right is to ask who a caller is; without TLS nobody is asked.
        "automountServiceAccountToken": fleet.secured,
        # Service variables would grow with the namespace, and nothing reads them.
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": LEAVE_S + DRAIN_S + 15,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": scheduler.topology_spread.topology_key,
                "whenUnsatisfiable": str(scheduler.topology_spread.when_unsatisfiable),
                "labelSelector": {"matchLabels": names.scheduler_selector(fleet.name)},
                # Each rollout is spread for itself: the old pods are about to go.
                "matchLabelKeys": ["pod-template-hash"],
            }
        ],
        "containers": [_container(fleet, settings)],
        "volumes": _volumes(fleet),
    }
    if settings.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    if scheduler.node_selector:
        pod["nodeSelector"] = dict(scheduler.node_selector)
    if scheduler.tolerations:
        pod["tolerations"] = [_toleration(each) for each in scheduler.tolerations]
    if scheduler.affinity:
        pod["affinity"] = scheduler.affinity
    if scheduler.priority_class_name:
        pod["priorityClassName"] = scheduler.priority_class_name
    return pod


def _container(fleet: Fleet, settings: OperatorSettings) -> dict[str, Any]:
    return {
        "name": "scheduler",
        "image": scheduler_image(fleet, settings),
        "imagePullPolicy": settings.image_pull_policy,
        "args": _arguments(fleet),
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [
            {"name": "grpc", "containerPort": names.GRPC_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": names.METRICS_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(fleet.scheduler),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "lifecycle": {"preStop": {"sleep": {"seconds": LEAVE_S}}},
        "startupProbe": _probe("/healthz", period_s=1, failures=60),
        # A loop that stands still for half a minute answers nobody.
        "livenessProbe": _probe("/healthz", period_s=10, failures=3),
        "readinessProbe": _probe("/readyz", period_s=5, failures=2),
        "volumeMounts": [
            {"name": name, "mountPath": path, "readOnly": True} for name, path in _mounts(fleet)
        ],
    }


def _arguments(fleet: Fleet) -> list[str]:
    scheduler = fleet.scheduler
    arguments = [
        f"--listen=[::]:{names.GRPC_PORT}",
        "--http-host=::",
        f"--http-port={names.METRICS_PORT}",
        "--advertise=$(POD_IP)",
        f"--block-tokens={fleet.block_tokens}",
        f"--policy={scheduler.policy}",
        f"--max-prompt-tokens={scheduler.admission.max_prompt_tokens}",
        *(f"--target={_target(target)}" for target in scheduler.admission.targets),
        f"--window-s={scheduler.window.seconds:g}",
        f"--min-pairs={scheduler.min_pairs}",
        f"--pools-file={CONFIG_PATH}/{POOLS_FILE}",
        f"--token-key-file={DECISION_KEY_PATH}/{DECISION_KEY}",
        f"--drain-s={DRAIN_S}",
        f"--log-level={scheduler.log_level}",
    ]
    if not fleet.secured:
        return [*arguments, "--auth=none"]
    return [
        *arguments,
        f"--tls-cert-file={TLS_PATH}/tls.crt",
        f"--tls-key-file={TLS_PATH}/tls.key",
        f"--peer-ca-file={TLS_PATH}/ca.crt",
        f"--scheduler-name={names.server_name(fleet.name, fleet.namespace)}",
        "--auth=kubernetes",
        f"--fleet={fleet.name}",
        f"--namespace={fleet.namespace}",
        f"--audience={names.audience(fleet.name, fleet.namespace)}",
        f"--client-auth={_client_auth(fleet.access)}",
    ]


def _target(target: AdmissionTarget) -> str:
    said = f"{target.priority}={target.time_to_first_token.seconds:.3f}"
    return said if target.queue is None else f"{said}/{target.queue.seconds:.3f}"


def _client_auth(access: Access) -> str:
    return "token" if access.clients == Clients.TOKEN else "none"


def _probe(path: str, *, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "metrics"},
        "periodSeconds": period_s,
        # The scheduler itself gives its event loop 2 s to answer.
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def _resources(scheduler: Scheduler) -> dict[str, Any]:
    requests, limits = scheduler.resources.requests, scheduler.resources.limits
    return {
        "requests": {"cpu": str(requests.cpu), "memory": str(requests.memory)},
        "limits": {
            **({"cpu": str(limits.cpu)} if limits.cpu is not None else {}),
            "memory": str(limits.memory),
        },
    }


def _mounts(fleet: Fleet) -> list[tuple[str, str]]:
    mounts = [("config", CONFIG_PATH), ("decision-key", DECISION_KEY_PATH)]
    return [*mounts, ("tls", TLS_PATH)] if fleet.secured else mounts


def _volumes(fleet: Fleet) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": names.scheduler(fleet.name)}},
        {"name": "decision-key", "secret": {"secretName": names.decision_key(fleet.name)}},
    ]
    if fleet.secured:
        volumes.append({"name": "tls", "secret": {"secretName": names.tls(fleet.name)}})
    return volumes


def _toleration(toleration: Toleration) -> dict[str, Any]:
    said: dict[str, Any] = {
        "key": toleration.key,
        "operator": str(toleration.operator),
        "value": toleration.value,
        "effect": str(toleration.effect),
        "tolerationSeconds": toleration.toleration_seconds,
    }
    return {key: value for key, value in said.items() if value not in ("", None)}
