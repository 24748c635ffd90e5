"""Decisions whose outcome has not come yet, and those that had one.

Pure. Bounded in number and in time: a decision without outcome expires, and the oldest are forgotten when there are too
many; their ids still say what was decided.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from servingfleet_protos.v1 import routing_pb2

from .eviction import Tail
from .policy.candidate import Reuse
from .tokens import Decision


class Footing(NamedTuple):
    """What a prediction of a rank rested on: its stream as far as it was applied then."""

    incarnation: int
    engine_seq: int | None
    credited: bool
    """Credits stood there: part of it may be of prompts that were not computed yet."""


class Promise(NamedTuple):
    """What a target was predicted to reuse."""

    reuse: Reuse
    tail: Tail | None
    """Where that ends, as far as known."""
    footing: Footing | None
    """None: its stream was not whole."""


@dataclass(slots=True)
class Pending:
    """An open decision."""

    decision: Decision
    request_id: str
    response: routing_pb2.RouteResponse
    promises: Mapping[tuple[str, int], Promise]
    """Of the best targets at that moment: the request may run elsewhere."""
    session: int = 0
    """As `pins` names it. 0: none."""
    failed: set[tuple[str, int]] = field(default_factory=set)
    """Targets whose failure was told of before: each counts once."""
    given: int = 1
    """Calls that were answered with it."""


class Decisions:
    """Open decisions by id and by request id; fingerprints of ended ones."""

    def __init__(self, *, ttl_s: float, max_open: int, max_ended: int) -> None:
        self._ttl_s = ttl_s
        self._max_open = max_open
        self._max_ended = max_ended
        self._open: OrderedDict[str, Pending] = OrderedDict()
        self._by_request: dict[tuple[str, str], str] = {}
        self._ended: OrderedDict[bytes, float] = OrderedDict()
        self.forgotten = 0
        """Open decisions dropped because there were too many."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, pending: Pending) -> list[Pending]:
        """Takes an open decision; returns those that had to be forgotten for it."""
        decision_id = pending.response.decision_id
        self._open[decision_id] = pending
        if pending.request_id:
            self._by_request[pending.decision.model, pending.request_id] = decision_id
        dropped = []
        while len(self._open) > self._max_open:
            oldest = self._take(next(iter(self._open)))
            assert oldest is not None
            dropped.append(oldest)
        self.forgotten += len(dropped)
        return dropped

    def get(self, decision_id: str) -> Pending | None:
        return self._open.get(decision_id)

    def of_request(self, model: str, request_id: str) -> Pending | None:
        """The open decision that this request got before."""
        decision_id = self._by_request.get((model, request_id))
        return self._open.get(decision_id) if decision_id is not None else None

    def end(self, decision_id: str, now: float) -> Pending | None:
        """An outcome has come: remembers that, and returns the decision if it was open."""
        self._ended[_fingerprint(decision_id)] = now
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)
        return self._take(decision_id)

    def ended(self, decision_id: str) -> bool:
        """An outcome of this decision has come before."""
        return _fingerprint(decision_id) in self._ended

    def expire(self, now: float) -> list[Pending]:
        """Takes out the decisions whose outcome will not come any more."""
        gone = []
        while self._open:
            oldest = next(iter(self._open.values()))
            if now - oldest.decision.at <= self._ttl_s:
                break
            taken = self._take(oldest.response.decision_id)
            assert taken is not None
            gone.append(taken)
        while self._ended:
            # From then on an outcome is late by the decision's own time.
            if now - next(iter(self._ended.values())) <= self._ttl_s:
                break
            self._ended.popitem(last=False)
        return gone

    def _take(self, decision_id: str) -> Pending | None:
        pending = self._open.pop(decision_id, None)
        if pending is not None and pending.request_id:
            key = (pending.decision.model, pending.request_id)
            if self._by_request.get(key) == decision_id:
                del self._by_request[key]
        return pending


def _fingerprint(decision_id: str) -> bytes:
    return hashlib.blake2b(decision_id.encode(), digest_size=16).digest()
