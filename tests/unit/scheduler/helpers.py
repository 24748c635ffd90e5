"""A scheduler and a relay for tests, both under a clock that the test moves."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from servingfleet_core import HASH_VERSION, block_hashes, namespace_root
from servingfleet_protos.v1 import common_pb2, routing_pb2, stream_pb2
from servingfleet_scheduler.service import Scheduler
from servingfleet_scheduler.sessions import Session
from servingfleet_scheduler.settings import SchedulerSettings, StaticReplica

MODEL = "model-a"
BLOCK = 16
KEY = b"a key of the fleet's"
LIVE = common_pb2.STREAM_STATE_LIVE


def make_scheduler(
    *,
    static: Sequence[str] = (),
    ranks: int = 1,
    now: float = 0.0,
    instance_id: str = "scheduler-1",
    key: bytes = KEY,
    address: str = "",
    **settings: Any,
) -> Scheduler:
    """A scheduler whose `static` replicas serve MODEL."""
    replicas = tuple(StaticReplica(MODEL, name, f"{name}:8000", ranks) for name in static)
    return Scheduler(
        SchedulerSettings(block_tokens=BLOCK, static_replicas=replicas, **settings),
        instance_id=instance_id,
        now=now,
        rng=random.Random(7),
        token_key=key,
        address=address,
    )


def tokens(count: int, *, first: int = 0) -> bytes:
    """Packed ids first, first + 1, ..."""
    return struct.pack(f"<{count}I", *range(first, first + count))


def hashes(count: int, *, first: int = 0) -> bytes:
    """Packed hashes of the full blocks of `tokens(count, first=first)`."""
    return block_hashes(namespace_root(MODEL), tokens(count, first=first), BLOCK)


def route_request(count: int = 64, *, first: int = 0, **fields: Any) -> routing_pb2.RouteRequest:
    """A prompt of `tokens(count, first=first)`."""
    prompt = routing_pb2.Prompt(tokens_le32=tokens(count, first=first))
    return routing_pb2.RouteRequest(model=MODEL, prompt=prompt, **fields)


def finished(
    decision_id: str, *, prompt: int = 64, cached: int = 0, **fields: Any
) -> routing_pb2.ReportRequest:
    """An outcome with counts."""
    said: dict[str, Any] = {"stage": routing_pb2.ReportRequest.STAGE_FINISHED} | fields
    return routing_pb2.ReportRequest(
        decision_id=decision_id, prompt_tokens=prompt, cached_tokens=cached, **said
    )


def profile(unit: int = BLOCK) -> stream_pb2.Profile:
    """One attention lane in GPU memory, number 0."""
    return stream_pb2.Profile(
        lanes=[
            stream_pb2.Lane(
                lane=0,
                tier=common_pb2.TIER_GPU,
                state_class=common_pb2.STATE_CLASS_ATTENTION,
                unit_tokens=unit,
            )
        ],
        adapters_separated=True,
        salts_separated=True,
        engine="vllm",
    )


def hello(replica: str = "r1", *, ranks: Iterable[int] = (0,), **fields: Any) -> stream_pb2.Hello:
    """A hello that is in order, but for what `fields` say."""
    said: dict[str, Any] = {
        "protocol_version": 1,
        "replica": replica,
        "stream_id": f"stream of {replica}",
        "model": MODEL,
        "endpoint": f"{replica}:8000",
        "block_tokens": BLOCK,
        "hash_version": HASH_VERSION,
        "profile": profile(),
        "ranks": [stream_pb2.RankState(rank=rank, state=LIVE) for rank in ranks],
    }
    return stream_pb2.Hello(**said | fields)


class FakeRelay:
    """Speaks for one replica; numbers its messages, and keeps what the scheduler answered."""

    def __init__(self, scheduler: Scheduler, replica: str = "r1", *, now: float = 0.0) -> None:
        self.scheduler = scheduler
        self.replica = replica
        self.now = now
        self.seq = 0
        self.received: list[stream_pb2.SchedulerMessage] = []
        self.session: Session = scheduler.open_session(now)

    def hello(self, **fields: Any) -> FakeRelay:
        self.session.receive(stream_pb2.RelayMessage(hello=hello(self.replica, **fields)), self.now)
        return self

    def reconnect(self) -> None:
        """A new connection of the same relay, whose scheduler side is closed already or not."""
        self.session = self.scheduler.open_session(self.now)

    def send(self, **body: Any) -> None:
        """One sequenced message."""
        self.seq += 1
        self.session.receive(stream_pb2.RelayMessage(seq=self.seq, **body), self.now)

    def tell(self, **body: Any) -> None:
        """One message without a number."""
        self.session.receive(stream_pb2.RelayMessage(**body), self.now)

    def hold(self, packed: bytes, *, rank: int = 0, lane: int = 0) -> None:
        self.send(
            delta=stream_pb2.Delta(rank=rank, lane=lane, op=stream_pb2.Delta.OP_HOLD, hashes=packed)
        )

    def snapshot(self, packed: bytes = b"", *, rank: int = 0) -> None:
        """A whole snapshot of one rank."""
        self.send(snapshot_begin=stream_pb2.SnapshotBegin(rank=rank))
        if packed:
            self.hold(packed, rank=rank)
        self.send(snapshot_end=stream_pb2.SnapshotEnd(rank=rank))

    def take(self, kind: str) -> list[Any]:
        """All messages of a kind that the scheduler has sent so far, and not taken before."""
        self.received += self.session.take()
        found = [getattr(each, kind) for each in self.received if each.WhichOneof("body") == kind]
        self.received = [each for each in self.received if each.WhichOneof("body") != kind]
        return found
