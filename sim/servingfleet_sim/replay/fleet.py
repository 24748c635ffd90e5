"""The simulated fleet, as FLEET.yaml describes it: pools of engines, their memory, their faults.

Pure. Everything is what the engines really do; `told` is what the schedulers are told of a pool beforehand, in the words
of the pools file that production schedulers read, and it may be wrong.

    pools:
      - name: h100               # label of the pool at the schedulers
        replicas: 4
        ranks: 2                 # data-parallel ranks of each replica
        engine: vllm             # or sglang: prefill first, loads overlap prefill
        gpu: h100                # coefficients of a GPU (emulator/speed.py), or `speed:` with its own
        factor: 1.0              # the same GPU so many times as fast: tensor parallelism
        gpu_tokens: 400000       # key-value cache of one rank
        tiers:                   # of one rank; what is on the GPU is copied there
          - {tier: host, tokens: 1500000, bandwidth_bytes_per_s: 40e9, latency_s: 0.003}
        told: {prefill_tokens_per_s: 30000}
    events: {lag_s: 0.05, loss: 0.0}
    failures:
      - {at: 120, replica: h100-0, for: 30}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from servingfleet_scheduler.policy.speeds import BYTES_PER_TOKEN, DEFAULTS, Speeds, TierSpeed
from servingfleet_scheduler.pools import BadPools, read_pools

from ..emulator.speed import GPUS, Speed

MAX_RANKS = 4096
"""Of the whole fleet: beyond it a replay takes days."""

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class BadFleet(ValueError):
    """The file does not describe a fleet: says where, and what was expected there."""


class TierSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory beyond the GPU, of one rank."""

    tier: Literal["host", "disk"]
    tokens: _Count
    bandwidth_bytes_per_s: _Positive = 40e9
    """What engines reach of PCIe 5's 64 GB/s."""
    latency_s: _Seconds = 0.003
    """Before the first byte moves."""


class PoolSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replicas that are alike."""

    name: _Name
    replicas: _Count = 1
    ranks: _Count = 1
    engine: Literal["vllm", "sglang"] = "vllm"
    gpu: str = ""
    """A name of emulator/speed.py; empty: `speed` tells."""
    speed: Speed | None = None
    factor: _Positive = 1.0
    bytes_per_token: _Positive = BYTES_PER_TOKEN
    """Key-value state of one token, all layers, one rank."""
    gpu_tokens: _Count = 400_000
    """About 50 GB at 128 KiB a token: an 8B model in 16 bits on an 80 GB GPU."""
    tiers: tuple[TierSpec, ...] = ()
    step_tokens: _Count = 8192
    """Most tokens computed in one step: vLLM's default from 70 GiB on."""
    max_sequences: _Count = 256
    """Most requests in one step."""
    overlap: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """Share of the prefill behind which a load hides, where the engine loads while it computes (sglang)."""
    tells_tiers: bool = False
    """Its answers tell reuse by tier, as SGLang's do where asked to; vLLM's tell one number."""
    load_interval_s: _Positive = 1.0
    """Between two readings of its load."""
    told: dict[str, Any] | None = None
    """Of the pools file: prefill_tokens_per_s, bytes_per_token, tiers. None: the truth."""

    @property
    def truth(self) -> Speed:
        """Coefficients of one rank."""
        speed = self.speed if self.speed is not None else GPUS[self.gpu]
        return speed.scaled(self.factor)


class EventsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The way of cache events from an engine to the schedulers."""

    lag_s: _Seconds = 0.05
    """From the end of an engine's step to the schedulers."""
    loss: _Share = 0.0
    """Share of event batches that never reach the relay; the next one shows the gap."""
    replay_s: _Seconds = 0.2
    """Until a relay has what it missed: it asks the engine to send it again."""
    link_s: _Seconds = 0.001
    """Between relay and scheduler, one way."""


class FailureSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"for_s": "for"}):
    """An engine's process ends, with all that ran there and all that it held, and comes back empty."""

    at: _Seconds
    """Since the run began."""
    replica: _Name
    for_s: _Positive
    """Seconds until it serves again."""


class FleetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet of one model."""

    pools: Annotated[tuple[PoolSpec, ...], msgspec.Meta(min_length=1)]
    schedulers: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    events: EventsSpec = EventsSpec()
    failures: tuple[FailureSpec, ...] = ()

    def replicas(self) -> dict[str, PoolSpec]:
        """Pools by replica; replicas are named after their pool."""
        return {f"{pool.name}-{n}": pool for pool in self.pools for n in range(pool.replicas)}

    def told(self) -> dict[str, Speeds]:
        """What the schedulers are told, by pool. Raises BadFleet."""
        return {pool.name: _told(pool) for pool in self.pools}


def read_fleet(text: bytes | str) -> FleetSpec:
    """Of YAML. Raises BadFleet."""
    try:
        # Lax: YAML 1.1 takes 40e9 for a string.
        fleet = msgspec.yaml.decode(text, type=FleetSpec, strict=False)
    except msgspec.DecodeError as error:
        raise BadFleet(f"fleet file: {error}") from None
    check(fleet)
    return fleet


def check(fleet: FleetSpec) -> None:
    """Raises BadFleet for what no single value shows."""
    names = [pool.name for pool in fleet.pools]
    for name in names:
        if names.count(name) > 1:
            raise BadFleet(f"fleet file: pool {name!r} is there twice; expected once")
    for pool in fleet.pools:
        if (pool.speed is None) == (pool.gpu == ""):
            raise BadFleet(f"fleet file: pool {pool.name!r} needs either `gpu` or `speed`")
        if pool.gpu and pool.gpu not in GPUS:
            raise BadFleet(
                f"fleet file: pool {pool.name!r} has gpu {pool.gpu!r}; known: {', '.join(GPUS)}"
            )
        tiers = [each.tier for each in pool.tiers]
        if tiers not in ([], ["host"], ["disk"], ["host", "disk"]):
            raise BadFleet(
                f"fleet file: pool {pool.name!r} has tiers {', '.join(tiers)}; expected host, "
                "then disk, each once at most"
            )
    ranks = sum(pool.replicas * pool.ranks for pool in fleet.pools)
    if ranks > MAX_RANKS:
        raise BadFleet(f"fleet file: {ranks} ranks; at most {MAX_RANKS}")
    replicas = fleet.replicas()
    for failure in fleet.failures:
        if failure.replica not in replicas:
            raise BadFleet(
                f"fleet file: failure of {failure.replica!r}, which is no replica; "
                f"there are {', '.join(list(replicas)[:8])}"
            )
    fleet.told()


def token_s(pool: PoolSpec, tier: TierSpec) -> float:
    """Seconds to load one token from a tier."""
    return pool.bytes_per_token / tier.bandwidth_bytes_per_s


def _told(pool: PoolSpec) -> Speeds:
    if pool.told is None:
        return _true_speeds(pool)
    said: Mapping[str, Any] = {**pool.told, "name": pool.name}
    try:
        return read_pools(msgspec.json.encode({"pools": [said]}))[pool.name]
    except BadPools as error:
        raise BadFleet(f"fleet file: pool {pool.name!r}, told: {error}") from None


def _true_speeds(pool: PoolSpec) -> Speeds:
    truth = pool.truth
    tiers = {each.tier: TierSpeed(each.latency_s, token_s(pool, each)) for each in pool.tiers}
    return replace(
        DEFAULTS,
        step_s=truth.step_s,
        token_s=truth.token_s,
        attention_s=truth.pair_s,
        step_tokens=pool.step_tokens,
        host=tiers.get("host", DEFAULTS.host),
        disk=tiers.get("disk", DEFAULTS.disk),
        assumed=False,
    )
