"""A stretch of network that can be cut: TCP connections pass through until someone ends them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.integration.fleet import PATIENCE_S

CHUNK = 65_536


class Cable:
    """Carries connections to a target, and loses what is under way when it is cut."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._ends: set[asyncio.StreamWriter] = set()
        self._carried = 0
        self._changed = asyncio.Condition()
        self.address = ""

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        ends = {writer, back}
        self._ends |= ends
        async with self._changed:
            self._carried += 1
            self._changed.notify_all()
        try:
            await asyncio.gather(_pump(reader, back), _pump(there, writer))
        finally:
            self._ends -= ends
            for end in ends:
                end.transport.abort()

    async def connected(self, count: int) -> None:
        """Waits for the connection of that number, from 1. Raises TimeoutError."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: self._carried >= count)

    def cut(self) -> int:
        """Ends every connection at once, without a goodbye. Returns how many there were."""
        for end in self._ends:
            end.transport.abort()
        return len(self._ends) // 2


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await source.read(CHUNK):
            sink.write(chunk)
            await sink.drain()
    sink.transport.abort()


@contextlib.asynccontextmanager
async def cable_to(target: str) -> AsyncIterator[Cable]:
    cable = Cable(target)
    server = await asyncio.start_server(cable.carry, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    cable.address = f"{host}:{port}"
    async with server:
        yield cable
        cable.cut()
