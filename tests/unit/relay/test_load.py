"""What the engine's HTTP server tells."""

from __future__ import annotations

from typing import Any

import pytest

from servingfleet_relay.answers import (
    STATISTICS_AGE_S,
    Identity,
    Metrics,
    Progress,
    ScrapeFailed,
    adapters_of,
    cached_tokens,
    identity_of,
    loads_of,
    model_of,
    parse_metrics,
    statistics_of,
)

METRICS = """\
# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1234"} 1.0
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7e+09
"""


def test_load_is_read_for_each_rank() -> None:
    metrics = parse_metrics(METRICS, (0, 1))
    first, second = metrics.loads[0], metrics.loads[1]
    assert (first.running_requests, first.waiting_requests, first.kv_usage) == (2, 1, 0.25)
    assert second.running_requests == 5
    assert not second.HasField("waiting_requests")


def test_identity_is_read_where_it_is_told() -> None:
    metrics = parse_metrics(METRICS, (0,))
    assert (metrics.started, metrics.gpu_blocks) == (1.7e9, 1234)
    assert parse_metrics("", (0,)).started is None


def test_other_ranks_are_left_out() -> None:
    assert list(parse_metrics(METRICS, (1,)).loads) == [1]


def test_the_older_name_of_the_usage_is_known() -> None:
    text = 'vllm:gpu_cache_usage_perc{engine="0"} 0.5\n'
    assert parse_metrics(text, (0,)).loads[0].kv_usage == 0.5


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "1e300"])
def test_figures_that_can_not_be_are_left_out(value: str) -> None:
    text = f'vllm:num_requests_running{{engine="0"}} {value}\n'
    assert parse_metrics(text, (0,)).loads == {}


def test_text_that_is_no_metrics_is_an_error() -> None:
    with pytest.raises(ScrapeFailed):
        parse_metrics("<html>{{{\n", (0,))


def test_the_base_model_is_the_one_without_a_parent() -> None:
    rows = {"data": [{"id": "lora", "parent": "base"}, {"id": "base", "parent": None}]}
    assert model_of(rows) == "base"


@pytest.mark.parametrize("answer", [None, [], {}, {"data": 1}, {"data": [1, {"id": 2}]}])
def test_an_answer_that_names_no_model_is_none(answer: object) -> None:
    assert model_of(answer) is None


# As vLLM 0.32 and SGLang 0.5.23 write them.
LORAS = {
    "data": [
        {"id": "base", "root": "org/base", "parent": None, "max_model_len": 4096},
        {"id": "sql", "root": "/loras/sql", "parent": "base"},
        {"id": "law", "root": "/loras/law", "parent": "base", "max_model_len": None},
    ]
}
BASE = {"data": LORAS["data"][:1]}


def test_adapters_are_those_with_a_parent() -> None:
    assert adapters_of(LORAS, "vllm") == adapters_of(LORAS, "sglang") == ("law", "sql")


def test_vllm_that_lists_none_has_none_and_of_others_it_is_not_known() -> None:
    assert adapters_of(BASE, "vllm") == ()
    assert adapters_of(BASE, "sglang") is None


@pytest.mark.parametrize(
    "models",
    [
        None,
        {},
        {"data": []},
        {"data": [{"id": "a" * 513, "parent": "base"}]},
        {"data": [{"id": str(number), "parent": "base"} for number in range(1025)]},
    ],
)
def test_an_answer_that_can_not_be_told_says_nothing_of_adapters(models: object) -> None:
    assert adapters_of(models, "vllm") is None


SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="1",model_name="m",tp_rank="0"} 3.0
sglang:num_queue_reqs{dp_rank="1",model_name="m",tp_rank="0"} 2.0
sglang:token_usage{dp_rank="1",model_name="m",tp_rank="0"} 0.5
sglang:max_total_num_tokens{dp_rank="1",model_name="m",tp_rank="0"} 4096.0
sglang:swa_token_usage{dp_rank="1",model_name="m",tp_rank="0"} 0.0
"""


def test_sglangs_load_is_read_for_each_rank() -> None:
    metrics = parse_metrics(SGLANG, (0, 1))
    load = metrics.loads[1]
    assert (load.running_requests, load.waiting_requests, load.kv_usage) == (3, 2, 0.5)
    assert (metrics.gpu_tokens, metrics.hybrid, metrics.engine) == (4096, False, "sglang")
    assert list(parse_metrics("sglang:num_running_reqs 1.0\n", (4,)).loads) == [4]


@pytest.mark.parametrize("name", ["swa_token_usage", "mamba_usage"])
def test_window_or_recurrent_layers_in_use_are_seen(name: str) -> None:
    assert parse_metrics(f"sglang:{name} 0.1\n", (0,)).hybrid


VERSION = {"version": "0.32.0"}
INFO: dict[str, object] = {"version": "0.5.23", "internal_states": [], "kv_events": None}


@pytest.mark.parametrize(
    ("info", "version", "engine", "identity"),
    [
        (None, VERSION, "vllm", Identity("vllm", "0.32.0")),
        ({"vllm_config": {}}, VERSION, "vllm", Identity("vllm", "0.32.0")),
        (INFO, None, None, Identity("sglang", "0.5.23")),
        (INFO, VERSION, "sglang", Identity("sglang", "0.5.23")),
        # Other engines answer /version alike: their metrics don't have vLLM's names.
        (None, VERSION, None, None),
        (None, VERSION, "sglang", None),
        (None, {"version": 3}, "vllm", None),
        ({"internal_states": []}, VERSION, "vllm", None),
        (None, None, "vllm", None),
        ([], [], None, None),
    ],
)
def test_an_engine_is_what_its_answers_prove_and_nothing_is_guessed(
    info: object, version: object, engine: str | None, identity: Identity | None
) -> None:
    assert identity_of(info, version, Metrics(engine=engine)) == identity


def test_metrics_of_two_engines_prove_neither() -> None:
    assert parse_metrics(METRICS + SGLANG, (0, 1)).engine is None
    assert parse_metrics(METRICS, (0, 1)).engine == "vllm"


COUNTED = """\
# TYPE vllm:request_success counter
vllm:request_success_total{engine="1",finished_reason="stop"} 3.0
vllm:request_success_total{engine="1",finished_reason="length"} 2.0
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="1"} 1000.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="1"} 640.0
# TYPE vllm:external_prefix_cache_hits counter
vllm:external_prefix_cache_hits_total{engine="1"} 60.0
"""


def test_what_a_rank_has_computed_is_what_it_did_not_reuse() -> None:
    assert parse_metrics(COUNTED, (0, 1)).progress == {1: Progress(finished=5, computed=300)}


def test_a_total_of_several_ranks_is_of_none() -> None:
    text = (
        "sglang:num_requests_total 5.0\nsglang:prompt_tokens_total 90.0\n"
        'sglang:cached_tokens_total{cache_source="device"} 30.0\n'
        'sglang:cached_tokens_total{cache_source="host"} 10.0\n'
    )
    assert parse_metrics(text, (0, 1)).progress == {}
    assert parse_metrics(text, (4,)).progress == {4: Progress(finished=5, computed=50)}


def test_tensorrt_llms_metrics_have_names_without_colons() -> None:
    text = (
        "trtllm_num_requests_running 2\ntrtllm_kv_cache_utilization 0.5\n"
        "trtllm_kv_cache_max_blocks 70\ntrtllm_kv_cache_tokens_per_block 32\n"
        'trtllm_request_success_total{finished_reason="end_id"} 3\n'
        "trtllm_prompt_tokens_total 900\ntrtllm_prompt_cached_tokens_total 320\n"
    )
    metrics = parse_metrics(text, (0,))
    assert (metrics.engine, metrics.gpu_blocks, metrics.block_tokens) == ("trtllm", 70, 32)
    assert metrics.progress == {0: Progress(finished=3, computed=580)}
    assert (metrics.loads[0].running_requests, metrics.loads[0].kv_usage) == (2, 0.5)


def test_a_load_of_several_ranks_is_of_none() -> None:
    text = "trtllm_num_requests_running 2\ntrtllm_num_requests_waiting 9\n"
    assert parse_metrics(text, (0, 1)).loads == {}


ITERATION = {
    "numActiveRequests": 3,
    "numQueuedRequests": 5,
    "kvCacheStats": {"maxNumBlocks": 200, "usedNumBlocks": 50, "tokensPerBlock": 32},
}


def test_tensorrt_llms_last_iteration_tells_its_load_and_that_it_is_old() -> None:
    metrics = statistics_of([{"numActiveRequests": 9}, ITERATION], (4,))
    load = metrics.loads[4]
    assert (load.running_requests, load.waiting_requests, load.kv_usage) == (3, 5, 0.25)
    assert load.age_s == STATISTICS_AGE_S
    assert (metrics.gpu_blocks, metrics.block_tokens) == (200, 32)


@pytest.mark.parametrize("row", [{}, {"numActiveRequests": "3"}, {"kvCacheStats": 5}])
def test_what_an_iteration_does_not_tell_is_not_known(row: dict[str, Any]) -> None:
    load = statistics_of([{"x": 1, **row}], (0,)).loads[0]
    assert not any(load.HasField(name) for name in ("running_requests", "kv_usage"))


def test_an_idle_engines_statistics_and_one_figure_of_several_ranks_tell_no_load() -> None:
    assert statistics_of([], (0,)).loads == {}
    assert statistics_of([ITERATION], (0, 1)).loads == {}


@pytest.mark.parametrize("answer", [{}, [5], "x", None])
def test_what_is_no_list_of_iterations_is_refused(answer: object) -> None:
    with pytest.raises(ScrapeFailed, match="no list"):
        statistics_of(answer, (0,))


def test_tensorrt_llm_is_told_by_the_owner_of_its_models() -> None:
    models = {"data": [{"id": "m", "owned_by": "tensorrt_llm"}]}
    assert identity_of(None, {"version": "1.2.1"}, None, models) == Identity("trtllm", "1.2.1")
    others = {"data": [{"id": "m", "owned_by": "tensorrt_llm"}, {"id": "n", "owned_by": "me"}]}
    assert identity_of(None, {"version": "1.2.1"}, None, others) is None


def test_sglang_says_how_large_the_blocks_of_its_events_are() -> None:
    info = {**INFO, "kv_events": {"publisher": "zmq", "block_size": 64}}
    assert identity_of(info, None, None) == Identity("sglang", "0.5.23", 64)


@pytest.mark.parametrize("events", [{}, {"block_size": "64"}, {"block_size": -1}, []])
def test_a_block_size_that_can_not_be_is_none(events: object) -> None:
    found = identity_of({**INFO, "kv_events": events}, None, None)
    assert found == Identity("sglang", "0.5.23", 0)


def test_sglangs_loads_tell_what_waits_in_tokens() -> None:
    row = {
        "dp_rank": 1,
        "num_running_reqs": 3,
        "num_waiting_reqs": 2,
        "num_waiting_uncached_tokens": 700,
        "token_usage": 0.25,
    }
    loads = loads_of({"loads": [row, {"dp_rank": 9}, "x"]}, (0, 1))
    assert list(loads) == [1]
    load = loads[1]
    assert (load.running_requests, load.waiting_requests, load.waiting_tokens) == (3, 2, 700)
    assert load.kv_usage == 0.25
    assert loads_of({"loads": [{"num_running_reqs": -1}]}, (0,))[0].HasField("kv_usage") is False
    assert loads_of([], (0,)) == {}


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ({"usage": {"prompt_tokens_details": {"cached_tokens": 48}}}, 48),
        ({"usage": {"prompt_tokens_details": None}}, None),
        ({"usage": {}}, None),
        ([], None),
    ],
)
def test_reported_reuse_is_read_where_it_is_told(answer: object, tokens: int | None) -> None:
    assert cached_tokens(answer) == tokens
