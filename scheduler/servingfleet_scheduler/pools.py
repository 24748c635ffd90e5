"""Speeds by pool, from the JSON of `--pools-file`: what an operator knows beforehand of unlike engines.

Pure. What a pool does not say stays as the defaults have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Literal

import msgspec

from .policy.speeds import BYTES_PER_TOKEN, DEFAULTS, Speeds, TierSpeed

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class BadPools(ValueError):
    """The file does not say what a pools file says: correct it."""


class _Tier(msgspec.Struct, forbid_unknown_fields=True):
    tier: Literal["host", "disk", "shared"]
    bandwidth_bytes_per_s: _Positive | None = None
    latency_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


class _Pool(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    prefill_tokens_per_s: _Positive | None = None
    bytes_per_token: _Positive | None = None
    step_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    tiers: list[_Tier] = []


class _File(msgspec.Struct, forbid_unknown_fields=True):
    pools: list[_Pool]


def read_pools(text: bytes) -> dict[str, Speeds]:
    """Raises BadPools: says where, and what was expected there."""
    try:
        pools = msgspec.json.decode(text, type=_File).pools
    except msgspec.DecodeError as error:
        raise BadPools(str(error)) from None
    _once("pools", "name", (pool.name for pool in pools))
    for number, pool in enumerate(pools):
        _once(f"pools[{number}].tiers", "tier", (tier.tier for tier in pool.tiers))
    return {pool.name: _speeds(pool) for pool in pools}


def _once(where: str, key: str, values: Iterable[str]) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            raise BadPools(f"{where}: {key} {value!r} is there {count} times; expected once")


def _speeds(pool: _Pool) -> Speeds:
    token_s = DEFAULTS.token_s
    if pool.prefill_tokens_per_s is not None:
        token_s = 1 / pool.prefill_tokens_per_s
    tiers = {tier.tier: tier for tier in pool.tiers}
    scale = (pool.bytes_per_token or BYTES_PER_TOKEN) / BYTES_PER_TOKEN
    return replace(
        DEFAULTS,
        token_s=token_s,
        # An engine that is slower in the linear part is slower in attention too.
        attention_s=DEFAULTS.attention_s * token_s / DEFAULTS.token_s,
        step_tokens=pool.step_tokens or DEFAULTS.step_tokens,
        assumed=pool.prefill_tokens_per_s is None,
        host=_tier(DEFAULTS.host, tiers.get("host"), scale),
        disk=_tier(DEFAULTS.disk, tiers.get("disk"), scale),
        shared=_tier(DEFAULTS.shared, tiers.get("shared"), scale),
    )


def _tier(default: TierSpeed, said: _Tier | None, scale: float) -> TierSpeed:
    """`scale`: bytes of a token, as a multiple of the default's."""
    token_s, fixed_s = default.token_s, default.fixed_s
    if said is not None and said.bandwidth_bytes_per_s is not None:
        token_s = BYTES_PER_TOKEN / said.bandwidth_bytes_per_s
    if said is not None and said.latency_s is not None:
        fixed_s = said.latency_s
    return TierSpeed(fixed_s, token_s * scale)
