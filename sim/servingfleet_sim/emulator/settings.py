"""What one emulated engine is told at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .events import Form, generation
from .speed import GPUS, Speed
from .steps import Limits


@dataclass(frozen=True)
class Settings:
    """Settings of one engine; its ranks are alike."""

    limits: Limits = field(default_factory=Limits)
    speed: Speed = GPUS["h100"]
    ranks: int = 1
    """Data-parallel ranks, each with its own caches, queue and event stream."""
    model: str = "emulated"
    """Name under which it is served."""
    adapters: Mapping[str, int] = field(default_factory=dict)
    """Names of LoRA adapters, served like models, and their numbers."""
    vocabulary: int = 32_000
    """Tokens of the tokenizer, and of what the model answers."""
    engine: Literal["vllm", "sglang", "trtllm"] = "vllm"
    """Whose caches, events and API it has."""
    engine_version: str = "0.33.0"
    """The release that it says it is; its event format follows."""
    pairs: bool = False
    """SGLang drafts with EAGLE: its cache is keyed by pairs of tokens."""
    form: Form = field(default_factory=lambda: generation("0.33.0"))
    topic: str = "kv-events"
    buffer_steps: int = 10_000
    """Batches kept for replay: vLLM's default. TensorRT-LLM: events kept until they are pulled."""
    host: str = "127.0.0.1"
    """Address to bind, for HTTP and events."""
    port: int = 8000
    """0: a free one."""
    events_port: int = 5557
    """Of rank 0; rank r uses the r-th after it. 0: free ones."""
    events_connect: bool = False
    """Publish to a relay that binds the event ports on loopback; replays are served on loopback as well."""
    replay_port: int | None = 5657
    """As events_port; None: no replay."""
    log: Path | None = None
    """File for the truth, see `truth`; None: none is kept."""
    log_tokens: bool = False
    """Whether the truth holds the tokens of stored blocks."""
