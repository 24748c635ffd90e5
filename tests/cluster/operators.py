"""The operator as processes of this machine, with the rights that the chart gives its pods and no others.

No pod is needed: what it does to the objects of a cluster can be seen on a control plane alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client
from prometheus_client.parser import text_string_to_metric_families

from .cluster import Cluster, Object, temporary_namespace, until

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "servingfleet"
CRDS = ROOT / "crds"
PREFIX = "servingfleet_operator_"

RELAY_IMAGE = "registry.example.com/servingfleet/relay:1"
SCHEDULER_IMAGE = "registry.example.com/servingfleet/scheduler:1"

END_S = 20.0
"""A replica that is told to stop has ended by then."""


@dataclass
class Replica:
    """One running process of the operator."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def ports(self) -> tuple[int, int]:
        """Of HTTP and of the webhook; (0, 0) while it starts."""
        for line in self.lines():
            if line.get("event") == "listening":
                return line["http_port"], line["webhook_port"]
        if self.process.poll() is not None:
            raise RuntimeError(f"the operator ended at once:\n{self.log.read_text()}")
        return 0, 0

    def lines(self) -> list[dict[str, Any]]:
        """What it has logged."""
        found = []
        for line in self.log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def said(self, event: str) -> list[dict[str, Any]]:
        """The log lines of that event."""
        return [line for line in self.lines() if line.get("event") == event]

    def probe(self, path: str) -> tuple[int, str]:
        """Status and text of /healthz, /readyz or /metrics; (0, reason) where nobody answers."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.ports[0]}{path}", timeout=3
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def metrics(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Its samples, by name without prefix and by label values in the order of their names."""
        status, text = self.probe("/metrics")
        assert status == 200, text
        return {
            (
                sample.name.removeprefix(PREFIX),
                tuple(value for _, value in sorted(sample.labels.items())),
            ): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def rights_lacking(self) -> dict[tuple[str, ...], float]:
        """Requests that the API server refused for lack of a right: resource and verb, or as the watches count them."""
        return {
            labels: value
            for (name, labels), value in self.metrics().items()
            if name == "api_rights_lacking_total"
            or (name == "watch_requests_total" and labels[0] == "403")
        }

    def leads(self) -> bool:
        """It is the one that writes."""
        return self.metrics()["leading", ()] == 1

    def writes(self) -> float:
        """Objects that it has sent by server-side apply so far."""
        return sum(value for (name, _), value in self.metrics().items() if name == "applies_total")

    def requests(self) -> dict[tuple[str, str], float]:
        """Requests to the API server so far, by verb and kind."""
        counted: dict[tuple[str, str], float] = {}
        for (name, labels), value in self.metrics().items():
            if name == "api_requests_total":
                _code, resource, verb = labels
                counted[verb, resource] = counted.get((verb, resource), 0) + value
        return counted

    def tell(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends it by the signal, and returns its exit status."""
        self.tell(number)
        if number == signal.SIGKILL:
            self.tell(signal.SIGCONT)
        return self.process.wait(END_S)


@dataclass
class Operators:
    """An installed release, and the replicas that were started for it."""

    cluster: Cluster
    name: str
    namespace: str
    folder: Path
    replicas: list[Replica] = field(default_factory=list)

    @property
    def fullname(self) -> str:
        """Prefix of the release's objects."""
        return f"{self.name}-servingfleet"

    def start(self, *arguments: str) -> Replica:
        """Starts a replica, which may or may not come to lead."""
        self.folder.mkdir(exist_ok=True)
        log = self.folder / f"operator-{len(self.replicas)}-{secrets.token_hex(2)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "servingfleet_operator"),
                    f"--instance={self.namespace}.{self.name}",
                    f"--namespace={self.namespace}",
                    f"--fullname={self.fullname}",
                    f"--relay-image={RELAY_IMAGE}",
                    f"--scheduler-image={SCHEDULER_IMAGE}",
                    *("--webhook-host=127.0.0.1", "--webhook-port=0"),
                    *("--http-host=127.0.0.1", "--http-port=0"),
                    f"--crd-dir={CRDS}",
                    *arguments,
                ],
                env={**os.environ, "KUBECONFIG": str(self._kubeconfig())},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        replica = Replica(process, log)
        self.replicas.append(replica)
        until(lambda: replica.ports[0], "the operator to listen")
        return replica

    def start_leading(self, *arguments: str) -> Replica:
        """Starts a replica and waits until it leads."""
        replica = self.start(*arguments)
        until(replica.leads, "the operator to lead")
        return replica

    def clear(self) -> None:
        """Ends what still runs, and its lease, so that the next replica need not wait for that."""
        for replica in self.replicas:
            if replica.process.poll() is None:
                replica.end(signal.SIGKILL)
        self.replicas.clear()
        self.cluster.kubectl(
            *("delete", "lease", self.fullname, "-n", self.namespace, "--ignore-not-found")
        )

    def _kubeconfig(self) -> Path:
        path = self.folder / "operator.kubeconfig"
        if not path.exists():
            account_kubeconfig(self.cluster, self.namespace, self.fullname, path)
        return path


def account_kubeconfig(cluster: Cluster, namespace: str, account: str, path: Path) -> None:
    """Writes a kubeconfig with a token of that ServiceAccount."""
    request = client.AuthenticationV1TokenRequest(
        spec=client.V1TokenRequestSpec(audiences=[], expiration_seconds=86_400)
    )
    answer = client.CoreV1Api(cluster.api).create_namespaced_service_account_token(
        account, namespace, request
    )
    assert answer.status is not None
    given = yaml.safe_load(cluster.kubeconfig.read_text())
    [context] = [each for each in given["contexts"] if each["name"] == given["current-context"]]
    [server] = [each for each in given["clusters"] if each["name"] == context["context"]["cluster"]]
    path.touch(0o600)
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [server],
                "users": [{"name": account, "user": {"token": answer.status.token}}],
                "contexts": [
                    {"name": account, "context": {"cluster": server["name"], "user": account}}
                ],
                "current-context": account,
            }
        )
    )


@contextlib.contextmanager
def installed(cluster: Cluster, folder: Path, **values: Any) -> Iterator[Operators]:
    """The chart, installed for the length of the block, without anything that runs."""
    name = f"op{secrets.token_hex(2)}"
    # What its pods would do is done by processes here.
    values = {"replicas": 1, "podDisruptionBudget": {"enabled": False}, **values}
    with temporary_namespace(cluster, f"operators-{secrets.token_hex(2)}") as namespace:
        cluster.helm(
            *("install", name, str(CHART), "--namespace", namespace, "--values", "-"),
            stdin=yaml.safe_dump(values),
        )
        # On a cluster with nodes they would take part in the election.
        cluster.kubectl("scale", f"deployment/{name}-servingfleet", "--replicas=0", "-n", namespace)
        operators = Operators(cluster, name, namespace, folder)
        try:
            yield operators
        finally:
            operators.clear()
            cluster.helm("uninstall", name, "--namespace", namespace)


def fleet(namespace: str, name: str = "demo", **spec: Any) -> Object:
    """A ServingFleet of one pool, whose pods are labelled `app: NAME`."""
    return {
        "apiVersion": "servingfleet.dev/v1alpha1",
        "kind": "ServingFleet",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"name": "m"},
            "pools": [{"name": "pool", "selector": {"matchLabels": {"app": name}}}],
            **spec,
        },
    }


def condition(cluster: Cluster, namespace: str, kind: str, name: str = "demo") -> Object:
    """A condition of the fleet; {} while there is none."""
    found = cluster.get("servingfleet", name, "-n", namespace)
    conditions = (found.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == kind), {})


def await_condition(
    cluster: Cluster, namespace: str, kind: str, status: str, name: str = "demo"
) -> Object:
    """Waits until the condition has that status for the spec as it stands, and returns it."""

    def probe() -> Object | None:
        generation = cluster.get("servingfleet", name, "-n", namespace)["metadata"]["generation"]
        found = condition(cluster, namespace, kind, name)
        current = found.get("observedGeneration") == generation
        return found if current and found["status"] == status else None

    return until(probe, f"condition {kind}={status} of fleet {name}")
