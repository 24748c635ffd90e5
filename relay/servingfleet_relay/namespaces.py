"""Notices that prompts of several namespaces share hashes, where an engine names no namespace.

Pure. An engine that announces a block once until it removes it announces a prompt's first block again only for a prompt
that it keeps apart: its hash then stands for two blocks, and a removal for either.
"""

from __future__ import annotations

from collections.abc import Iterable


class FirstBlocks:
    """The first blocks of prompts that one rank holds now."""

    def __init__(self) -> None:
        self._held: dict[int, set[bytes]] = {}

    def stored(self, lane: int, first: bytes) -> bool:
        """A prompt was stored from its first block on. True: that block was held already."""
        held = self._held.setdefault(lane, set())
        if first in held:
            return True
        held.add(first)
        return False

    def removed(self, lane: int, hashes: bytes, width: int) -> None:
        """Blocks are gone."""
        held = self._held.get(lane)
        if held:
            held.difference_update(hashes[at : at + width] for at in range(0, len(hashes), width))

    def cleared(self, lanes: Iterable[int]) -> None:
        """Nothing is held in these lanes."""
        for lane in lanes:
            self._held.pop(lane, None)
