"""What really happened, as lines of JSON: the account by which predictions are audited.

A line holds `what` and `t`, seconds since the epoch, and by `what`:

- `started`: ranks, blocks, block_size, model;
- `scheduled`: a prompt's first admission: id, rank, prompt_tokens, cached_tokens (both tiers), host_tokens;
- `finished`: its end: the same and output_tokens, preemptions, outcome (finished or aborted), and the times arrived,
  scheduled and first_token, null where it did not come to that;
- `stored`, `removed`: rank, seq of the batch, medium, number of the group of layers, hashes as published; stored ones with
  parent, what the group keeps (`kind`), and tokens if asked;
- `cleared`: rank, seq;
- `dropped`: rank, seq of a batch that a fault kept off the wire, and whether it can be replayed;
- `reset`: rank, done.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from .events import Cleared, Event, Removed, Stored

log = logging.getLogger(__name__)


class Truth:
    """The file. A line that can't be written is counted and lost: the engine goes on."""

    def __init__(
        self, path: Path | None, *, tokens: bool = False, name: Callable[[bytes], int | bytes]
    ) -> None:
        """`name`: a hash as published. Raises OSError where the file can't be opened."""
        self.lost = 0
        self._tokens = tokens
        self._name = name
        # Line buffered: a killed engine leaves all that it told.
        self._file: TextIO | None = None if path is None else path.open("a", buffering=1)

    def close(self) -> None:
        """Ends the file."""
        if self._file is not None:
            with contextlib.suppress(
                OSError
            ):  # what it still held was counted when it could not be written
                self._file.close()
            self._file = None

    def write(self, what: str, time: float, **fields: Any) -> None:
        """Adds a line."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"what": what, "t": time, **fields}) + "\n")
        except OSError as error:
            if not self.lost:
                log.error("truth lost", extra={"reason": error.strerror})
            self.lost += 1

    def write_batch(self, events: Iterable[Event], time: float, rank: int, seq: int) -> None:
        """Adds a line for each event of a batch."""
        if self._file is None:
            return
        for event in events:
            match event:
                case Stored():
                    fields: dict[str, Any] = {
                        "medium": event.medium,
                        "group": event.group,
                        "kind": event.kind,
                        "hashes": self._named(event.hashes),
                        "parent": None if event.parent is None else self._named([event.parent])[0],
                    }
                    if self._tokens:
                        fields["tokens"] = list(event.tokens)
                    self.write("stored", time, rank=rank, seq=seq, **fields)
                case Removed():
                    fields = {
                        "medium": event.medium,
                        "group": event.group,
                        "hashes": self._named(event.hashes),
                    }
                    self.write("removed", time, rank=rank, seq=seq, **fields)
                case Cleared():
                    self.write("cleared", time, rank=rank, seq=seq)

    def _named(self, hashes: Iterable[bytes]) -> list[int | str]:
        names = map(self._name, hashes)
        return [name.hex() if isinstance(name, bytes) else name for name in names]
