"""Token ids from the command line."""

from __future__ import annotations

import struct

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_cli.asking import parse_tokens


@pytest.mark.parametrize("text", ["1,2,3", "1 2 3", "1\n2\n3\n", "[1, 2, 3]", " [1,2,3] "])
def test_every_form_gives_the_same_tokens(text: str) -> None:
    assert parse_tokens(text) == struct.pack("<3I", 1, 2, 3)


@pytest.mark.parametrize("text", ["1,x", "[1, null]", "[1", "-1", "4294967296", "[[1]]", "{}"])
def test_what_is_not_a_token_id_is_refused_by_name(text: str) -> None:
    with pytest.raises(click.BadParameter, match="not token ids"):
        parse_tokens(text)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_survive_the_command_line(ids: list[int]) -> None:
    assert parse_tokens(str(ids)) == struct.pack(f"<{len(ids)}I", *ids)
