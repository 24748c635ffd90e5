"""Makes a port on the loopback of a network namespace reachable on ours: `forward.py NETNS PORT`.

The listener is opened first: a socket stays in the namespace where it was made, whatever the process does later.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import sys

CLONE_NEWNET = 0x40000000
CHUNK = 65536


def main() -> None:
    """Does not return."""
    netns, port = sys.argv[1], int(sys.argv[2])
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    enter(netns)
    asyncio.run(_serve(listener, port))


def enter(netns: str) -> None:
    """Moves this thread into a named network namespace. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{netns}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace.name)


async def _serve(listener: socket.socket, port: int) -> None:
    async def connected(near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        with contextlib.closing(back), contextlib.suppress(OSError):
            far, forth = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(forth):
                await asyncio.gather(_copy(near, forth), _copy(far, back))

    server = await asyncio.start_server(connected, sock=listener)
    await server.serve_forever()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(CHUNK):
            sink.write(data)
            await sink.drain()
    # Both directions end together: our clients do not half-close.
    sink.close()


if __name__ == "__main__":
    main()
