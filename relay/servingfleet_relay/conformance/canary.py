"""A prompt of our own, sent twice: the engine must announce its blocks, and reuse them the second time.

Pure: whoever sends it feeds the engine's batches in, and asks what differs. Three blocks and one token, of random ids, so
that nobody has sent it before.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

from servingfleet_protos.v1.common_pb2 import TIER_GPU

from ..adapters.events import Batch, Doubt, EngineProfile, Stored
from .standing import Finding

BLOCKS = 3
LEAST_TOKEN, MOST_TOKEN = 10, 250
"""Ids that every vocabulary has, and that are rarely special."""
MOST_TOKENS = 8192
"""Of a model with larger blocks no canary is sent."""


def prompt_of(unit_tokens: int, rng: random.Random) -> list[int]:
    """A prompt of three blocks and a token. Raises ValueError for blocks that are not known, or too large."""
    length = BLOCKS * unit_tokens + 1
    if not 1 < length <= MOST_TOKENS:
        raise ValueError(
            f"a canary of {BLOCKS} blocks of {unit_tokens} tokens and one; expected 2 to {MOST_TOKENS}"
        )
    return [rng.randrange(LEAST_TOKEN, MOST_TOKEN) for _ in range(length)]


class Canary:
    """What is expected of one prompt, and what was seen of it."""

    def __init__(self, prompt: Sequence[int], unit_tokens: int, engine: EngineProfile) -> None:
        self._engine = engine
        self.prompt = tuple(prompt)
        self.unit_tokens = unit_tokens
        self._packed = struct.pack(f"<{len(prompt)}I", *prompt)
        self._units = 0
        self._last: bytes | None = None
        self._pairs = False
        self._others = 0
        self._oddities: list[str] = []

    def observe(self, batch: Batch) -> None:
        """A batch that came after the prompt was sent."""
        for event in batch.events:
            if isinstance(event, Stored) and event.tier == TIER_GPU and event.tokens:
                self._stored(event)

    @property
    def announced(self) -> bool:
        """All its blocks were announced."""
        return self._units >= BLOCKS

    def differences(self, first: int | None, second: int | None) -> tuple[str, ...]:
        """What is not as it should be. `first` and `second`: cached tokens that the engine reported for the prompt, None
        where its answer does not say."""
        found = list(self._oddities)
        if not self.announced:
            found.append(
                f"{self._units} of {BLOCKS} blocks announced as the prompt's, {self._others} stores of something else"
            )
        whole = BLOCKS * self.unit_tokens
        for name, reported, allowed in (
            ("first", first, {0}),
            ("second", second, {whole, whole - self.unit_tokens} if self._pairs else {whole}),
        ):
            if reported is None and second is not None:
                continue  # SGLang, and some vLLM, leave out that nothing was reused
            if reported is None:
                flag = self._engine.report_flag
                hint = f": the engine needs {flag} to report any" if flag else ""
                found.append(f"the {name} answer reports no cached tokens{hint}")
            elif reported not in allowed:
                hint = ""
                if name == "second" and reported == whole - self.unit_tokens:
                    hint = ": if it drafts with EAGLE, set --less-units 1"
                expected = " or ".join(str(each) for each in sorted(allowed))
                found.append(
                    f"the {name} answer reports {reported} cached tokens; expected {expected}{hint}"
                )
        return tuple(found)

    def finding(self, first: int | None, second: int | None) -> Finding | None:
        """The differences, as a failure of the stream."""
        different = self.differences(first, second)
        return Finding("canary", "; ".join(different), Doubt.QUARANTINED) if different else None

    def _stored(self, event: Stored) -> None:
        keys = len(event.tokens) // 4 - bool(event.shape.pairs)
        starts = event.parent is None
        if starts and not self._packed.startswith(
            event.tokens[:-4] if event.shape.pairs else event.tokens
        ):
            self._others += 1
            return
        if not starts and event.parent != self._last:
            self._others += 1
            return
        if event.unit_tokens != self.unit_tokens:
            self._oddities.append(
                f"blocks of {event.unit_tokens} tokens; expected {self.unit_tokens}"
            )
        begin = 0 if starts else self._units * self.unit_tokens
        if self._packed[begin * 4 : (begin + keys) * 4] != event.tokens[: keys * 4]:
            self._others += 1
            return
        self._pairs = bool(event.shape.pairs)
        self._units = (begin + keys) // self.unit_tokens
        self._last = event.hashes[-event.width :]
