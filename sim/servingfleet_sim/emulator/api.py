"""The OpenAI-compatible requests that vLLM takes, and its answers. Pure: JSON in, JSON out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from . import words
from .sequence import Asked
from .settings import Settings

DEFAULT_MAX_TOKENS = 16
"""OpenAI's for completions. For chats too, where vLLM would go on to the end of the context: nothing here ever stops."""


class BadRequest(ValueError):
    """A request that can't be served: the client must change it. Becomes status 400."""

    status = 400
    kind = "BadRequestError"


class UnknownModel(BadRequest):
    """The model is not served here. Becomes status 404."""

    status = 404
    kind = "NotFoundError"


@dataclass(frozen=True)
class Call:
    """A completion or chat that was understood."""

    model: str
    prompts: tuple[Asked, ...]
    stream: bool
    include_usage: bool
    token_ids: bool
    """Whether the answer holds token ids, as vLLM's `return_token_ids` asks."""
    rank: int | None = None
    """The rank that the body names, as SGLang reads it. None: any."""


@dataclass(frozen=True)
class Answer:
    """Names one answer and shapes its parts."""

    identity: str
    created: int
    """Seconds since the epoch."""
    model: str
    chat: bool
    stop_key: str = "stop_reason"

    def whole(self, choices: list[dict[str, Any]], usage: Mapping[str, Any]) -> dict[str, Any]:
        """An answer in one piece."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": dict(usage)}

    def part(
        self, choices: list[dict[str, Any]], usage: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """One event of a streamed answer."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        row = {**self._head(kind), "choices": choices}
        if usage is not None:
            row["usage"] = dict(usage)
        return row

    def choice(self, index: int, asked: Asked, outputs: Sequence[int], ids: bool) -> dict[str, Any]:
        """A finished choice."""
        text = words.decode(outputs)
        row: dict[str, Any] = {"index": index, "logprobs": None}
        if self.chat:
            row["message"] = {"role": "assistant", "content": text}
        else:
            row["text"] = text
        row |= {"finish_reason": "length", self.stop_key: None}
        if ids:
            row |= {"token_ids": list(outputs), "prompt_token_ids": list(asked.prompt)}
        return row

    def delta(
        self, index: int, tokens: Sequence[int], *, first: bool, last: bool, ids: bool
    ) -> dict[str, Any]:
        """The next tokens of a streamed choice."""
        text = words.decode(tokens) if first else " " + words.decode(tokens)
        row: dict[str, Any] = {"index": index, "logprobs": None}
        if self.chat:
            row["delta"] = {"role": "assistant", "content": text} if first else {"content": text}
        else:
            row["text"] = text
        row |= {"finish_reason": "length" if last else None, self.stop_key: None}
        if ids:
            row["token_ids"] = list(tokens)
        return row

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.identity,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


def usage(
    prompt_tokens: int, output_tokens: int, details: Mapping[str, int] | None
) -> dict[str, Any]:
    """The usage of one request, with what it reused, or nothing of that."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": None if details is None else dict(details),
    }


def error(reason: str, status: int, kind: str) -> dict[str, Any]:
    """The body of a refusal."""
    return {"error": {"message": reason, "type": kind, "param": None, "code": status}}


@dataclass(frozen=True)
class Reader:
    """Reads requests under an engine's settings. Every method raises BadRequest."""

    settings: Settings

    def completion(self, body: Any) -> Call:
        """`POST /v1/completions`."""
        fields = _object(body, "the body")
        prompt = fields.get("prompt")
        prompts: list[tuple[int, ...]]
        if isinstance(prompt, str):
            prompts = [self._text(prompt)]
        elif isinstance(prompt, list) and prompt and all(isinstance(p, str) for p in prompt):
            prompts = [self._text(text) for text in prompt]
        elif isinstance(prompt, list) and prompt and all(isinstance(p, list) for p in prompt):
            prompts = [self._tokens(tokens) for tokens in prompt]
        elif isinstance(prompt, list) and prompt:
            prompts = [self._tokens(prompt)]
        else:
            raise BadRequest("prompt: expected a text, token ids, or a list of either")
        return self._call(fields, prompts, "max_tokens")

    def chat(self, body: Any) -> Call:
        """`POST /v1/chat/completions`."""
        fields = _object(body, "the body")
        named: Literal["max_tokens", "max_completion_tokens"] = (
            "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
        )
        return self._call(fields, [self._chat(fields)], named)

    def tokenize(self, body: Any) -> tuple[int, ...]:
        """`POST /tokenize`: the tokens of a prompt or of a chat."""
        fields = _object(body, "the body")
        if isinstance(fields.get("prompt"), str):
            return self._text(fields["prompt"])
        return self._chat(fields)

    def detokenize(self, body: Any) -> str:
        """`POST /detokenize`."""
        return words.decode(self._tokens(_object(body, "the body").get("tokens")))

    def rank(self, header: str | None) -> int | None:
        """The rank that `X-data-parallel-rank` names; None: any."""
        if header is None:
            return None
        if not header.isdigit() or int(header) >= self.settings.ranks:
            raise BadRequest(
                f"X-data-parallel-rank {header!r}: this engine has ranks 0 to "
                f"{self.settings.ranks - 1}"
            )
        return int(header)

    def _call(self, fields: Mapping[str, Any], prompts: list[tuple[int, ...]], limit: str) -> Call:
        settings = self.settings
        model = fields.get("model") or settings.model
        if model != settings.model and model not in settings.adapters:
            known = ", ".join((settings.model, *settings.adapters))
            raise UnknownModel(f"model {model!r} is not served here; known: {known}")
        if fields.get("n") not in (None, 1):
            raise BadRequest(f"n is {fields['n']!r}: this engine answers once")
        xargs = _object(fields.get("vllm_xargs") or {}, "vllm_xargs")
        outputs = xargs.get("output_token_ids")
        shared = Asked(
            prompt=(),
            max_tokens=_count(fields, limit),
            cache_salt=_text_or_none(fields, "cache_salt"),
            adapter=model if model in settings.adapters else None,
            adapter_number=settings.adapters.get(model),
            session=_text_or_none(fields, "session_id"),
            report_reused=xargs.get("kv_cache_report_mode") == "full",
            prompt_logprobs=fields.get("prompt_logprobs") is not None,
            outputs=None if outputs is None else self._tokens(outputs),
            vocabulary=settings.vocabulary,
        )
        options = _object(fields.get("stream_options") or {}, "stream_options")
        return Call(
            model,
            tuple(replace(shared, prompt=prompt) for prompt in prompts),
            stream=bool(fields.get("stream")),
            include_usage=bool(options.get("include_usage")),
            # SGLang's API has no such thing.
            token_ids=bool(fields.get("return_token_ids")) and settings.engine == "vllm",
            rank=self._rank_field(fields) if settings.engine == "sglang" else None,
        )

    def _rank_field(self, fields: Mapping[str, Any]) -> int | None:
        named = fields.get("routed_dp_rank")
        if named is None:
            named = fields.get("data_parallel_rank")
        if named is None:
            return None
        if type(named) is not int or not 0 <= named < self.settings.ranks:
            raise BadRequest(
                f"routed_dp_rank {named!r}: this engine has ranks 0 to {self.settings.ranks - 1}"
            )
        return named

    def _chat(self, fields: Mapping[str, Any]) -> tuple[int, ...]:
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages: expected a list with at least one message")
        try:
            return self._text(words.chat(messages))
        except words.BadMessage as wrong:
            raise BadRequest(str(wrong)) from wrong

    def _text(self, text: str) -> tuple[int, ...]:
        return words.encode(text, self.settings.vocabulary)

    def _tokens(self, tokens: Any) -> tuple[int, ...]:
        most = self.settings.vocabulary
        if not isinstance(tokens, list) or not all(
            type(token) is int and 0 <= token < most for token in tokens
        ):
            raise BadRequest(f"token ids: expected a list of integers from 0 to {most - 1}")
        return tuple(tokens)


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{name}: {type(value).__name__}, expected an object")
    return value


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if value is None:
        return DEFAULT_MAX_TOKENS
    if type(value) is not int or value < 1:
        raise BadRequest(f"{name} is {value!r}, expected a positive integer")
    return value


def _text_or_none(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"{name} is {value!r}, expected a text")
    return value or None
