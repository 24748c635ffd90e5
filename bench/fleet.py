"""What the benchmarks of processes share: servers, prompts, and relays that only exist as streams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from servingfleet_core import HASH_VERSION, block_hashes, namespace_root
from servingfleet_protos.v1 import common_pb2, stream_pb2
from servingfleet_protos.v1.stream_pb2 import Delta, RelayMessage
from servingfleet_protos.v1.stream_pb2_grpc import RelayIntakeStub
from servingfleet_sim.processes import Process

MODEL = "model"
BLOCK_TOKENS = 16
HASH_BYTES = 8
TOKEN_BYTES = 4
ROOT = namespace_root(MODEL)
SCHEDULER = ("-m", "servingfleet_scheduler", "--listen", "127.0.0.1:0", "--log-level", "info")
ECHO = (str(Path(__file__).parent / "echo.py"),)
PATIENCE_S = 60.0


class StreamEnded(RuntimeError):
    """The server ended a relay's stream: what is measured after that means nothing."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server process."""

    name: str
    target: str
    pid: int

    def cpu_s(self) -> float:
        """Seconds of processor time it has used, all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def serving(name: str, arguments: Sequence[str]) -> AsyncIterator[Server]:
    """A server process for the length of the block. Raises ProcessFailed if it does not come up."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            child = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, stdout=sink, stderr=sink
            )
        process = Process(child, name, log)
        try:
            port = (await process.event("listening"))["port"]
            yield Server(name, f"127.0.0.1:{port}", child.pid)
        finally:
            await process.stop()


def prompt_tokens(rng: random.Random, blocks: int) -> bytes:
    """A prompt of whole blocks and one token, packed."""
    return rng.randbytes((blocks * BLOCK_TOKENS + 1) * TOKEN_BYTES)


def hashes_of(tokens: bytes) -> bytes:
    """Packed canonical hashes."""
    return block_hashes(ROOT, tokens, BLOCK_TOKENS)


def hello(replica: str) -> RelayMessage:
    """Of an engine with one rank and a GPU tier."""
    lane = stream_pb2.Lane(
        lane=0,
        tier=common_pb2.TIER_GPU,
        state_class=common_pb2.STATE_CLASS_ATTENTION,
        unit_tokens=BLOCK_TOKENS,
    )
    return RelayMessage(
        hello=stream_pb2.Hello(
            protocol_version=1,
            replica=replica,
            stream_id="bench",
            model=MODEL,
            endpoint=f"{replica}:8000",
            block_tokens=BLOCK_TOKENS,
            hash_version=HASH_VERSION,
            profile=stream_pb2.Profile(
                lanes=[lane], adapters_separated=True, salts_separated=True, engine="vllm"
            ),
            ranks=[
                stream_pb2.RankState(
                    rank=0, incarnation=1, state=common_pb2.STREAM_STATE_LIVE, engine_seq=0
                )
            ],
        )
    )


def holds(hashes: bytes, blocks_each: int, op: Delta.Op.ValueType = Delta.OP_HOLD) -> list[Delta]:
    """The deltas of a prompt, some blocks in each."""
    size = blocks_each * HASH_BYTES
    deltas = []
    for at in range(0, len(hashes), size):
        before = hashes[at - HASH_BYTES : at]
        parent = int.from_bytes(before, "little") if op == Delta.OP_HOLD else 0
        part = hashes[at : at + size]
        confidence = Delta.CONFIDENCE_CONFIRMED
        deltas.append(Delta(rank=0, op=op, confidence=confidence, parent=parent, hashes=part))
    return deltas


class SyntheticRelay:
    """One stream to a server, which speaks for an engine that is only a list of deltas."""

    def __init__(self, channel: grpc.aio.Channel, replica: str) -> None:
        self._replica = replica
        self._call = RelayIntakeStub(channel).Stream()
        self._seq = 0
        self._acked = 0
        self._window = 0

    async def open(self, held: Iterable[Delta]) -> None:
        """Says hello, waits for the grant, and sends a snapshot. Returns when it is acknowledged."""
        await self._call.write(hello(self._replica))
        granted = False
        while not granted:
            granted = await self._read() == "grant_snapshot"
        begin = stream_pb2.SnapshotBegin(rank=0, incarnation=1)
        end = stream_pb2.SnapshotEnd(rank=0)
        await self.send(
            [
                RelayMessage(snapshot_begin=begin),
                *(RelayMessage(delta=delta) for delta in held),
                RelayMessage(snapshot_end=end),
            ]
        )

    async def send(self, messages: Sequence[RelayMessage]) -> None:
        """Sends sequenced messages and returns when all are acknowledged."""
        todo = deque(messages)
        while todo or self._acked < self._seq:
            while todo and self._seq - self._acked < self._window:
                self._seq += 1
                message = todo.popleft()
                message.seq = self._seq
                await self._call.write(message)
            await self._read()

    async def drain(self) -> None:
        """Reads and forgets, until the stream is closed."""
        with contextlib.suppress(StreamEnded, grpc.aio.AioRpcError, asyncio.CancelledError):
            while True:
                await self._call.read()

    def close(self) -> None:
        """Ends the stream."""
        self._call.cancel()

    async def _read(self) -> str:
        answer = await asyncio.wait_for(self._call.read(), PATIENCE_S)
        if not isinstance(answer, stream_pb2.SchedulerMessage):
            raise StreamEnded(f"the stream of {self._replica}: {await self._call.details()}")
        body = answer.WhichOneof("body") or ""
        if body == "welcome":
            self._window = answer.welcome.window
        elif body == "ack":
            self._acked = answer.ack.seq
        return body
