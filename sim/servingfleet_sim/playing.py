"""Plays a recording against running processes: publish, route, report, in the recorded order.

Time is not kept: each step waits until the one before it has arrived at the scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from servingfleet_protos.v1 import common_pb2, fleet_pb2

from .recordings import Control, Message, Recording, Request
from .verify import End, Verdict, judge, outcome, rank_of, route_request, timeline
from .wire import RecordedEngine

if TYPE_CHECKING:  # these names exist for type checkers only
    from servingfleet_protos.v1.fleet_pb2_grpc import FleetAsyncStub
    from servingfleet_protos.v1.routing_pb2_grpc import RouterAsyncStub

POLL_S = 0.005
PATIENCE_S = 30.0

UNPROVEN = frozenset(
    {
        common_pb2.STREAM_STATE_UNSPECIFIED,
        common_pb2.STREAM_STATE_UNPROVEN,
        common_pb2.STREAM_STATE_RESYNCING,
    }
)


class Stalled(RuntimeError):
    """What a step waits for did not come: a process is stuck, or lost what it was sent."""


def relay_arguments(
    engine: RecordedEngine,
    replica: str,
    model: str,
    *schedulers: str,
    recording: Recording | None = None,
) -> list[str]:
    """The command line of a relay beside a recorded engine, of which it is told what an operator would know."""
    arguments = [
        *("--replica", replica),
        *("--model", model),
        *("--engine", engine.adapter),  # a recording answers no questions
        *("--engine-events", engine.events),
        *("--engine-replay", engine.replay),
        *("--ranks", str(engine.ranks)),
        *("--metrics-port", "0"),
    ]
    if recording is not None:
        arguments += ["--host-unit-tokens", str(recording.host_unit_tokens)]
        for group in recording.layer_groups:
            sizes = [group.unit_tokens, *([group.window_tokens] if group.window_tokens else [])]
            arguments += ["--layer-group", ":".join([group.kind, *map(str, sizes)])]
    for scheduler in schedulers:
        arguments += ["--scheduler", scheduler]
    return arguments


@dataclass
class Player:
    """One recorded engine, played to a relay that is known to a scheduler as `replica`."""

    recording: Recording
    engine: RecordedEngine
    replica: str
    model: str
    router: RouterAsyncStub
    fleet: FleetAsyncStub

    async def connected(self) -> None:
        """Waits until the scheduler has the state of every rank. Raises Stalled."""
        for rank in range(self.recording.ranks):
            await self._until(rank, lambda r: r.state not in UNPROVEN, "a proven stream")

    async def play(self) -> AsyncIterator[Verdict]:
        """Each request's verdict, once it is reported. Raises Stalled, and what gRPC raises."""
        open_requests: dict[int, tuple[list[str], Verdict]] = {}
        for _, step in timeline(self.recording):
            match step:
                case Message():
                    await self.engine.publish(step)
                    await self._until(
                        step.rank,
                        lambda r, seq=step.seq: r.HasField("engine_seq") and r.engine_seq == seq,  # type: ignore[misc]
                        f"engine sequence {step.seq}",
                    )
                case Control():
                    await self._control(step)
                case Request():
                    open_requests[step.number] = await self._route(step)
                case End():
                    decisions, verdict = open_requests.pop(step.request.number)
                    await self._report(step.request, decisions)
                    yield verdict

    async def _route(self, request: Request) -> tuple[list[str], Verdict]:
        rank = rank_of(self.recording, request)
        answers = [
            await self.router.Route(
                route_request(request, prompt, self.model, self.replica, rank), timeout=PATIENCE_S
            )
            for prompt in request.prompts
        ]
        verdict = judge(self.recording, request, rank, answers[-1].prediction)
        return [answer.decision_id for answer in answers], verdict

    async def _report(self, request: Request, decisions: list[str]) -> None:
        for decision in decisions:
            await self.router.Report(outcome(request, decision), timeout=PATIENCE_S)

    async def _control(self, control: Control) -> None:
        if control.socket is False:
            await self.engine.stop()
            for rank in range(self.recording.ranks):
                await self._until(rank, lambda r: r.state in UNPROVEN, "the engine's death")
        elif control.socket is True:
            self.engine.start()
            await self.connected()

    async def _until(self, rank: int, reached: Callable[[fleet_pb2.Rank], bool], what: str) -> None:
        seen: fleet_pb2.Rank | None = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    seen = await self._rank(rank)
                    if seen is not None and reached(seen):
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise Stalled(
                f"{self.recording.name}: replica {self.replica} rank {rank} did not show {what} "
                f"within {PATIENCE_S:.0f} s; last seen: {seen or 'nothing'}"
            ) from None

    async def _rank(self, rank: int) -> fleet_pb2.Rank | None:
        answer = await self.fleet.ListReplicas(
            fleet_pb2.ListReplicasRequest(model=self.model), timeout=PATIENCE_S
        )
        for replica in answer.replicas:
            if replica.replica == self.replica and replica.connected:
                return next((known for known in replica.ranks if known.rank == rank), None)
        return None
