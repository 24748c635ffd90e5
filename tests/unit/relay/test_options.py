"""What the command line says."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from servingfleet_relay.command import main
from servingfleet_relay.options import (
    BadOption,
    check_identity,
    check_memory,
    host_port,
    labels,
    layer_groups,
    rank_sockets,
    targets,
)
from servingfleet_relay.settings import (
    LayerGroup,
    PipelineSettings,
    RelaySettings,
    messages_within,
    units_within,
)


def test_one_address_stands_for_all_ranks() -> None:
    sockets = rank_sockets((2, 3), ["tcp://h:5557"], ["tcp://h:5657"], bind=False)
    assert [(s.rank, s.events, s.replay) for s in sockets] == [
        (2, "tcp://h:5559", "tcp://h:5659"),
        (3, "tcp://h:5560", "tcp://h:5660"),
    ]


def test_an_address_for_each_rank_is_taken_as_it_is() -> None:
    sockets = rank_sockets((0, 1), ["ipc:///a", "ipc:///b"], [], bind=True)
    assert [(s.events, s.replay, s.bind) for s in sockets] == [
        ("ipc:///a", None, True),
        ("ipc:///b", None, True),
    ]


@pytest.mark.parametrize(
    ("ranks", "events", "replays"),
    [
        ((0, 1, 2), ["tcp://h:1", "tcp://h:2"], []),
        ((0, 1), ["ipc:///a"], []),
        ((0,), ["h:5557"], []),
        ((0,), ["tcp://h"], []),
        ((0, 1), ["tcp://h:65535"], []),
        ((0, 1), ["tcp://h:5557"], ["tcp://h:5558"]),
    ],
)
def test_addresses_that_can_not_work_are_refused(
    ranks: tuple[int, ...], events: list[str], replays: list[str]
) -> None:
    with pytest.raises(BadOption):
        rank_sockets(ranks, events, replays, bind=False)


def test_schedulers_may_be_repeated_or_listed() -> None:
    assert targets(["a:1,b:2", "[::1]:3", "a:1"]) == ("a:1", "b:2", "[::1]:3")


@pytest.mark.parametrize("value", ["a", "a:", ":1", "a:b", "a:0", "a:70000", ""])
def test_a_scheduler_without_port_is_refused(value: str) -> None:
    with pytest.raises(BadOption):
        targets([value])


def test_labels_need_a_key_and_a_value() -> None:
    assert labels(["a=b=c", "d="]) == {"a": "b=c", "d": ""}
    for wrong in (["a"], ["=b"], [f"k{n}=" for n in range(65)], ["a=" + "x" * 513]):
        with pytest.raises(BadOption):
            labels(wrong)


def test_layer_groups_have_a_kind_a_block_and_perhaps_a_window() -> None:
    assert layer_groups(["sliding_window:32:64", "full_attention:32", "mamba:528"]) == (
        LayerGroup("sliding_window", 32, 64),
        LayerGroup("full_attention", 32),
        LayerGroup("mamba", 528),
    )


@pytest.mark.parametrize(
    "value",
    [
        "",
        "attention:32",
        "full_attention",
        "full_attention:0",
        "full_attention:32:64",
        "sliding_window:32",
        "sliding_window:32:x",
        "mamba:-1",
    ],
)
def test_a_layer_group_that_can_not_be_is_refused(value: str) -> None:
    with pytest.raises(BadOption, match="layer-group"):
        layer_groups([value])


def test_a_wrong_option_ends_with_2_and_says_what_was_expected() -> None:
    options = ["--replica", "r", "--engine-events", "tcp://h:1", "--scheduler", "nowhere"]
    result = CliRunner().invoke(main, [*options, "--model", "m"])
    assert result.exit_code == 2
    assert "expected host:port" in result.output


def test_a_relay_that_can_not_know_its_model_does_not_start() -> None:
    options = ["--replica", "r", "--engine-events", "tcp://h:1", "--scheduler", "s:1"]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 2
    assert "--model" in result.output


REQUIRED = {"--replica": "r", "--engine-events": "tcp://h:1", "--scheduler": "s:1"}
OPTIONS = [
    option
    for option in main.params
    if isinstance(option, click.Option) and not option.hidden and not option.is_eager
]


def sample(option: click.Option) -> list[str]:
    """Values that differ from the default; two for an option that takes several."""
    if isinstance(option.type, click.Choice):
        return [str(option.type.choices[0])]
    if isinstance(option.type, (click.types.IntParamType, click.IntRange)):
        return ["7"]
    return ["one", "two"] if option.multiple else ["one"]


@pytest.mark.parametrize("option", OPTIONS, ids=[str(option.name) for option in OPTIONS])
def test_the_environment_says_all_that_the_command_line_can(
    option: click.Option, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = option.opts[0]
    others = [part for name, value in REQUIRED.items() if name != flag for part in (name, value)]
    values = ["true"] if option.is_flag else sample(option)
    told = [flag] if option.is_flag else [part for value in values for part in (flag, value)]
    expected = main.make_context("relay", [*others, *told]).params
    monkeypatch.setenv(f"SERVINGFLEET_RELAY_{str(option.name).upper()}", " ".join(values))
    assert main.make_context("relay", list(others)).params == expected
    assert expected[str(option.name)] != option.default


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ""),
        ("10.0.0.1:8000", "10.0.0.1:8000"),
        ("engine.n.svc:80", "engine.n.svc:80"),
        ("[fd00::1]:8000", "[fd00::1]:8000"),
        ("fd00::1:8000", "[fd00::1]:8000"),  # $(POD_IP):8000 in an IPv6 cluster
    ],
)
def test_an_endpoint_is_a_host_and_a_port(value: str, expected: str) -> None:
    assert host_port("--endpoint", value) == expected


@pytest.mark.parametrize("value", ["10.0.0.1", ":8000", "h:", "$(POD_IP):8000", "h" * 512 + ":1"])
def test_an_endpoint_that_nobody_can_reach_is_refused(value: str) -> None:
    with pytest.raises(BadOption, match="--endpoint"):
        host_port("--endpoint", value)


def test_a_token_is_never_shown_in_plain_text() -> None:
    check_identity(Path("ca"), "f-scheduler.n.svc", Path("token"))
    check_identity(Path("ca"), "", None)
    for name, token in (("", Path("token")), ("f-scheduler.n.svc", None)):
        with pytest.raises(BadOption, match="plain text"):
            check_identity(None, name, token)


def test_a_memory_limit_needs_a_supervisor_and_room_to_start() -> None:
    check_memory(0, supervise=False)
    check_memory(208, supervise=True)
    with pytest.raises(BadOption, match="--supervise"):
        check_memory(208, supervise=False)
    with pytest.raises(BadOption, match="expected at least 96"):
        check_memory(95, supervise=True)


def test_a_mirror_and_its_queue_fit_into_the_memory_that_the_process_is_given() -> None:
    usual = (PipelineSettings.max_units, RelaySettings.receive_high_water_messages)
    assert (units_within(0, 4), messages_within(0, 4)) == usual
    for ranks in (1, 8):
        mirrors = units_within(208, ranks) * 545 * ranks
        queues = messages_within(208, ranks) * 16_384 * ranks
        assert 0.9 * (208 - 55) * 2**20 < mirrors + queues < (208 - 55) * 2**20
    assert (units_within(16_384, 1), messages_within(16_384, 1)) == usual
