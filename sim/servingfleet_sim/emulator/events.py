"""What an engine's caches tell: stored, removed, cleared. And the bytes that each engine generation makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import msgpack  # type: ignore[import-untyped]

GPU = "GPU"
CPU = "CPU"

ExtraKeys = tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """Copies of blocks that can be reused from now on, in order of their place in the prompt."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    """Hash of the block before the first; None at the start of a prompt, and in placeholders."""
    tokens: tuple[int | tuple[int, int], ...]
    """Tokens of all the blocks, or pairs of them; none in placeholders."""
    block_size: int
    """Tokens in a block; 0 in placeholders."""
    medium: str = GPU
    adapter: str | None = None
    adapter_number: int | None = None
    extra_keys: ExtraKeys | None = None
    """What entered each block's hash beside its tokens; None where the engine does not say."""
    session: str | None = None
    described: bool = True
    """Whether it names the kind of attention; placeholders don't."""
    cache_salt: str | None = None
    """Where an engine tells it apart from the other keys."""
    group: int = 0
    """Number of the group of layers whose blocks these are. Of those that keep less than all, `hashes` leaves blocks out."""
    kind: str = "full_attention"
    """What that group keeps."""
    window: int = 0
    """Tokens of its window; 0: it has none."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Copies that are gone: one for each hash, whatever other copies remain."""

    hashes: tuple[bytes, ...]
    medium: str = GPU
    group: int = 0


@dataclass(frozen=True, slots=True)
class Cleared:
    """The GPU cache was emptied. The event names no medium."""


Event = Stored | Removed | Cleared


class Form(Protocol):
    """How an engine's release writes events."""

    @property
    def replay_topic(self) -> bool:
        """Whether replayed messages hold the topic, as live ones do."""
        ...

    def encode(self, events: Iterable[Event], time: float, rank: int) -> bytes:
        """One batch as the payload of a message. `time`: seconds since the epoch."""
        ...

    def name(self, digest: bytes) -> int | bytes:
        """A block's hash as the events show it."""
        ...


class HashForm(Enum):
    """How a block's hash is published."""

    INTEGER = "integer"
    """The low 64 bits, unsigned."""
    BYTES = "bytes"
    """All 32 bytes."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The event format of a vLLM release: see `generation`."""

    maps: bool
    stored_length: int = 0
    """Elements of a stored event where events are arrays."""
    removed_length: int = 0
    replay_topic: bool = False
    """Whether replayed messages hold the topic, as live ones do."""
    hash_form: HashForm = field(default=HashForm.INTEGER)

    def encode(self, events: Iterable[Event], time: float, rank: int) -> bytes:
        """See `Form`."""
        return encode(events, time, rank, self)

    def name(self, digest: bytes) -> int | bytes:
        """See `Form`."""
        return published(digest, self.hash_form)


# First release with each format; the array lengths are the mark of their generation.
_GENERATIONS = (
    ((0, 9, 1), Generation(maps=False, stored_length=6, removed_length=2)),
    ((0, 10, 2), Generation(maps=False, stored_length=7, removed_length=3)),
    ((0, 14, 0), Generation(maps=False, stored_length=8, removed_length=3)),
    ((0, 17, 0), Generation(maps=False, stored_length=9, removed_length=3)),
    ((0, 20, 0), Generation(maps=False, stored_length=10, removed_length=4)),
    ((0, 22, 0), Generation(maps=False, stored_length=12, removed_length=4)),
    ((0, 24, 0), Generation(maps=True)),
    ((0, 26, 0), Generation(maps=True, replay_topic=True)),
)


def generation(version: str, hash_form: HashForm = HashForm.INTEGER) -> Generation:
    """The format of a vLLM release. Raises ValueError for what is no release, or older than 0.9.1."""
    wanted = release(version)
    found = [form for first, form in _GENERATIONS if first <= wanted]
    if not found:
        raise ValueError(f"engine version {version}, expected 0.9.1 or later")
    form = found[-1]
    return Generation(
        form.maps, form.stored_length, form.removed_length, form.replay_topic, hash_form
    )


def release(version: str) -> tuple[int, ...]:
    """Its three numbers. Raises ValueError."""
    numbers = version.split(".")
    if not 2 <= len(numbers) <= 3 or not all(number.isdigit() for number in numbers):
        raise ValueError(f"engine version {version!r}, expected a release such as '0.33.0'")
    return (*map(int, numbers), 0)[:3]


def encode(events: Iterable[Event], time: float, rank: int, form: Generation) -> bytes:
    """One batch as the payload of a message. `time`: seconds since the epoch."""
    encoder = _map if form.maps else _array
    payload = msgpack.packb([time, [encoder(event, form) for event in events], rank])
    assert isinstance(payload, bytes)
    return payload


def published(digest: bytes, form: HashForm) -> int | bytes:
    """A block's hash as the events show it."""
    return digest if form is HashForm.BYTES else int.from_bytes(digest[-8:], "big")


def _map(event: Event, form: Generation) -> dict[str, Any]:
    match event:
        case Stored():
            row: dict[str, Any] = {
                "type": "BlockStored",
                "block_hashes": [published(digest, form.hash_form) for digest in event.hashes],
                "parent_block_hash": _parent(event, form),
                "token_ids": list(event.tokens),
                "block_size": event.block_size,
                "lora_id": event.adapter_number,
                "medium": event.medium,
                "lora_name": event.adapter,
            }
            # Fields at their default are left out, as msgspec's omit_defaults does.
            if event.extra_keys:
                row["extra_keys"] = _extra_keys(event)
            row["group_idx"] = event.group
            if event.described:
                row["kv_cache_spec_kind"] = event.kind
                if event.window:
                    row["kv_cache_spec_sliding_window"] = event.window
            if event.session is not None:
                row["session_id"] = event.session
            return row
        case Removed():
            return {
                "type": "BlockRemoved",
                "block_hashes": [published(digest, form.hash_form) for digest in event.hashes],
                "medium": event.medium,
                "group_idx": event.group,
            }
        case Cleared():
            return {"type": "AllBlocksCleared"}


def _array(event: Event, form: Generation) -> list[Any]:
    match event:
        case Stored():
            row: list[Any] = [
                "BlockStored",
                [published(digest, form.hash_form) for digest in event.hashes],
                _parent(event, form),
                list(event.tokens),
                event.block_size,
                event.adapter_number,
                event.medium,
                event.adapter,
                _extra_keys(event),
                event.group,
                event.kind if event.described else None,
                event.window or None,
            ]
            return row[: form.stored_length]
        case Removed():
            hashes = [published(digest, form.hash_form) for digest in event.hashes]
            return ["BlockRemoved", hashes, event.medium, event.group][: form.removed_length]
        case Cleared():
            return ["AllBlocksCleared"]


def _parent(event: Stored, form: Generation) -> int | bytes | None:
    return None if event.parent is None else published(event.parent, form.hash_form)


def _extra_keys(event: Stored) -> list[list[str] | None] | None:
    if not event.extra_keys:
        return None
    return [None if keys is None else list(keys) for keys in event.extra_keys]
