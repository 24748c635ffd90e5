"""Reads what the command line and the environment say, and refuses what can't work.

Pure. Every refusal says what was seen and what was expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .adapters.registry import ADAPTERS
from .settings import LayerGroup, RankSockets
from .supervisor import LEAST_MEMORY_MIB


class BadOption(ValueError):
    """Whoever starts the relay must correct an option."""


def rank_sockets(
    ranks: Sequence[int], events: Sequence[str], replays: Sequence[str], *, bind: bool
) -> tuple[RankSockets, ...]:
    """The sockets of each rank. One address stands for all ranks: the port rises with the rank."""
    event_addresses = _each("--engine-events", events, ranks)
    replay_addresses = _each("--engine-replay", replays, ranks) if replays else [None] * len(ranks)
    used = [*event_addresses, *(address for address in replay_addresses if address)]
    if len(set(used)) != len(used):
        raise BadOption(f"one address is used twice: {', '.join(sorted(used))}")
    return tuple(
        RankSockets(rank, address, replay, bind)
        for rank, address, replay in zip(ranks, event_addresses, replay_addresses, strict=True)
    )


def targets(schedulers: Sequence[str]) -> tuple[str, ...]:
    """host:port each; commas separate several in one value."""
    found = [part.strip() for value in schedulers for part in value.split(",") if part.strip()]
    for target in found:
        host, _, port = target.rpartition(":")
        if not host or not _is_port(port):
            raise BadOption(f"--scheduler {target!r}; expected host:port")
    if not found:
        raise BadOption("no --scheduler is given")
    return tuple(dict.fromkeys(found))


def checked(option: str, value: str, most_bytes: int) -> str:
    """The value, if schedulers will take it."""
    if len(value.encode()) > most_bytes:
        raise BadOption(f"{option} has {len(value.encode())} bytes; at most {most_bytes}")
    return value


def host_port(option: str, value: str) -> str:
    """host:port as schedulers and clients take it; "" for none. A bare IPv6 address gets its brackets."""
    if not value:
        return ""
    host, _, port = checked(option, value, 512).rpartition(":")
    if not host or not _is_port(port) or "$(" in host:
        raise BadOption(f"{option} {value!r}; expected host:port")
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else value


def check_identity(ca_file: Path | None, name: str, token_file: Path | None) -> None:
    """Refuses to show a credential, or to expect a name, where nothing is encrypted."""
    for option, given in (("--token-file", token_file), ("--scheduler-name", name)):
        if given and ca_file is None:
            raise BadOption(
                f"{option} is given without --scheduler-ca-file: schedulers would be spoken to in plain text"
            )


def check_memory(memory_mib: int, *, supervise: bool) -> None:
    """Refuses a limit that nobody sets, and one that no relay can start in. 0: no limit."""
    if memory_mib and not supervise:
        raise BadOption("--worker-memory-mib is given without --supervise")
    if 0 < memory_mib < LEAST_MEMORY_MIB:
        raise BadOption(f"--worker-memory-mib {memory_mib}; expected at least {LEAST_MEMORY_MIB}")


def labels(values: Sequence[str]) -> dict[str, str]:
    """key=value each, at most 64."""
    found = {}
    for value in values:
        key, equals, rest = value.partition("=")
        if not key or not equals:
            raise BadOption(f"--label {value!r}; expected key=value")
        found[checked("--label key", key, 512)] = checked(f"--label {key}", rest, 512)
    if len(found) > 64:
        raise BadOption(f"{len(found)} labels; at most 64")
    return found


def layer_groups(values: Sequence[str]) -> tuple[LayerGroup, ...]:
    """KIND:BLOCK or KIND:BLOCK:WINDOW each, in tokens."""
    profiles = [adapter.profile for adapter in ADAPTERS.values()]
    windows = {kind for profile in profiles for kind in profile.window_kinds}
    others = {
        kind
        for profile in profiles
        for kind in (*profile.attention_kinds, *profile.recurrent_kinds)
        if kind is not None
    }
    found = []
    for value in values:
        kind, *sizes = value.split(":")
        if kind not in windows | others:
            known = ", ".join(sorted(windows | others))
            raise BadOption(f"--layer-group {value!r}: kind {kind!r}; known: {known}")
        if len(sizes) != 1 + (kind in windows) or not all(map(_is_size, sizes)):
            form = "KIND:BLOCK:WINDOW" if kind in windows else "KIND:BLOCK"
            raise BadOption(f"--layer-group {value!r}; expected {form}, in tokens")
        found.append(LayerGroup(kind, *map(int, sizes)))
    if len(found) > 64:
        raise BadOption(f"{len(found)} layer groups; at most 64")
    return tuple(found)


def _each(option: str, addresses: Sequence[str], ranks: Sequence[int]) -> list[str]:
    if len(addresses) not in (1, len(ranks)):
        raise BadOption(
            f"{option} is given {len(addresses)} times for {len(ranks)} ranks; expected 1 or {len(ranks)}"
        )
    for address in addresses:
        if "://" not in address:
            raise BadOption(f"{option} {address!r}; expected tcp://host:port")
        if address.startswith("tcp://") and not _is_port(address.rpartition(":")[2]):
            raise BadOption(f"{option} {address!r} names no port")
    if len(addresses) == len(ranks) and len(ranks) > 1:
        return list(addresses)
    first = addresses[0]
    if not first.startswith("tcp://"):
        if len(ranks) > 1:
            raise BadOption(f"{option} {first!r} can't be shifted by rank: give it for each rank")
        return [first]
    base, _, port = first.rpartition(":")
    # The engine itself adds its rank to the port.
    shifted = [int(port) + rank for rank in ranks]
    if max(shifted) > 65_535:
        raise BadOption(f"{option} {first!r} leaves no port for rank {ranks[-1]}")
    return [f"{base}:{number}" for number in shifted]


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text) < 2**31


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text) < 65_536


def check_events(events: Sequence[str], engine_http: str, *, pull: bool, unit: int) -> None:
    """Where the engine's events come from: sockets, or its HTTP server. Raises BadOption."""
    if not pull:
        if not events:
            raise BadOption("--engine-events is missing: the engine's event socket, or --pull")
        return
    if events:
        raise BadOption(
            "--pull and --engine-events are both given: the engine has one or the other"
        )
    if not engine_http:
        raise BadOption("--pull is given and --engine-http is not: nowhere to pull from")
    if not unit:
        raise BadOption("--pull needs --engine-block-tokens, the engine's tokens_per_block")
