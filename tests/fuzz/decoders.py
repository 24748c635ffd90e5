"""Targets: what an engine's bytes become. Whatever they are, trouble is an event under a bounded reason."""

# ruff: noqa: PT017 - a target must take either way

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgpack  # type: ignore[import-untyped]

from servingfleet_relay.adapters import sglang, trtllm, vllm
from servingfleet_relay.adapters.events import Batch, Dropped, Removed, Stored
from servingfleet_relay.frames import END_OF_REPLAY, BadFrames, Frame, live_frame, reply_frame
from tests.fuzz.feed import Feed

TAGS = ("BlockStored", "BlockRemoved", "AllBlocksCleared", "BlockMoved")
FIELDS = (
    *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    *("locality", "ownership", "session_id", "lookahead_token_ids", "cache_salt", "mm_keys", "new"),
)
MEDIA = ("GPU", "CPU", "cpu", "STORAGE", "CPU_PINNED", "DISK", None)
KINDS = ("full_attention", "sliding_window", "mamba", "mla_attention", "chunked", None)
WORDS = re.compile(r"[a-z][a-z0-9_]{0,57}")
"""What a reason may be, so that "drop_" with it is a counter's name at every scheduler."""
MAX_DETAIL = 2048


def vllm_payload(data: bytes) -> None:
    """vLLM's batches: bytes as they are, or values packed."""
    _decoded(vllm.decode_payload, data)


def sglang_payload(data: bytes) -> None:
    """SGLang's likewise."""
    _decoded(sglang.decode_payload, data)


def trtllm_payload(data: bytes) -> None:
    """TensorRT-LLM's likewise."""
    _decoded(trtllm.decode_payload, data)


def frames(data: bytes) -> None:
    """The frames of live messages and of replies."""
    feed = Feed(data)
    parts = [feed.blob() for _ in range(feed.below(6))]
    for read in (live_frame, reply_frame):
        _read_frames(read, parts)


def packed_batch(feed: Feed) -> bytes:
    """A batch that msgpack can read, of events that are almost right."""
    batch = [1.0, [_event(feed) for _ in range(feed.below(5))], feed.pick((0, 0, 0, 1, None))]
    odd = feed.byte()
    if odd >= 0xF0:
        batch[odd % 3] = feed.value()
    size = 2 if odd % 16 == 1 else 3
    packed: bytes = msgpack.packb(batch[:size], unicode_errors="surrogateescape")
    return packed


def _decoded(decode: Callable[[bytes], Batch], data: bytes) -> None:
    feed = Feed(data)
    payload = packed_batch(feed) if feed.flag() else feed.rest()
    batch = decode(payload)
    assert batch.length in (0, 2, 3)
    assert batch.length or len(batch.events) == 1, "an unreadable batch is one drop"
    for event in batch.events:
        if isinstance(event, Stored):
            _check_stored(event)
        elif isinstance(event, Removed):
            assert event.width in (0, 8, 32)
            assert len(event.hashes) % (event.width or 1) == 0
        elif isinstance(event, Dropped):
            assert WORDS.fullmatch(event.reason), event.reason
            assert len(event.detail) <= MAX_DETAIL, len(event.detail)


def _check_stored(event: Stored) -> None:
    assert event.width in (0, 8, 32), event.width
    count = len(event.hashes) // (event.width or 1)
    assert count * event.width == len(event.hashes)
    assert event.parent is None or len(event.parent) == event.width
    if event.tokens:
        extra = 4 if event.shape.pairs else 0
        assert len(event.tokens) == count * event.unit_tokens * 4 + extra
    event.adapter.encode(), event.cache_salt.encode()  # the core takes text that is UTF-8


def _read_frames(read: Callable[[list[bytes]], Frame], parts: list[bytes]) -> None:
    try:
        frame = read(parts)
    except BadFrames as error:
        assert WORDS.fullmatch(error.reason)
    else:
        assert 0 <= frame.seq < 2**63 or (frame.seq == END_OF_REPLAY and read is reply_frame)
        assert frame.payload is parts[-1]


def _event(feed: Feed) -> Any:
    """An event from tiny ranges, so that blocks meet, with now and then a value that is anything."""
    kind = feed.byte()
    if kind >= 0xF8:
        return feed.value()
    tag = TAGS[(0, 0, 0, 1, 1, 2, 0, 3)[kind % 8]]
    fields: dict[str, Any] = {"type": tag}
    wide, count = kind & 0x40, 1 + feed.below(4)
    first = feed.below(12)
    if tag != "AllBlocksCleared":
        fields["block_hashes"] = [_hash(first + at, wide) for at in range(count)]
        fields["medium"] = "GPU" if feed.flag() else feed.pick(MEDIA)
    if tag == "BlockStored":
        unit = feed.pick((16, 16, 16, 8, 32, 4, 0))
        fields["parent_block_hash"] = _hash(first - 1, wide) if first and feed.flag() else None
        fields["token_ids"] = [first * 100 + at for at in range(count * unit)]
        fields["block_size"] = unit
        fields |= {"lora_id": None, "lora_name": feed.pick((None, None, "a"))}
    for _ in range(feed.pick((0, 0, 0, 1, 2))):
        fields[feed.pick(FIELDS)] = (
            feed.pick((*MEDIA, *KINDS, 0, 1)) if feed.flag() else feed.value()
        )
    if kind & 0x80:
        return [tag, *list(fields.values())[1:]]
    return fields


def _hash(number: int, wide: int) -> int | bytes:
    return number.to_bytes(32) if wide else number


DECODERS: Mapping[str, Callable[[bytes], None]] = {
    "vllm_payload": vllm_payload,
    "sglang_payload": sglang_payload,
    "trtllm_payload": trtllm_payload,
    "frames": frames,
}
