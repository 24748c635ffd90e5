"""What the API server's answers mean: an object, or an error that says what was asked, what was answered and who should act.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .errors import ClusterError, Conflict, Invalid, NotFound, Refused, Terminating, Unreachable
from .kinds import Kind


def checked(
    verb: str, path: str, kind: Kind, code: int, headers: Mapping[str, str], answer: bytes
) -> dict[str, Any]:
    """The object of the answer to a request (`verb`, `path`). Raises the error that any other answer amounts to."""
    try:
        body = json.loads(answer)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        # Plain text: a path that isn't served. With a success it was no API server, or one cut off in mid-sentence.
        body = {"message": answer[:200].decode(errors="replace").strip()}
        code = 502 if 200 <= code < 300 else code
    if 200 <= code < 300:
        return body
    said = f"{verb} {path}: {body.get('message') or f'HTTP {code}'}"
    if code in (401, 403) and not _terminating(body):
        raise Refused(
            f"{said}; the operator's account lacks the right to {verb} {kind.plural}: "
            "whoever installed it must upgrade the chart, or grant it",
            code=code,
        )
    if code == 500 and "failed to create typed patch object" in said:
        # The API server's word for an apply that doesn't fit the schema.
        raise Invalid(said, code=code)
    if code == 429 or code >= 500:
        retry_s = headers.get("Retry-After", "")
        raise Unreachable(
            f"{said}; the API server can't serve it now",
            code=code,
            retry_s=float(retry_s) if retry_s.isdecimal() else None,
        )
    raise _ERRORS.get(code, ClusterError)(said, code=code)


_ERRORS: Mapping[int, type[ClusterError]] = {
    400: Invalid,
    403: Terminating,
    404: NotFound,
    409: Conflict,
    422: Invalid,
}


def _terminating(body: Mapping[str, Any]) -> bool:
    causes = (body.get("details") or {}).get("causes") or ()
    return any(cause.get("reason") == "NamespaceTerminating" for cause in causes)
