"""What TensorRT-LLM keeps of its events until somebody asks: once, and not more than it has room for."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any


class PullBuffer:
    """Entries of all ranks in the order of their arrival. Takes the place of event sockets."""

    def __init__(self, ranks: int, most: int) -> None:
        """`most`: entries kept; then the oldest go, as shows in the numbers of those that follow."""
        self._entries: deque[dict[str, Any]] = deque(maxlen=most)
        self._next = [0] * ranks

    def start(self) -> None:
        """A new engine."""

    async def stop(self) -> None:
        """The engine's end."""

    async def send(
        self, rank: int, seq: int, frames: Sequence[bytes], *, live: bool = True, keep: bool = True
    ) -> None:
        """Numbers the entries of a batch, by rank, and keeps them. Not `live`: they are lost, numbers and all."""
        for entry in json.loads(frames[-1]):
            number, self._next[rank] = self._next[rank], self._next[rank] + 1
            if live:
                self._entries.append({"event_id": number, **entry})

    def drain(self) -> list[dict[str, Any]]:
        """What has come since the last call: nobody gets it again."""
        taken = list(self._entries)
        self._entries.clear()
        return taken
