"""Which lanes the engine of this replica keeps: learned from its events, declared to schedulers.

Pure. A lane is a tier times a layer group; its number never changes its meaning.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from servingfleet_protos.v1.common_pb2 import (
    KEY_FORM_PAIR,
    KEY_FORM_TOKEN,
    TIER_GPU,
    TIER_SHARED,
    StateClass,
    Tier,
)
from servingfleet_protos.v1.stream_pb2 import Lane as LaneMessage
from servingfleet_protos.v1.stream_pb2 import Profile, TierRule

from .adapters.events import Doubt, Dropped, EngineProfile, Group, Stored
from .layers import Layers
from .settings import LayerGroup

MAX_LANES = 64


@dataclass(frozen=True, slots=True)
class Lane:
    """One declared lane."""

    number: int
    tier: int
    state_class: int
    group: int
    window_tokens: int
    unit_tokens: int

    @property
    def name(self) -> str:
        """For people."""
        tier = Tier.Name(self.tier).removeprefix("TIER_").lower()  # type: ignore[arg-type]
        kind = StateClass.Name(self.state_class).removeprefix("STATE_CLASS_").lower()  # type: ignore[arg-type]
        return f"{tier} {kind}, group {self.group}, unit {self.unit_tokens}"


@dataclass(frozen=True, slots=True)
class Used:
    """The unit that one life of the engine used in a lane, in tokens."""

    tokens: int
    firm: bool
    """Several were stored in a row: it is no part of a larger one."""


class Lanes:
    """The lanes of one replica, shared by its ranks."""

    def __init__(
        self,
        profile: EngineProfile,
        *,
        block_tokens: int,
        engine_block_tokens: int = 0,
        host_unit_tokens: int = 0,
        layer_groups: Sequence[LayerGroup] = (),
        less_units: int = 0,
        shared_store: str = "",
    ) -> None:
        self.engine = profile
        self.version = 0
        """Rises whenever the profile that schedulers know is out of date."""
        self._block_tokens = block_tokens
        self._configured_unit = engine_block_tokens
        self._told_unit = 0
        self._host_unit = host_unit_tokens
        self._less_units = less_units
        self._store = shared_store
        self._layers = Layers(profile, layer_groups)
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._gpu_blocks = 0
        self._gpu_tokens = 0
        self._key_forms: dict[int, bool] = {}
        self._hybrid = False
        self._lookahead = False
        self._adapters_proven = not profile.adapters_since
        self._separates_adapters = True
        self._separates_salts = True
        for index, group in self._layers.declared():
            rule = self._layers.rule(index)
            self._lanes[TIER_GPU, index] = Lane(
                *(len(self._lanes), TIER_GPU, rule.state_class, index),
                *(rule.window_tokens, group.unit_tokens),
            )

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def of_store(self, event: Stored, units: Mapping[int, Used]) -> Lane | Dropped:
        """The lane of a store, declared if it is new; or why it has none.

        `units`: the unit of each lane, by its number, as this life of the engine has used it.
        """
        group = event.group.index or 0
        refusal = self._layers.learn(event, group)
        if refusal is not None:
            return refusal
        known = self._lanes.get((event.tier, group))
        unit = self._unit(event, group, known)
        if isinstance(unit, Dropped):
            return unit
        if known is not None:
            used = units.get(known.number, Used(unit, firm=True))
            # What came first may have been parts of a block, each alone.
            parts = unit > used.tokens and not used.firm and not self.engine.fixed_unit
            if unit != used.tokens and not parts:
                return self._other_unit(event, known.name, used.tokens)
            if known.unit_tokens == unit:
                return known
        if known is None and len(self._lanes) >= MAX_LANES:
            return Dropped("lane_limit", f"more than {MAX_LANES} lanes", Doubt.UNTRUSTED)
        lane = self._declare(event.tier, group, unit, known)
        if event.tier == TIER_GPU and self._store and (TIER_SHARED, group) not in self._lanes:
            # Others may have stored what this replica can load.
            self._declare(TIER_SHARED, group, self._host_unit or unit, None)
        return lane

    def _declare(self, tier: int, group: int, unit: int, known: Lane | None) -> Lane:
        rule = self._layers.rule(group)
        number = len(self._lanes) if known is None else known.number
        lane = Lane(number, tier, rule.state_class, group, rule.window_tokens, unit)
        self._lanes[tier, group] = lane
        self.version += 1
        return lane

    def of_removal(self, tier: int, group: Group) -> Lane | None:
        """The lane of a removal. None: nothing was ever stored there."""
        return self._lanes.get((tier, group.index or 0))

    def separation(self, *, adapters: bool, salts: bool) -> None:
        """What the events of this wire generation tell apart."""
        if (adapters, salts) != (self._separates_adapters, self._separates_salts):
            self._separates_adapters, self._separates_salts = adapters, salts
            self.version += 1

    def unit(self, tokens: int, *, certain: bool) -> None:
        """The engine says how many tokens its block holds. `certain`: its events must say so, too."""
        self._told_unit = tokens
        if certain:
            self._configured_unit = self._configured_unit or tokens

    @property
    def gpu_unit(self) -> int:
        """Tokens of a block on the GPU: of its largest layer group. 0: not known yet."""
        units = [lane.unit_tokens for lane in self._lanes.values() if lane.tier == TIER_GPU]
        return max(units, default=self._configured_unit or self._told_unit)

    def gpu_capacity(self) -> tuple[int, int]:
        """Blocks and tokens of the engine's GPU cache, as it says. 0: it doesn't."""
        return self._gpu_blocks, self._gpu_tokens

    def release(self, version: str) -> None:
        """The engine says which release it is."""
        if self.engine.adapters_since:
            proven = _numbers(version) >= self.engine.adapters_since
            if proven != self._adapters_proven:
                self._adapters_proven = proven
                self.version += 1

    def capacity(self, *, gpu_blocks: int = 0, gpu_tokens: int = 0) -> None:
        """The engine says how large its GPU cache is."""
        if (gpu_blocks, gpu_tokens) != (self._gpu_blocks, self._gpu_tokens):
            self._gpu_blocks, self._gpu_tokens = gpu_blocks, gpu_tokens
            self.version += 1

    @property
    def hybrid(self) -> bool:
        """Some layers keep a state whose eviction the engine does not announce."""
        return self._hybrid

    def set_hybrid(self) -> None:
        """From here on nothing that is stored is certain to be resumable."""
        if not self._hybrid:
            self._hybrid = True
            self.version += 1

    def set_lookahead(self) -> None:
        """Hashes cover tokens after their block, too: the last block of a match may be of another continuation."""
        if not self._lookahead:
            self._lookahead = True
            self.version += 1

    def of_keys(self, rank: int, pairs: bool) -> Dropped | None:
        """Notes the key form of a rank's blocks, or says why they can't be read: one form for a replica."""
        others = {form for other, form in self._key_forms.items() if other != rank}
        if others and pairs not in others:
            return Dropped(
                "key_form_mixed",
                f"rank {rank} has keys of {'pairs' if pairs else 'tokens'}, the other ranks don't",
                Doubt.QUARANTINED,
            )
        if self._key_forms.get(rank) != pairs:
            changed = pairs != self._pairs
            self._key_forms[rank] = pairs
            self.version += changed
        return None

    def forget_keys(self, rank: int) -> None:
        """A new life of the engine: its key form is not known yet."""
        pairs = self._pairs
        self._key_forms.pop(rank, None)
        self.version += pairs != self._pairs

    @property
    def _pairs(self) -> bool:
        return any(self._key_forms.values())

    @property
    def placeable(self) -> bool:
        """A full-attention group names the blocks of the others: so their place is known."""
        return self._layers.attention

    @property
    def bounded(self) -> str:
        """Why more may be reused than is held by what we know of the layers. "": it may not."""
        return self._layers.bounded

    def numbers(self, tiers: Iterable[int] | None = None) -> list[int]:
        """Lane numbers of these tiers, or of all."""
        wanted = None if tiers is None else set(tiers)
        return [
            lane.number for lane in self._lanes.values() if wanted is None or lane.tier in wanted
        ]

    def expected(self) -> set[int]:
        """Numbers of lanes whose upper bound is expected."""
        return {lane.number for lane in self if self._upper_in_predicted(lane.tier)}

    def message(self) -> Profile:
        """What schedulers are told."""
        attention_only = self._layers.attention_only
        return Profile(
            lanes=[
                LaneMessage(
                    lane=lane.number,
                    tier=lane.tier,  # type: ignore[arg-type]
                    state_class=lane.state_class,  # type: ignore[arg-type]
                    group=lane.group,
                    window_tokens=lane.window_tokens,
                    unit_tokens=lane.unit_tokens,
                    store_id=self._store if lane.tier == TIER_SHARED else "",
                    capacity_tokens=(
                        self._gpu_tokens or self._gpu_blocks * lane.unit_tokens
                        if lane.tier == TIER_GPU
                        else 0
                    ),
                    upper_in_predicted=self._upper_in_predicted(lane.tier),
                )
                for lane in self._lanes.values()
            ],
            tiers=[
                TierRule(
                    tier=tier,  # type: ignore[arg-type]
                    # Measured on vLLM: with window or recurrent groups a host hit leaves the last token, too.
                    cap=(
                        TierRule.CAP_PROMPT
                        if traits.whole_prompt and attention_only
                        else TierRule.CAP_PROMPT_MINUS_ONE
                    ),
                    less_units=self._less(tier),
                    extends=True,
                    overlap=traits.overlap,  # type: ignore[arg-type]
                    overlap_share=traits.overlap_share,
                    always_loads=traits.always_loads,
                )
                for tier, traits in self.engine.tiers.items()
            ],
            key_form=KEY_FORM_PAIR if self._pairs else KEY_FORM_TOKEN,
            adapters_separated=self._separates_adapters and self._adapters_proven,
            salts_separated=self._separates_salts,
            rank_fields=self.engine.rank_fields,
            mixed_steps=self.engine.mixed_steps,
        )

    def _less(self, tier: int) -> int:
        """Units that a match on the GPU is shorter by than what is held."""
        return max(self._less_units, int(self._lookahead)) if tier == TIER_GPU else 0

    def _upper_in_predicted(self, tier: int) -> bool:
        ahead = self._lookahead and tier == TIER_GPU
        return (self.engine.tiers[tier].upper_in_predicted or ahead) and not self._hybrid

    def _other_unit(self, event: Stored, where: str, expected: int) -> Dropped:
        unit = self._stated_unit(event)
        partial = unit < expected and event.single and not self.engine.fixed_unit
        return Dropped(
            "partial_block" if partial else "block_size",
            f"{where}: block_size {unit}; expected {expected}",
            Doubt.INCOMPLETE if partial else Doubt.QUARANTINED,
            _scope(event.tier),
        )

    def _stated_unit(self, event: Stored) -> int:
        return self._host_unit if self._host_unit and event.tier != TIER_GPU else event.unit_tokens

    def _unit(self, event: Stored, group: int, known: Lane | None) -> int | Dropped:
        """Tokens of one unit; a placeholder states none."""
        if not event.unit_tokens:
            gpu = self._lanes.get((TIER_GPU, group))
            unit = known.unit_tokens if known else self._host_unit or (gpu and gpu.unit_tokens)
            return unit or Dropped(
                *("unit_unknown", "a placeholder before any block of known size", Doubt.INCOMPLETE),
                _scope(event.tier),
            )
        if event.tier == TIER_GPU:
            told = self._layers.unit_tokens(group) or self._configured_unit
            if told not in (0, event.unit_tokens):
                return self._other_unit(event, f"group_idx {group}", told)
        unit = self._stated_unit(event)
        if unit % self._block_tokens and self._block_tokens % unit:
            return Dropped(
                "unit_size",
                f"block_size {unit} is neither multiple nor divisor of the canonical block "
                f"of {self._block_tokens} tokens",
                Doubt.QUARANTINED,
                _scope(event.tier),
            )
        return unit


def _scope(tier: int) -> int:
    """What is wrong with the GPU's blocks is wrong with the stream."""
    return 0 if tier == TIER_GPU else tier


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a release's name: "0.5.23.post1" is (0, 5, 23)."""
    parts = itertools.takewhile(str.isdecimal, version.removeprefix("v").split("."))
    return tuple(int(part) for part in parts)
