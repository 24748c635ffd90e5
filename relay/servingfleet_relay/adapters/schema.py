"""Reads events by name, written as arrays or maps, so that one event that can't be read costs one event.

Pure: bytes in, events out. Each engine's adapter brings the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from servingfleet_protos.v1.common_pb2 import TIER_GPU

from ..frames import BadFrames, live_frame
from . import wire
from .events import Batch, Cleared, Doubt, Dropped, Event, Foreign, Generation, Shape
from .wire import BadValue

GRAVE = frozenset(
    {"event_length", "field_missing", "field_type", "hash_range", "hash_type", "hash_width"}
)
"""Reasons for which an event means something else than it did, whatever the engine: quarantine."""

_GONE = ("clear", "delet", "drop", "evict", "expire", "free", "invalid", "remov")
"""A tag with one of these in it takes blocks away."""

NIL = type(None)
TEXT = (str, NIL)


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
    grave: frozenset[str] = GRAVE
    """Reasons that say that the stream means something else: quarantine."""
    types: Mapping[str, tuple[type, ...]] = field(default_factory=dict)
    """Of fields that `build` does not look at."""
    media: Mapping[str, int] = field(default_factory=dict)
    """Tiers of media. What is wrong with an event of another tier than the GPU's is of that tier alone."""


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
        # It may have held removals; well-formed and of another shape, it means something else.
        doubt = Doubt.QUARANTINED if error.reason == "batch_shape" else Doubt.STALE
        return Batch((Dropped(error.reason, str(error), doubt),))
    events = [event for raw in batch[1] for event in _events(raw, schemas)]
    rank = batch[2] if len(batch) == 3 else None
    return Batch(tuple(events), float(batch[0]), rank, len(batch))


def _events(raw: object, schemas: Mapping[str, Schema]) -> Sequence[Event]:
    tag, form = _tag(raw)
    schema = schemas.get(tag) if tag is not None else None
    if schema is None:
        named = f"event {tag!a:.60}" if tag is not None else f"an event, {form}, without a type"
        detail = f"{named}; known: {', '.join(schemas)}"
        doubt = Doubt.QUARANTINED if gone(tag) else Doubt.STALE
        return [Dropped("unknown_event", detail, doubt)]
    assert tag is not None
    tier = _tier(raw, schema)
    try:
        fields, unknown = _fields(raw, schema)
        return schema.build(fields, Shape(tag, form, unknown_fields=unknown))
    except BadValue as error:
        doubt = Doubt.QUARANTINED if error.reason in schema.grave else schema.doubt
        named = tag if form == "map" else f"{tag} as {form}"
        return [Dropped(error.reason, f"{named}: {error}", doubt, 0 if tier == TIER_GPU else tier)]


def gone(tag: object) -> bool:
    """Whether a tag that nobody knows speaks of blocks that are taken away."""
    return type(tag) is str and any(word in tag.lower() for word in _GONE)


def _tag(raw: object) -> tuple[str | None, str]:
    """The event's tag, None if it has none, and the form that it was written in."""
    if type(raw) is dict:
        tag, form = raw.get("type"), "map"
    elif type(raw) is list and raw:
        tag, form = raw[0], f"array {len(raw)}"
    else:
        tag, form = None, type(raw).__name__
    return (tag if type(tag) is str else None), form


def _tier(raw: Any, schema: Schema) -> int:
    """The tier that an event speaks of, by its medium alone. 0: none that is known."""
    if type(raw) is dict:
        medium = raw.get("medium")
    else:
        at = schema.fields.index("medium") + 1 if "medium" in schema.fields else len(raw)
        medium = raw[at] if at < len(raw) else None
    return schema.media.get(medium, 0) if type(medium) is str else 0


def _fields(raw: Any, schema: Schema) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The event's fields by name, and the names that no known release sends."""
    unknown: list[str] = []
    if type(raw) is list:
        if len(raw) not in schema.lengths:
            known = ", ".join(str(length) for length in sorted(schema.lengths))
            raise BadValue("event_length", f"array of {len(raw)}; known lengths: {known}")
        fields = dict(zip(schema.fields, raw[1:], strict=False))
    else:
        fields = raw
        missing = schema.required - raw.keys()
        if missing:
            raise BadValue("field_missing", f"no {', '.join(sorted(missing))}")
        known_keys = {"type", *schema.fields} | schema.map_only
        unknown = sorted(
            f"{key!a:.40}"
            for key, value in raw.items()
            if key not in known_keys and value is not None
        )
    for name, types in schema.types.items():
        if type(fields.get(name)) not in types:
            allowed = " or ".join("nil" if each is NIL else each.__name__ for each in types)
            seen = type(fields.get(name)).__name__
            raise BadValue("field_type", f"{name} is {seen}; expected {allowed}")
    return fields, tuple(unknown[:8])


def told(fields: Mapping[str, Any], names: Sequence[str]) -> frozenset[str]:
    """Which of some optional fields an event has."""
    return frozenset(name for name in names if fields.get(name) is not None)


def tier_of(
    fields: Mapping[str, Any], shape: Shape, media: Mapping[str, int], *, stored: bool
) -> int | Foreign:
    """The tier of an event's medium. Raises BadValue: an unknown medium is never the GPU."""
    if "medium" not in fields and shape.form != "map":
        return TIER_GPU  # releases whose arrays end before it had no other
    medium = fields.get("medium")
    if medium is None:
        raise BadValue("medium_missing", "no medium in a release that names it")
    if type(medium) is not str:
        raise BadValue("field_type", f"medium is {type(medium).__name__}; expected str")
    tier = media.get(medium)
    if tier is None:
        known = ", ".join(media)
        named = f"{medium!a:.40}"
        return Foreign(shape, named, stored, f"{shape.tag}: medium {named}; known: {known}")
    return tier


def _cleared(fields: Mapping[str, Any], shape: Shape) -> Sequence[Event]:
    return [Cleared(shape)]


def arrays(
    since: tuple[int, ...], stored: int, removed: int, *, batch_length: int = 3
) -> Generation:
    """Releases whose events are arrays of so many elements."""
    lengths = {"BlockStored": stored, "BlockRemoved": removed, "AllBlocksCleared": 1}
    forms = {tag: f"array {length}" for tag, length in lengths.items()}
    return Generation(since, forms, batch_length)


def maps(since: tuple[int, ...]) -> Generation:
    """Releases whose events are maps."""
    return Generation(
        since, dict.fromkeys(("BlockStored", "BlockRemoved", "AllBlocksCleared"), "map")
    )


CLEARED = Schema(
    fields=(),
    lengths=frozenset({1}),
    required=frozenset(),
    map_only=frozenset(),
    doubt=Doubt.STALE,
    build=_cleared,
)
"""AllBlocksCleared, where it may be an array or a map."""
