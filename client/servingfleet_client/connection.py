"""How a scheduler is reached: its address, who signs its certificate, the token that it is shown."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Generic, TypeVar

from .errors import UnusableFile

REREAD_S = 10.0
"""Age at which the CA file is read again. Its successor is there weeks before it is needed."""

_METHOD = {"service": "servingfleet.v1.Router"}
_AGAIN = {"backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        # Both calls may be made twice: a decision has its request id, a report its decision id.
        {
            "name": [{**_METHOD, "method": "Route"}],
            "retryPolicy": {
                **_AGAIN,
                "maxAttempts": 2,
                "initialBackoff": "0.05s",
                "maxBackoff": "0.5s",
            },
        },
        {
            "name": [{**_METHOD, "method": "Report"}],
            # Nobody waits for it, and the owner of a decision may need seconds to come back.
            "retryPolicy": {
                **_AGAIN,
                "maxAttempts": 5,
                "initialBackoff": "0.5s",
                "maxBackoff": "2s",
            },
        },
    ],
}
OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # A scheduler whose machine is gone is noticed before somebody asks. Schedulers allow pings this often.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # One that is back must not count as gone for two minutes, ...
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # ... nor its name be looked up only every 30 s, when one that it stood for has gone.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    # Each client has its own connection: behind the address of a Service, all would else reach one and the same scheduler.
    ("grpc.use_local_subchannel_pool", 1),
    # Of the pod network, where a proxy for the world outside has no business.
    ("grpc.enable_http_proxy", 0),
)

ChannelT = TypeVar("ChannelT")
Options = Sequence[tuple[str, Any]]
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scheduler:
    """A fleet's scheduler, and what it is asked with."""

    target: str | Sequence[str]
    """host:port. A name stands for all its addresses; several schedulers without a common name: their IP addresses."""
    ca_file: str | PathLike[str] | None = None
    """Who signs its certificate, PEM; read again when it changes. None: plain text."""
    token_file: str | PathLike[str] | None = None
    """The token to show; read for every call, since whoever renews it replaces the file."""
    server_name: str = ""
    """Name in the certificate, where it is not the host of `target`."""
    route_timeout_s: float = 2.0
    """Deadline of Route: what a user can be made to wait before the engine has even been asked."""
    report_timeout_s: float = 10.0
    """Deadline of Report, retries included."""

    def __post_init__(self) -> None:
        if self.ca_file is None and (self.token_file is not None or self.server_name):
            raise ValueError(
                "token_file and server_name need ca_file: in plain text anybody could read the token"
            )
        address(self.target)


def address(target: str | Sequence[str]) -> str:
    """gRPC's name of one scheduler or of several. Raises ValueError."""
    if isinstance(target, str):
        return target
    if len(target) == 1:
        return target[0]
    versions = {_ip_version(each) for each in target}
    if versions not in ({4}, {6}):
        raise ValueError(
            f"schedulers {', '.join(target) or '(none)'}: expected one name that stands for all, "
            "or IP addresses of one version with their ports"
        )
    return f"ipv{versions.pop()}:{','.join(target)}"


def _ip_version(target: str) -> int | None:
    try:
        return ipaddress.ip_address(target.rpartition(":")[0].strip("[]")).version
    except ValueError:
        return None


class Link(Generic[ChannelT]):
    """The channel to a scheduler: another one when the CA file has changed. May be used by several threads."""

    def __init__(
        self,
        scheduler: Scheduler,
        dial: Callable[[str, bytes | None, Options], ChannelT],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`dial` makes a channel of an address, the CA (None: plain text) and options. Raises UnusableFile."""
        self._scheduler = scheduler
        self._dial = dial
        self._clock = clock
        self._lock = threading.Lock()
        self._trusted = None if scheduler.ca_file is None else _read(scheduler.ca_file, "CA")
        self._read_at = clock()
        self._token = "" if scheduler.token_file is None else _read_token(scheduler.token_file)
        self._channel = self._dialled()
        self._retired: ChannelT | None = None

    def channel(self) -> tuple[ChannelT, ChannelT | None]:
        """The channel to use now, and one that can be closed: nobody has used it since the last change but one."""
        with self._lock:
            now = self._clock()
            if self._scheduler.ca_file is None or now - self._read_at < REREAD_S:
                return self._channel, None
            self._read_at = now
            try:
                trusted = _read(self._scheduler.ca_file, "CA")
            except UnusableFile:  # it may be about to be replaced: what was trusted still is
                return self._channel, None
            if trusted == self._trusted:
                return self._channel, None
            # A channel keeps the roots that it was made with. The calls that it still has end in peace.
            self._trusted = trusted
            closable, self._retired = self._retired, self._channel
            self._channel = self._dialled()
            return self._channel, closable

    def channels(self) -> list[ChannelT]:
        """All that are open."""
        with self._lock:
            return [each for each in (self._channel, self._retired) if each is not None]

    def metadata(self) -> Metadata:
        """What goes with a call."""
        if self._scheduler.token_file is None:
            return ()
        with contextlib.suppress(UnusableFile):  # likewise
            self._token = _read_token(self._scheduler.token_file)
        return (("authorization", f"Bearer {self._token}"),)

    def _dialled(self) -> ChannelT:
        options = OPTIONS
        if self._scheduler.server_name:
            options += (("grpc.ssl_target_name_override", self._scheduler.server_name),)
        return self._dial(address(self._scheduler.target), self._trusted, options)


def _read(file: str | PathLike[str], what: str) -> bytes:
    try:
        content = Path(file).read_bytes().strip()
    except OSError as error:
        raise UnusableFile(f"{what} file {file}: {error.strerror}") from error
    if not content:
        raise UnusableFile(f"{what} file {file} is empty")
    return content


def _read_token(file: str | PathLike[str]) -> str:
    token = _read(file, "token")
    # Else gRPC would refuse it as a header, with a message that may show it.
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise UnusableFile(
            f"token file {file} holds no token; expected one line of printable characters"
        )
    return token.decode()
