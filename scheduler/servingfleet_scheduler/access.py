"""Who a caller is, what it may do, and how long that may be believed.

Pure: `now` is seconds since the epoch. `reviews` asks the API server, `gate` brings both together.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from google.rpc import code_pb2

from .errors import AccessRefused

T = TypeVar("T")

API_GROUP = "servingfleet.dev"
RESOURCE = "servingfleets"
MAX_TOKEN_BYTES = 16 * 1024
POD_UID = "authentication.kubernetes.io/pod-uid"


class Right(NamedTuple):
    """A verb on a subresource of the fleet, as roles name it."""

    verb: str
    subresource: str

    def __str__(self) -> str:
        return f"{self.verb} {RESOURCE}/{self.subresource}"


ROUTE = Right("create", "route")
REPORT = Right("create", "report")
EXPLAIN = Right("create", "explain")
REUSE = Right("get", "reuse")
DRAIN = Right("update", "drain")

RIGHTS: Mapping[str, Right] = {
    "/servingfleet.v1.Router/Route": ROUTE,
    "/servingfleet.v1.Router/Report": REPORT,
    # It tells what others have cached.
    "/servingfleet.v1.Router/Explain": EXPLAIN,
    "/servingfleet.v1.Fleet/GetReuse": REUSE,
    "/servingfleet.v1.Fleet/ListReplicas": REUSE,
    "/servingfleet.v1.Fleet/SetDraining": DRAIN,
}
"""By method. What is not here, and not among those let through, is refused."""

LET_THROUGH = frozenset(
    {
        # Health is for everyone.
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.health.v1.Health/List",
        # Its handler looks at the token itself, again and again.
        "/servingfleet.v1.RelayIntake/Stream",
    }
)

CLIENTS = frozenset({ROUTE, REPORT})
"""What clients need no token for, where the fleet asks none of them."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom the API server sees behind a token."""

    username: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] | None = None

    @property
    def pod_uid(self) -> str:
        """Of the pod that the token is bound to. Empty: to none."""
        return next(iter((self.extra or {}).get(POD_UID, ())), "")

    @property
    def namespace(self) -> str:
        """Of its ServiceAccount. Empty: it is none."""
        kind, _, account = self.username.partition(":serviceaccount:")
        namespace, _, name = account.partition(":")
        return namespace if kind == "system" and name else ""


def check_relay(caller: Caller, namespace: str) -> None:
    """Raises AccessRefused unless the caller is a pod of the namespace; such a one speaks for itself."""
    if not caller.pod_uid:
        raise AccessRefused(
            code_pb2.PERMISSION_DENIED,
            "NOT_A_POD",
            f"{caller.username} is no pod: a relay needs the token that its pod projects",
        )
    if caller.namespace != namespace:
        raise AccessRefused(
            code_pb2.PERMISSION_DENIED,
            "OTHER_NAMESPACE",
            f"{caller.username} is not of namespace {namespace}, where the fleet is",
        )


def check_token(token: str) -> None:
    """Raises AccessRefused for what no API server need be asked about."""
    if not token:
        raise AccessRefused(
            code_pb2.UNAUTHENTICATED,
            "NO_CREDENTIAL",
            "no token: send the metadata authorization with 'Bearer ' and a token of the fleet",
        )
    if len(token) > MAX_TOKEN_BYTES:
        raise AccessRefused(
            code_pb2.UNAUTHENTICATED,
            "BAD_CREDENTIAL",
            f"the token has {len(token)} bytes; at most {MAX_TOKEN_BYTES}",
        )


def bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The token of a call. Empty: it has none."""
    for key, value in metadata:
        if key == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            if scheme.lower() == "bearer":
                return token.strip()
    return ""


def fingerprint(token: str) -> bytes:
    """What stands for a token in memory."""
    return hashlib.sha256(token.encode()).digest()


class Claims(NamedTuple):
    """What a token says of itself. Proves nothing: it bounds how long a verdict is kept, and helps people."""

    expires: float = math.inf
    audiences: tuple[str, ...] = ()


def claims(token: str) -> Claims:
    """Of a JWT; of any other token nothing is known."""
    part = token.split(".")[1] if token.count(".") == 2 else ""
    try:
        said = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return Claims()
    if not isinstance(said, dict):
        return Claims()
    expires, audiences = said.get("exp"), said.get("aud")
    if isinstance(audiences, str):
        audiences = [audiences]
    return Claims(
        float(expires) if isinstance(expires, int) and abs(expires) < 2**53 else math.inf,
        tuple(map(str, audiences)) if isinstance(audiences, list) else (),
    )


def why_not(said: Claims, audience: str, now: float) -> str:
    """Why the API server may not have accepted a token, for its owner."""
    if said.expires <= now:
        return f"the token has expired {now - said.expires:.0f} s ago: send a fresh one"
    if said.audiences and audience not in said.audiences:
        return (
            f"the token is for {', '.join(said.audiences)[:256]}; expected the audience {audience}"
        )
    return f"the API server does not accept the token for the audience {audience}"


@dataclass(frozen=True, slots=True)
class Verdict(Generic[T]):
    """What the API server said. `value` None: no."""

    value: T | None
    refresh_at: float
    """From then on it should be asked again, though the verdict still stands."""
    fresh_until: float
    usable_until: float
    """While the API server can't be asked."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """How long verdicts are kept, in seconds."""

    yes_s: float = 60.0
    """A right withdrawn, or a pod deleted, is noticed within this time."""
    refresh_s: float = 30.0
    """A verdict older than this is asked for again in the background, so that no steady caller waits."""
    no_s: float = 10.0
    """Shorter: a person who grants what was missing should not wait."""
    grace_s: float = 300.0
    """Beyond `yes_s`, while the API server can't be asked."""


class Verdicts(Generic[T]):
    """Verdicts by fingerprint, each `most` of yes and of no; the least recently asked for are forgotten first.

    Apart, so that inventing tokens does not push out those that are good.
    """

    def __init__(self, keeping: Keeping, most: int) -> None:
        self._keeping = keeping
        self._most = most
        self._yes: OrderedDict[bytes, Verdict[T]] = OrderedDict()
        self._no: OrderedDict[bytes, Verdict[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._yes) + len(self._no)

    def get(self, key: bytes, now: float) -> Verdict[T] | None:
        """What is known, as long as it is usable at all."""
        for kept in (self._yes, self._no):
            verdict = kept.get(key)
            if verdict is None:
                continue
            if now < verdict.usable_until:
                kept.move_to_end(key)
                return verdict
            del kept[key]
        return None

    def put(self, key: bytes, value: T | None, now: float, expires: float = math.inf) -> None:
        """Keeps an answer, never beyond `expires`."""
        keeping = self._keeping
        self._yes.pop(key, None)
        self._no.pop(key, None)
        kept = self._no if value is None else self._yes
        fresh_s = keeping.no_s if value is None else keeping.yes_s
        grace_s = 0.0 if value is None else keeping.grace_s
        kept[key] = Verdict(
            value,
            refresh_at=now + min(fresh_s, keeping.refresh_s),
            fresh_until=min(now + fresh_s, expires),
            usable_until=min(now + fresh_s + grace_s, expires),
        )
        if len(kept) > self._most:
            kept.popitem(last=False)
