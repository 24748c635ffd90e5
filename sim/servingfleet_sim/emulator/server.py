"""The HTTP side of an engine: the OpenAI endpoints as vLLM serves them, its metrics, and switches for faults."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from . import exposition
from .api import Answer, BadRequest, Call, Reader, error, usage
from .engine import Engine
from .rank import Rank, Ticket
from .steps import DoesNotFit

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 64 * 2**20
"""A prompt of a million token ids takes some 7 MB."""


class Server:
    """Serves one engine."""

    owner = "vllm"
    stop_key = "stop_reason"
    """Where an answer would name what stopped it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._settings = engine.settings
        self._reader = Reader(engine.settings)

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[self._refusals], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chats),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.post("/faults", self._faults),
                *self._own_routes(),
            ]
        )
        return app

    def _own_routes(self) -> list[web.RouteDef]:
        """Those that no other engine has."""
        return [
            web.post("/reset_prefix_cache", self._reset),
            web.get("/version", self._version),
        ]

    def _usage(self, tickets: list[Ticket]) -> dict[str, Any]:
        # One usage for all prompts, in which vLLM reports the reuse of the last.
        return usage(
            sum(ticket.sequence.prompt_tokens for ticket in tickets),
            sum(ticket.sequence.output_tokens for ticket in tickets),
            {"cached_tokens": tickets[-1].sequence.cached_tokens or 0},
        )

    def _page(self) -> bytes:
        """The metrics now."""
        schedulers = [rank.scheduler for rank in self._engine.ranks]
        return exposition.page(self._settings, schedulers, self._engine.started)

    def _error(self, wrong: BadRequest) -> dict[str, Any]:
        """The body of a refusal."""
        return error(str(wrong), wrong.status, wrong.kind)

    @web.middleware
    async def _refusals(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except BadRequest as wrong:
            return web.json_response(self._error(wrong), status=wrong.status)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._reader.completion(await _json(request)), False)

    async def _chats(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._reader.chat(await _json(request)), True)

    async def _answer(self, request: web.Request, call: Call, chat: bool) -> web.StreamResponse:
        named = self._reader.rank(request.headers.get("X-data-parallel-rank"))
        named = call.rank if named is None else named
        rank = self._engine.least_loaded() if named is None else self._engine.ranks[named]
        identity = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        prefix = "chatcmpl" if chat else "cmpl"
        answer = Answer(f"{prefix}-{identity}", int(time.time()), call.model, chat, self.stop_key)
        tickets = self._submit(rank, call, identity)
        try:
            if call.stream:
                return await self._stream(request, call, answer, tickets)
            for ticket in tickets:
                async for _ in _tokens(ticket):
                    pass
        finally:
            # Cancelled where the client is gone: what is not finished is of no use to anyone.
            for ticket in tickets:
                rank.abort(ticket)
        choices = [
            answer.choice(index, t.sequence.asked, t.sequence.outputs, call.token_ids)
            for index, t in enumerate(tickets)
        ]
        return web.json_response(answer.whole(choices, self._usage(tickets)))

    def _submit(self, rank: Rank, call: Call, identity: str) -> list[Ticket]:
        now = time.time()
        tickets: list[Ticket] = []
        try:
            for asked in call.prompts:
                ticket = Ticket(self._engine.sequence(asked), identity, now)
                rank.submit(ticket)
                tickets.append(ticket)
        except DoesNotFit as wrong:
            for ticket in tickets:
                rank.abort(ticket)
            raise BadRequest(str(wrong)) from wrong
        return tickets

    async def _stream(
        self, request: web.Request, call: Call, answer: Answer, tickets: list[Ticket]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        sending = asyncio.Lock()

        async def send(part: dict[str, Any]) -> None:
            async with sending:
                await response.write(b"data: " + json.dumps(part).encode() + b"\n\n")

        async def one(index: int, ticket: Ticket) -> None:
            first = True
            async for tokens, last in _tokens(ticket):
                choice = answer.delta(index, tokens, first=first, last=last, ids=call.token_ids)
                await send(answer.part([choice]))
                first = False

        try:
            async with asyncio.TaskGroup() as tasks:
                for index, ticket in enumerate(tickets):
                    tasks.create_task(one(index, ticket))
            if call.include_usage:
                await send(answer.part([], self._usage(tickets)))
            await response.write(b"data: [DONE]\n\n")
        except* ConnectionResetError:
            pass  # the client is gone, and with it the answer
        return response

    async def _models(self, _: web.Request) -> web.StreamResponse:
        names = (self._settings.model, *self._settings.adapters)
        rows = [
            {
                "id": name,
                "object": "model",
                "created": int(self._engine.started),
                "owned_by": self.owner,
                "root": name,
                "parent": None if name == self._settings.model else self._settings.model,
                "max_model_len": self._settings.limits.longest,
            }
            for name in names
        ]
        return web.json_response({"object": "list", "data": rows})

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        tokens = self._reader.tokenize(await _json(request))
        return web.json_response(
            {
                "count": len(tokens),
                "max_model_len": self._settings.limits.longest,
                "tokens": list(tokens),
                "token_strs": None,
            }
        )

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"prompt": self._reader.detokenize(await _json(request))})

    async def _reset(self, request: web.Request) -> web.StreamResponse:
        running = request.query.get("reset_running_requests") == "true"
        host = request.query.get("reset_external") == "true"
        done = [rank.reset(running=running, host=host) for rank in self._engine.ranks]
        return web.json_response({"success": all(done)})

    async def _version(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"version": self._settings.engine_version})

    async def _health(self, _: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=self._page(), content_type="text/plain", charset="utf-8")

    async def _faults(self, request: web.Request) -> web.StreamResponse:
        body = await _json(request)
        known = {"rank", "drop_batches", "drop_from_replay", "stall_s"}
        if not isinstance(body, dict) or not body.keys() <= known:
            raise BadRequest(f"faults: expected an object with keys of {', '.join(sorted(known))}")
        rank = self._reader.rank(str(body.get("rank", 0)))
        faults = self._engine.ranks[rank or 0].faults
        drops, stall = body.get("drop_batches", 0), body.get("stall_s", 0)
        if type(drops) is not int or drops < 0 or not isinstance(stall, int | float) or stall < 0:
            raise BadRequest("faults: expected numbers that are not negative")
        faults.drop_batches = drops
        faults.drop_from_replay = bool(body.get("drop_from_replay"))
        faults.stall_until = asyncio.get_running_loop().time() + stall
        return web.json_response({"rank": rank})


async def _tokens(ticket: Ticket) -> AsyncIterator[tuple[list[int], bool]]:
    """The tokens of a prompt as they come, and whether the last is among them.

    Together where several have come meanwhile, as vLLM does when its clients are slower than its steps.
    """
    last = False
    while not last:
        token, last = await ticket.tokens.get()
        tokens = [token]
        while not ticket.tokens.empty():
            token, last = ticket.tokens.get_nowait()
            tokens.append(token)
        yield tokens, last


async def _json(request: web.Request) -> Any:
    try:
        return await request.json()
    except ValueError as wrong:
        raise BadRequest(f"the body is not JSON: {wrong}") from wrong
