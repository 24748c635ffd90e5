"""What the command line says."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from servingfleet_relay.__main__ import main
from servingfleet_relay.options import BadOption, labels, layer_groups, rank_sockets, targets
from servingfleet_relay.settings import LayerGroup


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
