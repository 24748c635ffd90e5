"""The relay in a pod: what is added, what is left alone, and what is said where it is missing."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_operator import names
from servingfleet_operator.injection import (
    NotInjected,
    Reason,
    also,
    image_patch,
    inject,
    pool_of,
    state,
)
from servingfleet_operator.observed import Relay
from servingfleet_operator.spec import Fleet
from servingfleet_relay import command, logs

from .pods import SETTINGS, fleet, pod, selector
from .test_engines import PRIVATE, vllm

FLEET = fleet()


def injected(target: dict[str, Any], wanted: Fleet = FLEET) -> dict[str, Any]:
    patched = inject(target, wanted, wanted.pools[0], SETTINGS)
    assert not isinstance(patched, NotInjected), patched
    return patched


def relay_of(target: dict[str, Any]) -> dict[str, Any]:
    return next(
        each for each in target["spec"]["initContainers"] if each["name"] == names.RELAY_CONTAINER
    )


def refusal(target: dict[str, Any], wanted: Fleet = FLEET, **options: Any) -> Reason:
    outcome = inject(target, wanted, wanted.pools[0], SETTINGS, **options)
    assert isinstance(outcome, NotInjected)
    assert outcome.message
    return outcome.reason


def test_the_relay_is_the_last_init_container_and_outlives_its_start() -> None:
    target = vllm()
    target["spec"]["initContainers"] = [{"name": "download"}, {"name": "mesh"}]
    relay = injected(target)["spec"]["initContainers"][-1]
    assert relay["name"] == "servingfleet-relay"
    assert relay["restartPolicy"] == "Always"
    assert not any(key.endswith("Probe") for key in relay)
    assert "ports" not in relay


def test_the_relay_is_told_what_the_engine_s_command_line_says() -> None:
    wanted = fleet(
        {
            "name": "main",
            "selector": selector(app="vllm"),
            "hybrid": True,
            "extraKeys": True,
            "engineBlockTokens": 32,
            "hostUnitTokens": 64,
            "layerGroups": ["full_attention:16", "sliding_window:16:512"],
        },
        blockTokens=32,
    )
    target = vllm("-dp=8", "-dpl=2", "-dpr=4", "--port=8100")
    assert relay_of(injected(target, wanted))["args"] == [
        "--supervise",
        "--worker-memory-mib=224",
        "--model=org/model",
        "--engine=vllm",
        "--engine-events=tcp://127.0.0.1:5557",
        "--engine-replay=tcp://127.0.0.1:5657",
        "--engine-bind",
        "--ranks=2",
        "--first-rank=4",
        "--hybrid",
        "--extra-keys",
        "--engine-http=http://127.0.0.1:8100",
        "--endpoint=$(POD_IP):8100",
        "--block-tokens=32",
        "--engine-block-tokens=32",
        "--host-unit-tokens=64",
        "--layer-group=full_attention:16",
        "--layer-group=sliding_window:16:512",
        "--label=pool=main",
        "--label=pod=$(POD_NAME)",
        "--label=node=$(NODE_NAME)",
        "--metrics-port=-1",
        "--scheduler=demo-relays.serving.svc:7070",
        "--scheduler-ca-file=/var/run/servingfleet/ca.crt",
        "--scheduler-name=demo-scheduler.serving.svc",
        "--token-file=/var/run/servingfleet/token",
        "--log-level=info",
    ]


@pytest.mark.parametrize(
    "target",
    [
        vllm("-dp=8", "-dpl=2", "-dpr=4"),
        vllm("--host", "::1", events={**PRIVATE, "endpoint": "tcp://*:5557"}),
        pod(command=["/start.sh"]),
        pod("m", "--set=kv_cache_config.kv_events_config={}", command=["trtllm-serve"]),
        pod("m", "--set=kv_cache_config.event_buffer_max_size=9", command=["trtllm-serve"]),
    ],
)
def test_the_relay_takes_every_argument_that_it_is_given(
    target: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    async def run(*settings: Any) -> int:
        started.append(settings)
        raise SystemExit(0)

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(logs, "configure", lambda level: None)
    fields = {"POD_IP": "fd00::7", "POD_NAME": "vllm-0", "NODE_NAME": "gpu-1"}
    for transport in ("TLS", "PlainText"):
        access = {"transport": transport, "clients": "Token" if transport == "TLS" else "None"}
        arguments = relay_of(injected(target, fleet(access=access)))["args"]
        for name, value in fields.items():
            arguments = [each.replace(f"$({name})", value) for each in arguments]
        # The second as the kubelet sets it for a Service of that name.
        environment = {
            "SERVINGFLEET_RELAY_REPLICA": "uid-1",
            "SERVINGFLEET_RELAY_METRICS_PORT": "tcp://10.0.0.1:9090",
        }
        result = CliRunner().invoke(command.main, arguments, env=environment)
        assert result.exit_code == 0, result.output
    assert len(started) == 2


def test_without_tls_the_relay_shows_no_token_to_anybody() -> None:
    wanted = fleet(access={"transport": "PlainText", "clients": "None"})
    patched = injected(vllm(), wanted)
    secured = ("--token-file", "--scheduler-ca-file", "--scheduler-name")
    assert not any(each.startswith(secured) for each in relay_of(patched)["args"])
    assert "serviceAccountToken" not in str(patched["spec"]["volumes"])


def test_the_relay_holds_one_token_for_its_fleet_and_none_for_the_api() -> None:
    patched = injected(vllm())
    sources = patched["spec"]["volumes"][-1]["projected"]["sources"]
    assert sources == [
        {
            "serviceAccountToken": {
                "audience": "servingfleet.dev/serving/demo/relay",
                "expirationSeconds": 3600,
                "path": "token",
            }
        },
        {
            "configMap": {
                "name": "demo-client",
                "optional": True,
                "items": [{"key": "ca.crt", "path": "ca.crt"}],
            }
        },
    ]
    mounts = relay_of(patched)["volumeMounts"]
    # The API server mounts the account's token only where nothing is mounted.
    assert {each["mountPath"] for each in mounts} == {
        "/var/run/servingfleet",
        "/var/run/secrets/kubernetes.io/serviceaccount",
    }
    assert all(each["readOnly"] for each in mounts)


def restricted(container: dict[str, Any], spec: dict[str, Any]) -> bool:
    """The Pod Security Standard "restricted", as far as a container is concerned."""
    context, of_pod = container["securityContext"], spec.get("securityContext", {})
    user = context.get("runAsUser", of_pod.get("runAsUser"))
    return (
        context["allowPrivilegeEscalation"] is False
        and context["capabilities"] == {"drop": ["ALL"]}
        and context["runAsNonRoot"] is True
        and context["seccompProfile"] == {"type": "RuntimeDefault"}
        and not {"privileged", "procMount", "seLinuxOptions", "windowsOptions"} & set(context)
        and user != 0
        and "ports" not in container
        and "lifecycle" not in container
    )


def is_guaranteed(spec: dict[str, Any]) -> bool:
    return all(
        each.get("resources", {}).get("limits", {}).keys() >= {"cpu", "memory"}
        and each["resources"].get("requests", each["resources"]["limits"])
        == each["resources"]["limits"]
        for each in (*spec["containers"], *spec.get("initContainers", ()))
    )


RESOURCES = {"limits": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "1"}}

pods = st.builds(
    lambda flags, spec, container, metadata: {
        "metadata": {"labels": {"app": "vllm"}, **metadata},
        "spec": {
            **spec,
            "containers": [
                {"name": "engine", "image": "vllm", "args": flags, **container},
                *spec.get("containers", []),
            ],
        },
    },
    st.lists(st.sampled_from(["--port=1", "-dp=2", "--config", "x", "$(A)", "{}"]), max_size=4),
    st.fixed_dictionaries(
        {},
        optional={
            "initContainers": st.lists(
                st.sampled_from([{"name": "a"}, {"name": "b", "restartPolicy": "Always"}]),
                max_size=2,
                unique_by=lambda each: str(each["name"]),
            ),
            "containers": st.just([{"name": "istio-proxy", "resources": RESOURCES}]),
            "volumes": st.just([{"name": "cache", "emptyDir": {}}]),
            "imagePullSecrets": st.sampled_from([[], [{"name": "mine"}], [{"name": "registry"}]]),
            "securityContext": st.sampled_from([{"runAsUser": 0}, {"runAsUser": 7}, {}]),
            "hostNetwork": st.booleans(),
        },
    ),
    st.sampled_from([{}, {"resources": RESOURCES}, {"command": ["vllm", "serve"]}]),
    st.sampled_from([{}, {"generateName": "x-"}, {"annotations": {"a": "b"}}]),
)


@given(target=pods)
def test_injection_adds_and_never_changes(target: dict[str, Any]) -> None:
    before = copy.deepcopy(target)
    patched = injected(target)
    assert target == before
    spec = patched["spec"]
    assert spec["containers"] == before["spec"]["containers"]
    assert spec["initContainers"][:-1] == before["spec"].get("initContainers", [])
    assert spec["volumes"][:-1] == before["spec"].get("volumes", [])
    held = before["spec"].get("imagePullSecrets", [])
    assert spec["imagePullSecrets"][: len(held)] == held
    assert [each["name"] for each in spec["imagePullSecrets"]].count("registry") == 1
    assert patched["metadata"] == before["metadata"]
    added = {"initContainers", "volumes", "imagePullSecrets"}
    assert {key: spec[key] for key in spec.keys() - added} == {
        key: before["spec"][key] for key in before["spec"].keys() - added
    }


@given(target=pods)
def test_a_second_injection_does_nothing(target: dict[str, Any]) -> None:
    assert refusal(injected(target)) == Reason.ALREADY_INJECTED


@given(target=pods)
def test_the_relay_is_always_compliant_with_restricted(target: dict[str, Any]) -> None:
    patched = injected(target)
    assert restricted(relay_of(patched), patched["spec"])
    assert relay_of(patched)["securityContext"]["readOnlyRootFilesystem"] is True


@given(target=pods)
def test_a_guaranteed_pod_stays_guaranteed(target: dict[str, Any]) -> None:
    assert is_guaranteed(injected(target)["spec"]) == is_guaranteed(target["spec"])


def test_a_pod_that_has_resources_as_a_whole_is_not_made_larger_than_it_is() -> None:
    target = vllm()
    target["spec"]["resources"] = {"limits": {"cpu": "8"}}
    assert "resources" not in relay_of(injected(target))


def test_the_relay_never_runs_as_root_where_the_pod_would() -> None:
    target = vllm()
    assert "runAsUser" not in relay_of(injected(target))["securityContext"]
    target["spec"]["securityContext"] = {"runAsUser": 0}
    assert relay_of(injected(target))["securityContext"]["runAsUser"] == 65_532


def test_later_injectors_move_nothing_of_ours_and_we_nothing_of_theirs() -> None:
    patched = injected(vllm())
    patched["spec"]["initContainers"].append({"name": "istio-proxy", "restartPolicy": "Always"})
    before = copy.deepcopy(patched)
    assert refusal(patched) == Reason.ALREADY_INJECTED
    assert patched == before


def with_spec(**spec: Any) -> dict[str, Any]:
    target = vllm()
    target["spec"] |= spec
    return target


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (
            {**vllm(), "metadata": {"labels": {"app": "vllm", "servingfleet.dev/inject": "false"}}},
            Reason.OPTED_OUT,
        ),
        (
            {**vllm(), "metadata": {"ownerReferences": [{"kind": "Node", "name": "gpu-1"}]}},
            Reason.STATIC_POD,
        ),
        (with_spec(os={"name": "windows"}), Reason.WINDOWS),
        (with_spec(nodeSelector={"kubernetes.io/os": "windows"}), Reason.WINDOWS),
        (vllm("--headless"), Reason.NOT_SERVING),
        (with_spec(volumes=[{"name": "servingfleet-identity"}]), Reason.NAME_TAKEN),
        (with_spec(containers=[{"name": "servingfleet-relay"}]), Reason.NAME_TAKEN),
        (with_spec(initContainers=[{"name": "servingfleet-relay"}]), Reason.ALREADY_INJECTED),
    ],
)
def test_a_pod_that_cannot_have_a_relay_is_left_alone_with_the_reason(
    target: dict[str, Any], reason: Reason
) -> None:
    assert refusal(target) == reason


def test_a_container_that_the_pool_names_and_the_pod_lacks_is_told() -> None:
    wanted = fleet({"name": "main", "selector": selector(app="vllm"), "container": "llm"})
    assert refusal(vllm(), wanted) == Reason.NO_ENGINE_CONTAINER


def test_no_sidecar_is_added_where_it_would_be_an_init_container_that_never_ends() -> None:
    assert refusal(vllm(), kubernetes=(1, 29)) == Reason.KUBERNETES_TOO_OLD
    for version in ((1, 30), (2, 0)):
        assert isinstance(inject(vllm(), FLEET, FLEET.pools[0], SETTINGS, kubernetes=version), dict)


def test_a_version_that_could_not_be_read_is_no_old_one() -> None:
    assert isinstance(inject(vllm(), FLEET, FLEET.pools[0], SETTINGS, kubernetes=(0, 0)), dict)


def test_an_image_that_the_operator_does_not_allow_is_not_run() -> None:
    wanted = fleet(relay={"image": "elsewhere.example/relay:1"})
    assert refusal(vllm(), wanted) == Reason.IMAGE_NOT_ALLOWED
    wanted = fleet(relay={"image": "registry.example/other:2"})
    assert relay_of(injected(vllm(), wanted))["image"] == "registry.example/other:2"


def relay_state(target: dict[str, Any], wanted: Fleet = FLEET) -> tuple[Relay, str]:
    found = state(target, wanted, wanted.pools[0], SETTINGS)
    return found.state, found.reason


def test_a_pod_with_the_relay_that_it_would_get_now_is_injected() -> None:
    target = injected(vllm())
    # What the API server fills in is no difference.
    for variable in relay_of(target)["env"]:
        variable["valueFrom"]["fieldRef"]["apiVersion"] = "v1"
    relay_of(target)["terminationMessagePath"] = "/dev/termination-log"
    assert relay_state(target) == (Relay.INJECTED, "")


def test_variables_that_others_add_to_every_container_make_no_relay_outdated() -> None:
    target = injected(vllm())
    variables = relay_of(target)["env"]
    variables.insert(0, {"name": "AWS_REGION", "value": "eu-central-1"})
    variables.append({"name": "AWS_ROLE_ARN", "value": "role"})
    assert relay_state(target) == (Relay.INJECTED, "")
    variables[1]["valueFrom"] = {"fieldRef": {"fieldPath": "metadata.name"}}
    assert relay_state(target)[0] == Relay.OUTDATED


def test_a_pod_that_missed_the_webhook_is_told_from_one_that_could_not_be_injected() -> None:
    assert relay_state(vllm())[0] == Relay.NOT_INJECTED
    assert relay_state(with_spec(os={"name": "windows"}))[0] == Relay.NOT_INJECTABLE
    opted_out = vllm()
    opted_out["metadata"]["labels"]["servingfleet.dev/inject"] = "false"
    assert relay_state(opted_out)[0] == Relay.OPTED_OUT
    off = fleet(relay={"inject": False})
    assert relay_state(vllm(), off)[0] == Relay.INJECTION_OFF


def test_a_relay_that_was_told_something_else_is_outdated() -> None:
    target = injected(vllm())
    assert relay_state(target, fleet(blockTokens=64))[0] == Relay.OUTDATED
    assert relay_state(target, fleet(relay={"logLevel": "debug"}))[0] == Relay.OUTDATED


def test_a_relay_of_another_image_is_outdated_and_can_be_replaced_in_place() -> None:
    target = injected(vllm())
    newer = replace(SETTINGS, relay_image="registry.example/relay:2")
    found = state(target, FLEET, FLEET.pools[0], newer)
    assert found.state == Relay.OUTDATED
    assert "start it again" in found.reason
    assert image_patch(target, FLEET, newer) is None
    in_place = fleet(relay={"inPlaceUpgrade": True})
    assert "in place" in state(target, in_place, in_place.pools[0], newer).reason
    assert image_patch(target, in_place, newer) == {
        "spec": {
            "initContainers": [{"name": "servingfleet-relay", "image": "registry.example/relay:2"}]
        }
    }
    assert image_patch(target, in_place, SETTINGS) is None
    assert image_patch(vllm(), in_place, newer) is None


def test_a_relay_of_another_fleet_is_not_taken_for_ours() -> None:
    other = fleet()
    target = injected(vllm())
    relay = relay_of(target)
    relay["args"] = [each.replace("demo-relays", "other-relays") for each in relay["args"]]
    found, reason = relay_state(target, other)
    assert found == Relay.NOT_INJECTED
    assert "--scheduler=demo-relays.serving.svc:7070" in reason
    assert image_patch(target, fleet(relay={"inPlaceUpgrade": True}), SETTINGS) is None


@pytest.mark.parametrize(
    ("expression", "labels", "selected"),
    [
        ({"key": "role", "operator": "In", "values": ["a", "b"]}, {"role": "a"}, True),
        ({"key": "role", "operator": "In", "values": ["a", "b"]}, {}, False),
        ({"key": "role", "operator": "NotIn", "values": ["a"]}, {"role": "a"}, False),
        ({"key": "role", "operator": "NotIn", "values": ["a"]}, {}, True),
        ({"key": "role", "operator": "Exists"}, {"role": ""}, True),
        ({"key": "role", "operator": "Exists"}, {}, False),
        ({"key": "role", "operator": "DoesNotExist"}, {}, True),
        ({"key": "role", "operator": "DoesNotExist"}, {"role": "x"}, False),
    ],
)
def test_pools_select_as_the_api_server_does(
    expression: dict[str, Any], labels: dict[str, str], selected: bool
) -> None:
    chosen = {**selector(app="vllm"), "matchExpressions": [expression]}
    wanted = fleet({"name": "main", "selector": chosen})
    target = {"metadata": {"labels": {"app": "vllm", **labels}}}
    assert (pool_of(target, wanted) is not None) == selected
    assert pool_of({"metadata": {"labels": labels}}, wanted) is None


def test_a_pod_belongs_to_the_first_pool_and_what_else_selects_it_is_told() -> None:
    wanted = fleet(
        {"name": "a", "selector": selector(app="vllm")},
        {"name": "b", "selector": selector(app="vllm", role="x")},
    )
    other = Fleet(
        **{field: getattr(wanted, field) for field in ("model", "pools", "namespace")},
        name="other",
        uid="u-2",
    )
    elsewhere = Fleet(model=other.model, pools=other.pools, namespace="n", name="far", uid="u-3")
    target = {"metadata": {"labels": {"app": "vllm", "role": "x"}}}
    assert getattr(pool_of(target, wanted), "name", "") == "a"
    assert also(target, wanted, [wanted, other, elsewhere]) == ("pool b", "fleet other")
    assert also({"metadata": {"labels": {"app": "vllm"}}}, wanted, []) == ()
