"""The operator and real schedulers: it comes to trust them, asks them with a token of its own, and tells what they say.

No kubelet is here: the scheduler's pod is said to be ready, at a loopback address where a scheduler of this machine runs with
what the pod would have mounted and with the rights of its account.
"""

from __future__ import annotations

import base64
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from servingfleet_protos.v1 import stream_pb2, stream_pb2_grpc
from tests.cluster.cluster import Cluster, Object, until
from tests.cluster.operators import (
    Operators,
    Replica,
    account_kubeconfig,
    await_condition,
    condition,
    fleet,
)
from tests.unit.scheduler.helpers import hello

MOUNTS = {
    "/etc/servingfleet/config": ("configmap", "demo-scheduler"),
    "/etc/servingfleet/decision-key": ("secret", "demo-decision-key"),
    "/etc/servingfleet/tls": ("secret", "demo-tls"),
}


@dataclass
class Scheduler:
    """A scheduler process in the place of the one pod of fleet `demo`."""

    cluster: Cluster
    namespace: str
    folder: Path
    address: str
    process: subprocess.Popen[bytes] | None = None

    def pod(self) -> Object:
        """The pod that it stands for, as its controllers made it."""

        def only() -> Object | None:
            selector = "app.kubernetes.io/name=servingfleet-scheduler"
            found = self.cluster.get("pod", "-n", self.namespace, "-l", selector)["items"]
            alive = [each for each in found if "deletionTimestamp" not in each["metadata"]]
            return alive[0] if len(alive) == 1 else None

        return until(only, "one scheduler pod")

    def start(self) -> None:
        """Starts the process with the pod's own arguments."""
        [container] = self.pod()["spec"]["containers"]
        arguments = [
            self._here(each.replace("$(POD_IP)", self.address).replace("[::]", self.address))
            for each in container["args"]
        ]
        kubeconfig = self.folder / "scheduler.kubeconfig"
        account_kubeconfig(self.cluster, self.namespace, "demo-scheduler", kubeconfig)
        with (self.folder / "scheduler.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "servingfleet_scheduler"),
                    *arguments,
                    f"--http-host={self.address}",
                ],
                env={"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def say_ready(self, *, ready: bool = True) -> None:
        """Says of the pod what a kubelet would."""
        status = {
            "phase": "Running",
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "conditions": [
                {"type": kind, "status": "True" if ready else "False"}
                for kind in ("Ready", "ContainersReady", "Initialized", "PodScheduled")
            ],
        }
        self.cluster.kubectl(
            *("patch", "pod", self.pod()["metadata"]["name"], "-n", self.namespace),
            *("--subresource=status", "--type=merge", "-p", json.dumps({"status": status})),
        )

    def end(self) -> None:
        """Ends the process, without notice."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def _here(self, argument: str) -> str:
        """The argument with what the pod would have mounted lying in a folder of this machine."""
        for path, (kind, name) in MOUNTS.items():
            if path not in argument:
                continue
            folder = self.folder / name
            folder.mkdir(exist_ok=True)
            data = self.cluster.get(kind, name, "-n", self.namespace)["data"]
            for key, value in data.items():
                plain = base64.b64decode(value) if kind == "secret" else value.encode()
                (folder / key).write_bytes(plain)
            return argument.replace(path, str(folder))
        return argument


@pytest.fixture
def scheduler(
    cluster: Cluster, namespace: str, operator: Replica, tmp_path: Path
) -> Iterator[Scheduler]:
    """Of a fleet with one scheduler, which does not run yet."""
    if cluster.nodes:
        pytest.skip("pods run here: the scheduler's own would be in the way")
    cluster.apply(fleet(namespace, scheduler={"replicas": 1}))
    await_condition(cluster, namespace, "Reconciled", "True")
    octets = [random.randrange(1, 255) for _ in range(3)]
    made = Scheduler(cluster, namespace, tmp_path, "127.{}.{}.{}".format(*octets))
    yield made
    made.end()


def entries(cluster: Cluster, operators: Operators, namespace: str) -> list[Object]:
    """The fleet's entries in the webhook configuration."""
    name = f"{operators.fullname}-inject"
    found = cluster.get("mutatingwebhookconfiguration", name).get("webhooks") or []
    return [each for each in found if each["name"].startswith(f"demo.{namespace}.")]


def engine(namespace: str, name: str, *arguments: str, labels: Any = None) -> Object:
    """An engine's pod of fleet `demo`, made before the fleet could be asked."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app": "demo", **(labels or {})},
        },
        "spec": {
            "containers": [
                {
                    "name": "engine",
                    "image": "vllm/vllm-openai:v0.32.0",
                    "command": ["vllm", "serve", "m", *arguments],
                }
            ]
        },
    }


def test_a_fleet_is_ready_once_its_scheduler_answers_the_operator(
    cluster: Cluster, namespace: str, scheduler: Scheduler
) -> None:
    assert condition(cluster, namespace, "Ready")["status"] == "False"
    scheduler.start()
    scheduler.say_ready()
    await_condition(cluster, namespace, "SchedulerAvailable", "True")
    found = await_condition(cluster, namespace, "Ready", "True")
    assert found["reason"] == "SchedulerAnswers"
    status = cluster.get("servingfleet", "demo", "-n", namespace)["status"]
    assert status["scheduler"]["ready"] == "1/1"
    assert condition(cluster, namespace, "MeasurementJoined")["reason"] == "NoRequests"


def test_a_scheduler_that_stops_answering_is_told(
    cluster: Cluster, namespace: str, scheduler: Scheduler
) -> None:
    scheduler.start()
    scheduler.say_ready()
    await_condition(cluster, namespace, "Ready", "True")
    scheduler.end()
    found = await_condition(cluster, namespace, "Ready", "False")
    assert found["reason"] == "SchedulerNotAnswering"
    assert scheduler.pod()["metadata"]["name"] in found["message"]
    scheduler.start()
    await_condition(cluster, namespace, "Ready", "True")


def test_pods_are_sent_to_the_webhook_only_once_the_scheduler_has_run(
    cluster: Cluster, namespace: str, operators: Operators, scheduler: Scheduler
) -> None:
    assert entries(cluster, operators, namespace) == []
    scheduler.say_ready()
    [entry] = until(lambda: entries(cluster, operators, namespace), "the fleet's entry", 15.0)
    assert entry["failurePolicy"] == "Ignore"
    assert entry["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": namespace}
    # What was proven stays so: a scheduler that is away for a moment says nothing of the relay's image.
    scheduler.say_ready(ready=False)
    await_condition(cluster, namespace, "SchedulerAvailable", "False")
    assert entries(cluster, operators, namespace)
    cluster.apply(fleet(namespace, scheduler={"replicas": 1}, relay={"inject": False}))
    until(lambda: not entries(cluster, operators, namespace), "the entry to go", 15.0)


def test_the_entry_outlives_the_operator_and_goes_with_the_fleet(
    cluster: Cluster, namespace: str, operators: Operators, scheduler: Scheduler
) -> None:
    scheduler.say_ready()
    until(lambda: entries(cluster, operators, namespace), "the fleet's entry", 15.0)
    operators.clear()
    assert entries(cluster, operators, namespace)
    operators.start_leading()
    await_condition(cluster, namespace, "Reconciled", "True")
    assert entries(cluster, operators, namespace)
    cluster.kubectl("delete", "servingfleet", "demo", "-n", namespace)
    until(lambda: not entries(cluster, operators, namespace), "the entry to go", 15.0)


def test_an_engine_that_has_no_relay_and_publishes_nothing_is_told_with_the_remedy(
    cluster: Cluster, namespace: str, scheduler: Scheduler
) -> None:
    cluster.apply(engine(namespace, "early"))
    found = await_condition(cluster, namespace, "RelaysInjected", "False")
    assert found["reason"] == "NotInjected"
    assert "early" in found["message"]
    told = await_condition(cluster, namespace, "EnginesConfigured", "False")
    assert "--kv-events-config" in told["message"]
    [replica] = cluster.get("servingfleet", "demo", "-n", namespace)["status"]["replicas"]
    assert replica["name"] == "early"
    cluster.kubectl("label", "pod", "early", "-n", namespace, "servingfleet.dev/inject=false")
    await_condition(cluster, namespace, "RelaysInjected", "True")
    cluster.kubectl("delete", "pod", "early", "-n", namespace, "--force", "--grace-period=0")
    await_condition(cluster, namespace, "RelaysInjected", "Unknown")


def test_ports_that_stand_open_are_closed_by_a_policy_and_told_until_then(
    cluster: Cluster, namespace: str, scheduler: Scheduler
) -> None:
    events = json.dumps(
        {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}
    )
    cluster.apply(engine(namespace, "open", f"--kv-events-config={events}"))
    policy = until(
        lambda: cluster.get("networkpolicy", "demo-engines-pool", "-n", namespace),
        "the policy that closes the event port",
        15.0,
    )
    allowed = [
        (port["port"], port["endPort"])
        for port in policy["spec"]["ingress"][0]["ports"]
        if port["protocol"] == "TCP"
    ]
    assert not any(first <= 5557 <= last for first, last in allowed)
    await_condition(cluster, namespace, "EventsExposed", "False")


def test_two_fleets_that_select_the_same_pods_both_say_so(
    cluster: Cluster, namespace: str, scheduler: Scheduler
) -> None:
    cluster.apply(engine(namespace, "shared"))
    pools = [{"name": "mine", "selector": {"matchLabels": {"app": "demo"}}}]
    cluster.apply(fleet(namespace, "other", pools=pools))
    found = await_condition(cluster, namespace, "PoolsDisjoint", "False")
    assert "fleet other" in found["message"]
    await_condition(cluster, namespace, "PoolsDisjoint", "False", "other")
    cluster.kubectl("delete", "servingfleet", "other", "-n", namespace)
    await_condition(cluster, namespace, "PoolsDisjoint", "True")


def test_the_operator_that_leads_next_keeps_asking(
    cluster: Cluster, namespace: str, operators: Operators, operator: Replica, scheduler: Scheduler
) -> None:
    scheduler.start()
    scheduler.say_ready()
    await_condition(cluster, namespace, "Ready", "True")
    second = operators.start()
    operator.end(signal.SIGTERM)
    until(second.leads, "the second to lead", 15.0)
    scheduler.end()
    found = await_condition(cluster, namespace, "Ready", "False")
    assert found["reason"] == "SchedulerNotAnswering"


@contextmanager
def relay(scheduler: Scheduler, pod: str) -> Iterator[None]:
    """A relay's stream in the name of a pod, with the token that the pod would have."""
    cluster, namespace = scheduler.cluster, scheduler.namespace
    token = cluster.kubectl(
        *("create", "token", "default", "-n", namespace),
        *("--audience", f"servingfleet.dev/{namespace}/demo/relay"),
        *("--bound-object-kind=Pod", f"--bound-object-name={pod}"),
    )
    uid = cluster.get("pod", pod, "-n", namespace)["metadata"]["uid"]
    authority = cluster.get("configmap", "demo-client", "-n", namespace)["data"]["ca.crt"]
    over = threading.Event()

    def messages() -> Iterator[stream_pb2.RelayMessage]:
        yield stream_pb2.RelayMessage(hello=hello(uid, model="m"))
        over.wait()

    with grpc.secure_channel(
        f"{scheduler.address}:7070",
        grpc.ssl_channel_credentials(authority.encode()),
        [("grpc.ssl_target_name_override", f"demo-scheduler.{namespace}.svc")],
    ) as channel:
        call = stream_pb2_grpc.RelayIntakeStub(channel).Stream(
            messages(), metadata=(("authorization", f"Bearer {token.strip()}"),)
        )
        assert next(call).HasField("welcome")
        try:
            yield
        finally:
            over.set()
            call.cancel()


def test_a_pod_that_is_marked_gets_no_new_requests_until_the_mark_is_gone(
    cluster: Cluster, namespace: str, scheduler: Scheduler
) -> None:
    scheduler.start()
    scheduler.say_ready()
    cluster.apply(engine(namespace, "marked"))
    await_condition(cluster, namespace, "Ready", "True")

    def drained() -> bool:
        status = cluster.get("servingfleet", "demo", "-n", namespace)["status"]
        [replica] = status["replicas"]
        return "drained by operator" in replica.get("stateReason", "")

    mark = ("annotate", "pod", "marked", "-n", namespace)
    with relay(scheduler, "marked"):
        cluster.kubectl(*mark, "servingfleet.dev/drain=true")
        until(drained, "the mark to be seen")
        cluster.kubectl(*mark, "servingfleet.dev/drain-")
        until(lambda: not drained(), "the mark to be seen gone")
