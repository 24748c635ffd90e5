"""What is read from an engine's command line, and what never is."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_operator.engines import EngineFacts, findings, read
from servingfleet_operator.spec import Engine

from .pods import fleet, pod, selector

PRIVATE = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://127.0.0.1:5557",
    "replay_endpoint": "tcp://127.0.0.1:5657",
}


def facts(target: dict[str, Any], **pool: Any) -> EngineFacts:
    wanted = fleet({"name": "main", "selector": selector(app="vllm"), **pool})
    return read(target, wanted.pools[0])


def vllm(*flags: str, events: Any = PRIVATE, **container: Any) -> dict[str, Any]:
    written = ["--kv-events-config", json.dumps(events)] if events is not None else []
    return pod("org/model", "--enable-prompt-tokens-details", *written, *flags, **container)


def sglang(*flags: str, events: Any = None) -> dict[str, Any]:
    config = events or {"publisher": "zmq", "endpoint": "tcp://*:5557"}
    return pod(
        *("--model-path", "org/model", "--enable-metrics", "--enable-cache-report"),
        *("--kv-events-config", json.dumps(config)),
        *flags,
        command=["python3", "-m", "sglang.launch_server"],
    )


def codes(found: EngineFacts) -> set[str]:
    return {each.code for each in found.findings}


def message(found: EngineFacts, code: str) -> str:
    return next(each.message for each in found.findings if each.code == code)


def test_the_private_form_makes_the_relay_bind_and_exposes_nothing() -> None:
    found = facts(vllm())
    assert found.kind == Engine.VLLM
    assert (found.bind, found.events, found.event_ports) == (
        True,
        ("tcp://127.0.0.1:5557",),
        (5557,),
    )
    assert (found.replay, found.replay_ports) == (("tcp://127.0.0.1:5657",), (5657,))
    assert found.exposed == ()
    assert found.findings == ()
    assert (found.http, found.model, found.serving) == ("http://127.0.0.1:8000", "org/model", True)


@pytest.mark.parametrize(
    ("endpoint", "bind", "events", "exposed"),
    [
        ("tcp://*:5557", False, "tcp://127.0.0.1:5557", (5557,)),
        # vLLM connects to whatever has no *.
        ("tcp://0.0.0.0:5557", True, "tcp://127.0.0.1:5557", ()),
        ("tcp://localhost:6000", True, "tcp://127.0.0.1:6000", ()),
    ],
)
def test_vllm_binds_only_at_wildcards(
    endpoint: str, bind: bool, events: str, exposed: tuple[int, ...]
) -> None:
    found = facts(vllm(events={**PRIVATE, "endpoint": endpoint}))
    assert (found.bind, found.events, found.exposed) == (bind, (events,), exposed)


@pytest.mark.parametrize(
    ("config", "bind", "events", "exposed"),
    [
        ({"endpoint": "tcp://0.0.0.0:5557"}, False, "tcp://127.0.0.1:5557", (5557,)),
        ({"endpoint": "tcp://127.0.0.1:5557"}, True, "tcp://127.0.0.1:5557", ()),
        ({"endpoint": "tcp://127.0.0.1:5557", "bind": True}, False, "tcp://127.0.0.1:5557", ()),
        ({"endpoint": "tcp://10.0.0.9:5557", "bind": True}, False, "tcp://10.0.0.9:5557", (5557,)),
        ({}, False, "tcp://127.0.0.1:5557", (5557,)),
    ],
)
def test_sglang_binds_at_wildcards_or_when_it_is_told(
    config: dict[str, Any], bind: bool, events: str, exposed: tuple[int, ...]
) -> None:
    found = facts(sglang(events={"publisher": "zmq", **config}))
    assert (found.bind, found.events, found.exposed) == (bind, (events,), exposed)
    assert found.http_port == 30_000


def trtllm(*settings: str) -> dict[str, Any]:
    """One that tells its load."""
    told = ("return_perf_metrics=true", "enable_iter_perf_stats=true", *settings)
    return pod("org/model", *(f"--set={each}" for each in told), command=["trtllm-serve"])


def test_tensorrt_llm_binds_whatever_address_it_is_given() -> None:
    value = json.dumps(PRIVATE)
    found = facts(trtllm(f"kv_cache_config.kv_events_config={value}"))
    assert (found.kind, found.bind, found.exposed) == (Engine.TENSORRT_LLM, False, ())
    assert found.findings == ()
    assert facts(
        pod(
            "org/model",
            "--set=kv_cache_config.kv_events_config.enable_kv_cache_events=true",
            command=["trtllm-serve", "serve"],
        )
    ).exposed == (5557,)


BUFFERED = "kv_cache_config.event_buffer_max_size=16384"


@pytest.mark.parametrize(
    ("settings", "block"), [((), 32), (("kv_cache_config.tokens_per_block=64",), 64)]
)
def test_a_relay_pulls_what_tensorrt_llm_keeps_for_one_reader(
    settings: tuple[str, ...], block: int
) -> None:
    found = facts(trtllm(BUFFERED, *settings))
    assert (found.pull, found.block_tokens, found.findings) == (True, block, ())
    assert (found.events, found.replay, found.event_ports, found.exposed) == ((), (), (), ())


def test_what_tensorrt_llm_publishes_is_not_pulled_unless_the_pool_says_so() -> None:
    both = trtllm(BUFFERED, f"kv_cache_config.kv_events_config={json.dumps(PRIVATE)}")
    assert not facts(both).pull
    assert facts(both, engine="TensorRT-LLM", eventsFrom="relayPulls").pull


def test_the_pool_says_what_stands_in_tensorrt_llms_file() -> None:
    target = pod("m", "--config=/etc/trt.yaml", command=["trtllm-serve"])
    pool = {"engine": "TensorRT-LLM", "eventsFrom": "relayPulls", "ranks": 2}
    found = facts(target, **pool)
    assert found.pull
    assert codes(found) == {"BlockNotTold"}
    assert "engineBlockTokens of pool main" in message(found, "BlockNotTold")
    found = facts(target, **pool, engineBlockTokens=64)
    assert (found.block_tokens, found.ranks, found.findings) == (64, 2, ())


def test_a_pool_that_wants_to_pull_what_is_not_kept_is_told_so() -> None:
    found = facts(trtllm(), engine="TensorRT-LLM", eventsFrom="relayPulls")
    assert not found.pull
    assert "event_buffer_max_size" in message(found, "EventsOff")


@pytest.mark.parametrize("started", ["vllm", "sglang"])
def test_of_an_engine_that_can_not_be_pulled_the_sockets_are_read_and_closed(started: str) -> None:
    public = {**PRIVATE, "endpoint": "tcp://*:5557"}
    target = vllm(events=public) if started == "vllm" else sglang()
    found = facts(target, eventsFrom="relayPulls")
    assert (found.pull, found.events) == (False, ("tcp://127.0.0.1:5557",))
    assert 5557 in found.exposed
    assert "eventsFrom of pool main to auto" in message(found, "EventsNotPullable")


def test_a_tensorrt_llm_that_reuses_nothing_and_one_that_tells_no_load_are_told_so() -> None:
    found = facts(trtllm(BUFFERED, "kv_cache_config.enable_block_reuse=false"))
    assert codes(found) == {"PrefixCachingOff"}
    found = facts(pod("m", f"--set={BUFFERED}", command=["trtllm-serve"]))
    assert codes(found) == {"LoadNotReported"}


def test_a_replay_socket_that_binds_everywhere_is_exposed_by_itself() -> None:
    found = facts(vllm(events={**PRIVATE, "replay_endpoint": "tcp://*:5657"}))
    assert found.exposed == (5657,)


@pytest.mark.parametrize(
    ("events", "code"),
    [
        (None, "EventsOff"),
        ({**PRIVATE, "enable_kv_cache_events": False}, "EventsOff"),
        ({**PRIVATE, "publisher": "null"}, "EventsOff"),
        ({**PRIVATE, "endpoint": "tcp://router.other:5557"}, "EventsElsewhere"),
        ({**PRIVATE, "endpoint": "ipc:///tmp/events"}, "EventsUnreachable"),
        ({**PRIVATE, "endpoint": "tcp://[::1]:5557"}, "EventsUnreachable"),
        ({**PRIVATE, "endpoint": "tcp://[::]:5557"}, "EventsUnreachable"),
        ({**PRIVATE, "endpoint": "tcp://*:0"}, "EventsUnreachable"),
        ({**PRIVATE, "replay_endpoint": None}, "NoReplay"),
    ],
)
def test_what_is_wrong_with_the_events_comes_with_the_flag_to_paste(events: Any, code: str) -> None:
    found = facts(vllm(events=events))
    assert codes(found) == {code}
    assert f"add --kv-events-config '{json.dumps(PRIVATE)}'" in message(found, code)


def test_the_flag_to_paste_is_read_as_the_private_form() -> None:
    for target in (vllm(events=None), sglang(events={"publisher": "null"})):
        text = message(facts(target), "EventsOff")
        value = text[text.index("'{") + 1 : text.rindex("'")]
        container = target["spec"]["containers"][0]
        container["args"] = [*container["args"], "--kv-events-config", value]
        found = facts(target)
        assert (found.findings, found.bind, found.exposed) == ((), True, ())


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-events-config=" + json.dumps(PRIVATE)],
        ["--kv_events_config", json.dumps(PRIVATE)],
        [
            "--kv-events-config.enable_kv_cache_events=true",
            "--kv-events-config.endpoint",
            "tcp://127.0.0.1:5557",
            "--kv-events-config.replay_endpoint=tcp://127.0.0.1:5657",
        ],
        # The dotted form replaces the whole, as vLLM appends it.
        [
            "--kv-events-config",
            '{"endpoint": "tcp://*:1"}',
            "--kv-events-config.enable_kv_cache_events",
            "true",
            "--kv-events-config.endpoint=tcp://127.0.0.1:5557",
            "--kv-events-config.replay_endpoint=tcp://127.0.0.1:5657",
        ],
    ],
)
def test_all_spellings_of_a_flag_are_read_alike(flags: list[str]) -> None:
    assert facts(vllm(*flags, events=None)) == facts(vllm())


def test_the_last_of_a_repeated_flag_counts() -> None:
    assert facts(vllm("--port", "9000", "--port=9001")).http_port == 9001


@pytest.mark.parametrize(
    "command",
    [
        ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/model"],
        ["python", "-m", "vllm.entrypoints.cli.main", "serve", "org/model"],
        ["/opt/venv/bin/vllm", "serve", "org/model"],
        ["tini", "--", "vllm", "serve", "org/model"],
        ["numactl", "--cpunodebind=0", "vllm", "serve", "org/model"],
    ],
)
def test_the_engine_is_recognised_however_it_is_started(command: list[str]) -> None:
    found = facts(pod("--port", "8123", command=command))
    assert (found.kind, found.http_port, found.model) == (Engine.VLLM, 8123, "org/model")


def test_flags_of_an_image_that_starts_its_engine_itself_are_read() -> None:
    target = vllm("--port", "8123")
    container = target["spec"]["containers"][0]
    del container["command"]
    container["image"] = "registry.example/vllm-openai:v0.32.0"
    assert facts(target).http_port == 8123
    container["image"] = "registry.example/ours:1"
    assert codes(facts(target)) == {"NotReadable"}
    assert facts(target, engine="vLLM").http_port == 8123


SCRIPT = """\
# starts vllm serve --port 1
set -euo pipefail
export HF_HOME=/cache
if [ -n "$TOKEN" ]; then echo "token; set"; fi
exec vllm serve "$MODEL" \\
  --enable-prompt-tokens-details --port ${PORT} \\
  --kv-events-config '%s' 2>&1 | tee /log
"""


def test_a_script_given_to_a_shell_is_read() -> None:
    target = pod(
        SCRIPT % json.dumps(PRIVATE),
        command=["/bin/bash", "-c"],
        env=[{"name": "MODEL", "value": "org/model"}, {"name": "PORT", "value": "8200"}],
    )
    found = facts(target)
    assert (found.http_port, found.model, found.findings) == (8200, "org/model", ())
    assert found.bind


def test_parameters_of_a_script_are_put_where_it_names_them() -> None:
    target = pod(
        'exec vllm serve "$@"',
        "--",
        *vllm()["spec"]["containers"][0]["args"],
        command=["sh", "-ec"],
    )
    assert facts(target) == facts(vllm())


def test_the_kubelet_s_references_are_resolved_and_its_escapes_kept() -> None:
    target = vllm(
        "--port=$(PORT)",
        "--served-model-name",
        "$$(PORT)",
        env=[{"name": "BASE", "value": "81"}, {"name": "PORT", "value": "$(BASE)00"}],
    )
    assert (facts(target).http_port, facts(target).model) == (8100, "$(PORT)")


def test_an_address_that_is_the_pod_s_own_is_passed_on_by_reference() -> None:
    source = {"fieldRef": {"fieldPath": "status.podIP"}}
    target = vllm("--host", "$(IP)", env=[{"name": "IP", "valueFrom": source}])
    assert facts(target).http == "http://$(POD_IP):8000"


UNKNOWN_ENV = [
    {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
]


@pytest.mark.parametrize(
    "target",
    [
        vllm("$(SECRET)", events=None, env=UNKNOWN_ENV),
        vllm("--kv-events-config", "$(SECRET)", events=None, env=UNKNOWN_ENV),
        vllm("--kv-events-config", '{"endpoint": "tcp://*:$(SECRET)"', env=UNKNOWN_ENV),
        vllm("--config", "/etc/vllm.yaml", events=None),
        pod("vllm serve m $EXTRA", command=["sh", "-c"]),
        pod("EXTRA=--x; vllm serve m $EXTRA", command=["sh", "-c"], env=[{"name": "EXTRA"}]),
        pod("vllm serve m $(cat /flags)", command=["sh", "-c"]),
        pod("vllm serve m `cat /flags`", command=["sh", "-c"]),
        pod("vllm serve m 'unclosed", command=["sh", "-c"]),
        pod(command=["/start.sh"]),
        pod(command=["bash", "/start.sh"]),
        pod("vllm serve a & vllm serve b", command=["sh", "-c"]),
        pod("m", "--config=/etc/trt.yaml", command=["trtllm-serve"]),
    ],
)
def test_what_is_not_written_plainly_is_asked_for_and_never_guessed(target: Any) -> None:
    found = facts(target)
    assert "NotReadable" in codes(found)
    assert "EventsOff" not in codes(found)
    assert "of pool main" in message(found, "NotReadable")
    # What could be open is taken for open.
    assert found.exposed == (5557, 5657)


def test_an_address_that_is_not_told_is_asked_for_and_taken_as_loopback() -> None:
    found = facts(vllm("--host", "$(SECRET)", env=UNKNOWN_ENV))
    assert "--host or --port" in message(found, "NotReadable")
    assert found.http == "http://127.0.0.1:8000"


def test_what_the_pool_declares_is_not_asked_for() -> None:
    declared = {
        "engine": "vLLM",
        "eventsFrom": "relayBinds",
        "ranks": 2,
        "ports": {"http": 8001, "events": 6000, "replay": 6100},
    }
    for target in (pod(command=["/start.sh"]), pod("vllm serve m $EXTRA", command=["sh", "-c"])):
        found = facts(target, **declared)
        assert found.findings == ()
        assert (found.bind, found.ranks, found.http_port) == (True, 2, 8001)
        assert (found.event_ports, found.replay_ports) == ((6000, 6001), (6100, 6101))
        assert found.exposed == ()


def test_a_variable_that_can_only_be_a_value_hides_no_flags() -> None:
    target = pod(
        "vllm serve org/model --max-model-len $LENGTH --kv-events-config.endpoint=x",
        command=["sh", "-c"],
    )
    assert "EventsOff" in codes(facts(target))


@pytest.mark.parametrize(
    ("flags", "ranks", "first", "ports"),
    [
        ([], 1, 0, (5557,)),
        (["-dp", "4"], 4, 0, (5557, 5558, 5559, 5560)),
        (["--data-parallel-rank=3", "--data-parallel-size=8"], 1, 3, (5560,)),
        (["-dp", "8", "-dpl", "2", "--data-parallel-start-rank", "4"], 2, 4, (5561, 5562)),
    ],
)
def test_vllm_counts_ports_by_the_rank_in_the_whole_engine(
    flags: list[str], ranks: int, first: int, ports: tuple[int, ...]
) -> None:
    found = facts(vllm(*flags))
    assert (found.ranks, found.first_rank, found.event_ports) == (ranks, first, ports)
    assert found.events == ("tcp://127.0.0.1:5557",)


@pytest.mark.parametrize(
    "flags",
    [
        ["-dp", "4", "--data-parallel-backend", "ray"],
        ["-dp", "4", "--nnodes", "2"],
        ["-dp", "4", "-dpe"],
    ],
)
def test_ranks_that_are_spread_over_pods_are_asked_for(flags: list[str]) -> None:
    assert "NotReadable" in codes(facts(vllm(*flags)))
    assert facts(vllm(*flags), ranks=2).ranks == 2


def test_sglang_publishes_once_for_each_independent_cache() -> None:
    assert facts(sglang("--dp-size", "4", "--enable-dp-attention")).ranks == 4
    assert facts(sglang("--attn-dp-size", "2")).ranks == 2
    assert facts(sglang("--dp", "3")).ranks == 3


def test_events_and_replays_on_one_port_are_seen() -> None:
    target = vllm("-dp", "2", events={**PRIVATE, "replay_endpoint": "tcp://127.0.0.1:5558"})
    assert "port 5558" in message(facts(target), "PortsCollide")


@pytest.mark.parametrize(
    ("target", "code", "remedy"),
    [
        (vllm("--no-enable-prefix-caching"), "PrefixCachingOff", "--no-enable-prefix-caching"),
        (sglang("--disable-radix-cache"), "PrefixCachingOff", "--disable-radix-cache"),
        (pod("m"), "ReuseNotReported", "--enable-prompt-tokens-details"),
        (
            pod("--model-path", "m", command=["sglang", "serve"]),
            "ReuseNotReported",
            "--enable-cache-report",
        ),
        (
            pod("--model-path", "m", command=["sglang", "serve"]),
            "LoadNotReported",
            "--enable-metrics",
        ),
        (
            vllm("--kv-transfer-config", '{"kv_role": "kv_consumer"}'),
            "DecodesOnly",
            "pods that compute prompts",
        ),
        (sglang("--disaggregation-mode", "decode"), "DecodesOnly", "pods that compute prompts"),
        (
            vllm("--data-parallel-multi-port-external-lb"),
            "RanksHavePorts",
            "--data-parallel-multi-port-external-lb",
        ),
    ],
)
def test_what_would_make_figures_wrong_names_its_flag(target: Any, code: str, remedy: str) -> None:
    assert remedy in message(facts(target), code)


@pytest.mark.parametrize(
    "target", [vllm("--headless"), sglang("--nnodes", "2", "--node-rank", "1")]
)
def test_a_pod_that_answers_no_requests_is_told_from_one_that_does(target: Any) -> None:
    assert not facts(target).serving


def test_the_container_is_the_pool_s_else_the_one_that_starts_an_engine_else_the_first() -> None:
    target = vllm()
    target["spec"]["containers"].insert(0, {"name": "proxy", "image": "proxy:1"})
    assert facts(target).container == "engine"
    assert facts(target, container="proxy").container == "proxy"
    assert facts(target, container="absent").container == ""
    del target["spec"]["containers"][1]
    assert facts(target).container == "proxy"


def test_ports_that_a_person_listed_count_for_what_no_command_line_tells() -> None:
    target = pod("vllm serve a & vllm serve b", command=["sh", "-c"])
    target["metadata"]["annotations"] = {"servingfleet.dev/events": "6000, 7000"}
    found = facts(target)
    assert (found.ranks, found.events) == (2, ("tcp://127.0.0.1:6000", "tcp://127.0.0.1:7000"))
    assert found.replay == ()
    target["metadata"]["annotations"] = {"servingfleet.dev/events": "6000,seven"}
    assert "BadAnnotation" in codes(facts(target))


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ({"hostNetwork": True}, "dnsPolicy: ClusterFirstWithHostNet"),
        ({"dnsPolicy": "Default"}, "dnsPolicy: ClusterFirst"),
    ],
)
def test_a_pod_that_cannot_resolve_the_scheduler_is_told_what_to_set(
    spec: dict[str, Any], remedy: str
) -> None:
    target = vllm()
    target["spec"] |= spec
    assert message(facts(target), "NoClusterDNS").endswith(remedy)
    target["spec"]["dnsPolicy"] = "ClusterFirstWithHostNet"
    assert facts(target).findings == ()


def test_what_differs_from_the_fleet_is_told_with_both_values() -> None:
    wanted = fleet()
    found = read(vllm("--served-model-name", "small", "--block-size", "48"), wanted.pools[0])
    texts = {each.code: each.message for each in findings(found, wanted)}
    assert "'small'" in texts["ModelDiffers"]
    assert "--served-model-name org/model" in texts["ModelDiffers"]
    assert "BlockSizeDiffers" not in texts
    found = read(vllm("--block-size", "24"), wanted.pools[0])
    assert [each.code for each in findings(found, wanted)] == ["BlockSizeDiffers"]


@given(
    words=st.lists(
        st.one_of(
            st.text(max_size=12),
            st.sampled_from(
                [
                    *(
                        "vllm",
                        "serve",
                        "--kv-events-config",
                        "--port",
                        "--config",
                        "-m",
                        "sh",
                        "-c",
                    ),
                    *(
                        "$(X)",
                        "$X",
                        "trtllm-serve",
                        "--set",
                        "a.b=1",
                        "a=1",
                        "{}",
                        "--x.y=",
                        "sglang",
                    ),
                    *(
                        "sglang.launch_server",
                        '{"publisher": "zmq"}',
                        "--kv-events-config.endpoint=",
                    ),
                ]
            ),
        ),
        max_size=12,
    )
)
def test_no_command_line_breaks_the_reader(words: list[str]) -> None:
    found = facts(pod(*words, command=[]))
    assert found.ranks >= 1
    assert all(each.message.startswith("container engine: ") for each in found.findings)


DOUBLING = [
    {"name": "A0", "value": 100 * "x"},
    *({"name": f"A{n}", "value": f"$(A{n - 1})$(A{n - 1})"} for n in range(1, 24)),
]


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["vllm", "serve", "$(A23)"], "env": DOUBLING},
        {"command": ["sh", "-c", f"vllm serve {20_000 * '$A'}"], "env": [*DOUBLING[:1]]},
        {"command": ["sh", "-c", 100_000 * "echo a; " + "vllm serve m"]},
        {"command": ["sh", "-c", f"vllm serve {5000 * '$@ '}", *(5000 * ["x"])]},
        {"command": ["vllm", "serve", "m", "--data-parallel-size", "20000000"]},
        {"command": ["vllm", "serve", "m", "--port", 5000 * "9"]},
        {"command": ["vllm", "serve", "m", "--kv-events-config", 30_000 * "["]},
        {"command": ["trtllm-serve", "m", "--set", f"a=[{60_000 * 'b,'}]"]},
        {"command": ["trtllm-serve", "m", "--set", f"a={2000 * '['}"]},
        {"command": ["trtllm-serve", "m", "--set", "a=2026-99-99"]},
    ],
    ids=[
        "variables that double",
        "a variable again and again",
        "a long script",
        "parameters again and again",
        "ranks without end",
        "a port without end",
        "deep JSON",
        "long YAML",
        "deep YAML",
        "YAML that is no date",
    ],
)
def test_nothing_that_a_pod_says_keeps_the_operator_busy(container: dict[str, Any]) -> None:
    """Whoever may create a pod could else stop it for everybody."""
    target = pod()
    target["spec"]["containers"] = [{"name": "engine", "image": "engine", **container}]
    began = time.process_time()
    found = read(target, fleet().pools[0])
    assert time.process_time() - began < 2.0
    assert len(found.event_ports) <= 1024
