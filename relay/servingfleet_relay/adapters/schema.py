"""Reads events by name, written as arrays or maps, so that one event that can't be read costs one event.

Pure: bytes in, events out. Each engine's adapter brings the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servingfleet_protos.v1.common_pb2 import TIER_GPU

from ..frames import BadFrames, live_frame
from . import wire
from .events import Batch, Cleared, Doubt, Dropped, Event, Shape
from .wire import BadValue


@dataclass(frozen=True, slots=True)
class Schema:
    """How an engine writes one kind of event."""

    fields: tuple[str, ...]
    """In the order of the array form."""
    lengths: frozenset[int]
    """Array lengths that a release has sent, tag included."""
    required: frozenset[str]
    """Keys that every map has."""
    map_only: frozenset[str]
    doubt: Doubt
    """What it does to lose such an event."""
    build: Callable[[Mapping[str, Any], Shape], Sequence[Event]]
    grave: frozenset[str] = frozenset()
    """Reasons that say that the stream means something else: quarantine."""


def decode(frames: Sequence[bytes], schemas: Mapping[str, Schema]) -> Batch:
    """One live message, frames as received. Never raises: trouble is among the batch's events."""
    try:
        return decode_payload(live_frame(frames).payload, schemas)
    except BadFrames as error:
        return Batch((Dropped(error.reason, str(error), Doubt.NONE),))


def decode_payload(payload: bytes, schemas: Mapping[str, Schema]) -> Batch:
    """One batch. Never raises: trouble is among the batch's events."""
    try:
        batch = wire.read_batch(payload)
    except BadValue as error:
        # It may have held removals.
        return Batch((Dropped(error.reason, str(error), Doubt.STALE),))
    events = [event for raw in batch[1] for event in _events(raw, schemas)]
    rank = batch[2] if len(batch) == 3 else None
    return Batch(tuple(events), float(batch[0]), rank, len(batch))


def _events(raw: object, schemas: Mapping[str, Schema]) -> Sequence[Event]:
    tag, form = _tag(raw)
    schema = schemas.get(tag) if tag is not None else None
    if schema is None:
        named = f"event {tag!r}"[:80] if tag is not None else f"an event that is a {form}"
        return [Dropped("unknown_event", f"{named}; known: {', '.join(schemas)}", Doubt.STALE)]
    assert tag is not None
    try:
        fields, unknown = _fields(raw, schema)
        return schema.build(fields, Shape(tag, form, unknown_fields=unknown))
    except BadValue as error:
        doubt = Doubt.QUARANTINED if error.reason in schema.grave else schema.doubt
        return [Dropped(error.reason, f"{tag}: {error}", doubt)]


def _tag(raw: object) -> tuple[str | None, str]:
    """The event's tag, None if it has none, and the form that it was written in."""
    if type(raw) is dict:
        tag, form = raw.get("type"), "map"
    elif type(raw) is list and raw:
        tag, form = raw[0], f"array {len(raw)}"
    else:
        tag, form = None, type(raw).__name__
    return (tag if type(tag) is str else None), form


def _fields(raw: Any, schema: Schema) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The event's fields by name, and the names that no known release sends."""
    if type(raw) is list:
        if len(raw) not in schema.lengths:
            known = ", ".join(str(length) for length in sorted(schema.lengths))
            raise BadValue("event_length", f"array of {len(raw)}; known lengths: {known}")
        return dict(zip(schema.fields, raw[1:], strict=False)), ()
    missing = schema.required - raw.keys()
    if missing:
        raise BadValue("field_missing", f"no {', '.join(sorted(missing))}")
    known_keys = {"type", *schema.fields} | schema.map_only
    unknown = sorted(
        f"{key!a:.40}" for key, value in raw.items() if key not in known_keys and value is not None
    )
    return raw, tuple(unknown[:8])


def tier_of(fields: Mapping[str, Any], shape: Shape, media: Mapping[str, int]) -> int:
    """The tier of an event's medium. Raises BadValue: an unknown medium is never the GPU."""
    if "medium" not in fields and shape.form != "map":
        return TIER_GPU  # releases whose arrays end before it had no other
    medium = fields.get("medium")
    if medium is None:
        raise BadValue("medium_missing", "no medium in a release that names it")
    tier = media.get(medium) if type(medium) is str else None
    if tier is None:
        known = ", ".join(media)
        raise BadValue("unknown_medium", f"medium {medium!r:.40}; known: {known}")
    return tier


def removal_of_no_tier(error: BadValue, shape: Shape) -> Dropped:
    """A removal whose medium `tier_of` refused."""
    # Nothing is known to be held in an unknown medium; without one it may have been any.
    doubt = Doubt.STALE if error.reason == "medium_missing" else Doubt.NONE
    return Dropped(error.reason, f"{shape.tag}: {error}", doubt)


def _cleared(fields: Mapping[str, Any], shape: Shape) -> Sequence[Event]:
    return [Cleared(shape)]


CLEARED = Schema(
    fields=(),
    lengths=frozenset({1}),
    required=frozenset(),
    map_only=frozenset(),
    doubt=Doubt.STALE,
    build=_cleared,
)
"""AllBlocksCleared, where it may be an array or a map."""
