from __future__ import annotations

import struct

import pytest

from servingfleet_core import block_hashes, namespace_root
from servingfleet_protos.v1.routing_pb2 import MediaKey, Prompt, TokenList
from servingfleet_scheduler.errors import InvalidRequest
from servingfleet_scheduler.prompts import PreparedPrompt, prepare

from .helpers import BLOCK, MODEL, hashes, tokens

LIMIT = 1_048_576


def prepared(prompt: Prompt, limit: int = LIMIT) -> PreparedPrompt:
    return prepare(prompt, MODEL, block_tokens=BLOCK, max_prompt_tokens=limit)


def test_packed_and_repeated_tokens_give_the_same_hashes() -> None:
    packed = prepared(Prompt(tokens_le32=tokens(50)))
    repeated = prepared(Prompt(tokens=TokenList(ids=range(50))))
    assert packed.hashes() == repeated.hashes() == hashes(50)


def test_the_largest_token_id_is_hashed_as_it_is() -> None:
    ids = [2**32 - 1] * BLOCK
    found = prepared(Prompt(tokens=TokenList(ids=ids))).hashes()
    assert found == block_hashes(namespace_root(MODEL), struct.pack(f"<{BLOCK}I", *ids), BLOCK)


def test_hashes_are_taken_as_they_are_in_either_key_form() -> None:
    prompt = prepared(Prompt(block_hashes=hashes(64), prompt_tokens=70))
    assert prompt.hashes(pairs=False) == prompt.hashes(pairs=True) == hashes(64)
    assert prompt.prompt_tokens == 70


def test_adapter_and_salt_keep_equal_tokens_apart() -> None:
    plain = prepared(Prompt(tokens_le32=tokens(32))).hashes()
    adapted = prepared(Prompt(tokens_le32=tokens(32), adapter="lora")).hashes()
    salted = prepared(Prompt(tokens_le32=tokens(32), cache_salt="lora")).hashes()
    assert len({plain, adapted, salted}) == 3


def test_a_media_key_changes_the_block_where_it_starts_and_those_after() -> None:
    plain = prepared(Prompt(tokens_le32=tokens(48))).hashes()
    media = [MediaKey(key=b"image", token_offset=20)]
    with_image = prepared(Prompt(tokens_le32=tokens(48), media=media)).hashes()
    assert with_image[:8] == plain[:8]
    assert with_image[8:16] != plain[8:16]


def test_pairs_need_one_token_more_for_a_block() -> None:
    prompt = prepared(Prompt(tokens_le32=tokens(32)))
    assert (len(prompt.hashes(pairs=False)) // 8, len(prompt.hashes(pairs=True)) // 8) == (2, 1)


def test_a_prompt_at_the_limit_is_taken() -> None:
    prompt = prepared(Prompt(tokens_le32=bytes(4 * LIMIT)))
    assert len(prompt.hashes()) == 8 * LIMIT // BLOCK


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (Prompt(), "prompt"),
        (Prompt(tokens_le32=b""), "prompt.tokens_le32"),
        (Prompt(tokens=TokenList()), "prompt.tokens.ids"),
        (Prompt(tokens_le32=b"12345"), "prompt.tokens_le32"),
        (Prompt(tokens_le32=bytes(4 * LIMIT + 4)), "prompt.tokens_le32"),
        (Prompt(tokens=TokenList(ids=[1] * (LIMIT + 1))), "prompt.tokens.ids"),
        (Prompt(tokens_le32=tokens(20), prompt_tokens=21), "prompt.prompt_tokens"),
        (Prompt(block_hashes=bytes(12), prompt_tokens=99), "prompt.block_hashes"),
        (Prompt(block_hashes=bytes(8)), "prompt.prompt_tokens"),
        (Prompt(block_hashes=bytes(16), prompt_tokens=31), "prompt.block_hashes"),
        (Prompt(block_hashes=bytes(8), prompt_tokens=LIMIT + 1), "prompt.prompt_tokens"),
        (Prompt(tokens_le32=tokens(20), adapter="a" * 513), "prompt.adapter"),
        (Prompt(tokens_le32=tokens(20), cache_salt="ä" * 257), "prompt.cache_salt"),
        (
            Prompt(tokens_le32=tokens(20), media=[MediaKey(key=b"k", token_offset=20)]),
            "prompt.media[0].token_offset",
        ),
        (
            Prompt(
                tokens_le32=tokens(20),
                media=[MediaKey(key=b"k", token_offset=9), MediaKey(key=b"l", token_offset=3)],
            ),
            "prompt.media[1].token_offset",
        ),
        (Prompt(tokens_le32=tokens(20), media=[MediaKey()]), "prompt.media[0].key"),
        (
            Prompt(tokens_le32=tokens(20), media=[MediaKey(key=bytes(1025))]),
            "prompt.media[0].key",
        ),
    ],
)
def test_a_malformed_prompt_is_refused_by_its_field(prompt: Prompt, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        prepared(prompt)
    assert [each.field for each in refused.value.fields] == [field]


def test_a_refusal_never_repeats_the_salt() -> None:
    with pytest.raises(InvalidRequest) as refused:
        prepared(Prompt(tokens_le32=tokens(20), cache_salt="secret" * 100))
    assert "secret" not in str(refused.value)
