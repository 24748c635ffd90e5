"""Is this stream what we think it is? One rank, one life of the engine.

Pure. A stream keeps its form: what changes in the middle means something else than it did.
"""

from __future__ import annotations

from dataclasses import dataclass

from .adapters.events import Doubt, Shape

UNKNOWN_KEPT = 8
"""Names of unknown fields, about: an engine may make up ever new ones."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something odd about the stream, not about one event. `reason` is a bounded word for counters."""

    reason: str
    detail: str
    doubt: Doubt


class Fingerprint:
    """The constant traits of a stream, learned from its first events."""

    def __init__(self) -> None:
        self._batch_length = 0
        self._forms: dict[str, str] = {}
        self._hash_width = 0
        self._signed: bool | None = None
        self._pairs: bool | None = None
        self._unknown: set[str] = set()

    def batch(self, length: int) -> Finding | None:
        """Holds the length of a readable batch array to the stream's."""
        if self._batch_length in (0, length):
            self._batch_length = length
            return None
        return self._changed("batch_length_changed", self._batch_length, length)

    def event(self, shape: Shape) -> Finding | None:
        """Holds an event to the stream's form. A finding of QUARANTINED says: do not use it."""
        form = self._forms.setdefault(shape.tag, shape.form)
        written = {name.split()[0] for name in (*self._forms.values(), shape.form)}
        if form != shape.form or len(written) > 1:
            seen = ", ".join(sorted(set(self._forms.values())))
            return self._changed("form_changed", seen, f"{shape.tag} as {shape.form}")
        if shape.hash_width:
            if self._hash_width not in (0, shape.hash_width):
                return self._changed("hash_kind_changed", self._hash_width, shape.hash_width)
            self._hash_width = shape.hash_width
        if shape.low or shape.high:
            signed = shape.low
            if (shape.low and shape.high) or self._signed not in (None, signed):
                return self._changed("hash_kind_changed", "signed or unsigned", "both")
            self._signed = signed
        if shape.pairs is not None:
            if self._pairs not in (None, shape.pairs):
                return self._changed("key_form_changed", "one of tokens and pairs", "both")
            self._pairs = shape.pairs
        if shape.unknown_fields:
            if len(self._unknown) < UNKNOWN_KEPT:
                self._unknown.update(shape.unknown_fields)
            names = ", ".join(sorted(self._unknown)[:8])
            return Finding(
                "unknown_field",
                f"{shape.tag} has {names}: newer than this relay knows",
                Doubt.UNTRUSTED,
            )
        return None

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
            traits["unknown fields"] = ", ".join(sorted(self._unknown)[:8])
        return traits

    @staticmethod
    def _changed(reason: str, before: object, now: object) -> Finding:
        return Finding(reason, f"expected {before}, got {now}", Doubt.QUARANTINED)


class Doubts:
    """What is held against a stream, and until when."""

    def __init__(self) -> None:
        self.ambiguous = False
        """Hashes of this stream may stand for blocks of several namespaces."""
        self._passing = ""
        self._lasting = Doubt.NONE
        self._lasting_reason = ""

    def note(self, reason: str, detail: str, doubt: Doubt) -> None:
        """Remembers a doubt. The first text of the gravest stays."""
        text = f"{reason}: {detail}"
        self.ambiguous = self.ambiguous or doubt is Doubt.AMBIGUOUS
        if doubt in (Doubt.INCOMPLETE, Doubt.STALE):
            self._passing = self._passing or text
        elif doubt > self._lasting:
            self._lasting, self._lasting_reason = doubt, text

    def cleared(self) -> None:
        """The engine holds nothing: what was lost is of no account any more."""
        self._passing = ""

    @property
    def worst(self) -> tuple[Doubt, str]:
        """INCOMPLETE, AMBIGUOUS, UNTRUSTED or QUARANTINED with its reason; NONE with "" if there is none."""
        if self._lasting:
            return self._lasting, self._lasting_reason
        return (Doubt.INCOMPLETE, self._passing) if self._passing else (Doubt.NONE, "")
