"""SGLang's messages, as constructed bytes of each wire generation, hashed as SGLang hashes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any

SALT_TAG = b"sglang-cache-salt-v1\0"
NAMESPACE_TAG = b"sglang-kv-event-namespace-v1"


def signed(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)


def page_digests(
    tokens: Sequence[int], page: int, *, pairs: bool = False, salt: str = ""
) -> list[bytes]:
    """Chained digests of the full pages of a prompt."""
    keys = [[a, b] for a, b in pairwise(tokens)] if pairs else [[t] for t in tokens]
    digest = sha256(SALT_TAG + salt.encode()).digest() if salt else b""
    digests = []
    for at in range(0, len(keys) // page * page, page):
        flat = [token for key in keys[at : at + page] for token in key]
        digest = sha256(digest + struct.pack(f"<{len(flat)}I", *flat)).digest()
        digests.append(digest)
    return digests


def page_hashes(
    tokens: Sequence[int], page: int, *, pairs: bool = False, salt: str = ""
) -> list[int]:
    return [signed(digest) for digest in page_digests(tokens, page, pairs=pairs, salt=salt)]


def in_namespace(
    hashes: Sequence[int], *, extra_key: str | None, salt: str | None = None
) -> list[int]:
    """Hashes as the "dynamo" format (and, since 0.5.23, LoRA) publishes them."""
    seed = sha256(NAMESPACE_TAG)
    for part in (extra_key, salt):
        text = (part or "").encode()
        seed.update(b"\x00" if part is None else b"\x01" + len(text).to_bytes(8, "little") + text)
    return [
        signed(sha256(seed.digest() + h.to_bytes(8, "big", signed=True)).digest()) for h in hashes
    ]


def stored(
    tokens: Sequence[int],
    page: int = 16,
    *,
    skip: int = 0,
    hashes: Sequence[int] | None = None,
    salt: str = "",
    pairs: bool = False,
    **fields: Any,
) -> dict[str, Any]:
    """A BlockStored of 0.5.23 for the full pages of a prompt, without the first `skip`."""
    named = list(
        hashes if hashes is not None else page_hashes(tokens, page, salt=salt, pairs=pairs)
    )
    keys: list[Any] = list(tokens)
    if pairs:
        keys = [[a, b] for a, b in pairwise(tokens)]
    event = {
        "type": "BlockStored",
        "block_hashes": named[skip:],
        "parent_block_hash": named[skip - 1] if skip else None,
        "token_ids": keys[skip * page : len(named) * page],
        "block_size": page,
        "lora_id": None,
        "medium": "GPU",
    }
    if salt:
        event["cache_salt"] = salt
    return event | fields


def removed(hashes: Any, medium: Any = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


def stored_array(
    length: int, tokens: Sequence[int], page: int = 16, *, salt: str = ""
) -> list[Any]:
    """A BlockStored of the generation that sent arrays of this length."""
    event = stored(tokens, page, salt=salt)
    full = [
        *("BlockStored", event["block_hashes"], None, event["token_ids"], page, None),
        *("GPU", {"cache_salt": salt}),
    ]
    return full[:length]
