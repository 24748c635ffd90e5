"""A real vLLM server as a process of its own, on CPU, and what a client, an operator and a subscriber ask of it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgpack  # type: ignore[import-untyped]
import zmq
import zmq.asyncio

from .environment import Environment

MODEL = "tiny"
"""As clients name it."""
BLOCK = 32
"""Tokens. The CPU's attention takes multiples of 32 only."""
BLOCKS = 32
"""One of them is never used: the engine keeps it as its null block."""
START_PATIENCE_S = 300.0
ANSWER_PATIENCE_S = 60.0
REPLAY_PATIENCE_S = 10.0
_END = b"\xff" * 8

Message = dict[str, str]


class EngineFailed(RuntimeError):
    """The engine ended, does not come up, or does not answer: the text holds what it said last."""


@dataclass(frozen=True)
class Answer:
    """What the engine says that it did for one request."""

    prompt_tokens: int
    cached_tokens: int
    output: list[int]
    text: str


@dataclass(frozen=True)
class Ports:
    """Where it listens on the loopback. Rank r: events and replay on port + r."""

    http: int
    events: int
    replay: int


def free_ports(ranks: int) -> Ports:
    """Ports that are free now, below those that the system gives out by itself."""
    while True:
        first = random.randrange(20_000, 31_000)
        with ExitStack() as held, suppress(OSError):
            for port in range(first, first + 1 + 2 * ranks):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return Ports(first, first + 1, first + 1 + ranks)


@dataclass
class Engine:
    """One server. `start` after `kill` is a new life in the same place."""

    environment: Environment
    ports: Ports
    log: Path
    http: httpx.AsyncClient
    ranks: int = 1
    _child: asyncio.subprocess.Process | None = None
    _sequences: dict[int, int] = field(default_factory=dict)
    _copies: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    @property
    def base(self) -> str:
        """Base address of its HTTP server."""
        return f"http://127.0.0.1:{self.ports.http}"

    async def start(self) -> None:
        """Returns when it answers. Raises EngineFailed."""
        self._sequences.clear()
        self._copies.clear()
        with self.log.open("ab") as sink:
            self._child = await asyncio.create_subprocess_exec(
                *command(self.environment, self.ports, self.ranks),
                stdout=sink,
                stderr=sink,
                env=settings(),
                start_new_session=True,  # so that its workers end with it
            )
        try:
            async with asyncio.timeout(START_PATIENCE_S):
                while not await self._healthy():  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise self._failed(f"does not answer after {START_PATIENCE_S:.0f} s") from None

    async def kill(self) -> None:
        """Ends it at once, with all its workers; nothing of its state is written anywhere."""
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            await self._child.wait()
            self._child = None

    async def complete(
        self,
        prompt: Sequence[int],
        *,
        output: int = 1,
        headers: Mapping[str, str] | None = None,
        salt: str = "",
        prompt_logprobs: bool = False,
    ) -> Answer:
        """A completion of so many tokens. Raises EngineFailed."""
        asked: dict[str, Any] = {"prompt": list(prompt), "return_token_ids": True}
        if salt:
            asked["cache_salt"] = salt
        if prompt_logprobs:
            asked["prompt_logprobs"] = 1
        return await self._generate("/v1/completions", asked, output, headers)

    async def chat(self, messages: Sequence[Message], *, output: int = 1) -> Answer:
        """The assistant's next message, of so many tokens. Raises EngineFailed."""
        return await self._generate("/v1/chat/completions", {"messages": list(messages)}, output)

    async def tokens(self, messages: Sequence[Message]) -> list[int]:
        """The prompt that the engine makes of a chat. Raises EngineFailed."""
        answer = await self._post("/tokenize", {"model": MODEL, "messages": list(messages)})
        return [int(token) for token in answer.json()["tokens"]]

    async def reset(self) -> None:
        """Empties its cache. It announces that with its next step. Raises EngineFailed."""
        await self._post("/reset_prefix_cache", {})

    async def last_sequence(self, rank: int = 0) -> int | None:
        """Number of the last batch published, once nothing waits to be published. None: it published none.

        The publisher serves one replay, then takes one batch from its queue, and so on: when a second answer holds
        nothing that the first did not, the queue was empty in between.
        """
        context = zmq.asyncio.Context.instance()
        with context.socket(zmq.DEALER, socket_class=zmq.asyncio.Socket) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"tcp://127.0.0.1:{self.ports.replay + rank}")
            await self._replay(dealer, rank)
            while await self._replay(dealer, rank):
                pass
        return self._sequences.get(rank)

    def most_copies(self, rank: int = 0) -> int:
        """In how many places the block is held that is held in most, by all that `last_sequence` has seen."""
        return max(self._copies[rank].values(), default=0)

    async def _replay(self, dealer: zmq.asyncio.Socket, rank: int) -> bool:
        """Asks what came after the last known batch. Returns whether there was any."""
        start = self._sequences.get(rank, -1) + 1
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        found = False
        try:
            async with asyncio.timeout(REPLAY_PATIENCE_S):
                while (frames := await dealer.recv_multipart())[-2] != _END:
                    self._sequences[rank] = int.from_bytes(frames[-2], "big")
                    self._count(self._copies[rank], msgpack.unpackb(frames[-1])[1])
                    found = True
        except TimeoutError:
            raise self._failed(f"rank {rank} answers no replay from {start}") from None
        return found

    @staticmethod
    def _count(copies: Counter[int], events: list[dict[str, Any]]) -> None:
        for event in events:
            match event["type"]:
                case "BlockStored":
                    copies.update(event["block_hashes"])
                case "BlockRemoved":
                    copies.subtract(event["block_hashes"])
                case "AllBlocksCleared":
                    copies.clear()

    async def _generate(
        self,
        path: str,
        asked: dict[str, Any],
        output: int,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        asked |= {"model": MODEL, "max_tokens": output, "temperature": 0, "ignore_eos": True}
        body = (await self._post(path, asked, headers)).json()
        usage, choice = body["usage"], body["choices"][0]
        details = usage.get("prompt_tokens_details")
        if details is None:
            raise self._failed("reports no cached_tokens; expected --enable-prompt-tokens-details")
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return Answer(
            usage["prompt_tokens"],
            details.get("cached_tokens") or 0,
            choice.get("token_ids") or [],
            text or "",
        )

    async def _post(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        try:
            answer = await self.http.post(
                self.base + path, json=body, headers=headers, timeout=ANSWER_PATIENCE_S
            )
        except httpx.HTTPError as error:
            raise self._failed(f"{path}: {type(error).__name__} {error}") from error
        if answer.status_code != 200:
            raise self._failed(f"{path} answers {answer.status_code}: {answer.text[:300]}")
        return answer

    async def _healthy(self) -> bool:
        if self._child is None or self._child.returncode is not None:
            raise self._failed("ended while it started")
        try:
            return (await self.http.get(f"{self.base}/health", timeout=5.0)).status_code == 200
        except httpx.HTTPError:
            return False

    def _failed(self, what: str) -> EngineFailed:
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
        return EngineFailed(f"the engine {what}. The end of {self.log}:\n{tail}")


def command(environment: Environment, ports: Ports, ranks: int) -> list[str]:
    """The server's command line: the flags of docs/engines/vllm.md, and what a CPU needs."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports.events}",
        "replay_endpoint": f"tcp://*:{ports.replay}",
    }
    arguments = [
        str(environment.python),
        # Not the `vllm` command: it looks for the metadata of a distribution that is called vllm.
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(environment.model), "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(ports.http)),
        *("--load-format", "dummy", "--dtype", "float32", "--seed", "0", "--enforce-eager"),
        *("--max-model-len", "960", "--max-num-seqs", "4"),
        *("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS)),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--kv-events-config", json.dumps(events)),
    ]
    if ranks > 1:
        return [*arguments, "--data-parallel-size", str(ranks)]
    return [*arguments, "--distributed-executor-backend", "uni"]


def settings() -> dict[str, str]:
    """The server's environment."""
    return {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        # Its second process, and its next life, read what the first has compiled.
        "PYTHONDONTWRITEBYTECODE": "",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # The same block hashes in every life: the harder case for whoever has to notice a restart.
        "PYTHONHASHSEED": "0",
    }


@asynccontextmanager
async def engine_running(environment: Environment, ranks: int = 1) -> AsyncIterator[Engine]:
    """A server for the length of the block. Raises EngineFailed."""
    ports = free_ports(ranks)
    log = environment.logs / f"vllm-{ranks}-{ports.http}.log"
    async with httpx.AsyncClient(trust_env=False) as http:
        engine = Engine(environment, ports, log, http, ranks)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.kill()
