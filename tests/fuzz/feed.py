"""Reads a fuzzer's bytes as choices: every string of bytes is a valid script, and an empty one chooses zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

MAX_DEPTH = 4
NUMBERS = (0, 1, 2, 16, 2**20, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63))
"""Where engines and languages disagree."""


class Feed:
    """Takes from the front. True while there is more."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, size: int) -> bytes:
        """At most `size` bytes."""
        taken = self._data[self._at : self._at + size]
        self._at += len(taken)
        return taken

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._data))

    def byte(self) -> int:
        """0 to 255."""
        return int.from_bytes(self.take(1))

    def below(self, end: int) -> int:
        """0 to `end` - 1; `end` is at most 256."""
        return self.byte() % end

    def flag(self) -> bool:
        """Odd or even."""
        return self.byte() % 2 == 1

    def pick(self, values: Sequence[T]) -> T:
        """One of them."""
        return values[self.below(len(values))]

    def blob(self) -> bytes:
        """Bytes with a length of two bytes before them."""
        return self.take(int.from_bytes(self.take(2), "little"))

    def number(self) -> int:
        """A small one, a notorious one, or any of 64 bits with sign."""
        kind = self.byte()
        if kind < 0xC0:
            return kind
        if kind < 0xF0:
            return NUMBERS[kind % len(NUMBERS)]
        return int.from_bytes(self.take(8), "little", signed=True)

    def text(self) -> str:
        """Short, of any bytes."""
        return self.take(self.below(16)).decode(errors="surrogateescape")

    def value(self, depth: int = 0) -> Any:
        """Anything that msgpack can say."""
        match self.below(9 if depth < MAX_DEPTH else 6):
            case 0:
                return None
            case 1:
                return self.number()
            case 2:
                return self.flag()
            case 3:
                return self.take(self.pick((32, 8, 31, 0)))
            case 4:
                return self.text()
            case 5:
                return float(self.number())
            case 6:
                return {self.text(): self.value(depth + 1) for _ in range(self.below(4))}
            case _:
                return [self.value(depth + 1) for _ in range(self.below(6))]
