"""The relay's container, as an engine's pod is given it. Pure.

Fits the Pod Security Standard "restricted", keeps a Guaranteed pod so, and holds no token but the one that says which pod it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import names
from .engines import EngineFacts
from .images import relay_image
from .settings import OperatorSettings
from .spec import Engine, Fleet, Pool

TOKEN_LIFE_S = 3600
"""The kubelet replaces the token at four fifths of it."""
SUPERVISOR_MIB = 32
"""Of the container's memory, for what isn't the worker."""
LEAST_WORKER_MIB = 96
"""The relay refuses a smaller limit."""
NOBODY = 65_532
"""Runs the relay where the pod would run it as root."""

_API_TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
_ENGINES = {
    Engine.AUTO: "auto",
    Engine.VLLM: "vllm",
    Engine.SGLANG: "sglang",
    Engine.TENSORRT_LLM: "trtllm",
}
_MIB = 1024 * 1024


def container(
    pod: Mapping[str, Any],
    fleet: Fleet,
    pool: Pool,
    facts: EngineFacts,
    settings: OperatorSettings,
) -> dict[str, Any]:
    """The container for this pod. Raises ImageNotAllowed."""
    spec = pod["spec"]
    resources = {
        "cpu": str(fleet.relay.resources.cpu),
        "memory": str(fleet.relay.resources.memory),
    }
    context: dict[str, Any] = {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if (spec.get("securityContext") or {}).get("runAsUser") == 0:
        # The kubelet would refuse to start the relay as root, and the engine would wait for ever. Otherwise the image's
        # user or the pod's serves: some clusters allow no other.
        context["runAsUser"] = NOBODY
    return {
        "name": names.RELAY_CONTAINER,
        "image": relay_image(fleet, settings),
        "imagePullPolicy": settings.image_pull_policy,
        # A sidecar, without probes: whatever becomes of the relay, the engine's pod stays ready.
        "restartPolicy": "Always",
        "args": _arguments(fleet, pool, facts),
        "env": [
            _from_field("SERVINGFLEET_RELAY_REPLICA", "metadata.uid"),
            _from_field("POD_NAME", "metadata.name"),
            _from_field("POD_IP", "status.podIP"),
            _from_field("NODE_NAME", "spec.nodeName"),
        ],
        # Equal, so that a Guaranteed pod stays one. Where the pod has resources as a whole, they include the relay's: the sum
        # of the containers' must not be more.
        **(
            {}
            if spec.get("resources")
            else {"resources": {"requests": resources, "limits": resources}}
        ),
        "securityContext": context,
        "volumeMounts": [
            {"name": names.IDENTITY_VOLUME, "mountPath": names.IDENTITY_PATH, "readOnly": True},
            # In the place of the account's own token, which the API server would put here.
            {"name": names.IDENTITY_VOLUME, "mountPath": _API_TOKEN_PATH, "readOnly": True},
        ],
    }


def _arguments(fleet: Fleet, pool: Pool, facts: EngineFacts) -> list[str]:
    worker_mib = int(fleet.relay.resources.memory.number) // _MIB - SUPERVISOR_MIB
    # Pulled events don't tell it; published ones are believed more than a command line.
    block_tokens = facts.block_tokens if facts.pull else pool.engine_block_tokens
    arguments = ["--supervise"]
    if worker_mib >= LEAST_WORKER_MIB:
        arguments.append(f"--worker-memory-mib={worker_mib}")
    arguments += [
        f"--model={fleet.model.name}",
        f"--engine={_ENGINES[facts.kind]}",
        *(["--pull"] if facts.pull else []),
        *(f"--engine-events={address}" for address in facts.events),
        *(f"--engine-replay={address}" for address in facts.replay),
        *(["--engine-bind"] if facts.bind else []),
        *([f"--ranks={facts.ranks}"] if facts.ranks > 1 else []),
        *([f"--first-rank={facts.first_rank}"] if facts.first_rank else []),
        *(["--hybrid"] if pool.hybrid else []),
        *(["--extra-keys"] if pool.extra_keys else []),
        f"--engine-http={facts.http}",
        f"--endpoint=$(POD_IP):{facts.http_port}",
        f"--block-tokens={fleet.block_tokens}",
        *([f"--engine-block-tokens={block_tokens}"] if block_tokens else []),
        *([f"--host-unit-tokens={pool.host_unit_tokens}"] if pool.host_unit_tokens else []),
        *(f"--layer-group={group}" for group in pool.layer_groups),
        f"--label=pool={pool.name}",
        "--label=pod=$(POD_NAME)",
        "--label=node=$(NODE_NAME)",
        # No port: on the host's network it would be the host's. Said, since the kubelet sets the variable of this option where
        # the namespace has a Service servingfleet-relay-metrics.
        "--metrics-port=-1",
        scheduler_argument(fleet),
    ]
    if fleet.secured:
        arguments += [
            f"--scheduler-ca-file={names.IDENTITY_PATH}/ca.crt",
            f"--scheduler-name={names.server_name(fleet.name, fleet.namespace)}",
            f"--token-file={names.IDENTITY_PATH}/token",
        ]
    return [*arguments, f"--log-level={fleet.relay.log_level}"]


def scheduler_argument(fleet: Fleet) -> str:
    """The argument by which a relay is known to be the fleet's."""
    return f"--scheduler={names.relays_endpoint(fleet.name, fleet.namespace)}"


def identity_volume(fleet: Fleet) -> dict[str, Any]:
    """Where the relay finds who it is, and whom to trust."""
    token = {
        "serviceAccountToken": {
            "audience": names.relay_audience(fleet.name, fleet.namespace),
            "expirationSeconds": TOKEN_LIFE_S,
            "path": "token",
        }
    }
    # Optional: a pod must start, and wait for no fleet.
    bundle = {
        "configMap": {
            "name": names.client(fleet.name),
            "optional": True,
            "items": [{"key": "ca.crt", "path": "ca.crt"}],
        }
    }
    sources = [token, bundle] if fleet.secured else [bundle]
    return {"name": names.IDENTITY_VOLUME, "projected": {"sources": sources}}


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
