"""Recorded streams with one thing changed, as an engine's next release might change it.

Pure. What changes is how an event is written: a key, a type, a width, an order of elements. Values that the same release
might as well have sent (another token, another hash, a prompt's first block in place of a later one) are no mutations:
nothing in one event could show them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgpack  # type: ignore[import-untyped]

from servingfleet_sim.recordings import Message, Recording

NEVER = "unheard-of"
"""A value that no release sends."""

STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
REMOVED = ("block_hashes", "medium", "group_idx")
FIELDS = {"BlockStored": STORED, "BlockRemoved": REMOVED}
UNREAD = frozenset({"session_id"})
"""What the relay has no use for: any text will do, and none."""


@dataclass(frozen=True)
class Mutation:
    """One changed event (or batch, with `event` None) of a recording."""

    message: int
    event: int | None
    what: str
    """For people: "BlockStored: medium dropped"."""
    names: tuple[str, ...]
    """A message about it has to hold one of these."""
    batch: Any
    """The whole batch after the change."""

    def applied(self, recording: Recording) -> Recording:
        """The recording with this change."""
        messages = list(recording.messages)
        old = messages[self.message]
        body = msgpack.packb(self.batch)
        messages[self.message] = replace(old, frames=(*old.frames[:-1], body))
        return replace(recording, messages=tuple(messages))


def mutations(recording: Recording) -> Iterator[Mutation]:
    """Every mutation of every event and batch."""
    for at, message in enumerate(recording.messages):
        batch = _unpacked(message)
        for index, event in enumerate(batch[1]):
            for what, names, changed in _changes(event):
                if changed == event and type(changed) is type(event):
                    continue
                events = [*batch[1][:index], changed, *batch[1][index + 1 :]]
                yield Mutation(at, index, what, names, [batch[0], events, *batch[2:]])
        for what, names, other in _batches(batch):
            yield Mutation(at, None, what, names, other)


def as_arrays(recording: Recording) -> Recording:
    """vLLM's maps as the arrays of 0.22 and 0.23, which said the same by position."""
    messages = []
    for message in recording.messages:
        time, events, *rest = _unpacked(message)
        body = msgpack.packb([time, [_array(event) for event in events], *rest])
        messages.append(replace(message, frames=(*message.frames[:-1], body)))
    engine = {**recording.engine, "vllm": "0.23.0"}
    return replace(recording, messages=tuple(messages), engine=engine)


def _unpacked(message: Message) -> Any:
    return msgpack.unpackb(message.frames[-1], strict_map_key=False)


def _array(event: dict[str, Any]) -> list[Any]:
    return [event["type"], *(event.get(name) for name in FIELDS.get(event["type"], ()))]


def _changes(event: Any) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    changes = _map_changes(event) if isinstance(event, dict) else _array_changes(event)
    tag = event["type"] if isinstance(event, dict) else event[0]
    for what, names, changed in changes:
        yield f"{tag}: {what}", names, changed


def _map_changes(event: dict[str, Any]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    for key, value in event.items():
        rest = {name: kept for name, kept in event.items() if name != key}
        if key not in UNREAD:
            yield f"{key} dropped", (key,), rest
            yield f"{key} renamed", (key,), {f"{key}_v2": value, **rest}
        for what, other in _values(event, key, value):
            yield f"{key} {what}", (key, NEVER), {**event, key: other}
    yield "a new key", (NEVER,), {**event, NEVER: 1}
    yield "as an array", ("array",), list(event.values())


def _array_changes(event: list[Any]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    names = ("type", *FIELDS.get(event[0], ()))
    named = dict(zip(names, event, strict=True))
    for at, name in enumerate(names[1:], start=1):
        # What is left may be as long as an older release's.
        yield f"{name} left out", ("array", name), [*event[:at], *event[at + 1 :]]
        swapped = [*event]
        swapped[at], swapped[at - 1] = swapped[at - 1], swapped[at]
        pair = (names[at - 1], name)
        yield f"{pair[0]} and {pair[1]} swapped", pair, swapped
        for what, other in _values(named, name, event[at]):
            yield f"{name} {what}", (name, NEVER), [*event[:at], other, *event[at + 1 :]]
    yield "a new element", ("array",), [*event, 1]


def _values(event: dict[str, Any], key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Other values for a key: of another kind, or that no release sends."""
    yield "a map", {NEVER: 1}
    yield "a fraction", 1.5
    yield "true", True
    if value is not None and key not in UNREAD and not _defaults_to_nil(event, key):
        yield "nil", None
    if type(value) is str:
        if key not in UNREAD:
            yield "other text", NEVER
        yield "bytes", value.encode()
        yield "a number", 7
    elif type(value) is int:
        yield "text of a number", str(value)
        yield "in a list", [value]
        if key not in ("block_hashes", "parent_block_hash"):
            yield "negative", -7
    elif type(value) is list and value:
        yield "text", str(value)
        yield "in a list", [value]
        yield "with text in it", [*value[:-1], NEVER]
        if key in ("token_ids", "extra_keys"):
            yield "one short", value[1:]
            yield "one more", [*value, value[-1]]
        if key != "extra_keys":
            yield "with nil in it", [None, *value[1:]]
    if key in ("block_hashes", "parent_block_hash"):
        yield from _hashes(value)
    elif key == "token_ids" and value:
        yield from _tokens(value)
    elif key == "block_size" and value:
        yield "doubled", 2 * value
        yield "halved", value // 2


def _defaults_to_nil(event: dict[str, Any], key: str) -> bool:
    """Whether nil says something that the release may say, too."""
    return key == "parent_block_hash" or (key == "extra_keys" and not event["block_hashes"])


def _hashes(value: Any) -> Iterator[tuple[str, Any]]:
    values = value if type(value) is list else [] if value is None else [value]
    if not values:
        return

    def wrap(changed: list[Any]) -> Any:
        return changed if type(value) is list else changed[0]

    if type(values[0]) is int:
        wide = [v.to_bytes(32, "big", signed=v < 0) for v in values]
        yield "of 32 bytes", wrap(wide)
        yield "of 8 bytes", wrap([v[-8:] for v in wide])
        if any(v >= 2**63 for v in values):
            yield "of the other sign", wrap([v - 2**64 if v >= 2**63 else v for v in values])
        elif any(v < 0 for v in values):
            yield "of the other sign", wrap([v % 2**64 for v in values])
    else:
        yield "of 64 bits", wrap([int.from_bytes(v[-8:], "big") for v in values])
        yield "of 16 bytes", wrap([v[:16] for v in values])


def _tokens(value: list[Any]) -> Iterator[tuple[str, Any]]:
    if type(value[0]) is int:
        yield "as pairs", [[a, b] for a, b in zip(value, value[1:] + value[:1], strict=True)]
        yield "below zero", [-1, *value[1:]]
        yield "beyond 32 bits", [2**32, *value[1:]]
    else:
        yield "unzipped", [a for a, _ in value]
        yield "that don't overlap", [value[0], *[[a + 1, b] for a, b in value[1:]]]


def _batches(batch: list[Any]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    yield "batch: the rank dropped", ("batch", "got 2"), batch[:2]
    yield "batch: events first", ("batch",), [batch[1], batch[0], *batch[2:]]
    yield "batch: rank and events swapped", ("events",), [batch[0], batch[2], batch[1]]
    yield "batch: an element more", ("batch",), [*batch, 1]
    yield "batch: a map", ("batch",), {"ts": batch[0], "events": batch[1]}
    yield "batch: another rank", ("rank",), [batch[0], batch[1], 7]
    yield "batch: time in milliseconds", ("time",), [batch[0] * 1000, *batch[1:]]
