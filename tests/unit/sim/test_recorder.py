from __future__ import annotations

import asyncio
import contextlib
import time

import zmq
import zmq.asyncio

from servingfleet_relay.settings import RankSockets
from servingfleet_sim.recorder import Recorder, wall_clock


async def test_an_engine_that_others_keep_busy_is_not_waited_for_without_end() -> None:
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    recorder = Recorder(
        [RankSockets(0, f"tcp://127.0.0.1:{port}", None)], lambda message: None, wall_clock()
    )

    async def busy() -> None:
        number = 0
        while True:
            await publisher.send_multipart([b"", number.to_bytes(8, "big"), b"\x90"])
            number += 1
            await asyncio.sleep(0.01)

    async def work() -> None:
        await recorder.quiet(2.0, at_most_s=0.5)

    other = asyncio.create_task(busy())
    try:
        began = time.monotonic()
        async with asyncio.timeout(20.0):
            await recorder.during(work, 10.0)
    finally:
        other.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await other
        context.destroy(linger=0)
    assert recorder.messages > 0
    assert time.monotonic() - began >= 2.0
