"""Starts the project's own processes and finds the ports that they chose."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from . import bound

START_PATIENCE_S = 30.0
STOP_PATIENCE_S = 10.0


class ProcessFailed(RuntimeError):
    """A process ended, or did not come up: the text holds the last lines that it logged."""


class Process:
    """A child process that logs JSON lines to stderr, kept in `log`."""

    def __init__(self, child: asyncio.subprocess.Process, name: str, log: Path) -> None:
        self.child = child
        self.name = name
        self.log = log

    def lines(self) -> list[dict[str, Any]]:
        """What it has logged so far; lines that are not JSON under the key `text`."""
        rows = []
        for line in self.log.read_text(errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = {"text": line}
            rows.append(row if isinstance(row, dict) else {"text": line})
        return rows

    async def event(self, name: str) -> dict[str, Any]:
        """Waits for the first line of a constant event. Raises ProcessFailed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_PATIENCE_S):
                while self.child.returncode is None:
                    for line in self.lines():
                        if line.get("event") == name:
                            return line
                    await asyncio.sleep(0.01)
        status = self.child.returncode
        state = "is silent" if status is None else f"ended with status {status}"
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
        raise ProcessFailed(f"{self.name} {state}; expected the event {name!r}. Its log:\n{tail}")

    async def stop(self) -> int:
        """Asks it to end, and kills it if it does not. Returns its status."""
        if self.child.returncode is None:
            # Not by asyncio's own method, which may reap a child that has just ended and lose its status.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(self.child.wait(), STOP_PATIENCE_S)
            except TimeoutError:
                self.child.kill()
        return await self.child.wait()


@contextlib.asynccontextmanager
async def running(module: str, arguments: Sequence[str], log: Path) -> AsyncIterator[Process]:
    """A process of this project for the length of the block. It dies with this one, too, should that be killed."""
    with log.open("wb") as sink:
        child = await asyncio.create_subprocess_exec(
            *bound.command(module), *arguments, stdout=sink, stderr=sink
        )
    process = Process(child, f"{module} {' '.join(arguments)}", log)
    try:
        yield process
    finally:
        await process.stop()
