"""The webhook's entry and what it makes of pods, as a real API server sees both."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from servingfleet_operator import pki
from servingfleet_operator.admission import entry
from servingfleet_operator.injection import image_patch, state
from servingfleet_operator.metrics import Metrics
from servingfleet_operator.observed import Relay
from servingfleet_operator.settings import OperatorSettings
from servingfleet_operator.spec import Fleet, parse
from servingfleet_operator.webhook import Webhook
from tests.cluster.cluster import Cluster, CommandFailed, Object, until

SETTINGS = OperatorSettings(
    instance="ops.servingfleet",
    namespace="ops",
    fullname="servingfleet",
    relay_image="registry.example/relay:1",
    scheduler_image="registry.example/scheduler:1",
    image_pull_secrets=("registry",),
)
OPEN_EVENTS = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
COMPLIANT = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@dataclass
class Answering:
    """A webhook of ours that the API server asks, and the fleets that it knows."""

    cluster: Cluster
    port: int
    bundle: bytes
    fleets: dict[tuple[str, str], Fleet]
    metrics: Metrics

    def configure(self, *fleets: Fleet) -> None:
        """Has the API server ask about exactly these fleets' pods."""
        self.fleets.clear()
        entries = []
        for fleet in fleets:
            self.fleets[fleet.namespace, fleet.name] = fleet
            made = entry(fleet, SETTINGS, self.bundle)
            made["clientConfig"] = {
                "caBundle": made["clientConfig"]["caBundle"],
                "url": f"https://localhost:{self.port}{made['clientConfig']['service']['path']}",
            }
            entries.append(made)
        self.cluster.apply(
            {
                "apiVersion": "admissionregistration.k8s.io/v1",
                "kind": "MutatingWebhookConfiguration",
                "metadata": {"name": "servingfleet-inject-test"},
                "webhooks": entries,
            }
        )

    def await_injection(self, fleet: Fleet) -> None:
        """The API server notices a new configuration within a second or two."""
        labels = dict(fleet.pools[0].selector.match_labels)
        until(
            lambda: relay_of(create(self.cluster, fleet.namespace, labels, dry_run=True)),
            "the webhook to be asked",
        )

    def asked(self, outcome: str) -> float:
        value = self.metrics.registry.get_sample_value(
            "servingfleet_operator_admissions_total", {"outcome": outcome}
        )
        return value or 0.0


@pytest.fixture(scope="module")
def answering(cluster: Cluster) -> Iterator[Answering]:
    cluster.machinery()
    plan = pki.plan(None, None, ["localhost"], "webhook", datetime.now(UTC))
    fleets: dict[tuple[str, str], Fleet] = {}
    metrics = Metrics()
    webhook = Webhook(SETTINGS, lambda *key: fleets.get(key), lambda: (1, 34), metrics)
    webhook.use(plan.certificates)
    listening: Future[int] = Future()
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve() -> None:
        async with webhook.serve("localhost", 0) as port:
            listening.set_result(port)
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield Answering(cluster, listening.result(30), plan.certificates.ca_bundle, fleets, metrics)
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()
        with warnings.catch_warnings():
            # The API server closes its end of our connections only when it has noticed.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        cluster.kubectl(
            *("delete", "mutatingwebhookconfiguration", "servingfleet-inject-test"),
            "--ignore-not-found",
        )


@pytest.fixture
def fleet(answering: Answering, namespace: str) -> Fleet:
    made = fleet_of(namespace, {"name": "main", "selector": {"matchLabels": {"app": "vllm"}}})
    answering.configure(made)
    answering.await_injection(made)
    return made


def fleet_of(namespace: str, *pools: Object, **spec: Any) -> Fleet:
    metadata = {"name": "demo", "namespace": namespace, "uid": "u-1", "generation": 1}
    return parse(
        {"metadata": metadata, "spec": {"model": {"name": "m"}, "pools": list(pools), **spec}}
    )


def create(
    cluster: Cluster,
    namespace: str,
    labels: dict[str, str],
    *,
    dry_run: bool = False,
    name: str = "",
    **spec: Any,
) -> Object:
    """Creates a pod and returns it as it was admitted."""
    container = {
        "name": "engine",
        "image": "registry.example/engine:1",
        "command": ["vllm", "serve", "m"],
        "args": ["--kv-events-config", OPEN_EVENTS],
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": namespace, "labels": labels}
        | ({"name": name} if name else {"generateName": "engine-"}),
        "spec": {"containers": [container], **spec},
    }
    dry = ["--dry-run=server"] if dry_run else []
    made = cluster.kubectl("create", *dry, "-o", "json", "-f", "-", stdin=json.dumps(pod))
    return dict(json.loads(made))


def relay_of(pod: Object) -> Object | None:
    return next(
        (
            each
            for each in pod["spec"].get("initContainers", [])
            if each["name"] == "servingfleet-relay"
        ),
        None,
    )


def test_a_pod_of_a_pool_gets_a_sidecar_that_is_as_it_was_meant(
    cluster: Cluster, fleet: Fleet
) -> None:
    init = [{"name": "download", "image": "registry.example/download:1"}]
    pod = create(cluster, fleet.namespace, {"app": "vllm"}, initContainers=init)
    assert [each["name"] for each in pod["spec"]["initContainers"]] == [
        "download",
        "servingfleet-relay",
    ]
    assert pod["spec"]["initContainers"][1]["restartPolicy"] == "Always"
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    # What the API server filled in is no difference.
    assert state(pod, fleet, fleet.pools[0], SETTINGS).state == Relay.INJECTED


def test_the_relay_gets_no_token_for_the_api_though_the_engine_does(
    cluster: Cluster, fleet: Fleet
) -> None:
    pod = create(cluster, fleet.namespace, {"app": "vllm"})
    [engine], relay = pod["spec"]["containers"], relay_of(pod)
    assert relay is not None
    path = "/var/run/secrets/kubernetes.io/serviceaccount"
    volumes = {each["mountPath"]: each["name"] for each in relay["volumeMounts"]}
    assert volumes == {
        "/var/run/servingfleet": "servingfleet-identity",
        path: "servingfleet-identity",
    }
    [token] = [each["name"] for each in engine["volumeMounts"] if each["mountPath"] == path]
    assert token.startswith("kube-api-access")


def test_a_compliant_pod_stays_admitted_where_only_restricted_ones_are(
    cluster: Cluster, fleet: Fleet
) -> None:
    cluster.kubectl(
        "label", "namespace", fleet.namespace, "pod-security.kubernetes.io/enforce=restricted"
    )
    container = {"name": "engine", "image": "e", "securityContext": COMPLIANT}
    pod = create(cluster, fleet.namespace, {"app": "vllm"}, containers=[container])
    assert relay_of(pod)
    with pytest.raises(CommandFailed, match="restricted"):
        create(cluster, fleet.namespace, {"app": "vllm"})


def test_a_guaranteed_pod_stays_guaranteed(cluster: Cluster, fleet: Fleet) -> None:
    limits = {"cpu": "8", "memory": "64Gi"}
    container = {"name": "engine", "image": "e", "resources": {"limits": limits}}
    pod = create(cluster, fleet.namespace, {"app": "vllm"}, containers=[container])
    assert relay_of(pod)
    assert pod["status"]["qosClass"] == "Guaranteed"


def test_a_pod_with_resources_as_a_whole_is_admitted(cluster: Cluster, fleet: Fleet) -> None:
    whole = {"limits": {"cpu": "8", "memory": "64Gi"}, "requests": {"cpu": "8", "memory": "64Gi"}}
    container = {"name": "engine", "image": "e", "resources": whole}
    pod = create(cluster, fleet.namespace, {"app": "vllm"}, containers=[container], resources=whole)
    assert relay_of(pod)
    assert pod["status"]["qosClass"] == "Guaranteed"


def test_the_webhook_is_not_asked_about_others(
    cluster: Cluster, fleet: Fleet, answering: Answering
) -> None:
    before = answering.metrics.text()
    opted_out = {"app": "vllm", "servingfleet.dev/inject": "false"}
    for labels in ({"app": "other"}, {}, opted_out):
        assert relay_of(create(cluster, fleet.namespace, labels)) is None
    assert relay_of(create(cluster, "default", {"app": "vllm"}, dry_run=True)) is None
    ready = create(
        cluster,
        fleet.namespace,
        {"app": "vllm"},
        initContainers=[{"name": "servingfleet-relay", "image": "mine"}],
    )
    assert [each["image"] for each in ready["spec"]["initContainers"]] == ["mine"]
    assert answering.metrics.text() == before
    cluster.kubectl("label", "namespace", fleet.namespace, "servingfleet.dev/inject=false")
    until(
        lambda: relay_of(create(cluster, fleet.namespace, {"app": "vllm"}, dry_run=True)) is None,
        "the namespace to be left alone",
    )


def test_pools_are_alternatives(cluster: Cluster, namespace: str, answering: Answering) -> None:
    both = {"app": "vllm"}
    made = fleet_of(
        namespace,
        {"name": "a", "selector": {"matchLabels": {**both, "role": "a"}}},
        {
            "name": "b",
            "selector": {
                "matchLabels": both,
                "matchExpressions": [
                    {"key": "role", "operator": "NotIn", "values": ["a", "c"]},
                    {"key": "off", "operator": "DoesNotExist"},
                ],
            },
        },
    )
    answering.configure(made)
    answering.await_injection(made)
    for labels, pool in (
        ({**both, "role": "a"}, "a"),
        ({**both, "role": "b"}, "b"),
        (both, "b"),
        ({**both, "role": "c"}, None),
        ({**both, "off": "x"}, None),
        ({"role": "a"}, None),
    ):
        relay = relay_of(create(cluster, namespace, labels))
        assert (f"--label=pool={pool}" in relay["args"] if relay else None) == (pool and True)


@pytest.mark.parametrize("expressions", [0, 16])
def test_entries_of_the_largest_fleets_are_accepted_and_work(
    cluster: Cluster, namespace: str, answering: Answering, expressions: int
) -> None:
    pools = [
        {
            "name": f"pool-{number}",
            "selector": {
                "matchLabels": {"example.com/pool": f"value-{number}"},
                "matchExpressions": [
                    {
                        "key": f"example.com/key-{key}",
                        "operator": "NotIn",
                        "values": [f"{'v' * 60}{value}" for value in range(64)],
                    }
                    for key in range(expressions)
                ][number % 16 :],
            },
        }
        for number in range(32)
    ]
    made = fleet_of(namespace, *pools)
    answering.configure(made)
    answering.await_injection(made)
    assert relay_of(create(cluster, namespace, {"example.com/pool": "value-31"}))
    assert relay_of(create(cluster, namespace, {"example.com/pool": "other"})) is None


def test_a_webhook_that_is_away_keeps_no_pod_from_starting(
    cluster: Cluster, fleet: Fleet, answering: Answering
) -> None:
    made = entry(fleet, SETTINGS, answering.bundle)
    made["clientConfig"] = {
        "caBundle": made["clientConfig"]["caBundle"],
        # Nobody listens on the discard port.
        "url": "https://localhost:9/inject",
    }
    name = "servingfleet-inject-test"
    patch = json.dumps({"webhooks": [made]})
    cluster.kubectl("patch", "mutatingwebhookconfiguration", name, "--type=merge", "-p", patch)

    def missing() -> Object | None:
        pod = create(cluster, fleet.namespace, {"app": "vllm"})
        return None if relay_of(pod) else pod

    missed = until(missing, "a pod that the webhook missed")
    found = state(missed, fleet, fleet.pools[0], SETTINGS)
    assert found.state == Relay.NOT_INJECTED


def test_a_dry_run_is_answered_as_any_other_creation(
    cluster: Cluster, fleet: Fleet, answering: Answering
) -> None:
    before = answering.asked("Injected")
    assert relay_of(create(cluster, fleet.namespace, {"app": "vllm"}, dry_run=True))
    assert answering.asked("Injected") == before + 1


def test_the_relay_of_a_pod_can_be_replaced_in_place(cluster: Cluster, fleet: Fleet) -> None:
    create(cluster, fleet.namespace, {"app": "vllm"}, name="engine")
    newer = OperatorSettings(
        instance="ops.servingfleet",
        namespace="ops",
        fullname="servingfleet",
        relay_image="registry.example/relay:2",
        scheduler_image="registry.example/scheduler:1",
    )
    pool = {"name": "main", "selector": {"matchLabels": {"app": "vllm"}}}
    wanted = fleet_of(fleet.namespace, pool, relay={"inPlaceUpgrade": True})
    pod = cluster.get("pod", "engine", "-n", fleet.namespace)
    assert state(pod, wanted, wanted.pools[0], newer).state == Relay.OUTDATED
    patch = json.dumps(image_patch(pod, wanted, newer))
    cluster.kubectl("patch", "pod", "engine", "-n", fleet.namespace, "-p", patch)
    pod = cluster.get("pod", "engine", "-n", fleet.namespace)
    assert state(pod, wanted, wanted.pools[0], newer).state == Relay.INJECTED
