"""What the relay and the fleet's status need to know of a pod's engine. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import Engine


@dataclass(frozen=True)
class Finding:
    """Something that a person should change, and how."""

    code: str
    message: str
    """Names the container, what was seen and the exact flag."""
    severe: bool = True
    """Prefixes are not known, or wrongly, without it. Otherwise something is only worse than it could be."""


@dataclass(frozen=True)
class EngineFacts:
    """One pod's engine."""

    kind: Engine
    """AUTO: the command line doesn't tell; the relay will ask the engine."""
    container: str
    """"": the pod has no container of the name that the pool gives."""
    pull: bool
    """There are no event sockets: the relay pulls the events over HTTP."""
    bind: bool
    """The engine connects, so that the relay binds."""
    events: tuple[str, ...]
    """Event addresses for the relay: of rank 0, from which the others are counted, or one for each rank. (): it pulls."""
    event_ports: tuple[int, ...]
    """One for each of the pod's ranks."""
    replay: tuple[str, ...]
    """Likewise; (): the engine replays nothing."""
    replay_ports: tuple[int, ...]
    http: str
    """Base address of its HTTP server, as the relay reaches it."""
    http_port: int
    ranks: int
    first_rank: int
    model: str
    """As clients name it; "": not told."""
    block_tokens: int
    """0: not told."""
    serving: bool
    """It answers requests: false for the further pods of an engine that spans several."""
    exposed: tuple[int, ...]
    """Ports on which prompts' tokens can be read from outside the pod, unless a NetworkPolicy closes them."""
    findings: tuple[Finding, ...] = ()
