"""vLLM's messages, as constructed bytes of each wire generation."""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]

ARRAY_LENGTHS = (6, 7, 8, 9, 10, 12)
REMOVED_LENGTH = {6: 2, 7: 3, 8: 3, 9: 3, 10: 4, 12: 4}


def payload(*events: Any, time: float = 1.0, rank: int | None = 0, length: int = 3) -> bytes:
    """A packed batch."""
    packed: bytes = msgpack.packb([time, list(events), rank][:length])
    return packed


def live(seq: int, *events: Any, **batch: Any) -> list[bytes]:
    """The frames of a live message."""
    return [b"kv-events", seq.to_bytes(8, "big"), payload(*events, **batch)]


def reply(seq: int, *events: Any, topic: bool = True, **batch: Any) -> list[bytes]:
    """The frames of a reply to a replay request."""
    _, number, body = live(seq, *events, **batch)
    return [b"", b"kv-events", number, body] if topic else [b"", number, body]


END = [b"", b"", b"\xff" * 8, b""]
END_WITHOUT_TOPIC = [b"", b"\xff" * 8, b""]


def stored(
    hashes: list[Any],
    tokens: list[Any],
    *,
    parent: Any = None,
    block: Any = 16,
    **fields: Any,
) -> dict[str, Any]:
    """A BlockStored of the newest generation."""
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": block,
        "lora_id": None if fields.get("lora_name") is None else 1,
        "medium": "GPU",
        "lora_name": None,
    }
    if fields.get("medium", "GPU") == "GPU" and hashes:
        # The offload's events leave them out, and those that name no block.
        event["extra_keys"] = [None] * len(hashes)
    return event | fields


def stored_array(
    length: int, hashes: list[Any], tokens: list[Any], *, block: int = 16
) -> list[Any]:
    """A BlockStored of the generation that sent arrays of this length."""
    extra = [None] * len(hashes)
    full = [
        *("BlockStored", hashes, None, tokens, block, None),
        *("GPU", None, extra, 0, "full_attention", None),
    ]
    return full[:length]


def removed(hashes: list[Any], **fields: Any) -> dict[str, Any]:
    """A BlockRemoved of the newest generation."""
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"} | fields


def removed_array(length: int, hashes: list[Any]) -> list[Any]:
    """A BlockRemoved of the generation that sent arrays of this length."""
    return ["BlockRemoved", hashes, "GPU", 0][:length]


CLEARED = {"type": "AllBlocksCleared"}


def tokens(blocks: int, block: int = 16, start: int = 0) -> list[int]:
    """Distinct token ids for some blocks."""
    return list(range(start, start + blocks * block))
