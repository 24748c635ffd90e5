"""An emulated engine's own account, read again: what it holds now, and what it did for each request.

The independent side of every check here: tokens and counts as the engine wrote them down, no hash of the project's.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

UNROUTED = "flood-"
"""How the ids of requests begin that no scheduler knows of."""

Name = int | str
"""An engine's name of a block: it stands for the whole prefix that ends with the block."""


@dataclass(frozen=True)
class Served:
    """A request as its engine saw it. Tokens."""

    rank: int
    prompt: int
    cached: int
    outcome: str
    """"finished" or "aborted"."""


@dataclass
class Account:
    """The account in a file that grows. A new life of the engine goes on in the same file and holds nothing."""

    path: Path
    served: dict[str, Served] = field(default_factory=dict)
    """By request id, all lives."""
    scheduled: set[str] = field(default_factory=set)
    """Ids of requests that were begun, all lives."""
    published: dict[int, int] = field(default_factory=dict)
    """Sequence number of each rank's last batch in this life."""
    removals: Counter[int] = field(default_factory=Counter)
    """Blocks removed by rank, all lives."""
    lives: int = 0
    resets: int = 0
    last: float = 0.0
    """The engine's wall clock at its last line."""
    _block: int = 16
    _copies: dict[int, Counter[Name]] = field(default_factory=lambda: defaultdict(Counter))
    _children: dict[tuple[Name | None, tuple[int, ...]], Name] = field(default_factory=dict)
    _read: int = 0

    def refresh(self) -> Account:
        """Takes in the lines that were added."""
        with self.path.open("rb") as lines:
            lines.seek(self._read)
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # still being written
                self._read += len(line)
                self._take(json.loads(line))
        return self

    def reusable(self, rank: int, prompt: Sequence[int]) -> int:
        """Tokens of the prompt that the rank would reuse now: it computes at least the last one."""
        copies = self._copies[rank]
        parent: Name | None = None
        reused = 0
        while reused + self._block < len(prompt):
            block = tuple(prompt[reused : reused + self._block])
            name = self._children.get((parent, block))
            if name is None or not copies[name]:
                break
            parent = name
            reused += self._block
        return reused

    def _take(self, line: dict[str, Any]) -> None:
        self.last = line["t"]
        if "seq" in line:
            self.published[line["rank"]] = line["seq"]
        match line["what"]:
            case "started":
                self.lives += 1
                self._block = line["block_size"]
                self.published.clear()
                self._copies.clear()
            case "stored":
                self._stored(line)
            case "removed":
                self.removals[line["rank"]] += len(line["hashes"])
                self._copies[line["rank"]].subtract(line["hashes"])
            case "cleared":
                self._copies[line["rank"]].clear()
            case "reset":
                self.resets += 1
                # The cache is empty from here on; the batch that says so comes with the next step.
                if line["done"]:
                    self._copies[line["rank"]].clear()
            case "scheduled":
                self.scheduled.add(line["id"])
            case "finished" if not line["id"].startswith(UNROUTED):
                assert line["id"] not in self.served, f"{line['id']} ended twice"
                self.served[line["id"]] = Served(
                    line["rank"], line["prompt_tokens"], line["cached_tokens"], line["outcome"]
                )

    def _stored(self, line: dict[str, Any]) -> None:
        parent: Name | None = line["parent"]
        for index, name in enumerate(line["hashes"]):
            first = index * self._block
            self._children[parent, tuple(line["tokens"][first : first + self._block])] = name
            self._copies[line["rank"]][name] += 1
            parent = name
