"""How a command reaches a scheduler: in plain text, or over TLS and with a token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import grpc

from . import exits

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True)
class Scheduler:
    """A scheduler, and what it is asked with."""

    target: str
    timeout_s: float
    ca_file: Path | None = None
    """None: plain text."""
    token_file: Path | None = None
    server_name: str = ""

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """A channel whose failed calls end the command with a clear line."""
        with self._dial() as channel:
            try:
                yield channel
            except grpc.RpcError as error:
                exits.raise_for(error, self.target, secured=self.ca_file is not None)

    def _dial(self) -> grpc.Channel:
        if self.ca_file is None:
            return grpc.insecure_channel(self.target)
        credentials = grpc.ssl_channel_credentials(self.ca_file.read_bytes())
        if self.token_file is not None:
            shown = grpc.metadata_call_credentials(_Token(self.token_file))
            credentials = grpc.composite_channel_credentials(credentials, shown)
        options = []
        if self.server_name:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        return grpc.secure_channel(self.target, credentials, options=options)


class _Token(grpc.AuthMetadataPlugin):
    """The token of a file, read at each call: those that others renew are good for an hour or less."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._token = _read_token(file)

    def __call__(
        self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback
    ) -> None:
        # Where it can't be read, it may be about to be replaced, and the last one still be good.
        with suppress(exits.Exit):
            self._token = _read_token(self._file)
        callback((("authorization", f"Bearer {self._token}"),), None)


def _read_token(file: Path) -> str:
    try:
        token = file.read_bytes().strip()
    except OSError as error:
        raise exits.Exit(f"--token-file {file}: {error.strerror}", exits.USAGE) from error
    # Else gRPC would refuse it as a header, with a message that may show it.
    if not token or not all(0x21 <= byte <= 0x7E for byte in token):
        raise exits.Exit(f"--token-file {file} holds no token", exits.USAGE)
    return token.decode()


def scheduler_options(function: F) -> F:
    """Adds the options that reach a scheduler, as the argument `scheduler`."""
    one = _option(default="127.0.0.1:7070", help="host:port of the scheduler.")
    return _connecting(lambda known: {"scheduler": known[0]}, one)(function)


def schedulers_options(function: F) -> F:
    """Adds the options that reach one or several, as the argument `schedulers`."""
    many = _option(
        default=("127.0.0.1:7070",),
        multiple=True,
        help="host:port of a scheduler; again for each further one. In the environment: separated by spaces.",
    )
    return _connecting(lambda known: {"schedulers": known}, many)(function)


def _option(**more: Any) -> Callable[[F], F]:
    return click.option(
        "--scheduler",
        "targets",
        envvar="SERVINGFLEET_SCHEDULER",
        show_default=True,
        show_envvar=True,
        **more,
    )


def _connecting(
    passed: Callable[[list[Scheduler]], dict[str, Any]], scheduler_option: Callable[[F], F]
) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        @functools.wraps(function)
        def command(
            targets: str | tuple[str, ...],
            timeout: float,
            ca_file: Path | None,
            token_file: Path | None,
            server_name: str,
            **others: Any,
        ) -> Any:
            if ca_file is None and (token_file is not None or server_name):
                raise click.UsageError(
                    "--token-file and --server-name need --ca-file: "
                    "in plain text anybody could read the token"
                )
            known = [
                Scheduler(target, timeout, ca_file, token_file, server_name)
                for target in ([targets] if isinstance(targets, str) else targets)
            ]
            return function(**passed(known), **others)

        for option in reversed(_OPTIONS):
            command = option(command)
        return scheduler_option(command)  # type: ignore[arg-type]

    return decorate


_OPTIONS = [
    click.option(
        "--ca-file",
        type=FILE,
        envvar="SERVINGFLEET_CA_FILE",
        show_envvar=True,
        help="Who signs the scheduler's certificate, PEM. Absent: plain text.",
    ),
    click.option(
        "--token-file",
        type=FILE,
        envvar="SERVINGFLEET_TOKEN_FILE",
        show_envvar=True,
        help="Token to show, made for the fleet's audience.",
    ),
    click.option(
        "--server-name",
        default="",
        envvar="SERVINGFLEET_SERVER_NAME",
        show_envvar=True,
        help="Name in the certificate, where it is not the host of --scheduler.",
    ),
    click.option(
        "--timeout", default=5.0, show_default=True, help="Seconds to wait for the answer."
    ),
]
