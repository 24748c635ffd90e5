"""Where each session went last, for requests that ask to stay there.

Pure. Sessions are known by a hash under the fleet's key: the same for all its schedulers, so that one can tell the others
through the relays, and nothing of a session's name leaves the process.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple


class Pin(NamedTuple):
    """A session's last target."""

    replica: str
    rank: int
    at: float


class Pins:
    """Last targets by session; the least recently used are forgotten first."""

    def __init__(self, key: bytes, *, most: int, ttl_s: float) -> None:
        """`key`: the fleet's. `ttl_s`: seconds after its last request in which a session is remembered."""
        short = hashlib.sha256(key).digest()
        self._named = hashlib.blake2b(digest_size=8, key=short, person=b"session")
        self._most = most
        self._ttl_s = ttl_s
        self._pins: OrderedDict[int, Pin] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pins)

    def session(self, model: str, session_id: str) -> int:
        """The session's 64-bit name among the schedulers; 0: it is none."""
        if not session_id:
            return 0
        named = self._named.copy()
        # The model first, by its length: no other split of the two gives the same bytes.
        named.update(f"{len(model)}:{model}{session_id}".encode())
        return int.from_bytes(named.digest(), "little") or 1

    def note(self, session: int, replica: str, rank: int, now: float) -> None:
        """A request of the session goes there. 0 is no session."""
        if not session:
            return
        self._pins[session] = Pin(replica, rank, now)
        self._pins.move_to_end(session)
        while len(self._pins) > self._most:
            self._pins.popitem(last=False)

    def get(self, session: int, now: float) -> Pin | None:
        """Where its last request went. None: not known, or too long ago."""
        pin = self._pins.get(session)
        return pin if pin is not None and now - pin.at <= self._ttl_s else None

    def expire(self, now: float) -> None:
        """Forgets those whose time is over."""
        while self._pins and now - next(iter(self._pins.values())).at > self._ttl_s:
            self._pins.popitem(last=False)
