"""How an engine writes its events: learned from the first, held to ever after, and to the release that it says it is.

Pure. A stream keeps its form: what changes in the middle means something else than it did.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..adapters.events import Doubt, EngineProfile, Generation, Shape
from .standing import Finding

UNKNOWN_KEPT = 8
"""Names of unknown fields, about: an engine may make up ever new ones."""
FITTING_KEPT = 256
_RELEASE = re.compile(r"v?(\d+(?:\.\d+)+)(?:\.post\d+)?(?:\+[\w.]+)?")
"""Builds between releases may write as either of them."""

ODDITIES: Mapping[str, tuple[Doubt, str]] = {
    "block_size_unscaled": (
        *(Doubt.INCOMPLETE, "block_size is that of one rank of several that share a prompt"),
    ),
    "extra_keys_adapter": (Doubt.INCOMPLETE, "extra_keys don't begin with lora_name"),
    "extra_keys_count": (Doubt.INCOMPLETE, "extra_keys are not as many as block_hashes"),
    "lookahead": (Doubt.AMBIGUOUS, "lookahead_token_ids: hashes cover tokens after their block"),
    "one_token_more": (Doubt.NONE, "token_ids has one more than the blocks hold, as LMCache's"),
}
"""What it says of a stream that an event has one of `Shape.oddities`."""


def release_numbers(version: str) -> tuple[int, ...] | None:
    """The numbers of a release; None of what is no plain release."""
    found = _RELEASE.fullmatch(version)
    return tuple(int(part) for part in found[1].split(".")) if found else None


class Fingerprint:
    """The constant traits of a stream."""

    def __init__(self, before: Mapping[str, str] | None = None) -> None:
        """`before`: the traits of the engine's last life."""
        self._before = dict(before or {})
        self._batch_length = 0
        self._forms: dict[str, str] = {}
        self._expected: Generation | None = None
        self._release = ""
        self._told: dict[tuple[str, int, str], frozenset[str]] = {}
        self._hash_width = 0
        self._signed: bool | None = None
        self._pairs: bool | None = None
        self._unknown: set[str] = set()
        self._fitting: set[tuple[Shape, int]] = set()
        """Shapes that fit: most events have one of a few."""

    def release(self, profile: EngineProfile, version: str) -> None:
        """The engine says which release it is: its events are held to that release's form."""
        numbers = release_numbers(version)
        written = [each for each in profile.generations if numbers and each.since <= numbers]
        self._expected = written[-1] if written else None
        self._release = f"{profile.engine} {version}"
        self._fitting.clear()

    def batch(self, length: int) -> Finding | None:
        """Holds the length of a readable batch array to the stream's."""
        if self._batch_length not in (0, length):
            return _changed("batch_length_changed", self._batch_length, length)
        self._batch_length = length
        if length == 2 and "map" in self._forms.values():
            return _changed("batch_length_changed", "3, as all that send maps", length)
        if self._expected is not None and self._expected.batch_length != length:
            expected = self._expected.batch_length
            detail = f"{self._release} writes batches of {expected}; got {length}"
            return Finding("form_of_release", detail, Doubt.UNTRUSTED)
        return None

    def event(self, shape: Shape, tier: int = 0) -> list[Finding]:
        """Holds an event to the stream's form. A finding of QUARANTINED says: do not use it."""
        if (shape, tier) in self._fitting:
            return []
        found = [self._form(shape), self._hashes(shape), self._fields(shape, tier)]
        if shape.pairs is not None:
            if self._pairs not in (None, shape.pairs):
                change = _changed(
                    "key_form_changed", "one of tokens and pairs in token_ids", "both"
                )
                found.append(change)
            else:
                self._pairs = shape.pairs
        if shape.unknown_fields:
            if len(self._unknown) < UNKNOWN_KEPT:
                self._unknown.update(shape.unknown_fields)
            detail = (
                f"{shape.tag} has {', '.join(shape.unknown_fields)}: newer than this relay knows"
            )
            found.append(Finding("unknown_field", detail, Doubt.UNTRUSTED))
        for word in shape.oddities:
            doubt, text = ODDITIES[word]
            found.append(Finding(word, f"{shape.tag}: {text}", doubt, tier))
        found.append(self._since_before())
        told = [each for each in found if each is not None]
        if not told and not self._before and len(self._fitting) < FITTING_KEPT:
            self._fitting.add((shape, tier))
        return told

    def describe(self) -> dict[str, str]:
        """The traits, for people. Empty until something was seen."""
        traits = {f"form of {tag}": form for tag, form in self._forms.items()}
        if self._batch_length:
            traits["batch length"] = str(self._batch_length)
        if self._hash_width:
            sign = {None: "", True: " signed", False: " unsigned"}[self._signed]
            traits["hashes"] = f"{self._hash_width} bytes{sign}"
        if self._pairs is not None:
            traits["keys"] = "pairs" if self._pairs else "tokens"
        if self._unknown:
            traits["unknown fields"] = ", ".join(sorted(self._unknown)[:UNKNOWN_KEPT])
        return traits

    def _form(self, shape: Shape) -> Finding | None:
        form = self._forms.setdefault(shape.tag, shape.form)
        written = {name.split()[0] for name in self._forms.values()}
        if form != shape.form or len(written) > 1:
            seen = ", ".join(sorted(set(self._forms.values())))
            return _changed("form_changed", seen, f"{shape.tag} as {shape.form}")
        if form == "map" and self._batch_length == 2:
            return _changed("batch_length_changed", "3, as all that send maps", 2)
        expected = self._expected.forms.get(shape.tag, form) if self._expected else form
        if expected != form:
            detail = f"{self._release} writes {shape.tag} as {expected}; got {form}"
            return Finding("form_of_release", detail, Doubt.UNTRUSTED)
        return None

    def _hashes(self, shape: Shape) -> Finding | None:
        if shape.hash_width:
            if self._hash_width not in (0, shape.hash_width):
                before = f"block_hashes and parent_block_hash of {self._hash_width} bytes"
                return _changed("hash_kind_changed", before, f"{shape.hash_width} bytes")
            self._hash_width = shape.hash_width
        if shape.low or shape.high:
            signed = shape.low
            if (shape.low and shape.high) or self._signed not in (None, signed):
                expected = "block_hashes and parent_block_hash, all signed or all unsigned"
                return _changed("hash_kind_changed", expected, "both")
            self._signed = signed
        return None

    def _fields(self, shape: Shape, tier: int) -> Finding | None:
        if shape.told is None:
            return None
        before = self._told.setdefault((shape.tag, tier, shape.variant), shape.told)
        if before == shape.told:
            return None
        names = ", ".join(sorted(before ^ shape.told))
        return Finding(
            "fields_changed",
            f"{shape.tag}: some have {names} and some don't; expected all or none",
            Doubt.QUARANTINED,
            tier,
        )

    def _since_before(self) -> Finding | None:
        """Once for each trait that is not what it was in the engine's last life."""
        if not self._before:
            return None
        for name, now in self.describe().items():
            before = self._before.get(name, now)
            if not (before.startswith(now) or now.startswith(before)):
                del self._before[name]
                detail = f"{name}: {now}; before the engine's restart: {before}"
                return Finding("fingerprint_changed", detail, Doubt.NONE)
        return None


def _changed(reason: str, before: object, now: object) -> Finding:
    return Finding(reason, f"expected {before}, got {now}", Doubt.QUARANTINED)
