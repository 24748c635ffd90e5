"""A fleet on a cluster with nodes: emulated engines, a ServingFleet, and clients in pods."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .cluster import Cluster, Object, until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = (EXAMPLES / "client" / "ask.py", Path(__file__).with_name("gateway.py"))

MODEL = "qwen3-8b"
PRIVATE_EVENTS: Object = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://127.0.0.1:5557",
    "replay_endpoint": "tcp://127.0.0.1:5657",
}
"""The engine connects to its relay on the pod's own loopback."""
OPEN_EVENTS: Object = {
    **PRIVATE_EVENTS,
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:5657",
}
"""The engine binds to every address, and the relay connects."""
RESTRICTED: Object = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
SMALL: Object = {
    "scheduler": {"resources": {"requests": {"cpu": "100m"}}},
    "relay": {"resources": {"cpu": "200m"}},
}
"""Whole fleets, and what is still ending of the one before, fit on one machine of two cores."""
CHANGE_S = 90.0
"""Until the status shows what has changed. A scheduler is asked every 15 s."""


@dataclass
class Fleet:
    """A ServingFleet in a namespace of its own."""

    cluster: Cluster
    namespace: str
    images: Mapping[str, str]
    name: str = "chat"
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    # Making it

    def create(self, pools: Sequence[Object] = (), **spec: Any) -> None:
        """Applies the fleet. One pool, of the pods labelled app=vllm, unless told otherwise."""
        pool = {"name": "vllm", "selector": {"matchLabels": {"app": "vllm"}}}
        self.cluster.apply(
            {
                "apiVersion": "servingfleet.dev/v1alpha1",
                "kind": "ServingFleet",
                "metadata": {"name": self.name, "namespace": self.namespace},
                "spec": {
                    "model": {"name": MODEL},
                    "pools": list(pools) or [pool],
                    # Two cores are shared by all.
                    "relay": {"resources": {"cpu": "100m"}},
                    **spec,
                },
            }
        )

    def create_engines(
        self,
        name: str = "vllm",
        replicas: int = 2,
        events: Object | None = PRIVATE_EVENTS,
        arguments: Sequence[str] = (),
    ) -> None:
        """Applies a Deployment of emulated engines, told what a real one would be told."""
        command = ["vllm", "serve", "Qwen/Qwen3-8B", f"--served-model-name={MODEL}"]
        command += ["--enable-prefix-caching", "--enable-prompt-tokens-details", *arguments]
        if events is not None:
            command.append(f"--kv-events-config={json.dumps(events)}")
        container = {
            "name": "engine",
            "image": self.images["emulator"],
            "command": command,
            "ports": [{"name": "http", "containerPort": 8000}],
            "readinessProbe": {
                "httpGet": {"path": "/health", "port": "http"},
                "periodSeconds": 1,
                "failureThreshold": 60,
            },
            "securityContext": RESTRICTED,
        }
        self.cluster.apply(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": name, "namespace": self.namespace},
                "spec": {
                    "replicas": replicas,
                    "selector": {"matchLabels": {"app": name}},
                    "template": {
                        "metadata": {"labels": {"app": name}},
                        "spec": {"containers": [container], "terminationGracePeriodSeconds": 5},
                    },
                },
            }
        )

    def apply(self, *objects: Object) -> None:
        """Applies objects that name no namespace in the fleet's."""
        for each in objects:
            each["metadata"]["namespace"] = self.namespace
        self.cluster.apply(*objects)

    def rendered(self, folder: Path) -> list[Object]:
        """What kustomize makes of a folder."""
        return list(yaml.safe_load_all(self.cluster.kubectl("kustomize", str(folder))))

    # Seeing it

    def status(self) -> Object:
        """`.status`; {} before the operator has written one."""
        status = self.cluster.get("servingfleet", self.name, "-n", self.namespace).get("status", {})
        assert isinstance(status, dict)
        return status

    def condition(self, kind: str) -> Object:
        """The condition of that type; {} where there is none."""
        found = [c for c in self.status().get("conditions", ()) if c["type"] == kind]
        return found[0] if found else {}

    def await_condition(self, kind: str, status: str, reason: str = "") -> Object:
        """Waits for a condition, and returns it."""

        def reached() -> Object:
            found = self.condition(kind)
            assert found.get("status") == status, found
            assert reason in ("", found["reason"]), found
            return found

        return until(reached, f"{kind}={status} {reason}", CHANGE_S)

    def await_live(self, replicas: int) -> None:
        """Waits until that many replicas are known, and the streams of all are unbroken."""

        def live() -> bool:
            seen = self.status().get("summary", {}).get("live")
            assert seen == f"{replicas}/{replicas}", f"{seen}\n{self._scene()}"
            return True

        until(live, f"{replicas} live replicas", CHANGE_S)

    def _scene(self) -> str:
        """What a person would look at when it takes too long."""
        where = ("-n", self.namespace)
        pods = self.cluster.kubectl("get", "pods", *where, "-o", "wide")
        events = self.cluster.kubectl("events", *where, "--types=Warning")
        return f"{self.status().get('replicas')}\n{pods}{events}"

    def await_schedulers(self, ready: str = "2/2") -> None:
        """Waits until so many schedulers are ready."""
        until(
            lambda: self.status().get("scheduler", {}).get("ready") == ready,
            f"{ready} schedulers",
            CHANGE_S,
        )

    def await_gone(self, kind: str, name: str) -> None:
        """Waits until the object is no more."""
        arguments = ("get", kind, name, "-n", self.namespace, "--ignore-not-found", "-o", "name")
        until(lambda: not self.cluster.kubectl(*arguments), f"the end of {kind} {name}", CHANGE_S)

    def pods(self, app: str = "vllm") -> list[Object]:
        """The pods of that app that are not being deleted."""
        items = self.cluster.get("pods", "-n", self.namespace, "-l", f"app={app}")["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def schedulers(self) -> list[Object]:
        """The scheduler's pods that are not being deleted."""
        label = "app.kubernetes.io/name=servingfleet-scheduler"
        items = self.cluster.get("pods", "-n", self.namespace, "-l", label)["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    # Using it

    def allow_clients(self) -> None:
        """Makes the account of the clients, and binds it to the fleet's Role."""
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "gateway", "namespace": self.namespace},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "Role",
                "name": f"{self.name}-client",
            },
            "subjects": [
                {"kind": "ServiceAccount", "name": "gateway", "namespace": self.namespace}
            ],
        }
        self.cluster.apply(
            *(_account(name, self.namespace) for name in ("gateway", "stranger")),
            binding,
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "gateway", "namespace": self.namespace},
                "data": {script.name: script.read_text() for script in SCRIPTS},
            },
        )

    def start_client(self, *arguments: str, account: str = "gateway", audience: str = "") -> Client:
        """Starts a pod of users and their gateway, with a token of that account."""
        name = f"client-{next(self._numbers)}"
        audience = audience or f"servingfleet.dev/{self.namespace}/{self.name}"
        config = f"{self.name}-client"
        environment = [
            {"name": variable, "valueFrom": {"configMapKeyRef": {"name": config, "key": key}}}
            for variable, key in (("FLEET_ENDPOINT", "endpoint"), ("FLEET_MODEL", "model"))
        ]
        identity = [
            {"serviceAccountToken": {"path": "token", "audience": audience}},
            {"configMap": {"name": config, "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        ]
        self.cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": self.namespace, "labels": {"app": name}},
                "spec": {
                    "serviceAccountName": account,
                    "automountServiceAccountToken": False,
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 1,
                    "containers": [
                        {
                            "name": "gateway",
                            "image": self.images["scheduler"],
                            "command": ["python", "/code/gateway.py", *arguments],
                            "env": environment,
                            "securityContext": RESTRICTED,
                            "volumeMounts": [
                                {"name": "fleet", "mountPath": "/var/run/fleet"},
                                {"name": "code", "mountPath": "/code"},
                            ],
                        }
                    ],
                    "volumes": [
                        {"name": "fleet", "projected": {"sources": identity}},
                        {"name": "code", "configMap": {"name": "gateway"}},
                    ],
                },
            }
        )
        return Client(self, name)

    def play(self, *arguments: str) -> Object:
        """Runs clients to their end, and returns their counts."""
        return self.start_client(*arguments).counts()


@dataclass(frozen=True)
class Client:
    """A pod that asks."""

    fleet: Fleet
    name: str

    def log(self) -> str:
        return self.fleet.cluster.kubectl("logs", self.name, "-n", self.fleet.namespace)

    def await_start(self) -> None:
        """Waits until it asks."""
        until(lambda: '"asking"' in self.log(), f"the start of {self.name}")

    def await_end(self) -> str:
        """Waits until its pod has ended, and returns the phase."""

        def phase() -> str:
            pod = self.fleet.cluster.get("pod", self.name, "-n", self.fleet.namespace)
            assert pod["status"]["phase"] in ("Succeeded", "Failed"), pod["status"]["phase"]
            return str(pod["status"]["phase"])

        return until(phase, f"the end of {self.name}", 180.0)

    def counts(self) -> Object:
        """What came of all requests. Counts that are 0 are left out."""
        phase = self.await_end()
        log = self.log()
        assert phase == "Succeeded", f"{self.name} failed: {log or self._ended()}"
        counts = json.loads(log.splitlines()[-1])
        assert isinstance(counts, dict)
        return counts

    def _ended(self) -> Object:
        status = self.fleet.cluster.get("pod", self.name, "-n", self.fleet.namespace)["status"]
        return dict(status["containerStatuses"][0]["state"])


def without_hardware(manifest: Path, image: str) -> list[Object]:
    """The objects of an example, with emulated engines: no GPU, no disk of weights, another image, and little CPU."""
    objects = [each for each in yaml.safe_load_all(manifest.read_text()) if each]
    for each in objects:
        if each["kind"] == "ServingFleet":
            each["spec"] |= SMALL
        claims = each.get("spec", {}).pop("volumeClaimTemplates", [])
        dropped = {claim["metadata"]["name"] for claim in claims}
        pod = each.get("spec", {}).get("template", {}).get("spec", {})
        for container in pod.get("containers", ()):
            container["image"] = image
            container.pop("resources", None)
            container["volumeMounts"] = _without(container.get("volumeMounts", ()), dropped)
    return objects


def _without(mounts: Iterable[Object], dropped: set[str]) -> list[Object]:
    return [mount for mount in mounts if mount["name"] not in dropped]


def _account(name: str, namespace: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": name, "namespace": namespace},
    }
