"""Which blocks a window group keeps, where nothing but the prompt's length tells.

Pure. Of use where no full-attention group's events place the blocks. A window group's store leaves out the blocks that no next request can use, and not their tokens. It keeps the
window that ends with the last block before the prompt's last token: so the dispatched prompt tells which they are.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from servingfleet_core import Mirror, block_hashes, namespace_root

from .adapters.events import Stored

MAX_DISPATCHES = 4096
MAX_BYTES = 16 * 2**20
"""Of hashes: two million canonical blocks."""
LINGER_S = 10.0
"""The events of a request may come after its end."""


@dataclass(slots=True)
class _Dispatch:
    hashes: bytes
    prompt_tokens: int
    until: float
    prefilled: bool = False


@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of a prompt, as a store tells it."""

    chain: int
    """Canonical hash of the last block."""
    end_tokens: int
    """Tokens of the prompt up to its end."""
    units: int
    unit_tokens: int
    """A multiple of the canonical block."""


class Dispatches:
    """Prompts lately sent to one rank."""

    def __init__(self, model: str, block_tokens: int) -> None:
        self._model = model
        self._block_tokens = block_tokens
        self._open: OrderedDict[str, _Dispatch] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._open)

    def opened(
        self, decision: str, hashes: bytes, prompt_tokens: int, expires_s: float, now: float
    ) -> None:
        """A prompt was sent; `hashes` are those of its canonical blocks. The oldest make room."""
        self.forget(decision)
        until = now + expires_s + LINGER_S
        self._open[decision] = _Dispatch(hashes, prompt_tokens, until)
        self._bytes += len(hashes)
        while len(self._open) > MAX_DISPATCHES or self._bytes > MAX_BYTES:
            self.forget(next(iter(self._open)))

    def ended(self, decision: str, now: float) -> None:
        """Its request is over, or never was."""
        known = self._open.get(decision)
        if known is not None:
            known.until = min(known.until, now + LINGER_S)

    def forget(self, decision: str) -> None:
        """Unknown ones are fine."""
        known = self._open.pop(decision, None)
        if known is not None:
            self._bytes -= len(known.hashes)

    def clear(self) -> None:
        """Nothing was sent."""
        self._open.clear()
        self._bytes = 0

    def expire(self, now: float) -> None:
        """Forgets what is over."""
        for decision in [name for name, known in self._open.items() if known.until < now]:
            self.forget(decision)

    def infer(self, event: Stored, window_tokens: int, mirror: Mirror) -> tuple[Stored, int]:
        """The event with its tokens up to the last block that it names, and how many blocks lie before the first.

        As it is, without tokens, where nothing tells.
        """
        span, unit = event.span, event.unit_tokens
        if span is None or unit % self._block_tokens or not window_tokens:
            return event, 0
        root = (namespace_root(self._model, event.adapter), 0)
        place = root if span.parent is None else mirror.place(span.parent)
        if place is None:
            return event, 0
        chain, blocks = place
        units, kept = len(span.tokens) // (4 * unit), len(event.hashes) // (event.width or 1)
        last = block_hashes(chain, span.tokens, self._block_tokens)[-8:]
        end = blocks * self._block_tokens + units * unit
        stretch = Stretch(int.from_bytes(last, "little"), end, units, unit)
        masked = self.masked(stretch, kept, -(-(window_tokens - 1) // unit))
        if kept == units and span.parent is not None:
            # Nothing is left out. Of a prompt's first block the namespace may be untold.
            masked = 0
        if masked is None or not kept:
            return event, 0
        tokens = span.tokens[: 4 * unit * (masked + kept)]
        return replace(event, parent=span.parent, tokens=tokens), masked

    def masked(self, stretch: Stretch, kept: int, window_units: int) -> int | None:
        """How many units of the stretch lie before the `kept` ones that follow on each other.

        None: no prompt that was sent agrees, or several do and not with one another.
        """
        unit = stretch.unit_tokens
        end = stretch.end_tokens // unit
        first = end - stretch.units
        at = 8 * (stretch.end_tokens // self._block_tokens - 1)
        chain = stretch.chain.to_bytes(8, "little")
        same = [
            known
            for known in self._open.values()
            if not known.prefilled and known.hashes[at : at + 8] == chain
        ]
        # The last store of a prefill ends with the prompt's last full unit; before it come parts of longer prompts.
        whole = [known for known in same if known.prompt_tokens // unit == end]
        found = set()
        for known in whole or same:
            boundary = (known.prompt_tokens - 1) // unit
            begin = max(first, boundary - window_units)
            if min(end, boundary) - begin == kept:
                found.add(begin - first)
        if whole:
            whole[0].prefilled = True
        return found.pop() if len(found) == 1 else None
