"""The cases of a replay: what --policy and --variant say. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import click
import msgspec

from servingfleet_scheduler.policy import POLICIES
from servingfleet_sim.replay.options import ORACLE, Options

PLAYED = (*sorted(POLICIES), ORACLE)

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Choices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a case may differ in: the keys of --variant."""

    policy: str = "cost"
    rate: _Positive = 1.0
    target: _Positive | None = None
    admission: bool = True
    credit: bool = True
    learn: bool = True
    price_tiers: bool = True
    price_others: bool = True
    tell_tiers: bool = True
    schedulers: Annotated[int, msgspec.Meta(ge=1, le=16)] | None = None
    lag: _Seconds | None = None
    quantile: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    explore: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01
    jitter: _Seconds = 1.0
    closed_loop: bool = False

    def options(self, block_tokens: int) -> Options:
        """As the simulator takes them."""
        return Options(
            policy=self.policy,
            block_tokens=block_tokens,
            closed_loop=self.closed_loop,
            jitter_s=self.jitter,
            schedulers=self.schedulers,
            lag_s=self.lag,
            credit=self.credit,
            learn=self.learn,
            price_tiers=self.price_tiers,
            price_others=self.price_others,
            tell_tiers=self.tell_tiers,
            quantile=self.quantile,
            explore_share=self.explore,
            deadlines=self.admission,
        )


def read_choices(
    base: Choices, policies: Sequence[str], variants: Sequence[str]
) -> dict[str, Choices]:
    """Cases by name, the baseline first. Raises click.UsageError."""
    found: dict[str, Choices] = {}
    for policy in policies or ("cost",):
        _add(found, policy, msgspec.structs.replace(base, policy=policy))
    first = next(iter(found.values()))
    for variant in variants:
        name, colon, pairs = variant.partition(":")
        said = [pair.partition("=") for pair in pairs.split(",")]
        if not name or not colon or not all(equals for _, equals, _ in said):
            raise click.UsageError(f"--variant {variant!r}; expected NAME:KEY=VALUE,...")
        try:
            changed = msgspec.convert({key: text for key, _, text in said}, Choices, strict=False)
        except msgspec.ValidationError as error:
            raise click.UsageError(
                f"--variant {variant!r}: {error}; keys: {', '.join(Choices.__struct_fields__)}"
            ) from None
        values = {key: getattr(changed, key) for key, _, _ in said}
        _add(found, name, msgspec.structs.replace(first, **values))
    return found


def _add(found: dict[str, Choices], name: str, choices: Choices) -> None:
    if choices.policy not in PLAYED:
        raise click.UsageError(f"policy {choices.policy!r}; known: {', '.join(PLAYED)}")
    if name in found:
        raise click.UsageError(f"case {name!r} is there twice; give the variant another name")
    found[name] = choices
