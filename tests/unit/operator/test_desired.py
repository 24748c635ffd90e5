from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from kubernetes import client

from servingfleet_operator import names
from servingfleet_operator.desired import children
from servingfleet_operator.images import ImageNotAllowed, relay_image, scheduler_image
from servingfleet_operator.pki import Certificates
from servingfleet_operator.spec import Fleet
from servingfleet_scheduler.__main__ import main as scheduler_command
from servingfleet_scheduler.pools import read_pools
from servingfleet_scheduler.settings import AdmissionTarget

from .pods import SETTINGS, fleet, selector

CERTIFICATES = Certificates(b"ca of the fleet", b"certificate", b"its key")
KEY = bytes(range(32))
PLAIN = {"access": {"transport": "PlainText", "clients": "None"}}
EVERYTHING: dict[str, Any] = {
    "scheduler": {
        "podMonitor": True,
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [
            {"operator": "Exists"},
            {"key": "a", "value": "b", "effect": "NoExecute", "tolerationSeconds": 5},
        ],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "high",
        "resources": {"limits": {"cpu": "2"}},
        "admission": {"targets": [{"priority": -10, "timeToFirstToken": "1h", "queue": "1.5s"}]},
    },
    "access": {"namespaces": ["gateways", "serving"]},
}

FLEETS = pytest.mark.parametrize("spec", [{}, PLAIN, EVERYTHING], ids=["least", "plain", "most"])

_API = {
    ("apps/v1", "Deployment"): client.V1Deployment,
    ("v1", "ConfigMap"): client.V1ConfigMap,
    ("v1", "Secret"): client.V1Secret,
    ("v1", "Service"): client.V1Service,
    ("v1", "ServiceAccount"): client.V1ServiceAccount,
    ("networking.k8s.io/v1", "NetworkPolicy"): client.V1NetworkPolicy,
    ("policy/v1", "PodDisruptionBudget"): client.V1PodDisruptionBudget,
    ("rbac.authorization.k8s.io/v1", "Role"): client.V1Role,
}


def made(target: Fleet, *, pod_monitor: bool = True) -> dict[tuple[str, str], dict[str, Any]]:
    """The children by kind and name."""
    certificates = CERTIFICATES if target.secured else None
    found = children(target, SETTINGS, certificates, KEY, pod_monitor=pod_monitor)
    assert len({(each["kind"], each["metadata"]["name"]) for each in found}) == len(found)
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def pod_of(target: Fleet) -> dict[str, Any]:
    spec: dict[str, Any] = made(target)["Deployment", "demo-scheduler"]["spec"]["template"]["spec"]
    return spec


def arguments(target: Fleet) -> dict[str, str]:
    return dict(each.split("=", 1) for each in pod_of(target)["containers"][0]["args"])


def unknown_fields(value: Any, kind: str, path: str = "") -> Iterator[str]:
    """Fields that the Kubernetes API does not have."""
    inner = re.fullmatch(r"(?:List\[|Dict\[str, )(.*)\]", kind)
    if inner:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from unknown_fields(item, inner[1], f"{path}.{key}")
    elif hasattr(client, kind):
        model = getattr(client, kind)
        types = {model.attribute_map[name]: each for name, each in model.openapi_types.items()}
        for key, item in value.items():
            if key in types:
                yield from unknown_fields(item, types[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"


@FLEETS
def test_every_child_belongs_to_its_fleet_and_to_this_operator(spec: dict[str, Any]) -> None:
    for child in made(fleet(**spec)).values():
        metadata = child["metadata"]
        assert metadata["namespace"] == "serving"
        assert names.is_owned(child, "u-1")
        (owner,) = metadata["ownerReferences"]
        assert owner["blockOwnerDeletion"]
        assert metadata["labels"][names.MANAGED_BY_LABEL] == "servingfleet"
        assert metadata["labels"][names.FLEET_LABEL] == "demo"
        assert metadata["labels"][names.OPERATOR_LABEL] == SETTINGS.instance
        # A reconcile would send these to others' loss: they are the API server's.
        assert not {"managedFields", "uid", "resourceVersion"} & metadata.keys()
        assert "status" not in child


@FLEETS
def test_no_child_has_a_field_that_kubernetes_does_not_know(spec: dict[str, Any]) -> None:
    for child in made(fleet(**spec)).values():
        if child["kind"] == "PodMonitor":
            continue  # not of Kubernetes itself
        kind = _API[child["apiVersion"], child["kind"]].__name__
        assert list(unknown_fields(child, kind)) == []


@FLEETS
def test_equal_specs_give_equal_bytes(spec: dict[str, Any]) -> None:
    assert json.dumps([*made(fleet(**spec)).values()]) == json.dumps(
        [*made(fleet(**spec)).values()]
    )


def test_what_a_pod_mounts_is_applied_before_the_deployment() -> None:
    kinds = [kind for kind, _ in made(fleet())]
    assert kinds.index("Deployment") > max(
        kinds.index(kind) for kind in ("Secret", "ConfigMap", "ServiceAccount", "NetworkPolicy")
    )


@FLEETS
def test_the_scheduler_fits_the_restricted_standard(spec: dict[str, Any]) -> None:
    pod = pod_of(fleet(**spec))
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    # OpenShift gives each namespace its own user ids.
    assert "runAsUser" not in pod["securityContext"] | container["securityContext"]
    assert {next(key for key in volume if key != "name") for volume in pod["volumes"]} <= {
        "configMap",
        "secret",
    }


@FLEETS
def test_the_scheduler_is_started_with_options_that_it_has(spec: dict[str, Any]) -> None:
    options = {name: option for option in scheduler_command.params for name in option.opts}
    for name, value in arguments(fleet(**spec)).items():
        assert name in options, name
        if not value.startswith("/"):
            options[name].type.convert(value, options[name], None)


def test_what_classes_of_requests_are_promised_is_told_as_the_scheduler_reads_it() -> None:
    targets = [
        {"priority": 0, "timeToFirstToken": "2500ms"},
        {"priority": -10, "timeToFirstToken": "300h", "queue": "1.5s"},
    ]
    target = fleet(scheduler={"admission": {"targets": targets}})
    told = [each for each in pod_of(target)["containers"][0]["args"] if "--target=" in each]
    (option,) = (each for each in scheduler_command.params if "--target" in each.opts)
    assert [option.type.convert(each.split("=", 1)[1], option, None) for each in told] == [
        AdmissionTarget(0, 2.5),
        AdmissionTarget(-10, 1_080_000.0, queue_s=1.5),
    ]


def test_a_scheduler_gets_a_token_of_its_own_only_to_ask_who_calls() -> None:
    assert pod_of(fleet())["automountServiceAccountToken"] is True
    assert pod_of(fleet(**PLAIN))["automountServiceAccountToken"] is False
    assert (
        made(fleet())["ServiceAccount", "demo-scheduler"]["automountServiceAccountToken"] is False
    )


def test_with_tls_callers_are_asked_who_they_are() -> None:
    said = arguments(fleet())
    assert said["--auth"] == "kubernetes"
    assert (said["--fleet"], said["--namespace"]) == ("demo", "serving")
    assert said["--audience"] == "servingfleet.dev/serving/demo"
    assert said["--client-auth"] == "token"
    assert said["--scheduler-name"] == "demo-scheduler.serving.svc"
    assert arguments(fleet(access={"clients": "TLSOnly"}))["--client-auth"] == "none"


def test_in_plain_text_nothing_of_tls_is_left() -> None:
    said = arguments(fleet(**PLAIN))
    assert said["--auth"] == "none"
    assert not [name for name in said if name.startswith("--tls")]
    found = made(fleet(**PLAIN))
    assert ("Secret", "demo-tls") not in found
    assert not {"ca.crt", "audience"} & found["ConfigMap", "demo-client"]["data"].keys()


def test_secrets_hold_what_was_given() -> None:
    found = made(fleet())
    tls = found["Secret", "demo-tls"]
    assert tls["type"] == "kubernetes.io/tls"
    assert {key: b64decode(value) for key, value in tls["data"].items()} == {
        "ca.crt": b"ca of the fleet",
        "tls.crt": b"certificate",
        "tls.key": b"its key",
    }
    assert b64decode(found["Secret", "demo-decision-key"]["data"]["key"]) == KEY


def test_a_client_finds_all_that_it_needs_in_one_place() -> None:
    target = fleet(model={"name": "org/model", "tokenizer": "org/model@main"})
    assert made(target)["ConfigMap", "demo-client"]["data"] == {
        "endpoint": "demo-scheduler.serving.svc:7070",
        "model": "org/model",
        "tokenizer": "org/model@main",
        "audience": "servingfleet.dev/serving/demo",
        "ca.crt": "ca of the fleet",
    }


def template(
    target: Fleet, certificates: Certificates = CERTIFICATES, decision_key: bytes = KEY
) -> Any:
    found = children(target, SETTINGS, certificates, decision_key, pod_monitor=False)
    return next(each for each in found if each["kind"] == "Deployment")["spec"]["template"]


def test_a_rotated_certificate_restarts_no_scheduler() -> None:
    assert template(fleet(), Certificates(b"new", b"new", b"new")) == template(fleet())


def test_another_decision_key_restarts_the_schedulers_which_read_it_once() -> None:
    """It is made anew where somebody deleted the Secret."""
    before, after = template(fleet()), template(fleet(), decision_key=KEY[::-1])
    assert before["metadata"]["annotations"] != after["metadata"]["annotations"]


def test_other_speeds_restart_the_schedulers() -> None:
    pool = {"name": "main", "selector": selector(app="vllm")}
    fast = fleet({**pool, "speed": {"prefillTokensPerSecond": 30_000}})
    assert (
        template(fast)["metadata"]["annotations"]
        != template(fleet(pool))["metadata"]["annotations"]
    )


def test_speeds_reach_the_scheduler_in_its_own_units() -> None:
    target = fleet(
        {
            "name": "fast",
            "selector": selector(app="vllm"),
            "speed": {
                "prefillTokensPerSecond": 40_000,
                "bytesPerToken": "128Ki",
                "stepTokens": 2048,
            },
            "tiers": [{"tier": "host", "bandwidth": "40G", "latency": "3ms"}],
        },
        {"name": "plain", "selector": selector(app="other")},
    )
    text = made(target)["ConfigMap", "demo-scheduler"]["data"]["pools.json"]
    assert json.loads(text) == {
        "pools": [
            {
                "name": "fast",
                "prefill_tokens_per_s": 40_000,
                "bytes_per_token": 131_072,
                "step_tokens": 2048,
                "tiers": [{"tier": "host", "bandwidth_bytes_per_s": 4e10, "latency_s": 0.003}],
            }
        ]
    }
    assert list(read_pools(text.encode())) == ["fast"]


def test_only_the_fleets_own_the_operators_and_named_namespaces_reach_the_scheduler() -> None:
    policy = made(fleet(access={"namespaces": ["gateways"]}))["NetworkPolicy", "demo-scheduler"]
    calls, scrapes = policy["spec"]["ingress"]
    assert [each["namespaceSelector"]["matchLabels"] for each in calls["from"]] == [
        {"kubernetes.io/metadata.name": name} for name in ("gateways", "ops", "serving")
    ]
    assert [port["port"] for port in calls["ports"]] == [7070]
    assert "from" not in scrapes
    assert [port["port"] for port in scrapes["ports"]] == [9090]


def test_relays_find_schedulers_that_are_not_ready_yet() -> None:
    service = made(fleet())["Service", "demo-relays"]["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True


def test_every_selector_means_the_scheduler_pods_and_only_those() -> None:
    found = made(fleet(**EVERYTHING))
    wanted = {names.NAME_LABEL: names.SCHEDULER, names.FLEET_LABEL: "demo"}
    labels = template(fleet())["metadata"]["labels"]
    assert wanted.items() <= labels.items()
    # Or a pool with a wide selector would take it for an engine.
    assert labels[names.INJECT_LABEL] == "false"
    assert found["Service", "demo-scheduler"]["spec"]["selector"] == wanted
    assert found["Service", "demo-relays"]["spec"]["selector"] == wanted
    for kind, key in (
        ("Deployment", "selector"),
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
        ("PodMonitor", "selector"),
    ):
        assert found[kind, "demo-scheduler"]["spec"][key] == {"matchLabels": wanted}


def test_clients_may_route_and_report_and_nothing_else() -> None:
    (rule,) = made(fleet())["Role", "demo-client"]["rules"]
    assert rule["resources"] == ["servingfleets/report", "servingfleets/route"]
    assert rule["verbs"] == ["create"]
    assert rule["resourceNames"] == ["demo"]


def test_a_single_scheduler_does_not_keep_its_node_from_being_drained() -> None:
    budget = made(fleet(scheduler={"replicas": 1}))["PodDisruptionBudget", "demo-scheduler"]
    assert budget["spec"]["maxUnavailable"] == 1
    assert "minAvailable" not in budget["spec"]


def test_a_pod_monitor_is_made_only_where_wanted_and_possible() -> None:
    key = ("PodMonitor", "demo-scheduler")
    assert key in made(fleet(**EVERYTHING))
    assert key not in made(fleet(**EVERYTHING), pod_monitor=False)
    assert key not in made(fleet())


def test_where_the_schedulers_run_is_passed_on() -> None:
    pod = pod_of(fleet(**EVERYTHING))
    assert pod["nodeSelector"] == {"disk": "ssd"}
    assert pod["tolerations"] == [
        {"operator": "Exists"},
        {
            "key": "a",
            "operator": "Equal",
            "value": "b",
            "effect": "NoExecute",
            "tolerationSeconds": 5,
        },
    ]
    assert pod["affinity"] == {"podAntiAffinity": {}}
    assert pod["priorityClassName"] == "high"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["containers"][0]["resources"] == {
        "requests": {"cpu": "500m", "memory": "512Mi"},
        "limits": {"cpu": "2", "memory": "2Gi"},
    }
    assert (
        not {"nodeSelector", "tolerations", "affinity", "priorityClassName"}
        & pod_of(fleet()).keys()
    )


def test_calls_have_time_to_end_before_a_scheduler_is_killed() -> None:
    pod = pod_of(fleet())
    leaving = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    draining = int(arguments(fleet())["--drain-s"])
    assert pod["terminationGracePeriodSeconds"] >= leaving + draining + 5


@pytest.mark.parametrize("part", ["relay", "scheduler"])
def test_an_image_that_the_operator_does_not_allow_is_refused(part: str) -> None:
    target = fleet(**{part: {"image": "elsewhere.example/relay:1"}})
    choose = relay_image if part == "relay" else scheduler_image
    with pytest.raises(ImageNotAllowed) as refused:
        choose(target, SETTINGS)
    assert f"spec.{part}.image is elsewhere.example/relay:1" in str(refused.value)
    assert "allows registry.example/*" in str(refused.value)
    assert "allowedImages" in str(refused.value)


def test_an_allowed_image_is_taken_and_the_operators_own_is_the_default() -> None:
    target = fleet(scheduler={"image": "registry.example/team/scheduler:2"})
    assert scheduler_image(target, SETTINGS) == "registry.example/team/scheduler:2"
    assert relay_image(target, SETTINGS) == SETTINGS.relay_image
    # Without any allowance it may still be said in full what is the default anyway.
    closed = replace(SETTINGS, allowed_images=())
    assert relay_image(fleet(relay={"image": SETTINGS.relay_image}), closed) == SETTINGS.relay_image
    with pytest.raises(ImageNotAllowed, match="allows none"):
        scheduler_image(target, closed)


@pytest.mark.parametrize("text", ["ops.servingfleet", "a" * 80, "-x-", "a/b", ""])
def test_any_text_becomes_a_label_value(text: str) -> None:
    value = names.label_value(text)
    assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", value)
    assert len(value) <= 63


def test_two_long_texts_stay_two_labels() -> None:
    assert names.label_value("a" * 80) != names.label_value("a" * 81)
    assert names.label_value("a/b") != names.label_value("a_b")


def test_the_longest_fleet_name_gives_names_that_kubernetes_takes() -> None:
    longest = "a" * 40
    for name in (names.scheduler, names.relays, names.tls, names.decision_key, names.client):
        assert len(name(longest)) <= 63
    assert len(names.ca_secret("f" * 63, longest, "n" * 63)) <= 253
