"""What the relay believes schedulers by and proves itself with: two files that are renewed while it runs.

Edge. In a pod the kubelet writes both: the fleet's certificate authorities, and the pod's own token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import grpc.aio

from .settings import RelaySettings

log = logging.getLogger(__name__)

MAX_TOKEN_BYTES = 16 * 1024
MAX_CA_BYTES = 1024 * 1024

ChannelOptions = Sequence[tuple[str, str | int]]


class Unusable(Exception):
    """A file can't be used now: whoever mounts it must act. It is read again at the next dial."""


class RenewedFile:
    """A small file that others replace. Its trouble is logged once, until it is another trouble or none."""

    def __init__(self, option: str, path: Path, max_bytes: int) -> None:
        self._option = option
        self._path = path
        self._max_bytes = max_bytes
        self._trouble = ""

    def read(self, trouble_with: Callable[[bytes], str]) -> bytes:
        """What it holds now. Raises Unusable; also if `trouble_with` the content is not ""."""
        content = b""
        try:
            with self._path.open("rb") as file:
                content = file.read(self._max_bytes + 1)
        except OSError as error:
            trouble = error.strerror or type(error).__name__
        else:
            if not content.strip():
                trouble = "it is empty"
            elif len(content) > self._max_bytes:
                trouble = f"it is longer than {self._max_bytes} bytes"
            else:
                trouble = trouble_with(content)
        if trouble != self._trouble:
            self._trouble = trouble
            if trouble:
                fields = {"option": self._option, "file": str(self._path), "error": trouble}
                log.warning("file not usable, schedulers wait for it", extra=fields)
            else:
                log.info("file usable", extra={"option": self._option, "file": str(self._path)})
        if trouble:
            raise Unusable(f"{self._option} {self._path}: {trouble}")
        return content


class Credentials:
    """How the relay dials. Without certificate authorities: in plain text, and without a token."""

    def __init__(self, settings: RelaySettings, on_renewal: Callable[[], None]) -> None:
        """`on_renewal` is called whenever another token has taken the place of `token`."""
        self._interval_s = settings.renewal_interval_s
        self._name = settings.scheduler_name
        self._on_renewal = on_renewal
        self._ca = None
        self._token_file = None
        if settings.scheduler_ca_file is not None:
            path = settings.scheduler_ca_file
            self._ca = RenewedFile("--scheduler-ca-file", path, MAX_CA_BYTES)
            if settings.token_file is not None:
                self._token_file = RenewedFile("--token-file", settings.token_file, MAX_TOKEN_BYTES)
        self.token = ""
        """As last read. "": none is shown."""

    def channel(self, address: str, options: ChannelOptions) -> grpc.aio.Channel:
        """A channel that trusts whom the file names now; open ones keep their trust. Raises Unusable."""
        if self._ca is None:
            return grpc.aio.insecure_channel(address, options=options)
        trusted = grpc.ssl_channel_credentials(self._ca.read(_trouble_with_certificates))
        if self._name:
            options = [*options, ("grpc.ssl_target_name_override", self._name)]
        return grpc.aio.secure_channel(address, trusted, options=options)

    def read_token(self) -> str:
        """The token as it is now, "" if none is to be shown. Raises Unusable."""
        if self._token_file is not None:
            before = self.token
            self.token = self._token_file.read(_trouble_with_token).decode().strip()
            if before not in ("", self.token):
                log.info("token renewed")
                self._on_renewal()
        return self.token

    async def watch(self) -> None:
        """Reads the token again and again, until it is cancelled."""
        while self._token_file is not None:
            await asyncio.sleep(self._interval_s)
            # Trouble is told there; open streams keep the token that they showed.
            with contextlib.suppress(Unusable):
                self.read_token()


def _trouble_with_certificates(content: bytes) -> str:
    return "" if b"-----BEGIN CERTIFICATE-----" in content else "it holds no PEM certificate"


def _trouble_with_token(content: bytes) -> str:
    # Anything else gRPC would refuse as a header, with a message that may show it.
    return "" if all(0x21 <= byte <= 0x7E for byte in content.strip()) else "it holds no token"
