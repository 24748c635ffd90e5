"""The recorded engine's sockets."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

from servingfleet_sim.recordings import Message
from servingfleet_sim.wire import END, RecordedEngine

PATIENCE_S = 10.0


def message(seq: int, rank: int = 0) -> Message:
    return Message(0.0, rank, (b"topic", seq.to_bytes(8, "big"), b"payload"))


async def replay(engine: RecordedEngine, rank: int, *request: bytes) -> list[int]:
    """The sequence numbers that the replay socket of a rank answers with, up to its end marker."""
    context = zmq.asyncio.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{engine.replay_port + rank}")
        await dealer.send_multipart(request)
        seqs: list[int] = []
        while True:
            empty, _, seq, _ = await asyncio.wait_for(dealer.recv_multipart(), PATIENCE_S)
            assert empty == b""
            if seq == END:
                return seqs
            seqs.append(int.from_bytes(seq, "big"))
    finally:
        context.destroy(linger=0)


async def test_each_rank_replays_its_own_messages_from_where_it_is_asked() -> None:
    async with RecordedEngine(2) as engine:
        for seq in range(4):
            await engine.publish(message(seq))
        await engine.publish(message(7, rank=1))
        assert await replay(engine, 0, b"", (2).to_bytes(8, "big")) == [2, 3]
        assert await replay(engine, 1, b"", bytes(8)) == [7]


async def test_an_engine_started_again_has_published_nothing() -> None:
    async with RecordedEngine(1) as engine:
        await engine.publish(message(0))
        await engine.stop()
        engine.start()
        assert await replay(engine, 0, b"", bytes(8)) == []
