"""A client of one engine that asks the scheduler first, and holds every answer to the prediction."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from servingfleet_protos.v1 import common_pb2, routing_pb2
from tests.integration.fleet import PATIENCE_S, Scheduler

from .engine import MODEL, Answer

REPLICA = "engine-0"
RESET = "a cache reset that the idle engine has not announced"


@dataclass(frozen=True)
class Verdict:
    """One request. Tokens."""

    kind: str
    predicted: int
    lower: int
    upper: int
    reported: int
    exception: str = ""
    """Why nobody could have known better; empty: nothing of the kind."""

    @property
    def exact(self) -> bool:
        return self.predicted == self.reported and self.in_bounds

    @property
    def in_bounds(self) -> bool:
        return self.lower <= self.reported <= self.upper


@dataclass
class Account:
    """Every verdict of a run, for the table at its end."""

    verdicts: list[Verdict] = field(default_factory=list)

    def rows(self) -> list[str]:
        """Requests by kind: exact, in bounds only, excepted by name, wrong."""
        rows = [f"{'kind':<44} {'exact':>6} {'bounded':>8} {'excepted':>9} {'wrong':>6}"]
        for kind in dict.fromkeys(verdict.kind for verdict in self.verdicts):
            counts = Counter(_class(v) for v in self.verdicts if v.kind == kind)
            rows.append(
                f"{kind:<44} {counts['exact']:>6} {counts['bounded']:>8} "
                f"{counts['excepted']:>9} {counts['wrong']:>6}"
            )
        return rows


class Answering(Protocol):
    """An engine, as far as a client sees it."""

    async def complete(
        self,
        prompt: Sequence[int],
        *,
        output: int = 1,
        headers: Mapping[str, str] | None = None,
        salt: str = "",
        prompt_logprobs: bool = False,
    ) -> Answer:
        """A completion of so many tokens."""
        ...

    async def last_sequence(self, rank: int = 0) -> int | None:
        """Number of the last batch of events published. None: there was none."""
        ...


@dataclass
class Client:
    """Asks one request at a time, each after everything before it has arrived at the scheduler."""

    engine: Answering
    scheduler: Scheduler
    account: Account
    replica: str = REPLICA

    async def ask(
        self,
        kind: str,
        prompt: Sequence[int],
        *,
        output: int = 1,
        rank: int = 0,
        salt: str = "",
        prompt_logprobs: bool = False,
        bounds_only: bool = False,
        exception: str = "",
    ) -> tuple[Verdict, Answer]:
        """Route, complete, report. Fails where the prediction misses and no exception is named.

        `bounds_only`: inside its bounds is enough.
        """
        decision = await self.route(prompt, rank=rank, salt=salt, prompt_logprobs=prompt_logprobs)
        answer = await self.engine.complete(
            prompt,
            output=output,
            headers=decision.headers,
            salt=salt,
            prompt_logprobs=prompt_logprobs,
        )
        verdict = await self.settle(
            kind, decision, answer, rank=rank, bounds_only=bounds_only, exception=exception
        )
        return verdict, answer

    async def route(
        self,
        prompt: Sequence[int],
        *,
        rank: int | None = 0,
        salt: str = "",
        prompt_logprobs: bool = False,
    ) -> routing_pb2.RouteResponse:
        """The decision for a prompt that is to run on a rank of this engine. None: on any."""
        wanted = routing_pb2.RouteRequest(
            model=MODEL,
            prompt=routing_pb2.Prompt(
                tokens_le32=struct.pack(f"<{len(prompt)}I", *prompt),
                cache_salt=salt,
                prompt_logprobs=prompt_logprobs,
            ),
        )
        wanted.only.add(replica=self.replica, rank=rank)
        return await self.scheduler.router.Route(wanted, timeout=PATIENCE_S)

    async def settle(
        self,
        kind: str,
        decision: routing_pb2.RouteResponse,
        answer: Answer,
        *,
        rank: int = 0,
        bounds_only: bool = False,
        exception: str = "",
    ) -> Verdict:
        """Reports what the engine said, judges it, and waits until the scheduler knows what it did."""
        reported = await self.scheduler.router.Report(
            routing_pb2.ReportRequest(
                decision_id=decision.decision_id,
                stage=routing_pb2.ReportRequest.STAGE_FINISHED,
                prompt_tokens=answer.prompt_tokens,
                cached_tokens=answer.cached_tokens,
            ),
            timeout=PATIENCE_S,
        )
        assert reported.disposition == routing_pb2.ReportResponse.DISPOSITION_JOINED, reported
        told = decision.prediction
        assert told.prompt_tokens == answer.prompt_tokens
        verdict = Verdict(
            kind, told.predicted, told.lower, told.upper, answer.cached_tokens, exception
        )
        self.account.verdicts.append(verdict)
        if not exception:
            assert verdict.in_bounds, verdict
            assert verdict.exact or bounds_only, verdict
        await self.caught_up(rank)
        return verdict

    async def caught_up(self, rank: int = 0) -> int | None:
        """Waits until the scheduler has applied all that the engine has published, in a live stream."""
        last = await self.engine.last_sequence(rank)
        await self.scheduler.until(
            lambda replicas: any(
                seen.rank == rank
                and seen.state == common_pb2.STREAM_STATE_LIVE
                and (last is None or (seen.HasField("engine_seq") and seen.engine_seq == last))
                for name, replica in replicas.items()
                if name == self.replica and replica.connected
                for seen in replica.ranks
            ),
            f"rank {rank} live at engine sequence {last}",
        )
        return last


def _class(verdict: Verdict) -> str:
    if verdict.exact:
        return "exact"
    if verdict.exception:
        return "excepted"
    return "bounded" if verdict.in_bounds else "wrong"
