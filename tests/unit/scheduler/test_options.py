"""What the command line refuses, and what it tells whoever wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from servingfleet_scheduler.__main__ import main
from servingfleet_scheduler.peers import peer_address
from tests.unit.relay.authorities import Authority

IDENTITY = ("--auth", "kubernetes", "--fleet", "demo", "--namespace", "llm", "--audience", "a")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    certificate, key = Authority("ca").issued("host")
    contents = {
        "cert": certificate,
        "key": key,
        "pools": b'{"pools": [{"name": "a", "speed": 1}]}',
        "secret": b"0123456789abcdef",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return {name: str(tmp_path / name) for name in contents}


def refusal(*arguments: str) -> str:
    """What is said on standard error; the process must not come up."""
    result = CliRunner().invoke(main, ["--listen", "127.0.0.1:0", *arguments])
    assert result.exit_code != 0
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


def test_a_certificate_needs_its_key(files: dict[str, str]) -> None:
    assert "go together" in refusal("--tls-cert-file", files["cert"])
    assert "go together" in refusal("--tls-key-file", files["key"])


@pytest.mark.parametrize("missing", ["--fleet", "--namespace", "--audience"])
def test_callers_are_checked_in_the_name_of_a_fleet(files: dict[str, str], missing: str) -> None:
    named = list(IDENTITY)
    del named[named.index(missing) : named.index(missing) + 2]
    tls = ("--tls-cert-file", files["cert"], "--tls-key-file", files["key"])
    assert f"needs {missing}" in refusal(*named, *tls)


def test_tokens_are_not_taken_in_plain_text() -> None:
    assert "anybody could read the tokens" in refusal(*IDENTITY)


def test_an_address_for_others_needs_what_they_must_share(files: dict[str, str]) -> None:
    assert "--token-key-file" in refusal("--advertise", "10.0.0.1")
    tls = ("--tls-cert-file", files["cert"], "--tls-key-file", files["key"])
    key = ("--token-key-file", files["secret"])
    assert "--peer-ca-file" in refusal("--advertise", "10.0.0.1", *key, *tls)


def test_a_pools_file_that_says_something_else_is_told_by_name_and_place(
    files: dict[str, str],
) -> None:
    said = refusal("--pools-file", files["pools"])
    assert files["pools"] in said
    assert "speed" in said
    assert "$.pools[0]" in said


def test_a_certificate_of_another_key_is_told(files: dict[str, str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(Authority("ca").issued("host")[1])
    said = refusal("--tls-cert-file", files["cert"], "--tls-key-file", str(other))
    assert "KEY_VALUES_MISMATCH" in said


@pytest.mark.parametrize(
    ("advertised", "address"),
    [
        ("", ""),
        ("10.0.0.1", "10.0.0.1:7070"),
        ("10.0.0.1:9", "10.0.0.1:9"),
        ("fd00::1", "[fd00::1]:7070"),
        ("[fd00::1]:9", "[fd00::1]:9"),
        ("scheduler-0", "scheduler-0:7070"),
    ],
)
def test_an_address_for_others_may_leave_out_the_port(advertised: str, address: str) -> None:
    assert peer_address(advertised, 7070) == address


@pytest.mark.parametrize("target", ["2", "high=2", "0=", "0=0", "0=-1", "0=inf", "0=2/", "0=2/x"])
def test_a_target_that_is_none_is_refused_with_its_form(target: str) -> None:
    assert "PRIORITY=SECONDS[/QUEUE_SECONDS]" in refusal("--target", target)


def test_a_class_has_one_target() -> None:
    assert "twice" in refusal("--target", "0=2", "--target", "0=3")
