"""Ends a command that has started processes: whatever asks it to end, it ends them first."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Runs it. Interrupted, it is cancelled and the command exits as shells expect: 128 and the signal's number.

    A second signal changes nothing: it would cut the cleaning up short.
    """
    caught: list[signal.Signals] = []

    async def main() -> T:
        task = asyncio.ensure_future(work)

        def interrupt(number: signal.Signals) -> None:
            if not caught:
                caught.append(number)
                task.cancel()

        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, interrupt, number)
        return await task

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise SystemExit(128 + caught[0] if caught else 1) from None
