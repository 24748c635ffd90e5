"""One relay and one scheduler, fed with constructed events: what would a router expect?

The very code of the two processes, without a network and under a clock of its own.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from servingfleet_protos.v1 import routing_pb2
from servingfleet_relay.frames import END_OF_REPLAY
from servingfleet_relay.pipeline import Pipeline, RankStatus
from servingfleet_relay.settings import PipelineSettings
from servingfleet_scheduler.service import Scheduler
from servingfleet_scheduler.settings import SchedulerSettings
from tests.unit.relay.batches import live

REPLICA, MODEL, LINK = "replica", "m", "constructed"


class Reuse(NamedTuple):
    """Prompt tokens."""

    lower: int
    predicted: int
    upper: int


class Constructed:
    """An engine whose events are written by hand."""

    def __init__(
        self,
        *,
        replica: str = REPLICA,
        scheduler: Scheduler | None = None,
        block_tokens: int = 16,
        joined_late: bool = False,
        **settings: Any,
    ) -> None:
        """`joined_late`: the relay can't know what the engine published before, and replays are the test's to answer.
        `scheduler`: of a fleet that it joins."""
        self.now = 1_000.0
        self.replica = replica
        self.lags = False
        """What the relay has to say does not reach the scheduler."""
        values = {"engine": "vllm", "ranks": (0,)} | settings
        self.relay = Pipeline(
            PipelineSettings(
                replica=replica,
                model=MODEL,
                stream_id=LINK,
                block_tokens=block_tokens,
                **values,
            ),
            self.now,
        )
        self.scheduler = scheduler or Scheduler(
            SchedulerSettings(block_tokens=block_tokens),
            instance_id=LINK,
            now=self.now,
            rng=random.Random(0),
            token_key=b"the key of one test",
        )
        self.session = self.scheduler.open_session(self.now)
        self.session.receive(self.relay.open_link(LINK, self.now), self.now)
        self.ring: dict[int, list[list[bytes]]] = {rank: [] for rank in values["ranks"]}
        self.replays = not joined_late
        for rank in self.ring:
            self.relay.socket_up(rank, self.now)
            if joined_late:
                self.relay.take_replay_requests()
                self.relay.replay_failed(rank, "no replay socket", self.now)
        self.settle()

    def joined_by(self, replica: str, **settings: Any) -> Constructed:
        """Another engine of the same fleet."""
        return Constructed(replica=replica, scheduler=self.scheduler, **settings)

    def publishes(self, *events: Any, rank: int = 0, **batch: Any) -> Constructed:
        """Each event in a batch of its own."""
        for event in events:
            ring = self.ring[rank]
            ring.append(live(len(ring), event, rank=batch.get("names", rank)))
            self.relay.live(rank, ring[-1], self.now)
            self.now += 0.1
        self.settle()
        return self

    def restarts(self) -> Constructed:
        """Another engine process takes its place, and has published nothing yet."""
        for rank, ring in self.ring.items():
            ring.clear()
            self.relay.socket_down(rank, self.now)
            self.relay.socket_up(rank, self.now)
        self.settle()
        return self

    def answers(self, *entries: object) -> Constructed:
        """What a pull brings."""
        self.relay.pulled(entries, self.now)
        self.settle()
        return self

    def waits(self, seconds: float) -> Constructed:
        """Time passes, and with it whatever waits."""
        self.now += seconds
        self.relay.tick(self.now)
        self.scheduler.tick(self.now)
        self.settle()
        return self

    def reuse(
        self,
        prompt: Sequence[int],
        *,
        adapter: str = "",
        salt: str = "",
        rank: int = 0,
        replica: str = "",
    ) -> Reuse:
        """What a router is told of a prompt, if it goes here, or to another replica of the fleet."""
        request = routing_pb2.RouteRequest(
            model=MODEL,
            prompt=routing_pb2.Prompt(
                tokens_le32=struct.pack(f"<{len(prompt)}I", *prompt),
                adapter=adapter,
                cache_salt=salt,
            ),
        )
        request.only.add(replica=replica or self.replica, rank=rank)
        answer = self.scheduler.route(request, self.now)
        # It is not sent: nothing is credited.
        self.scheduler.report(
            routing_pb2.ReportRequest(
                decision_id=answer.decision_id, stage=routing_pb2.ReportRequest.STAGE_ABORTED
            ),
            self.now,
        )
        self.settle()
        seen = answer.prediction
        return Reuse(seen.lower, seen.predicted, seen.upper)

    def reports(self, prompt: Sequence[int], cached: int, times: int = 1) -> Constructed:
        """The prompt is sent, and the engine says what of it was reused."""
        for _ in range(times):
            request = routing_pb2.RouteRequest(
                model=MODEL,
                prompt=routing_pb2.Prompt(tokens_le32=struct.pack(f"<{len(prompt)}I", *prompt)),
            )
            request.only.add(replica=self.replica, rank=0)
            answer = self.scheduler.route(request, self.now)
            self.settle()
            self.scheduler.report(
                routing_pb2.ReportRequest(
                    decision_id=answer.decision_id,
                    stage=routing_pb2.ReportRequest.STAGE_FINISHED,
                    prompt_tokens=len(prompt),
                    cached_tokens=cached,
                ),
                self.now,
            )
            self.settle()
        return self

    def settle(self) -> None:
        """Carries messages both ways until neither side has more to say."""
        busy = True
        while busy:
            busy = False
            for ask in self.relay.take_replay_requests() if self.replays else ():
                busy = True
                self._replay(ask.rank, ask.start_seq)
            for message in self.relay.take(LINK, 1024) if not self.lags else ():
                busy = True
                self.session.receive(message, self.now)
            for answer in self.session.take():
                busy = True
                self.relay.receive(LINK, answer, self.now)

    def _replay(self, rank: int, start: int) -> None:
        for frames in self.ring[rank][start:]:
            self.relay.replayed(rank, [b"", *frames], self.now)
        end = END_OF_REPLAY.to_bytes(8, "big")
        self.relay.replayed(rank, [b"", b"", end, b""], self.now)

    def status(self, rank: int = 0) -> RankStatus:
        """What the relay says of a rank."""
        return next(each for each in self.relay.status().ranks if each.rank == rank)

    def failed(self, rank: int = 0) -> set[str]:
        """Reasons of all failures."""
        return {each.reason for each in self.status(rank).failures}
