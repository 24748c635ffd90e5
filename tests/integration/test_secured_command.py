"""The `servingfleet` command against a scheduler behind TLS that asks for a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.apiserver import ApiServer
from tests.integration.fleet import Fleet
from tests.integration.secured import AUDIENCE, NAME, secured
from tests.integration.test_command import TOKENS, run
from tests.unit.relay.authorities import Authority


@pytest.fixture
async def target(
    fleet: Fleet, tmp_path: Path, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Its address; the CA and the token of one who may route and ask for figures are in the environment."""
    server.users["good", AUDIENCE] = {"username": "jane"}
    server.rights = {("jane", "create", "route"), ("jane", "get", "reuse")}
    authority = Authority("ca")
    replica = ["--static-replica", "model=m,replica=gpu-0"]
    scheduler = await secured(fleet, tmp_path / "tls", replica, authority, trusted=authority)
    token = tmp_path / "token"
    token.write_text("good\n")
    monkeypatch.setenv("SERVINGFLEET_SCHEDULER", scheduler.target)
    monkeypatch.setenv("SERVINGFLEET_CA_FILE", str(tmp_path / "tls" / "ca.crt"))
    monkeypatch.setenv("SERVINGFLEET_TOKEN_FILE", str(token))
    monkeypatch.setenv("SERVINGFLEET_SERVER_NAME", NAME)
    return scheduler.target


ROUTE = ("route", "--model", "m", "--tokens", TOKENS)


@pytest.mark.parametrize("asked", [ROUTE, ("reuse",), ("replicas",), ("top", "--once")])
async def test_every_command_shows_its_token(target: str, asked: tuple[str, ...]) -> None:
    status, out, err = await run(*asked)
    assert (status, err) == (0, "")
    assert "gpu-0" in out or "m: 0 outcomes" in out


async def test_a_missing_right_is_named_with_who_must_act(target: str) -> None:
    status, _, err = await run("explain", *ROUTE[1:])
    assert status == 4
    assert "jane may not create servingfleets/explain of fleet llm/demo" in err
    assert "bind it to a Role" in err


async def test_without_a_token_it_says_how_to_get_one(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SERVINGFLEET_TOKEN_FILE")
    status, _, err = await run(*ROUTE)
    assert status == 4
    assert "UNAUTHENTICATED" in err
    assert "kubectl create token" in err


async def test_a_bad_token_is_refused_and_not_repeated(target: str, tmp_path: Path) -> None:
    token = tmp_path / "bad"
    token.write_text("stolen")
    status, _, err = await run(*ROUTE, "--token-file", str(token))
    assert status == 4
    assert f"for the audience {AUDIENCE}" in err
    assert "stolen" not in err


@pytest.mark.parametrize("content", ["", "two\nlines", "bad\x7fbyte"])
async def test_a_file_without_a_token_is_wrong_usage(
    target: str, tmp_path: Path, content: str
) -> None:
    token = tmp_path / "empty"
    token.write_text(content)
    status, _, err = await run(*ROUTE, "--token-file", str(token))
    assert status == 2
    assert "holds no token" in err


async def test_a_certificate_that_is_not_believed_says_what_to_check(target: str) -> None:
    status, _, err = await run(*ROUTE, "--server-name", "another")
    assert status == 3
    assert "--server-name" in err


async def test_plain_text_to_tls_says_what_is_missing(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CA_FILE", "TOKEN_FILE", "SERVER_NAME"):
        monkeypatch.delenv(f"SERVINGFLEET_{name}")
    status, _, err = await run(*ROUTE)
    assert status == 3
    assert "give --ca-file" in err


async def test_a_token_is_not_sent_in_plain_text(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SERVINGFLEET_CA_FILE")
    status, _, err = await run(*ROUTE)
    assert status == 2
    assert "need --ca-file" in err
