"""Addresses, files, and when a channel is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servingfleet_client import Scheduler, UnusableFile
from servingfleet_client.connection import REREAD_S, Link, Options, address


@pytest.mark.parametrize(
    ("target", "named"),
    [
        ("scheduler:7070", "scheduler:7070"),
        ("dns:///scheduler:7070", "dns:///scheduler:7070"),
        (["scheduler:7070"], "scheduler:7070"),
        (["10.0.0.1:1", "10.0.0.2:2"], "ipv4:10.0.0.1:1,10.0.0.2:2"),
        (["[::1]:1", "[fd00::2]:2"], "ipv6:[::1]:1,[fd00::2]:2"),
    ],
)
def test_one_scheduler_or_several_are_one_name_to_grpc(target: Any, named: str) -> None:
    assert address(target) == named


@pytest.mark.parametrize("target", [[], ["a:1", "b:1"], ["10.0.0.1:1", "[::1]:1"]])
def test_schedulers_that_no_one_name_stands_for_are_refused(target: list[str]) -> None:
    with pytest.raises(ValueError, match="one name that stands for all"):
        Scheduler(target)


@pytest.mark.parametrize("more", [{"token_file": "t"}, {"server_name": "n"}])
def test_nobody_shows_a_token_in_plain_text(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="anybody could read the token"):
        Scheduler("scheduler:7070", **more)


class Dialled:
    """A link that dials nothing, and its time."""

    def __init__(self, folder: Path, ca: bytes = b"old", token: str = "first\n") -> None:
        self.now = 0.0
        self.ca, self.token = folder / "ca.crt", folder / "token"
        self.ca.write_bytes(ca)
        self.token.write_text(token)
        self.dialled: list[bytes | None] = []
        self.options: dict[str, Any] = {}
        scheduler = Scheduler("s:1", ca_file=self.ca, token_file=self.token, server_name="name")
        self.link = Link(scheduler, self._dial, lambda: self.now)

    def _dial(self, address: str, trusted: bytes | None, options: Options) -> int:
        self.dialled.append(trusted)
        self.options = dict(options)
        return len(self.dialled)

    def channel_later(self) -> tuple[int, int | None]:
        self.now += REREAD_S
        return self.link.channel()


def test_another_ca_means_another_channel_and_the_old_one_keeps_its_calls(tmp_path: Path) -> None:
    dialled = Dialled(tmp_path)
    assert dialled.channel_later() == (1, None)
    dialled.ca.write_bytes(b"new")
    assert dialled.link.channel() == (1, None)  # not read for every call
    assert dialled.channel_later() == (2, None)
    assert sorted(dialled.link.channels()) == [1, 2]
    dialled.ca.write_bytes(b"newer")
    assert dialled.channel_later() == (3, 1)
    assert dialled.dialled == [b"old", b"new", b"newer"]
    assert dialled.options["grpc.ssl_target_name_override"] == "name"


@pytest.mark.parametrize("content", [b"", None])
def test_a_ca_that_can_not_be_read_leaves_what_was_trusted(
    tmp_path: Path, content: bytes | None
) -> None:
    dialled = Dialled(tmp_path)
    if content is None:
        dialled.ca.unlink()
    else:
        dialled.ca.write_bytes(content)
    assert dialled.channel_later() == (1, None)


def test_the_token_is_read_for_each_call_and_a_bad_one_not_taken(tmp_path: Path) -> None:
    dialled = Dialled(tmp_path)
    assert dialled.link.metadata() == (("authorization", "Bearer first"),)
    dialled.token.write_text("second\n")
    for content in ("second\n", "", "two\nlines", "\x7f"):
        dialled.token.write_text(content)
        assert dialled.link.metadata() == (("authorization", "Bearer second"),)


@pytest.mark.parametrize(
    ("ca", "token", "message"),
    [
        (b"", "good", "CA file .* is empty"),
        (b"ca", "", "token file .* is empty"),
        (b"ca", "secret\nsecret", "holds no token"),
    ],
)
def test_files_of_no_use_are_told_at_once_and_not_repeated(
    tmp_path: Path, ca: bytes, token: str, message: str
) -> None:
    with pytest.raises(UnusableFile, match=message) as refused:
        Dialled(tmp_path, ca, token)
    assert "secret" not in str(refused.value)


def test_a_missing_file_is_told_by_name() -> None:
    with pytest.raises(UnusableFile, match="CA file /nowhere/ca: No such file"):
        Link(Scheduler("s:1", ca_file="/nowhere/ca"), lambda *_: None)


def test_plain_text_has_neither_ca_nor_token() -> None:
    seen: list[bytes | None] = []
    link = Link(Scheduler("s:1"), lambda _, trusted, __: seen.append(trusted))
    assert (seen, link.metadata()) == ([None], ())
