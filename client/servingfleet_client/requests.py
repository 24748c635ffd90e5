"""What is asked and reported, as messages. Pure."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from servingfleet_protos.v1 import common_pb2, routing_pb2

Stage = routing_pb2.ReportRequest.Stage

Tokens = bytes | bytearray | Iterable[int]
"""Token ids of a prompt: one by one (a list, an array), or packed as little-endian unsigned 32-bit integers."""


class RouteOptions(TypedDict, total=False):
    """All that can be said of a request beside its tokens."""

    request_id: str
    """Idempotency: while the decision is open, asking again under this id gives it again. Absent: a new one."""
    adapter: str
    """LoRA adapter, as the engine names it."""
    cache_salt: str
    media: Iterable[routing_pb2.MediaKey]
    """Images and the like inside the prompt, in order of `token_offset`."""
    prompt_logprobs: bool
    """The request asks for them: engines then reuse nothing."""
    session_id: str
    """Groups the requests of one conversation."""
    pin_session: bool
    """Stay where the session went last, while that may be chosen."""
    priority: int
    """Class for admission: higher is more important."""
    labels: Mapping[str, str]
    """Only replicas whose labels have all of these, at most 16."""
    only: Iterable[common_pb2.Target]
    exclude: Iterable[common_pb2.Target]
    """Where it must not go: for example where it has just failed."""
    deadline_s: float | None
    """Largest acceptable time to first token. None: never rejected for time."""
    max_fallbacks: int
    """Next best targets to name, at most 16."""
    expected_output_tokens: int
    """0: unknown."""


_OF_PROMPT = ("adapter", "cache_salt", "media", "prompt_logprobs")


def route_request(model: str, tokens: Tokens, options: RouteOptions) -> routing_pb2.RouteRequest:
    """Raises ValueError for tokens that are none, and for options that do not exist or have the wrong type."""
    fields: dict[str, Any] = {**options}
    of_prompt = {name: fields.pop(name) for name in _OF_PROMPT if name in fields}
    try:
        prompt = routing_pb2.Prompt(tokens_le32=packed(tokens), **of_prompt)
        return routing_pb2.RouteRequest(model=model, prompt=prompt, **fields)
    except TypeError as error:
        raise ValueError(f"route: {error}") from error


def packed(tokens: Tokens) -> bytes:
    """Little-endian unsigned 32-bit integers. Raises ValueError."""
    if isinstance(tokens, bytes | bytearray):
        if len(tokens) % 4:
            raise ValueError(f"tokens: {len(tokens)} bytes; expected 4 for each token")
        return bytes(tokens)
    try:
        ids = array("I", tokens)
    except (OverflowError, TypeError) as error:
        # Not the tokens themselves: they are somebody's prompt.
        raise ValueError(f"tokens: {error}; expected integers from 0 to 2**32 - 1") from error
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def report_request(
    decision_id: str,
    stage: Stage.ValueType,
    *,
    ran_on: common_pb2.Target | None = None,
    failed_on: Iterable[common_pb2.Target] = (),
    usage: object = None,
    reuse_when_absent: int | None = None,
    prompts: int = 1,
    ttft_s: float | None = None,
) -> routing_pb2.ReportRequest:
    """What became of a decision; `usage` as `counts` reads it."""
    return routing_pb2.ReportRequest(
        decision_id=decision_id,
        stage=stage,
        ran_on=ran_on,
        failed_on=failed_on,
        prompts_in_usage=prompts,
        ttft_s=ttft_s,
        **counts(usage, reuse_when_absent),
    )


class Counts(TypedDict):
    """Tokens of one answer."""

    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None


def counts(usage: object, reuse_when_absent: int | None = None) -> Counts:
    """Token counts of an OpenAI `usage`, a mapping or an object, under a report's names; None: it does not say.

    Both forms are read: that of completions and chats, and that of responses (`input_tokens`).
    `reuse_when_absent`: tokens reused where it does not say. None: unknown, and the outcome joins nothing. What is no
    count is not said: no user's answer may fail for what an engine writes there.
    """
    details = _first(usage, "prompt_tokens_details", "input_tokens_details")
    cached = _first(details, "cached_tokens")
    return Counts(
        prompt_tokens=_count(_first(usage, "prompt_tokens", "input_tokens")),
        cached_tokens=reuse_when_absent if cached is None else _count(cached),
        output_tokens=_count(_first(usage, "completion_tokens", "output_tokens")),
    )


def _count(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32:
        return value
    return None


def _first(source: object, *names: str) -> Any:
    for name in names:
        value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
        if value is not None:
            return value
    return None
