"""The layer groups of the engine's model: which there are, and by which rule each of them is resumed.

Pure. Learned from events, or declared before the first; a group that changes its rule means another engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from servingfleet_protos.v1.common_pb2 import (
    STATE_CLASS_ATTENTION,
    STATE_CLASS_RECURRENT,
    STATE_CLASS_WINDOW,
    TIER_GPU,
    StateClass,
)

from .adapters.events import Doubt, Dropped, EngineProfile, Stored
from .settings import LayerGroup

CHUNKED = (
    "layers that look back to the start of a chunk are read as if they looked back a whole one"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """How a group is resumed."""

    state_class: int
    window_tokens: int
    """0 unless the class is WINDOW."""


class Layers:
    """The groups, by their index."""

    def __init__(self, engine: EngineProfile, declared: Sequence[LayerGroup]) -> None:
        self.bounded = ""
        """Why more may be reused than is held by what we know of the layers. "": it may not."""
        self._engine = engine
        self._rules: dict[int, Rule] = {}
        self._declared: dict[int, LayerGroup] = {}
        for index, group in enumerate(declared):
            rule = self._rule_of(group.kind, group.window_tokens)
            if rule is not None:
                self._rules[index] = rule
                self._declared[index] = group

    def declared(self) -> Iterator[tuple[int, LayerGroup]]:
        """The groups that the engine is known to have. Events that say otherwise are held against the stream."""
        return iter(self._declared.items())

    def rule(self, index: int) -> Rule:
        """Of a group that is known."""
        return self._rules[index]

    def unit_tokens(self, index: int) -> int:
        """Tokens of a group's block as it was declared. 0: it was not."""
        group = self._declared.get(index)
        return group.unit_tokens if group else 0

    @property
    def attention(self) -> bool:
        """There is a full-attention group."""
        return any(rule.state_class == STATE_CLASS_ATTENTION for rule in self._rules.values())

    @property
    def attention_only(self) -> bool:
        """There is no other."""
        return all(rule.state_class == STATE_CLASS_ATTENTION for rule in self._rules.values())

    def learn(self, event: Stored, index: int) -> Dropped | None:
        """Takes a store's word for its group, or says why it can't be used."""
        kind, window = event.group.kind, event.group.window_tokens
        known = self._rules.get(index)
        if kind in self._engine.chunked_kinds and index in self._declared:
            window = self._declared[index].window_tokens
            self.bounded = CHUNKED
        if kind is None:
            if known is not None:
                return None
            if not event.unit_tokens:
                return Dropped(
                    *("group_unknown", f"placeholder of group_idx {index}", Doubt.INCOMPLETE),
                    0 if event.tier == TIER_GPU else event.tier,
                )
            if index:
                # Releases 0.20 and 0.21 number the groups and do not say what they are.
                detail = f"group_idx {index} without a kv_cache_spec_kind"
                return Dropped("group_unsupported", detail, Doubt.UNTRUSTED)
        learned = self._rule_of(kind, window)
        seen = f"group_idx {index}: kv_cache_spec_kind {kind!a:.40}, kv_cache_spec_sliding_window {window}"
        if learned is None:
            return Dropped("group_unsupported", seen, Doubt.UNTRUSTED)
        if known is not None and known != learned:
            was = StateClass.Name(known.state_class).removeprefix("STATE_CLASS_").lower()  # type: ignore[arg-type]
            detail = f"{seen}; so far {was}, {known.window_tokens}"
            return Dropped("group_changed", detail, Doubt.QUARANTINED)
        self._rules[index] = learned
        return None

    def _rule_of(self, kind: str | None, window: int) -> Rule | None:
        engine = self._engine
        if kind in engine.attention_kinds:
            return Rule(STATE_CLASS_ATTENTION, 0)
        if kind in (*engine.window_kinds, *engine.chunked_kinds) and window:
            return Rule(STATE_CLASS_WINDOW, window)
        if kind in engine.recurrent_kinds:
            return Rule(STATE_CLASS_RECURRENT, 0)
        return None
