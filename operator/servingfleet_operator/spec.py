"""A ServingFleet's spec as typed values: names, types, bounds and defaults as `crds/servingfleet.yaml` has them.

Pure. What each field means stands in the CRD, and a test walks both. Rules across fields are the API server's (CEL in
the CRD): they hold for whatever it hands out, and are not said twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .errors import OperatorError
from .quantities import Duration, Quantity


class BadSpec(OperatorError):
    """The resource can't be read: whoever wrote it, or the CRD that let it pass, must be corrected."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        """Where, as kubectl explain would: spec.pools[0].ranks."""
        self.problem = problem
        """What was seen and what was expected."""


class Engine(StrEnum):
    AUTO = "auto"
    VLLM = "vLLM"
    SGLANG = "SGLang"
    TENSORRT_LLM = "TensorRT-LLM"


class EventsFrom(StrEnum):
    AUTO = "auto"
    ENGINE_BINDS = "engineBinds"
    RELAY_BINDS = "relayBinds"
    RELAY_PULLS = "relayPulls"


class Tier(StrEnum):
    HOST = "host"
    DISK = "disk"
    SHARED = "shared"


class Policy(StrEnum):
    COST = "cost"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"
    PREFIX_OVERLAP = "prefix-overlap"
    APPROXIMATE = "approximate"


class Transport(StrEnum):
    TLS = "TLS"
    PLAIN_TEXT = "PlainText"


class Clients(StrEnum):
    TOKEN = "Token"
    TLS_ONLY = "TLSOnly"
    NONE = "None"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class SelectorOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class WhenUnsatisfiable(StrEnum):
    SCHEDULE_ANYWAY = "ScheduleAnyway"
    DO_NOT_SCHEDULE = "DoNotSchedule"


class TolerationOperator(StrEnum):
    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    ANY = ""
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


_LABEL_KEY = (
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)
_LONGEST_PREFIX = 253
_LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
_DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"

DnsLabel = Annotated[str, Meta(min_length=1, max_length=63, pattern=_DNS_LABEL)]
Image = Annotated[str, Meta(max_length=512, pattern=r"^(\S+)?$")]
TopologyKey = Annotated[str, Meta(min_length=1, max_length=317)]
LabelKey = Annotated[str, Meta(max_length=317, pattern=_LABEL_KEY)]
LabelValue = Annotated[str, Meta(max_length=63, pattern=_LABEL_VALUE)]
NodeLabelValue = Annotated[str, Meta(max_length=63)]
Labels = Annotated[dict[str, LabelValue], Meta(min_length=1, max_length=16)]
LayerGroup = Annotated[
    str,
    Meta(
        max_length=64,
        pattern=r"^((full_attention|mla_attention|mamba):[1-9][0-9]{0,8}"
        r"|(sliding_window|sliding_window_mla):[1-9][0-9]{0,8}:[1-9][0-9]{0,8})$",
    ),
]
Port = Annotated[int, Meta(ge=1, le=65_535)]
Tokens = Annotated[int, Meta(ge=1, le=65_536)]
TokensOrLearned = Annotated[int, Meta(ge=0, le=65_536)]


class _Part(msgspec.Struct, frozen=True, rename="camel"):
    pass


class Model(_Part, frozen=True):
    name: Annotated[str, Meta(max_length=512, pattern=r"^[^\s$]+$")]
    tokenizer: Annotated[str, Meta(max_length=512)] = ""


class SelectorRequirement(_Part, frozen=True):
    key: LabelKey
    operator: SelectorOperator
    values: Annotated[tuple[LabelValue, ...], Meta(max_length=64)] = ()


class Selector(_Part, frozen=True):
    match_labels: Labels
    match_expressions: Annotated[tuple[SelectorRequirement, ...], Meta(max_length=16)] = ()

    def __post_init__(self) -> None:
        # Said twice, unlike other rules: one selector that is none would have the API server refuse the webhook's entries
        # of all fleets, whatever definition let it pass.
        for key in (*self.match_labels, *(each.key for each in self.match_expressions)):
            if not re.fullmatch(_LABEL_KEY, key) or key.find("/") > _LONGEST_PREFIX:
                raise ValueError(
                    f"{key[:80]!r} is no label's name; expected one such as app or example.com/app"
                )


class Ports(_Part, frozen=True):
    http: Port = 8000
    events: Port = 5557
    replay: Annotated[int, Meta(ge=0, le=65_535)] = 5657
    """0: the engine replays nothing."""


class Speed(_Part, frozen=True):
    prefill_tokens_per_second: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    bytes_per_token: Quantity | None = None
    step_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class TierSpeed(_Part, frozen=True):
    tier: Tier
    bandwidth: Quantity
    latency: Duration | None = None


class Pool(_Part, frozen=True):
    name: DnsLabel
    selector: Selector
    engine: Engine = Engine.AUTO
    container: Annotated[str, Meta(max_length=63)] = ""
    ports: Ports = Ports()
    ranks: Annotated[int, Meta(ge=1, le=1024)] = 1
    events_from: EventsFrom = EventsFrom.AUTO
    hybrid: bool = False
    extra_keys: bool = False
    engine_block_tokens: TokensOrLearned = 0
    host_unit_tokens: TokensOrLearned = 0
    layer_groups: Annotated[tuple[LayerGroup, ...], Meta(max_length=64)] = ()
    speed: Speed = Speed()
    tiers: Annotated[tuple[TierSpeed, ...], Meta(max_length=3)] = ()


class RelayResources(_Part, frozen=True):
    cpu: Quantity = Quantity("500m")
    memory: Quantity = Quantity("256Mi")


class Relay(_Part, frozen=True):
    inject: bool = True
    image: Image = ""
    resources: RelayResources = RelayResources()
    in_place_upgrade: bool = False
    log_level: LogLevel = LogLevel.INFO


class Requests(_Part, frozen=True):
    cpu: Quantity = Quantity("500m")
    memory: Quantity = Quantity("512Mi")


class Limits(_Part, frozen=True):
    cpu: Quantity | None = None
    memory: Quantity = Quantity("2Gi")


class Resources(_Part, frozen=True):
    requests: Requests = Requests()
    limits: Limits = Limits()


class AdmissionTarget(_Part, frozen=True):
    priority: Annotated[int, Meta(ge=-1_000_000_000, le=1_000_000_000)]
    time_to_first_token: Duration
    queue: Duration | None = None


class Admission(_Part, frozen=True):
    max_prompt_tokens: Annotated[int, Meta(ge=1, le=1_048_576)] = 1_048_576
    targets: Annotated[tuple[AdmissionTarget, ...], Meta(max_length=16)] = ()


class Toleration(_Part, frozen=True):
    key: Annotated[str, Meta(max_length=317)] = ""
    operator: TolerationOperator = TolerationOperator.EQUAL
    value: NodeLabelValue = ""
    effect: TaintEffect = TaintEffect.ANY
    toleration_seconds: int | None = None


class TopologySpread(_Part, frozen=True):
    topology_key: TopologyKey = "kubernetes.io/hostname"
    when_unsatisfiable: WhenUnsatisfiable = WhenUnsatisfiable.SCHEDULE_ANYWAY


class Scheduler(_Part, frozen=True):
    replicas: Annotated[int, Meta(ge=1, le=16)] = 2
    image: Image = ""
    resources: Resources = Resources()
    policy: Policy = Policy.COST
    admission: Admission = Admission()
    window: Duration = Duration("1h")
    min_pairs: Annotated[int, Meta(ge=2, le=1_000_000)] = 20
    pod_monitor: bool = False
    node_selector: Annotated[dict[str, NodeLabelValue], Meta(max_length=32)] = {}
    tolerations: Annotated[tuple[Toleration, ...], Meta(max_length=32)] = ()
    affinity: dict[str, Any] = {}
    """A core/v1 Affinity, passed on as it is."""
    topology_spread: TopologySpread = TopologySpread()
    priority_class_name: Annotated[str, Meta(max_length=253)] = ""
    log_level: LogLevel = LogLevel.INFO


class Access(_Part, frozen=True):
    transport: Transport = Transport.TLS
    clients: Clients = Clients.TOKEN
    namespaces: Annotated[tuple[DnsLabel, ...], Meta(max_length=64)] = ()


class Spec(_Part, frozen=True, kw_only=True):
    """`.spec`."""

    model: Model
    block_tokens: Tokens = 16
    pools: Annotated[tuple[Pool, ...], Meta(min_length=1, max_length=32)]
    relay: Relay = Relay()
    scheduler: Scheduler = Scheduler()
    access: Access = Access()


class Fleet(Spec, frozen=True, kw_only=True):
    """A ServingFleet: its spec, and which object it is."""

    name: str
    namespace: str
    uid: str
    generation: int = 0

    @property
    def secured(self) -> bool:
        """Connections are encrypted, and callers prove who they are."""
        return self.access.transport == Transport.TLS

    def pool(self, name: str) -> Pool | None:
        """The pool of that name."""
        return next((pool for pool in self.pools if pool.name == name), None)


def parse(resource: Mapping[str, Any]) -> Fleet:
    """The fleet that a ServingFleet object describes. Raises BadSpec."""
    metadata = resource.get("metadata") or {}
    identity = {
        key: metadata[key] for key in ("name", "namespace", "uid", "generation") if key in metadata
    }
    try:
        return msgspec.convert({**(resource.get("spec") or {}), **identity}, Fleet, dec_hook=_read)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        raise BadSpec(f"spec{path.rstrip('`')}", problem) from error


def _read(kind: type, value: object) -> object:
    if kind is Quantity and isinstance(value, int | str) and not isinstance(value, bool):
        return Quantity(str(value))
    if kind is Duration and isinstance(value, str):
        return Duration(value)
    raise ValueError(f"expected a {kind.__name__.lower()}, got {value!r}")
