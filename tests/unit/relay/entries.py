"""TensorRT-LLM's pulled entries, as its serializer writes them."""

from __future__ import annotations

from typing import Any


def entry(event_id: int, data: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """One entry of the answer."""
    return {"event_id": event_id, "data": data, "window_size": 4096, **fields}


def created(event_id: int = 0, **fields: Any) -> dict[str, Any]:
    """The first of a cache."""
    data = {"type": "created", "num_blocks_per_cache_level": [9, 0]}
    return entry(event_id, data, **fields)


def block(hash_: Any, ids: list[int], level: Any = 0, **fields: Any) -> dict[str, Any]:
    """One block of a store."""
    rows = [{"type": "unique_token", "token_id": each, "token_extra_id": 0} for each in ids]
    return {
        "type": "stored_block",
        "block_hash": hash_,
        "tokens": rows,
        "cache_level": level,
        "priority": 35,
        **fields,
    }


def stored(
    event_id: int, *blocks: dict[str, Any], parent: Any = None, **fields: Any
) -> dict[str, Any]:
    """Blocks in a row."""
    data = {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}
    return entry(event_id, data, **fields)


def removed(event_id: int, *hashes: Any, **fields: Any) -> dict[str, Any]:
    """Blocks that left the reuse tree."""
    return entry(event_id, {"type": "removed", "block_hashes": list(hashes)}, **fields)


def updated(event_id: int, hash_: Any, old: Any, new: Any, **fields: Any) -> dict[str, Any]:
    """A block that moved between levels; with `old` None only its priority changed."""
    diff = {"type": "event_diff", "new_value": new, "old_value": old}
    data = {
        "type": "updated",
        "block_hash": hash_,
        "cache_level": None if old is None else diff,
        "priority": {"type": "event_diff", "new_value": 50, "old_value": 35},
    }
    return entry(event_id, data, **fields)
