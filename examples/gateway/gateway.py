"""A gateway: speaks OpenAI's API to users, asks the fleet where each request should go, and reports what became of it.

    python gateway.py --model qwen3-8b --scheduler 127.0.0.1:7070 --tokenizer http://127.0.0.1:8000

Bodies go to the engine as they came, but for two additions: a stream ends with its usage, and some engines are told in
the body which of their ranks is meant.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import aiohttp
from aiohttp import web

import servingfleet_client as fleet

TRIES = 3
"""Engines that a request is sent to, one after the other, until one begins to answer."""
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=2, sock_read=60)
LONGEST_LINE_BYTES = 2**20
HTTP_STATUS: Mapping[type[Exception], int] = {
    fleet.InvalidRequest: 400,
    fleet.UnknownModel: 404,
    fleet.Rejected: 429,
    fleet.NoReplicas: 503,
    fleet.Unavailable: 503,
    fleet.TimedOut: 503,
    ValueError: 400,
}


class EngineFailed(Exception):
    """The engine did not answer: another one may."""


class BrokeOff(EngineFailed):
    """The engine did not answer to the end. The user has seen a part: only they can ask again."""


class Gateway:
    """The front of one model."""

    def __init__(
        self,
        client: fleet.AsyncClient,
        http: aiohttp.ClientSession,
        tokenizer: str,
        *,
        pin: bool = False,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """`tokenizer`: base address of what serves vLLM's `/tokenize`, such as any engine of the model. `pin`: sessions
        stay where they are. `labels`: of the replicas that may be used."""
        self._client = client
        self._http = http
        self._tokenizer = tokenizer
        self._pin = pin
        self._labels = labels or {}

    def app(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=64 * 2**20)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise ValueError("the body: expected an object")  # noqa: TRY004 - the user is wrong
            return await self._try(request, body, await self._tokens(body))
        except BrokeOff:
            raise  # nothing can be said any more: the connection ends
        except (fleet.FleetError, EngineFailed, ValueError) as error:
            return refusal(error)

    async def _try(
        self, request: web.Request, body: dict[str, Any], tokens: list[int]
    ) -> web.StreamResponse:
        options = self._options(request, body)
        # Only EngineFailed is held against the engine. Whatever else ends the block, a user who has gone for example,
        # is reported as an abort.
        async with self._client.request(tokens, failures=EngineFailed, **options) as routed:
            while True:
                try:
                    return await self._send(request, body, routed)
                except BrokeOff:
                    raise
                except EngineFailed:
                    if not routed.fall_back():
                        raise

    def _options(self, request: web.Request, body: dict[str, Any]) -> fleet.RouteOptions:
        """What the fleet should know of a request beside its tokens."""
        options = fleet.RouteOptions(
            session_id=request.headers.get("X-Session-Id", ""),
            cache_salt=body.get("cache_salt") or "",
            prompt_logprobs=body.get("prompt_logprobs") is not None,
            expected_output_tokens=body.get("max_completion_tokens") or body.get("max_tokens") or 0,
            max_fallbacks=TRIES - 1,
            pin_session=self._pin and "X-Session-Id" in request.headers,
            priority=int(request.headers.get("X-Priority", "0")),
            labels=self._labels,
        )
        if body.get("model", self._client.model) != self._client.model:
            options["adapter"] = body["model"]
        if "X-First-Token-Within" in request.headers:
            options["deadline_s"] = float(request.headers["X-First-Token-Within"])
        return options

    async def _tokens(self, body: dict[str, Any]) -> list[int]:
        """Of the prompt or the chat, as the engine will see it."""
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            if not all(type(token) is int for token in prompt):
                raise ValueError("prompt: expected one text, or the token ids of one")
            return prompt
        async with await self._post(f"{self._tokenizer}/tokenize", body, {}) as response:
            if response.status != 200:
                raise ValueError(f"the engine can't read it: {await response.text()}")
            tokens: list[int] = (await response.json())["tokens"]
            return tokens

    async def _send(
        self, request: web.Request, body: dict[str, Any], routed: fleet.Routed
    ) -> web.StreamResponse:
        """The engine's answer. Raises EngineFailed."""
        told = body.get("stream_options") or {}
        sent = {**body, **routed.body}
        if body.get("stream"):
            sent["stream_options"] = {**told, "include_usage": True}
        url = f"http://{routed.endpoint}{request.path}"
        headers = {**routed.headers, "X-Request-Id": routed.request_id}
        async with await self._post(url, sent, headers) as answer:
            if answer.status >= 500:
                raise EngineFailed(f"{routed.endpoint} answered {answer.status}")
            if answer.status == 200 and body.get("stream"):
                return await stream(request, answer, routed, told.get("include_usage", False))
            try:
                content = await answer.read()
            except aiohttp.ClientError as error:
                raise EngineFailed(f"{routed.endpoint}: {error}") from error
            if answer.status == 200:
                routed.finished(json.loads(content).get("usage"))
            # Else the engine has refused what the user asked for.
            return web.Response(status=answer.status, body=content, content_type="application/json")

    async def _post(
        self, url: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        try:
            return await self._http.post(url, json=body, headers=headers)
        except aiohttp.ClientError as error:
            raise EngineFailed(f"{url}: {error}") from error


async def stream(
    request: web.Request, answer: aiohttp.ClientResponse, routed: fleet.Routed, usage_wanted: bool
) -> web.StreamResponse:
    """Passes an answer's events on as they come. Raises EngineFailed, and BrokeOff once there is a part."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    usage = None
    done = False
    try:
        async with aclosing(events(answer)) as coming:
            async for data in coming:
                part = {} if data == b"[DONE]" else json.loads(data)
                usage = part.get("usage") or usage
                if part.get("choices"):
                    routed.first_token()
                elif "usage" in part and not usage_wanted:
                    continue  # this gateway has asked for it, not the user
                if not response.prepared:  # until here another engine could have been tried
                    await response.prepare(request)
                await response.write(b"data: " + data + b"\n\n")
                done = data == b"[DONE]"
        if not done:
            raise EngineFailed(f"{routed.endpoint} ended its stream before its end")
    except EngineFailed as error:
        if response.prepared:
            raise BrokeOff(*error.args) from error
        raise
    routed.finished(usage)
    return response


async def events(answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    """The data of a stream's events. Raises EngineFailed, so that nobody takes it for an error of the user's side."""
    try:
        async for line in answer.content:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()
    except (aiohttp.ClientError, ValueError) as error:  # the latter: a line beyond all measure
        raise EngineFailed(f"{answer.url.authority}: {error}") from error


def refusal(error: Exception) -> web.Response:
    """What the user is told in place of an answer, in OpenAI's form."""
    status = next((code for kind, code in HTTP_STATUS.items() if isinstance(error, kind)), 502)
    told: dict[str, Any] = {"message": str(error), "type": type(error).__name__}
    headers = {}
    if isinstance(error, fleet.FleetError):
        told["code"] = error.reason
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return web.json_response({"error": told}, status=status, headers=headers)


async def app(options: argparse.Namespace) -> web.Application:
    """The gateway with its connections, which end with it."""
    client = fleet.AsyncClient(
        fleet.Scheduler(
            options.scheduler,
            ca_file=options.ca_file,
            token_file=options.token_file,
            server_name=options.server_name,
        ),
        options.model,
    )
    http = aiohttp.ClientSession(timeout=TIMEOUT, read_bufsize=LONGEST_LINE_BYTES)

    async def close(_: web.Application) -> None:
        await http.close()
        await client.close()

    gateway = Gateway(client, http, options.tokenizer, pin=options.pin, labels=dict(options.label))
    served = gateway.app()
    served.on_cleanup.append(close)
    return served


def label(text: str) -> tuple[str, str]:
    """Of the form KEY=VALUE. Raises ValueError."""
    key, separator, value = text.partition("=")
    if not (key and separator):
        raise ValueError(text)
    return key, value


def main() -> None:
    """Serves until it is told to end."""
    options = argparse.ArgumentParser(description="An OpenAI-compatible front of a fleet.")
    options.add_argument("--model", required=True, help="as the engines serve it")
    options.add_argument("--tokenizer", required=True, help="base address of an engine")
    options.add_argument("--scheduler", default="127.0.0.1:7070", help="host:port")
    options.add_argument("--ca-file", help="who signs the scheduler's certificate")
    options.add_argument("--token-file", help="the token to show it")
    options.add_argument("--server-name", default="", help="the name in its certificate")
    options.add_argument("--pin", action="store_true", help="sessions stay where they are")
    options.add_argument(
        "--label",
        action="append",
        default=[],
        type=label,
        help="KEY=VALUE that replicas must have; again for each further one",
    )
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--port", type=int, default=8080)
    given = options.parse_args()
    # Handlers are cancelled when their user goes away, and so is what the engine does for them.
    web.run_app(app(given), host=given.host, port=given.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
