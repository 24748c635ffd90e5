"""Asks an engine what a file says, one request after the other, and notes what it reports to have reused.

Edge. The file's lines are those of a recording's `requests.jsonl`, so that one that was recorded once can be asked of
the engine's next release.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from servingfleet_relay.adapters.registry import ADAPTERS

from .recordings import RecordingError

REQUEST_S = 600.0
FLAGS = {
    name: adapter.profile.report_flag
    for name, adapter in ADAPTERS.items()
    if adapter.profile.report_flag
}
"""What makes an engine report its reuse."""


@dataclass(frozen=True)
class Step:
    """One line: a request, or a control such as "/reset_prefix_cache"."""

    label: str = ""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Body of a completion. `lora` names an adapter."""
    headers: Mapping[str, str] = field(default_factory=dict)
    control: str = ""
    """Path that is posted to; empty: a request."""


def read_steps(path: Path) -> list[Step]:
    """Raises RecordingError, OSError."""
    steps = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        where = f"{path}:{number}"
        try:
            row = json.loads(text)
        except ValueError as error:
            raise RecordingError(f"{where}: not JSON: {error}") from error
        step = _step(row) if isinstance(row, dict) else None
        if step is None:
            raise RecordingError(
                f'{where}: expected {{"request": {{"prompt": ...}}}} or {{"control": "/path"}}'
            )
        steps.append(step)
    return steps


def _step(row: Mapping[str, Any]) -> Step | None:
    if "control" in row:
        # Of an engine inside a process there are calls, and of its life there are words: neither can be posted.
        control = row["control"]
        return Step(control=control) if isinstance(control, str) and control[:1] == "/" else None
    request, headers = row.get("request"), row.get("headers") or {}
    if not isinstance(request, dict) or not isinstance(headers, dict) or not request.get("prompt"):
        return None
    return Step(str(row.get("label", "")), request, headers)


@dataclass
class Driver:
    """Asks one engine, and keeps a line for each request and control."""

    http: httpx.AsyncClient
    """With the engine's address as its base."""
    model: str
    clock: Callable[[], float]
    rows: list[dict[str, Any]] = field(default_factory=list)
    refused: int = 0
    """Requests that the engine answered with an error, or with something else."""

    async def play(self, steps: Sequence[Step], settled: Callable[[], Awaitable[None]]) -> None:
        """Every step, each when `settled` says that the one before has been published. Raises httpx.HTTPError."""
        for number, step in enumerate(steps):
            if step.control:
                await self._control(step)
            else:
                await self._request(number, step)
            await settled()

    @property
    def reports_reuse(self) -> bool:
        """Whether the engine reported reuse at all. One that found none may leave it out of its answer."""
        return any(row.get("cached_tokens") is not None for row in self.rows)

    def finished(self) -> list[dict[str, Any]]:
        """The lines. Where the engine is known to report reuse, an answer that tells of none found none."""
        if not self.reports_reuse:
            return [{k: v for k, v in row.items() if k != "cached_tokens"} for row in self.rows]
        return [
            {**row, "cached_tokens": row["cached_tokens"] or 0} if "cached_tokens" in row else row
            for row in self.rows
        ]

    async def _control(self, step: Step) -> None:
        begun = self.clock()
        answer = await self.http.post(step.control)
        self.rows.append(
            {
                "t": begun,
                "control": step.control,
                "status": answer.status_code,
                "resp": {"success": answer.status_code == 200 and _told(answer)},
            }
        )

    async def _request(self, number: int, step: Step) -> None:
        asked = {key: value for key, value in step.request.items() if value is not None}
        body = {**asked, "model": asked.get("lora") or self.model, "stream": False}
        body.pop("lora", None)
        row: dict[str, Any] = {"t": 0.0, "n": number, "label": step.label}
        row["request"] = {**body, "lora": asked.get("lora")}
        row["headers"] = dict(step.headers) or None
        tokens = await self._tokens(body)
        if tokens is not None:
            row["prompt_token_ids"] = tokens
        row["t"] = self.clock()
        answer = await self.http.post("/v1/completions", json=body, headers=dict(step.headers))
        row |= {"t_done": self.clock(), "status": answer.status_code}
        usage = _usage(answer)
        if usage is not None:
            row |= usage
        else:
            row["error"] = answer.text[:500]
            self.refused += 1
        self.rows.append(row)

    async def _tokens(self, body: Mapping[str, Any]) -> list[Any] | None:
        """The tokens of a prompt that is text, or of several; None: it holds its tokens."""
        prompt = body["prompt"]
        if isinstance(prompt, str):
            return await self._tokenized(prompt, body["model"])
        if isinstance(prompt, list) and isinstance(prompt[0], str):
            return [await self._tokenized(text, body["model"]) for text in prompt]
        return None

    async def _tokenized(self, text: str, model: str) -> list[int]:
        answer = await self.http.post("/tokenize", json={"model": model, "prompt": text})
        answer.raise_for_status()
        return list(answer.json()["tokens"])


def _usage(answer: httpx.Response) -> dict[str, int | None] | None:
    """What an answer reports; None: it is no answer to a completion."""
    if answer.status_code != httpx.codes.OK:
        return None
    try:
        usage = answer.json()["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return {
            "prompt_tokens": int(usage["prompt_tokens"]),
            "completion_tokens": usage.get("completion_tokens"),
            "cached_tokens": details.get("cached_tokens"),
        }
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def _told(answer: httpx.Response) -> bool:
    """What the answer says of its success; SGLang's says nothing but its status."""
    try:
        told = answer.json()
    except ValueError:
        return True
    return bool(told.get("success", True)) if isinstance(told, dict) else True
