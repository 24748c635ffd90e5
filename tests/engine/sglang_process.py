"""SGLang's own cache and publisher as a process, asked as an engine is (`sglang_cache.py`)."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .engine import ANSWER_PATIENCE_S, START_PATIENCE_S, Answer, EngineFailed, Ports, free_ports
from .environment import Environment

SCRIPT = Path(__file__).with_name("sglang_cache.py")


@dataclass
class SglangCache:
    """One cache. What it answers to a prompt is made up; what it reuses is not."""

    ports: Ports
    log: Path
    child: asyncio.subprocess.Process
    outputs: random.Random = field(default_factory=lambda: random.Random(0))
    core: str = ""
    """The tree that it has chosen: SGLang has one in Rust and one in Python."""
    evicted: int = 0
    """Tokens so far."""
    _sequence: int | None = None

    async def complete(
        self,
        prompt: Sequence[int],
        *,
        output: int = 1,
        headers: Mapping[str, str] | None = None,
        salt: str = "",
        prompt_logprobs: bool = False,
    ) -> Answer:
        """Looks for a prompt, and puts it with its answer into the cache. Raises EngineFailed."""
        answered = [self.outputs.randrange(10, 1000) for _ in range(output)]
        told = await self.tell({"prompt": list(prompt), "output": answered, "salt": salt})
        self.evicted += told["evicted"]
        return Answer(len(prompt), told["cached"], answered, "")

    async def reset(self) -> None:
        """Empties it, which it tells at once. Raises EngineFailed."""
        await self.tell({"reset": True})

    async def last_sequence(self, rank: int = 0) -> int | None:
        """Number of the last batch that it has published."""
        return self._sequence

    async def tell(self, line: Mapping[str, Any], patience_s: float = ANSWER_PATIENCE_S) -> Any:
        """Sends a line and returns the answer. Raises EngineFailed."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(line).encode() + b"\n")
        try:
            async with asyncio.timeout(patience_s):
                answer = await self.child.stdout.readline()
        except TimeoutError:
            answer = b""
        if not answer:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
            raise EngineFailed(f"SGLang's cache does not answer. The end of {self.log}:\n{tail}")
        told = json.loads(answer)
        self._sequence = told["seq"]
        return told


@asynccontextmanager
async def cache_running(
    environment: Environment, packages: Path, page: int, capacity: int, *, pairs: bool
) -> AsyncIterator[SglangCache]:
    """A cache of so many tokens for the length of the block. Raises EngineFailed."""
    ports = free_ports(1)
    log = environment.logs / f"sglang-{ports.http}.log"
    with log.open("wb") as sink:
        child = await asyncio.create_subprocess_exec(
            *(str(environment.python), "-P", str(SCRIPT)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=sink,
            env={**os.environ, "PYTHONPATH": str(packages), "CUDA_VISIBLE_DEVICES": ""},
        )
    cache = SglangCache(ports, log, child)
    settings = {"page": page, "capacity": capacity, "pairs": pairs}
    sockets = {"events_port": ports.events, "replay_port": ports.replay}
    try:
        started = await cache.tell(settings | sockets, START_PATIENCE_S)
        cache.core = started["core"]
        yield cache
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
