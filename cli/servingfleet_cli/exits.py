"""Exit codes, the same for every command, and the errors that carry them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import click
import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

OK = 0
NO = 1
"""The answer is no: a prediction was wrong, a stream has faults, a request was rejected."""
USAGE = 2
"""The command line, or a file that it names, can't be used."""
UNREACHABLE = 3
"""The scheduler did not answer."""
REFUSED = 4
"""The scheduler refused the question: unknown model, bad field, no permission."""

HELP = "Exit codes: 0 yes, 1 no, 2 wrong usage, 3 scheduler unreachable, 4 question refused."


class Exit(click.ClickException):
    """Ends the command with a line on stderr."""

    exit_code: int  # type: ignore[misc]  # click declares it for the class, and reads it from the instance

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


HINTS = {
    grpc.StatusCode.UNAUTHENTICATED: (
        "  show a token: --ca-file CA --token-file FILE, the file written by\n"
        "  kubectl create token SERVICEACCOUNT --audience AUDIENCE > FILE"
    ),
    grpc.StatusCode.PERMISSION_DENIED: (
        "  the token's account needs that right: bind it to a Role that grants it"
    ),
}


def raise_for(error: grpc.RpcError, target: str, *, secured: bool) -> NoReturn:
    """Turns a failed call into an exit that says who should act. `secured`: it was tried over TLS."""
    call = error if isinstance(error, grpc.Call) else None
    code = call.code() if call else grpc.StatusCode.UNKNOWN
    said = (call.details() if call else None) or str(error)
    details = list(_details(error))
    if code is grpc.StatusCode.UNAVAILABLE and not details:
        why = (
            "its certificate must be signed by --ca-file, and name its host or --server-name"
            if secured
            else "if it serves TLS, give --ca-file"
        )
        raise Exit(f"no scheduler answers at {target}: {said}\n  {why}", UNREACHABLE) from error
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        raise Exit(f"the scheduler at {target} did not answer in time", UNREACHABLE) from error
    lines = [f"{code.name}: {said}", *details]
    if code in HINTS:
        lines.append(HINTS[code])
    exit_code = NO if code is grpc.StatusCode.RESOURCE_EXHAUSTED else REFUSED
    raise Exit("\n".join(lines), exit_code) from error


def _details(error: grpc.RpcError) -> list[str]:
    status = rpc_status.from_call(error) if isinstance(error, grpc.Call) else None
    lines: list[str] = []
    packed_details: Iterable[Any] = status.details if status else ()
    for packed in packed_details:
        violations = error_details_pb2.BadRequest()
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        if packed.Unpack(violations):
            lines += [f"  {v.field}: {v.description}" for v in violations.field_violations]
        elif packed.Unpack(info):
            facts = ", ".join(f"{key}={value}" for key, value in sorted(info.metadata.items()))
            lines.append(f"  reason {info.reason}" + (f" ({facts})" if facts else ""))
        elif packed.Unpack(retry):
            lines.append(f"  try again in {retry.retry_delay.ToTimedelta().total_seconds():.2f} s")
    return lines
