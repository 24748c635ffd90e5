"""Reads a batch of events without types, so that one event that nobody knows costs one event.

Pure. Nothing is allocated for what a message only claims to hold.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgpack  # type: ignore[import-untyped]

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""A step of 100,000 prompt tokens with its hashes needs about a tenth."""


class BadValue(ValueError):
    """A value that is not what the schema says. `reason` is a bounded word for counters."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def read_batch(payload: bytes) -> list[Any]:
    """The batch as plain values: [time, events] or [time, events, rank]. Raises BadValue."""
    batch = _unpack(payload)
    if type(batch) is not list or len(batch) not in (2, 3):
        what = f"an array of {len(batch)}" if type(batch) is list else type(batch).__name__
        raise BadValue("batch_shape", f"batch is {what}; expected an array of 2 or 3")
    if type(batch[1]) is not list:
        raise BadValue("batch_shape", f"events are {type(batch[1]).__name__}; expected an array")
    if type(batch[0]) not in (int, float):
        raise BadValue("batch_shape", f"time is {type(batch[0]).__name__}; expected a number")
    if len(batch) == 3 and batch[2] is not None and not is_integer(batch[2], 0, 2**31):
        raise BadValue("batch_shape", "rank is neither nil nor a small integer")
    return batch


def _unpack(payload: bytes) -> Any:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise BadValue(
            "payload_size", f"payload of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES}"
        )
    # The unpacker reserves room for as many elements as an array claims, at every depth. Skipping
    # reserves nothing and ends well only if all that is claimed is there.
    try:
        unpacker = msgpack.Unpacker(max_buffer_size=MAX_PAYLOAD_BYTES)
        unpacker.feed(payload)
        unpacker.skip()
        if unpacker.tell() != len(payload):
            raise BadValue("malformed_msgpack", "bytes follow the batch")
        return msgpack.unpackb(
            payload, raw=False, strict_map_key=False, unicode_errors="surrogateescape"
        )
    except msgpack.OutOfData as error:
        raise BadValue("truncated", f"payload of {len(payload)} bytes ends too early") from error
    except BadValue:
        raise
    # Unhashable map keys are a TypeError, impossible timestamps an OverflowError.
    except (msgpack.UnpackException, ValueError, TypeError, OverflowError) as error:
        raise BadValue("malformed_msgpack", f"payload is no msgpack: {error!r}"[:200]) from error


def is_integer(value: object, least: int, below: int) -> bool:
    """A true integer in range: bool is none."""
    return type(value) is int and least <= value < below


MAX_TOKEN = 2**31
"""No vocabulary is larger. LMCache has put hashes where tokens belong."""


def pack_tokens(values: object, below: int = MAX_TOKEN) -> bytes:
    """Token ids, packed little-endian. Raises BadValue."""
    if type(values) is not list:
        raise BadValue("field_type", f"token_ids is {type(values).__name__}; expected an array")
    if not values:
        return b""
    if set(map(type, values)) != {int}:
        raise BadValue("token_type", "token_ids holds something that is no integer")
    if min(values) < 0 or max(values) >= below:
        raise BadValue(
            "token_range", f"token_ids holds an id that is negative or above {below - 1}"
        )
    return struct.pack(f"<{len(values)}I", *values)


def pack_hash(value: object, name: str = "parent_block_hash") -> bytes:
    """An engine hash: 8 bytes for an integer of either sign, or the 32 that came. Raises BadValue."""
    if type(value) is int:
        if not -(2**63) <= value < 2**64:
            raise BadValue("hash_range", f"{name} is beyond 64 bits")
        return (value & (2**64 - 1)).to_bytes(8, "little")
    if type(value) is bytes:
        if len(value) != 32:
            raise BadValue("hash_width", f"{name}: {len(value)} bytes; expected 32")
        return value
    raise BadValue("hash_type", f"{name}: {type(value).__name__}; expected an integer or 32 bytes")


def pack_hashes(values: object, name: str = "block_hashes") -> tuple[bytes, int]:
    """Engine hashes and their width in bytes (0: there are none). Raises BadValue."""
    if type(values) is not list:
        raise BadValue("field_type", f"{name} is {type(values).__name__}; expected an array")
    packed = [pack_hash(value, name) for value in values]
    widths = set(map(len, packed))
    if len(widths) > 1:
        raise BadValue("hash_type", f"{name} mixes integers and bytes")
    return b"".join(packed), widths.pop() if widths else 0


def distinct(hashes: bytes, width: int) -> bytes:
    """Packed hashes without repeats, in order."""
    parts = (hashes[at : at + width] for at in range(0, len(hashes), width))
    return b"".join(dict.fromkeys(parts))


def signs(values: Sequence[object]) -> tuple[bool, bool]:
    """Whether an integer below 0, and one of 2^63 or more, is among the values."""
    numbers = [value for value in values if type(value) is int]
    return any(n < 0 for n in numbers), any(n >= 2**63 for n in numbers)


def text(name: str, value: object) -> str:
    """A string, or "" for nil. Raises BadValue."""
    if value is None:
        return ""
    if type(value) is not str:
        raise BadValue("field_type", f"{name} is {type(value).__name__}; expected a string")
    if not value.isprintable() and any("\ud800" <= c <= "\udfff" for c in value):
        raise BadValue("invalid_utf8", f"{name} is not UTF-8")
    return value
