"""Reads a recorded event stream: what the engine published, what was asked of it, what it says it reused.

One folder a recording (docs/recordings.md): `events.jsonl`, `requests.jsonl`, `engine.json` where known. Pure but for
reading files; nothing here interprets an event.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from servingfleet_relay.adapters.registry import ADAPTERS
from servingfleet_relay.settings import LayerGroup


class RecordingError(ValueError):
    """A folder is not a recording that we can read: says which file, which line, and what was expected."""


@dataclass(frozen=True)
class Message:
    """One multipart message as a subscriber received it."""

    time: float
    """Arrival, seconds since the epoch."""
    rank: int
    frames: tuple[bytes, ...]

    @property
    def seq(self) -> int | None:
        """The engine's sequence number, or None where the frames hold none."""
        if len(self.frames) < 2 or len(self.frames[-2]) != 8:
            return None
        return int.from_bytes(self.frames[-2], "big")


@dataclass(frozen=True)
class Request:
    """One request to the engine and what it reported at the end."""

    number: int
    """Line in the recording, from 0."""
    label: str
    start: float
    end: float
    prompts: tuple[tuple[int, ...], ...]
    """Token ids; more than one where one request carried several prompts."""
    prompt_tokens: int
    cached_tokens: int
    adapter: str = ""
    cache_salt: str = ""
    prompt_logprobs: bool = False
    rank: int | None = None
    """Data-parallel rank that the request named; None: it named none."""


@dataclass(frozen=True)
class Control:
    """Something done to the engine, other than a request: a reset, a stop, a start."""

    time: float
    what: str
    succeeded: bool

    @property
    def is_reset(self) -> bool:
        """Whether the engine's prefix cache was emptied: vLLM's word, or SGLang's."""
        call = self.what.split()[0]
        return self.succeeded and ("reset" in call or "flush_cache" in call)

    @property
    def socket(self) -> bool | None:
        """True: the engine's sockets came up; False: they went away; None: neither."""
        words = self.what.split()
        if words[0] == "engine" and words[-1] in ("gone", "healthy"):
            return words[-1] == "healthy"
        return None


@dataclass(frozen=True)
class Recording:
    """One recorded run."""

    name: str
    ranks: int
    messages: tuple[Message, ...]
    requests: tuple[Request, ...]
    controls: tuple[Control, ...]
    engine: Mapping[str, Any] = field(default_factory=dict)
    adapter: str = "vllm"
    """The engine whose events these are."""

    @property
    def host_unit_tokens(self) -> int:
        """Chunk of the engine's CPU offload, where it was given one; else 0."""
        transfer = self.engine.get("engine_args", {}).get("kv_transfer_config") or {}
        return int(transfer.get("kv_connector_extra_config", {}).get("block_size", 0))

    @property
    def pulled_unit_tokens(self) -> int:
        """Tokens of the engine's block where its events were pulled, which don't tell it; else 0. Raises RecordingError."""
        if not self.engine.get("pulled"):
            return 0
        unit = self.engine.get("tokens_per_block")
        if type(unit) is not int or unit <= 0:
            raise RecordingError(
                f"{self.name}: tokens_per_block of engine.json is {unit!r:.40}; expected the size of the engine's blocks, "
                "which events that were pulled don't tell"
            )
        return unit

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """What the engine says of its layers. (): nothing, or of some a kind that we don't know."""
        specs = [_layer_group(group["spec"]) for group in self.engine.get("kv_cache_groups", ())]
        return tuple(spec for spec in specs if spec is not None) if None not in specs else ()


_KINDS = {
    "FullAttentionSpec": "full_attention",
    "SlidingWindowSpec": "sliding_window",
    "MambaSpec": "mamba",
}

NEXT_TOKEN = 0
"""Stands for the token of a prompt that an engine computes whatever it holds; a bare cache is asked without it."""


def read(folder: Path) -> Recording:
    """Reads one folder. Raises RecordingError."""
    try:
        return _read(folder)
    except RecordingError:
        raise
    # What a row or engine.json may lack, or hold of another kind, in too many places to name each.
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RecordingError(
            f"{folder}: a row is not what docs/recordings.md says: {error!r:.200}"
        ) from error


def _read(folder: Path) -> Recording:
    messages, ranks = read_events(folder)
    facts = _facts(folder)
    path = folder / "requests.jsonl"
    rows = list(_rows(path)) if path.is_file() else []
    if any("op" in row for _, row in rows):
        # Only SGLang's cache was ever recorded by itself.
        requests, controls = _operations(path, rows, messages)
        adapter = "sglang"
    else:
        requests, controls = _requests(path, rows)
        adapter = _adapter(facts) or "vllm"
    return Recording(folder.name, ranks, messages, requests, controls, facts, adapter)


def message_line(message: Message, source: str) -> str:
    """A line of events.jsonl. `source`: where the message's rank was received."""
    frames = [base64.b64encode(frame).decode() for frame in message.frames]
    return json.dumps({"t": message.time, "src": source, "frames": frames}) + "\n"


def _facts(folder: Path) -> dict[str, Any]:
    path = folder / "engine.json"
    return _object(path.read_text(), path, 1) if path.is_file() else {}


def _adapter(facts: Mapping[str, Any]) -> str | None:
    return next((name for name in ADAPTERS if name in facts), None)


def read_events(folder: Path) -> tuple[tuple[Message, ...], int]:
    """Reads what the engine published, and counts its ranks. Raises RecordingError."""
    path = folder / "events.jsonl"
    if not path.is_file():
        raise RecordingError(f"{folder}: no events.jsonl; expected the folder of a recorded stream")
    rows = list(_rows(path))
    sources = sorted({_text(row, "src", path, line) for line, row in rows}, key=_port)
    ranks = {source: rank for rank, source in enumerate(sources)}
    messages = tuple(
        Message(_number(row, "t", path, line), ranks[row["src"]], _frames(row, path, line))
        for line, row in rows
    )
    return messages, max(1, len(ranks))


def read_messages(path: Path, rank: int = 0) -> tuple[Message, ...]:
    """Reads one file of messages, such as the answer of a replay socket. Raises RecordingError."""
    return tuple(
        Message(_number(row, "t", path, line), rank, _frames(row, path, line))
        for line, row in _rows(path)
    )


def _layer_group(spec: str) -> LayerGroup | None:
    """From vLLM's own words, such as "SlidingWindowSpec(block_size=32, sliding_window=64, ...)"."""
    kind = _KINDS.get(spec.partition("(")[0])
    sizes = dict(re.findall(r"(block_size|sliding_window)=(\d+)", spec))
    if kind is None or "block_size" not in sizes:
        return None
    # A full-attention group may hold window layers, which then keep everything.
    window = int(sizes.get("sliding_window", 0)) if kind == "sliding_window" else 0
    return LayerGroup(kind, int(sizes["block_size"]), window)


def _requests(
    path: Path, rows: Sequence[tuple[int, dict[str, Any]]]
) -> tuple[tuple[Request, ...], tuple[Control, ...]]:
    requests: list[Request] = []
    controls: list[Control] = []
    starts = sorted(_number(row, "t", path, line) for line, row in rows)
    for _, row in rows:
        time = float(row["t"])
        if "control" in row:
            controls.append(Control(time, str(row["control"]), _succeeded(row)))
        elif "cached_tokens" in row:
            # A recording without end times was sequential: each request ended before the next began.
            following = next((start for start in starts if start > time), time + 1.0)
            requests.append(_request(len(requests), row, float(row.get("t_done", following))))
    return tuple(requests), tuple(controls)


def _operations(
    path: Path, rows: Sequence[tuple[int, dict[str, Any]]], messages: Sequence[Message]
) -> tuple[tuple[Request, ...], tuple[Control, ...]]:
    """Operations on a bare cache: what a request matched there is what an engine would have reported.

    They have an order and no times: each that published (`n_events`) did so in the next message, the rest lie between.
    """
    publish = [int(row.get("n_events") or 0) > 0 for _, row in rows]
    before = len(messages) - sum(publish)
    if before < 0:
        raise RecordingError(
            f"{path}: {sum(publish)} operations published, and there are {len(messages)} messages"
        )
    # What was published before the first operation.
    start = messages[before - 1].time if before else messages[0].time - 1.0 if messages else 0.0
    told = iter(messages[before:])
    requests: list[Request] = []
    controls: list[Control] = []
    group: list[tuple[int, dict[str, Any]]] = []
    for (line, row), published in zip(rows, publish, strict=True):
        group.append((line, row))
        if published:
            end = next(told).time
            _lay(path, group, start, end, requests, controls)
            group, start = [], end
    _lay(path, group, start, start + 1.0, requests, controls)
    return tuple(requests), tuple(controls)


def _lay(
    path: Path,
    group: Sequence[tuple[int, dict[str, Any]]],
    start: float,
    end: float,
    requests: list[Request],
    controls: list[Control],
) -> None:
    """Spreads operations over a span of time; the last ends with it."""
    step = (end - start) / (2 * max(1, len(group)))
    for at, (line, row) in enumerate(group):
        begun = start + (2 * at + 1) * step
        match row["op"]:
            case "request":
                request = _matched(path, line, row, len(requests))
                requests.append(replace(request, start=begun, end=begun + step))
            case "reset":
                controls.append(Control(begun, "reset", True))
            case "none" | "evict":
                pass  # nothing happens, or the events tell
            case other:
                raise RecordingError(
                    f"{path}:{line}: op is {other!r}, expected none, request, evict or reset"
                )


def _matched(path: Path, line: int, row: Mapping[str, Any], number: int) -> Request:
    tokens, matched = row.get("tokens"), row.get("matched")
    if not isinstance(tokens, list) or not isinstance(matched, int):
        raise RecordingError(f"{path}:{line}: expected a list of tokens and what of it matched")
    return Request(
        number=number,
        label=str(row.get("label", "")),
        start=0.0,
        end=0.0,
        prompts=((*tokens, NEXT_TOKEN),),
        prompt_tokens=len(tokens) + 1,
        cached_tokens=matched,
        # An extra_key keeps prompts apart as an adapter does, and a router is told of both alike.
        adapter=row.get("extra_key") or "",
        cache_salt=row.get("cache_salt") or "",
    )


def _request(number: int, row: Mapping[str, Any], end: float) -> Request:
    asked = row["request"]
    prompt = row.get("prompt_token_ids") or asked["prompt"]
    prompts = (
        tuple(map(tuple, prompt)) if prompt and isinstance(prompt[0], list) else (tuple(prompt),)
    )
    headers = {key.lower(): value for key, value in (row.get("headers") or {}).items()}
    rank = headers.get("x-data-parallel-rank")
    return Request(
        number=number,
        label=str(row.get("label", "")),
        start=float(row["t"]),
        end=end,
        prompts=prompts,
        prompt_tokens=int(row["prompt_tokens"]),
        cached_tokens=int(row["cached_tokens"]),
        adapter=asked.get("lora") or "",
        cache_salt=asked.get("cache_salt") or "",
        prompt_logprobs=asked.get("prompt_logprobs") is not None,
        rank=None if rank is None else int(rank),
    )


def _succeeded(row: Mapping[str, Any]) -> bool:
    answer = row.get("resp")
    if isinstance(answer, Mapping):
        return bool(answer.get("success"))
    return answer in (None, "True", True)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(errors="surrogateescape") as lines:
        for line, text in zip(itertools.count(1), lines, strict=False):
            yield line, _object(text, path, line)


def _object(text: str, path: Path, line: int) -> dict[str, Any]:
    try:
        row = json.loads(text)
    # Python's reader gives up on depth, and on numbers of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{path}:{line}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RecordingError(f"{path}:{line}: {type(row).__name__}, expected an object")
    return row


def _number(row: Mapping[str, Any], key: str, path: Path, line: int) -> float:
    value = row.get(key)
    if not isinstance(value, int | float):
        raise RecordingError(f"{path}:{line}: {key!r} is {value!r}, expected a number")
    return float(value)


def _text(row: Mapping[str, Any], key: str, path: Path, line: int) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise RecordingError(f"{path}:{line}: {key!r} is {value!r}, expected a string")
    return value


def _frames(row: Mapping[str, Any], path: Path, line: int) -> tuple[bytes, ...]:
    frames = row.get("frames")
    if not isinstance(frames, list):
        raise RecordingError(
            f"{path}:{line}: 'frames' is {frames!r}, expected a list of base64 strings"
        )
    try:
        return tuple(base64.b64decode(frame, validate=True) for frame in frames)
    except (binascii.Error, TypeError, ValueError) as error:
        raise RecordingError(f"{path}:{line}: a frame is not base64: {error}") from error


def _port(source: str) -> tuple[int, str]:
    digits = source.rpartition(":")[2]
    return (int(digits) if digits.isdigit() else 0, source)
