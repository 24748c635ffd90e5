"""A pod while it is read: begins with what the pool says, and each engine's reader corrects that. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .. import names
from ..spec import Engine, EventsFrom, Pool
from .commandline import POD_IP, UNKNOWN
from .facts import EngineFacts, Finding
from .flags import Flags, Unreadable, number

LOOPBACK = "127.0.0.1"
MOST_RANKS = 1024
"""As in a pool's spec."""
_ANY = ("*", "0.0.0.0")

Binds = Callable[[str], bool]
"""Whether an engine binds its event socket at an endpoint, or connects to it."""


@dataclass
class Socket:
    """Where events, or replays, can be had."""

    base: int
    """Port of rank 0: rank r is on base + r."""
    host: str = LOOPBACK
    """As the relay reaches it, or binds it."""
    bind: bool = False
    """By the relay."""
    exposed: bool = False

    @property
    def address(self) -> str:
        """As the relay takes it."""
        return f"tcp://{self.host}:{self.base}"


@dataclass
class Reading:
    """What is known of one pod so far."""

    pod: Mapping[str, Any]
    pool: Pool
    container: Mapping[str, Any]
    kind: Engine
    flags: Flags
    events: Socket | None = None
    """None: the engine publishes none that the relay can have."""
    replay: Socket | None = None
    http_host: str = LOOPBACK
    http_port: int = 0
    ranks: int = 0
    first_rank: int = 0
    model: str = ""
    block_tokens: int = 0
    pull: bool = False
    """The relay pulls the events over HTTP."""
    serving: bool = True
    event_ports: tuple[int, ...] = ()
    """One for each rank, where a person listed them."""
    findings: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        ports = self.pool.ports
        self.events = self._unread(ports.events)
        self.replay = Socket(ports.replay, exposed=self.events.exposed) if ports.replay else None
        self.http_port, self.ranks = ports.http, self.pool.ranks
        wanted = self.pool.events_from == EventsFrom.RELAY_PULLS
        self.pull = wanted and self.kind in (Engine.AUTO, Engine.TENSORRT_LLM)
        if wanted and not self.pull:
            self.found(
                "EventsNotPullable",
                f"is {self.kind}, whose events can't be pulled: set eventsFrom of pool {self.pool.name} to auto",
            )

    @property
    def name(self) -> str:
        """Of the container."""
        return str(self.container.get("name", ""))

    def found(self, code: str, message: str, *, severe: bool = True) -> None:
        """Keeps a finding about the container."""
        self.findings.append(Finding(code, f"container {self.name}: {message}", severe))

    def attempt(self, what: str, fields: str, step: Callable[[], None]) -> None:
        """Leaves to the pool what the step can't read, and says which fields of it then count."""
        try:
            step()
        except Unreadable:
            self.found(
                "NotReadable",
                f"{what} can't be read from the command line: set {fields} of pool {self.pool.name}, "
                "or write it plainly",
                severe=False,
            )

    def read_http(self, default: int) -> None:
        """Where the HTTP server listens. Raises Unreadable."""
        host = self.flags.text("--host")
        if host == POD_IP:
            self.http_host = "$(POD_IP)"
        elif host and host not in (*_ANY, "::", "localhost"):
            self.http_host = f"[{host}]" if ":" in host else host
        port = self.flags.number("--port")
        if port is None and self.flags.opaque:
            if self.pool.ports.http == type(self.pool.ports)().http:
                raise Unreadable("--port")
        else:
            self.http_port = default if port is None else port

    def read_model(self) -> None:
        """The name that clients use. Raises Unreadable."""
        path = self.flags.text("--model-path", "--model") or self.flags.positional
        self.model = self.flags.text("--served-model-name") or path
        if UNKNOWN in self.model:
            self.model = ""

    def read_events(self, config: object, binds: Binds, *, publishes: bool) -> None:
        """The event and replay sockets that a configuration describes, with what is wrong about them.

        `config` is the engine's own, None where there is none. Raises Unreadable where flags may be missing.
        """
        if config is None and self.flags.opaque:
            if self.pool.events_from == EventsFrom.AUTO:
                raise Unreadable("events")
            return
        self.events = self.replay = None
        if not isinstance(config, Mapping) or not publishes:
            self.found("EventsOff", f"publishes no events: {self.advice()}")
            return
        self.events = self._socket(str(config.get("endpoint", "tcp://*:5557")), binds)
        replay = config.get("replay_endpoint")
        if replay:
            # This socket binds with every engine.
            self.replay = self._socket(str(replay), lambda endpoint: True)
        else:
            self.found(
                "NoReplay",
                "has no replay_endpoint, so that what it held before the relay came, or lost in a gap, stays "
                f"unknown: {self.advice()}",
                severe=False,
            )

    def read_annotation(self) -> None:
        """Event ports that a person listed, for what no command line tells."""
        text = (self.pod.get("metadata", {}).get("annotations") or {}).get(names.EVENTS_ANNOTATION)
        if not text:
            return
        ports = [_port(part.strip()) for part in text.split(",")]
        if not all(ports) or len(ports) > MOST_RANKS:
            self.found(
                "BadAnnotation",
                f"annotation {names.EVENTS_ANNOTATION} is {text[:64]!r}; expected event ports such as 5557,5558",
            )
            return
        self.event_ports = tuple(ports)
        self.ranks, self.first_rank = len(ports), 0
        self.events = self.events or self._unread(self.event_ports[0])
        if len(ports) > 1:
            # Replay ports can be counted from the first only where the engine counted its ranks.
            self.replay = None

    def check_network(self) -> None:
        """The relay must resolve the scheduler's name."""
        spec = self.pod.get("spec") or {}
        host = bool(spec.get("hostNetwork"))
        wanted = "ClusterFirstWithHostNet" if host else "ClusterFirst"
        policy = spec.get("dnsPolicy", "ClusterFirst")
        if policy not in ("ClusterFirstWithHostNet", wanted):
            self.found(
                "NoClusterDNS",
                f"with dnsPolicy {policy}{' on the host network' if host else ''} its pod can't resolve the "
                f"scheduler's name: set dnsPolicy: {wanted}",
            )

    def advice(self) -> str:
        """The flag to add, in the form that nobody outside the pod can read."""
        ports = self.pool.ports
        config: dict[str, Any] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://{LOOPBACK}:{ports.events}",
        }
        if ports.replay:
            config["replay_endpoint"] = f"tcp://{LOOPBACK}:{ports.replay}"
        if self.kind == Engine.SGLANG:
            del config["enable_kv_cache_events"]
        if self.kind == Engine.TENSORRT_LLM:
            return (
                f"add --set 'kv_cache_config.kv_events_config={json.dumps(config)}', or to the file that --config "
                "names; where the release does not know it, --set kv_cache_config.event_buffer_max_size=16384"
            )
        return f"add --kv-events-config '{json.dumps(config)}'"

    def facts(self) -> EngineFacts:
        """All that is known."""
        self.ranks = min(self.ranks, MOST_RANKS)
        found = EngineFacts(
            kind=self.kind,
            container=self.name,
            pull=self.pull,
            bind=False,
            events=(),
            event_ports=(),
            replay=(),
            replay_ports=(),
            http=f"http://{self.http_host}:{self.http_port}",
            http_port=self.http_port,
            ranks=self.ranks,
            first_rank=self.first_rank,
            model=self.model,
            block_tokens=self.block_tokens,
            serving=self.serving,
            exposed=(),
        )
        found = self._pulled(found) if self.pull else self._published(found)
        return replace(found, findings=tuple(self.findings))

    def _pulled(self, found: EngineFacts) -> EngineFacts:
        # Nothing more is exposed than the port that clients need, and no NetworkPolicy of ours can close that.
        block_tokens = self.pool.engine_block_tokens or self.block_tokens
        if not block_tokens:
            self.found(
                "BlockNotTold",
                "its events, which the relay pulls, don't tell the size of a block: set engineBlockTokens of pool "
                f"{self.pool.name} to the engine's tokens_per_block",
            )
        return replace(found, block_tokens=block_tokens)

    def _published(self, found: EngineFacts) -> EngineFacts:
        ranks = range(self.first_rank, self.first_rank + self.ranks)
        events = self.events or Socket(self.pool.ports.events)
        event_ports = self.event_ports or tuple(events.base + rank for rank in ranks)
        replay_ports = tuple(self.replay.base + rank for rank in ranks) if self.replay else ()
        if clash := set(event_ports) & set(replay_ports):
            self.found(
                "PortsCollide",
                f"rank r uses port + r, so that events and replays meet on port {min(clash)}: put "
                f"replay_endpoint at least {self.ranks} ports from endpoint",
            )
        exposed = {
            *(event_ports if events.exposed else ()),
            *(replay_ports if self.replay and self.replay.exposed else ()),
        }
        return replace(
            found,
            bind=events.bind,
            events=tuple(f"tcp://{events.host}:{port}" for port in self.event_ports)
            or (events.address,),
            event_ports=event_ports,
            replay=(self.replay.address,) if self.replay else (),
            replay_ports=replay_ports,
            exposed=tuple(sorted(exposed)),
        )

    def _unread(self, port: int) -> Socket:
        private = self.pool.events_from == EventsFrom.RELAY_BINDS
        # What could be open is taken for open.
        return Socket(port, bind=private, exposed=not private)

    def _socket(self, endpoint: str, binds: Binds) -> Socket | None:
        """How the relay meets the engine there; None, with a finding, where it can't."""
        written = endpoint.replace(POD_IP, "$(POD_IP)")
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        if not endpoint.startswith("tcp://"):
            self.found(
                "EventsUnreachable",
                f"{written!r} is not reached from another container: {self.advice()}",
            )
        elif not _port(port):
            self.found(
                "EventsUnreachable", f"{written!r} names no port in advance: {self.advice()}"
            )
        elif ":" in host:
            # The engines' sockets speak no IPv6, not even at [::]: the engine ends with an error.
            self.found("EventsUnreachable", f"{written!r} is no IPv4 address: {self.advice()}")
        elif binds(endpoint):
            exposed = not _is_loopback(host)
            reached = LOOPBACK if host in _ANY else host.replace(POD_IP, "$(POD_IP)")
            return Socket(int(port), reached, exposed=exposed)
        elif _is_loopback(host) or host == "0.0.0.0":
            return Socket(int(port), bind=True)
        else:
            self.found("EventsElsewhere", f"sends its events to {written!r}: {self.advice()}")
        return None


def _port(text: str) -> int:
    """0: it is none."""
    found = number(text) or 0
    return found if found < 65_536 else 0


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")
