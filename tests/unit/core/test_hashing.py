"""The published hash vectors against the core, and against a second implementation of the recipe."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from servingfleet_core import HASH_VERSION, block_hashes, namespace_root

SEED = 0x7366_6C65_6574_3031


@dataclass(frozen=True)
class Vector:
    name: str
    model: str
    adapter: str
    cache_salt: str
    pairs: bool
    block_tokens: int
    tokens: list[int]
    media: list[tuple[int, bytes]]
    root: int
    hashes: list[int]


def vectors() -> list[Vector]:
    text = (Path(__file__).parent / "hash_vectors.json").read_text()
    return [
        Vector(
            **{
                **raw,
                "media": [(index, bytes.fromhex(key)) for index, key in raw["media"]],
                "root": int(raw["root"], 16),
                "hashes": [int(value, 16) for value in raw["hashes"]],
            }
        )
        for raw in json.loads(text)["vectors"]
    ]


def pack_tokens(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def digest(data: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(data, SEED)) or 1


def recipe_root(model: str, adapter: str, cache_salt: str, pairs: bool) -> int:
    fields = ["sf1", model, adapter, cache_salt, "pair" if pairs else "token"]
    encoded = [field.encode() for field in fields]
    return digest(b"".join(struct.pack("<I", len(field)) + field for field in encoded))


def recipe(
    root: int, tokens: list[int], block: int, media: list[tuple[int, bytes]], pairs: bool
) -> list[int]:
    hashes = []
    for start in range(0, len(tokens) - block - pairs + 1, block):
        data = struct.pack("<Q", root) + pack_tokens(tokens[start : start + block + pairs])
        for index, key in media:
            if start <= index < start + block:
                data += struct.pack("<II", index - start, len(key)) + key
        root = digest(data)
        hashes.append(root)
    return hashes


def unpacked(hashes: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(hashes) // 8}Q", hashes))


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: vector.name)
def test_the_core_gives_the_published_hashes(vector: Vector) -> None:
    root = namespace_root(vector.model, vector.adapter, vector.cache_salt, vector.pairs)
    tokens = pack_tokens(vector.tokens)
    hashes = block_hashes(root, tokens, vector.block_tokens, vector.media, vector.pairs)
    assert (root, unpacked(hashes)) == (vector.root, vector.hashes)


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: vector.name)
def test_a_second_implementation_gives_the_published_hashes(vector: Vector) -> None:
    root = recipe_root(vector.model, vector.adapter, vector.cache_salt, vector.pairs)
    hashes = recipe(root, vector.tokens, vector.block_tokens, vector.media, vector.pairs)
    assert (root, hashes) == (vector.root, vector.hashes)


TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(
    names=st.tuples(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8)),
    tokens=TOKENS,
    block=st.integers(1, 17),
    media=st.lists(st.tuples(st.integers(0, 39), st.binary(max_size=300)), max_size=4),
    pairs=st.booleans(),
)
def test_both_implementations_agree_on_any_prompt(
    names: tuple[str, str, str],
    tokens: list[int],
    block: int,
    media: list[tuple[int, bytes]],
    pairs: bool,
) -> None:
    items = sorted((item for item in media if item[0] < len(tokens)), key=lambda item: item[0])
    root = namespace_root(*names, pairs)
    assert root == recipe_root(*names, pairs)
    hashes = block_hashes(root, pack_tokens(tokens), block, items, pairs)
    assert unpacked(hashes) == recipe(root, tokens, block, items, pairs)


def test_the_recipe_has_a_name() -> None:
    assert HASH_VERSION == "sf1"


def test_adapter_and_salt_are_told_apart_though_their_letters_are_the_same() -> None:
    roots = {
        namespace_root("m", "ab", ""),
        namespace_root("m", "", "ab"),
        namespace_root("m", "a", "b"),
        namespace_root("ma", "b", ""),
        namespace_root("m", "ab", "", True),
    }
    assert len(roots) == 5


def test_a_media_key_changes_its_block_and_those_after_it_only() -> None:
    tokens = pack_tokens(list(range(12)))
    plain = unpacked(block_hashes(1, tokens, 4))
    keyed = unpacked(block_hashes(1, tokens, 4, [(5, b"cat")]))
    assert [a == b for a, b in zip(plain, keyed, strict=True)] == [True, False, False]


def test_a_pair_block_needs_one_token_more() -> None:
    assert len(block_hashes(1, pack_tokens([1] * 8), 4, pairs=True)) == 8
    assert len(block_hashes(1, pack_tokens([1] * 9), 4, pairs=True)) == 16


@pytest.mark.parametrize(
    "arguments",
    [
        (1, b"123", 4),
        (1, b"", 0),
        (-1, b"", 4),
        (2**64, b"", 4),
        (1, b"", -4),
        (1, b"", 2**21),
        (1, bytes(16), 4, [(4, b"beyond")]),
        (1, bytes(16), 4, [(-1, b"before")]),
        (1, bytes(16), 4, [(2, b""), (1, b"")]),
    ],
)
def test_malformed_arguments_are_value_errors(arguments: tuple[object, ...]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (each case names what is wrong)
        block_hashes(*arguments)  # type: ignore[arg-type]
