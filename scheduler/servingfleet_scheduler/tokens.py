"""Decision ids: authenticated tokens that say what was decided.

An id carries enough to send its outcome to the scheduler that decided, or to count it when that one is gone or has
forgotten. It is opaque to clients, at most 1 KiB, and can't be made up without the fleet's key. Base64url of version, tag and payload.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import struct
from collections.abc import Iterable
from dataclasses import dataclass

VERSION = 2
TAG_BYTES = 16
MAX_ID_BYTES = 1024
_FIXED = struct.Struct("<dQIIIIII")  # time, nonce, rank, prompt, predicted, lower, upper, best
_LATER = struct.Struct("<I")
"""expected: after the names, where schedulers of a release before neither look for it nor mind it."""
_MAX_NAMES_BYTES = 640
"""Owner, its address, replica and model together. Beyond it the model is written as a digest, to keep the id below its
limit."""
MAX_ADDRESS_BYTES = 261
"""A DNS name (253), a colon, a port."""
_PLAIN, _DIGEST = 0, 1
_DIGEST_BYTES = 16


class BadToken(ValueError):
    """Not an id of any scheduler: cut short, altered in its frame, or of another version."""


class ForeignToken(ValueError):
    """Well formed, but not signed with this fleet's key: another fleet's, or of a scheduler with a key of its own."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, as far as the ledger needs it. Counts are prompt tokens."""

    owner: str
    """Instance id of the scheduler that decided."""
    model: str
    replica: str
    rank: int
    at: float
    """Seconds since the epoch."""
    nonce: int
    prompt: int
    predicted: int
    lower: int
    upper: int
    best: int
    """Longest predicted reuse on any target at that moment."""
    expected: int
    """What the cost counted on, rounded; `predicted` in ids of a release that does not say."""
    owner_address: str = ""
    """host:port where the other schedulers of the fleet reach the owner. Empty: nowhere."""


class Tokens:
    """Writes and reads decision ids under one key."""

    def __init__(self, key: bytes) -> None:
        if len(key) < 16:
            raise ValueError(f"token key has {len(key)} bytes; at least 16 are needed")
        self._key = key

    def write(self, decision: Decision) -> str:
        """The id of a decision."""
        kind = _PLAIN
        names = [
            name.encode()
            for name in (decision.owner, decision.owner_address, decision.replica, decision.model)
        ]
        if sum(map(len, names)) > _MAX_NAMES_BYTES:
            kind, names[-1] = _DIGEST, _digest(decision.model)
        payload = _FIXED.pack(
            decision.at,
            decision.nonce,
            decision.rank,
            decision.prompt,
            decision.predicted,
            decision.lower,
            decision.upper,
            decision.best,
        )
        payload += bytes([kind])
        for name in names:
            payload += struct.pack("<H", len(name)) + name
        payload += _LATER.pack(decision.expected)
        framed = bytes([VERSION]) + self._tag(payload) + payload
        return _encode(framed)

    def read(self, token: str, models: Iterable[str] = ()) -> Decision:
        """Raises BadToken or ForeignToken. `models`: those known, for ids that hold only a digest of theirs."""
        if len(token) > MAX_ID_BYTES:
            raise BadToken(f"has {len(token)} characters; at most {MAX_ID_BYTES}")
        try:
            framed = base64.b64decode(
                token.encode("ascii") + b"=" * (-len(token) % 4), altchars=b"-_", validate=True
            )
        except (binascii.Error, UnicodeEncodeError):
            raise BadToken("is not base64url") from None
        if _encode(framed) != token:
            # One decision has one id: else a second outcome could pass for another decision's.
            raise BadToken("is not base64url as this scheduler writes it")
        if len(framed) < 1 + TAG_BYTES + _FIXED.size or framed[0] != VERSION:
            raise BadToken("is cut short, or of another version")
        tag, payload = framed[1 : 1 + TAG_BYTES], framed[1 + TAG_BYTES :]
        if not hmac.compare_digest(tag, self._tag(payload)):
            raise ForeignToken("is not signed with this fleet's key")
        return _decode(payload, models)

    def _tag(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, payload, "sha256")[:TAG_BYTES]


def _encode(framed: bytes) -> str:
    return base64.urlsafe_b64encode(framed).decode().rstrip("=")


def _decode(payload: bytes, models: Iterable[str]) -> Decision:
    at, nonce, rank, prompt, predicted, lower, upper, best = _FIXED.unpack_from(payload)
    kind = payload[_FIXED.size]
    names = []
    offset = _FIXED.size + 1
    for _ in range(4):
        (size,) = struct.unpack_from("<H", payload, offset)
        names.append(payload[offset + 2 : offset + 2 + size])
        offset += 2 + size
    owner, owner_address, replica, model = names
    expected = predicted
    if len(payload) >= offset + _LATER.size:
        (expected,) = _LATER.unpack_from(payload, offset)
    if kind == _DIGEST:
        model = next((name.encode() for name in models if _digest(name) == model), b"")
    return Decision(
        owner=owner.decode(),
        owner_address=owner_address.decode(),
        model=model.decode(),
        replica=replica.decode(),
        rank=rank,
        at=at,
        nonce=nonce,
        prompt=prompt,
        predicted=predicted,
        lower=lower,
        upper=upper,
        best=best,
        expected=expected,
    )


def _digest(model: str) -> bytes:
    return hashlib.blake2b(model.encode(), digest_size=_DIGEST_BYTES).digest()
