"""Plays a workload against a fleet as a gateway would: Route, the engine's streamed answer, Report.

Every request ends under exactly one `End`. A failure before the first token is tried elsewhere, and counted; after it
the user has seen part of an answer, so that the request has failed.
"""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import grpc
import httpx

from servingfleet_protos.v1 import common_pb2, routing_pb2

from .emulator import words
from .workload import Session, Turn

if TYPE_CHECKING:  # this name exists for type checkers only
    from servingfleet_protos.v1.routing_pb2_grpc import RouterAsyncStub

Stage = routing_pb2.ReportRequest.Stage

CALL_S = 5.0
"""Deadline of a call to the scheduler."""
REQUEST_S = 30.0
"""Deadline of a request, retries included; then its client goes away."""
MAX_RETRIES = 2
RETRY_PAUSE_S = 0.1


class End(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    REFUSED = "refused"
    """The scheduler had no target for it."""
    FAILED = "failed"
    """An engine refused it or broke off, and so did those tried after it."""
    ABORTED = "aborted"
    """Its deadline passed."""


class EngineFailed(Exception):
    """The engine did not answer, or not to the end."""


@dataclass
class Request:
    """One turn on its way, and what came of it. Times are seconds since the epoch."""

    session: int
    turn: int
    model: str
    prompt: tuple[int, ...]
    late_s: float
    """Asked so long after its time, because the answer before it came late."""
    asked: float = 0.0
    """Before Route was called, and `routed` when it had answered: of the last try."""
    routed: float = 0.0
    answer: routing_pb2.RouteResponse | None = None
    """The decision of the last try; None: none was made."""
    retries: int = 0
    ttft_s: float | None = None
    """From the first Route to the first token, as the client saw it."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    end: End = End.ABORTED
    reason: str = ""
    """Why it did not finish; for people."""
    joined: bool = False
    """The scheduler counted its outcome in its figures."""

    @property
    def name(self) -> str:
        """Its id at the scheduler and the engine; a retry has another."""
        return f"s{self.session}-t{self.turn}-{self.retries}"


@dataclass
class Progress:
    """Counts of all requests so far."""

    asked: int = 0
    open: int = 0
    ends: Counter[End] = field(default_factory=Counter)
    retries: int = 0
    late: int = 0
    unreported: int = 0
    """Reports that the scheduler did not take."""


@dataclass
class Clients:
    """The users of a fleet and the gateway between them. `requests` holds what was asked, in order of its asking."""

    router: RouterAsyncStub
    http: httpx.AsyncClient
    vocabulary: int = 32_000
    """Of the engines' tokenizer."""
    progress: Progress = field(default_factory=Progress)
    requests: list[Request] = field(default_factory=list)

    async def play(self, sessions: Iterable[Session], seconds: float) -> None:
        """Asks every turn that is due within `seconds`, and waits for the answers."""
        start = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for session in sessions:
                if not session.turns:
                    continue
                await _until(start + session.turns[0].at_s)
                tasks.create_task(self._session(session, start, seconds))

    async def _session(self, session: Session, start: float, seconds: float) -> None:
        said: tuple[int, ...] = ()
        for number, turn in enumerate(session.turns):
            await _until(start + turn.at_s)
            late_s = asyncio.get_running_loop().time() - start - turn.at_s
            if turn.at_s + late_s >= seconds:
                return
            said += turn.tokens
            request = Request(session.number, number, session.model, said, late_s)
            answer = await self._request(request, turn)
            if answer is None:
                return  # a conversation can't go on without it
            said += answer

    async def _request(self, request: Request, turn: Turn) -> tuple[int, ...] | None:
        """The answer's tokens; None where there is none."""
        self.requests.append(request)
        self.progress.asked += 1
        self.progress.open += 1
        self.progress.late += request.late_s > 1
        output: list[int] = []
        try:
            async with asyncio.timeout(REQUEST_S):
                await self._try(request, turn, output)
        except TimeoutError:
            request.end, request.reason = End.ABORTED, f"not complete within {REQUEST_S:.0f} s"
            if request.answer is not None:
                await self._report(request, Stage.STAGE_ABORTED)
        finally:
            self.progress.open -= 1
        self.progress.ends[request.end] += 1
        return tuple(output) if request.end is End.FINISHED else None

    async def _try(self, request: Request, turn: Turn, output: list[int]) -> None:
        """Routes and asks until it is answered, or may not be tried again. Raises TimeoutError only."""
        first = time.time()
        exclude: list[common_pb2.Target] = []
        while True:
            try:
                await self._route(request, turn, exclude)
            except grpc.aio.AioRpcError as error:
                request.end, request.reason = End.REFUSED, f"{error.code().name}: {error.details()}"
                again = error.code() is grpc.StatusCode.UNAVAILABLE
            else:
                assert request.answer is not None
                try:
                    await self._ask(request, request.answer, turn, output, first)
                except EngineFailed as error:
                    request.end, request.reason = End.FAILED, str(error)
                    await self._report(request, Stage.STAGE_FAILED)
                    exclude.append(request.answer.target)
                    again = not output
                else:
                    request.end, request.reason = End.FINISHED, ""
                    await self._report(request, Stage.STAGE_FINISHED)
                    return
            if not again or request.retries == MAX_RETRIES:
                return
            request.retries += 1
            request.answer = None
            self.progress.retries += 1
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _route(self, request: Request, turn: Turn, exclude: list[common_pb2.Target]) -> None:
        asked = routing_pb2.RouteRequest(
            model=request.model,
            prompt=routing_pb2.Prompt(
                tokens_le32=struct.pack(f"<{len(request.prompt)}I", *request.prompt)
            ),
            request_id=request.name,
            session_id=str(request.session),
            exclude=exclude,
            expected_output_tokens=turn.answer_tokens,
        )
        request.asked = time.time()
        request.answer = await self.router.Route(asked, timeout=CALL_S)
        request.routed = time.time()

    async def _ask(
        self,
        request: Request,
        decision: routing_pb2.RouteResponse,
        turn: Turn,
        output: list[int],
        first: float,
    ) -> None:
        """Reads the streamed answer. Raises EngineFailed."""
        body = {
            "model": request.model,
            "prompt": request.prompt,
            "max_tokens": turn.answer_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        headers = {**decision.headers, "X-Request-Id": request.name}
        url = f"http://{decision.endpoint}/v1/completions"
        usage: dict[str, Any] | None = None
        try:
            async with self.http.stream("POST", url, json=body, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    reason = (await response.aread()).decode(errors="replace")[:200]
                    raise EngineFailed(f"{url} answered {response.status_code}: {reason}")
                async for part in _parts(response):
                    usage = part.get("usage") or usage
                    for choice in part["choices"]:
                        output.extend(self._tokens(choice))
                    if request.ttft_s is None and output:
                        request.ttft_s = time.time() - first
                        await self._report(request, Stage.STAGE_FIRST_TOKEN)
        except httpx.HTTPError as error:
            raise EngineFailed(f"{url}: {type(error).__name__} {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise EngineFailed(f"{url} sent what is no completion: {error!r}") from error
        if usage is None:
            raise EngineFailed(f"{url} told no usage")
        request.prompt_tokens = usage["prompt_tokens"]
        request.output_tokens = usage["completion_tokens"]
        # The fleet's engines are told to report reuse; SGLang then leaves out what is nothing.
        request.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    def _tokens(self, choice: dict[str, Any]) -> Sequence[int]:
        """Of a part of the answer. Where the engine tells none, as a gateway that has the tokenizer."""
        told: Sequence[int] | None = choice.get("token_ids")
        return words.encode(choice["text"], self.vocabulary) if told is None else told

    async def _report(
        self, request: Request, stage: routing_pb2.ReportRequest.Stage.ValueType
    ) -> None:
        assert request.answer is not None
        report = routing_pb2.ReportRequest(
            decision_id=request.answer.decision_id,
            stage=stage,
            ran_on=request.answer.target,
            ttft_s=request.ttft_s,
        )
        if stage == Stage.STAGE_FINISHED:
            for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
                value = getattr(request, name)
                if value is not None:
                    setattr(report, name, value)
        try:
            answer = await self.router.Report(report, timeout=CALL_S)
        except grpc.aio.AioRpcError:
            self.progress.unreported += 1
        else:
            request.joined = answer.disposition == answer.DISPOSITION_JOINED


async def _parts(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of an answer. Raises ValueError for one that ends before its end."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if line:
            yield json.loads(data)
    raise ValueError("the stream ended without [DONE]")


async def _until(when: float) -> None:
    await asyncio.sleep(max(0.0, when - asyncio.get_running_loop().time()))
