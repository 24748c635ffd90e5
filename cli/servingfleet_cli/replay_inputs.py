"""What a replay is given: the fleet file, and the trace or what is made up in its place."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import msgspec

from servingfleet_sim.replay.fleet import BadFleet, FleetSpec, read_fleet
from servingfleet_sim.replay.generator import Load, generate
from servingfleet_sim.replay.traces import BadTrace, Trace, read_trace

from . import exits

GENERATED = "generated"


def fleet_of(path: Path) -> FleetSpec:
    """Raises exits.Exit."""
    try:
        return read_fleet(path.read_bytes())
    except (BadFleet, OSError) as error:
        raise exits.Exit(f"--fleet {path}: {error}", exits.USAGE) from error


def trace_of(name: str, seed: int, start_every_s: float) -> Trace:
    """Raises exits.Exit."""
    try:
        if name == GENERATED or name.startswith(f"{GENERATED}:"):
            return generate(_load(name), seed)
        return read_trace(name, seed=seed, start_every_s=start_every_s)
    except (BadTrace, OSError, ValueError) as error:
        raise exits.Exit(str(error), exits.USAGE) from error


def _load(name: str) -> Load:
    """Of "generated:KEY=VALUE,...". Raises ValueError."""
    pairs = name.removeprefix(GENERATED).removeprefix(":")
    said = {key: text for key, _, text in (p.partition("=") for p in pairs.split(",") if p)}
    known = {each.name for each in fields(Load)}
    if unknown := said.keys() - known:
        raise ValueError(f"{name}: {', '.join(sorted(unknown))}; keys: {', '.join(sorted(known))}")
    try:
        return msgspec.convert(said, Load, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}") from None
