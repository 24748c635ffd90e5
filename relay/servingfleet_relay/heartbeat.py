"""The worker's side of the supervisor: shows that the event loop turns. Edge."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import resource

_MAIN_STACK_BYTES = 8 * 1024 * 1024


def prepare() -> None:
    """What a worker does first under a supervisor."""
    # A worker that hangs is aborted, and then says where it hung.
    faulthandler.enable()
    # Small stacks are for the threads; the first thread's grows on demand, and decoders may nest deeply.
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wished = _MAIN_STACK_BYTES
    resource.setrlimit(
        resource.RLIMIT_STACK,
        (wished if hard == resource.RLIM_INFINITY else min(wished, hard), hard),
    )


async def beat(descriptor: int, interval_s: float) -> None:
    """Writes until it is cancelled. Raises BrokenPipeError when nobody supervises any more."""
    os.set_blocking(descriptor, False)
    while True:
        with contextlib.suppress(BlockingIOError):
            os.write(descriptor, b".")
        await asyncio.sleep(interval_s)
