"""The host tier of one rank: copies of runs of full blocks in main memory, like vLLM's offloading connector.

Pure. A chunk is a run of blocks that is stored, loaded and evicted as one, and known by the hash of its last block.
Its events name every block of it; a placeholder names the last hash only, and no tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass

from .events import CPU, Event, Removed, Stored
from .groups import FULL, Group
from .pool import NULL_BLOCK
from .sequence import Lane, Sequence

Key = tuple[int, bytes]
"""Number of a group of layers, and the hash of a chunk's last block."""


@dataclass(eq=False, slots=True)
class _Chunk:
    stored: Stored
    ready: bool = False


class HostTier:
    """At most `chunks` chunks of `chunk_blocks` blocks each; the least recently used goes first, tails before heads."""

    def __init__(
        self,
        chunks: int,
        chunk_blocks: int,
        block_size: int,
        groups: Listed[Group],
        *,
        described: bool,
    ) -> None:
        self.capacity = chunks
        self.chunk_blocks = chunk_blocks
        self.block_size = block_size
        self.described = described
        self._groups = groups
        self._chunks: OrderedDict[Key, _Chunk] = OrderedDict()
        self._begun: list[Key] = []
        self._writing: list[Key] = []
        self._pinned: dict[Key, int] = {}
        self._ended: list[Listed[Key]] = []
        self._events: list[Event] = []

    @property
    def chunk_tokens(self) -> int:
        """Tokens in a chunk."""
        return self.chunk_blocks * self.block_size

    @property
    def writing(self) -> bool:
        """Whether copies are under way that the next step will announce."""
        return bool(self._begun or self._writing)

    def content(self, group: int = 0) -> dict[bytes, int]:
        """Every hash by which its events name what it holds for a group of layers, and how often."""
        held: dict[bytes, int] = {}
        for key, chunk in self._chunks.items():
            if chunk.ready and key[0] == group:
                for digest in self._announced(chunk, key).hashes:
                    held[digest] = held.get(digest, 0) + 1
        return held

    def match(self, sequence: Sequence, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that it can load; None: a copy is still being moved, ask again.

        Up to the end of a chunk, which may be that of the prompt: unlike the GPU's, its hit may cover every token, but
        for window layers. Less than a chunk is not worth a load.
        """
        if sequence.asked.prompt_logprobs:
            return 0
        size = self.chunk_tokens
        first = local_tokens // size
        # Full attention first, then the longest window.
        order = sorted(
            self._groups, key=lambda group: (group.spec.kind != FULL, -group.spec.window)
        )
        most = len(sequence.tokens) - any(group.spec.kind != FULL for group in order)
        settled, moving = False, False
        while not settled:
            settled = True
            for group in order:
                keys = self._keys(sequence, group)
                before = most = min(most, len(keys) * size)
                if most - local_tokens < size:
                    return 0
                end = min(-(-most // size), len(keys))
                hits, moved = self._hits(group, keys[first:end], most)
                most = min(most, size * (first + hits))
                moving = moving or moved
                settled = settled and most == before
                if most - local_tokens < size:
                    return 0
        loads = (
            key
            for group in order
            for key in self._needed(group, self._keys(sequence, group), first, most)
        )
        if moving or any(key in self._pinned for key in loads):
            return None
        return most - local_tokens

    def pin(self, sequence: Sequence, local_tokens: int, end_token: int) -> None:
        """Begins to load what its new blocks hold: their chunks stay until `unpin`, and need not be offered."""
        end = -(-end_token // self.chunk_tokens)
        for group, lane in zip(self._groups, sequence.lanes, strict=True):
            place = -(-local_tokens // self.block_size)
            while place < len(lane.blocks) and lane.blocks[place] == NULL_BLOCK:
                place += 1
            first = place // self.chunk_blocks
            sequence.loads += self._keys(sequence, group)[first:end]
            lane.offered = end
        for key in sequence.loads:
            self._pinned[key] = self._pinned.get(key, 0) + 1
        self._note(sequence, sequence.loads)

    def unpin(self, sequence: Sequence) -> None:
        """Ends a `pin`."""
        for key in sequence.loads:
            left = self._pinned.get(key, 0) - 1
            if left > 0:
                self._pinned[key] = left
            else:
                self._pinned.pop(key, None)
        sequence.loads.clear()

    def offer(self, sequence: Sequence, tokens: int) -> None:
        """Begins to copy the chunks that the first `tokens` tokens fill, that it lacks, and that their group keeps."""
        offered: dict[Key, Stored] = {}
        for group, lane in zip(self._groups, sequence.lanes, strict=True):
            keys = self._keys(sequence, group)[: tokens // self.chunk_tokens]
            first, lane.offered = lane.offered, max(lane.offered, len(keys))
            for index in self._kept(sequence, group, lane, first, len(keys)):
                offered[keys[index]] = self._stored(sequence, group, index)
        if not offered:
            return
        missing = [key for key in offered if key not in self._chunks]
        self._note(sequence, offered)
        if not self._make_room(len(missing), offered.keys()):
            return
        for key in missing:
            self._chunks[key] = _Chunk(offered[key])
            self._begun.append(key)

    def used(self, sequence: Sequence) -> None:
        """The sequence has ended: with the next `settle` its chunks are the ones used last."""
        if sequence.chunks:
            self._ended.append(
                sorted(sequence.chunks, key=lambda key: (sequence.chunks[key], key[0]))
            )

    def settle(self) -> None:
        """Puts the chunks of ended sequences last in line, tails before heads.

        vLLM does it with the step after, when the copies of that step have found their place.
        """
        for keys in self._ended:
            for key in reversed(keys):
                if key in self._chunks:
                    self._chunks.move_to_end(key)
        self._ended.clear()

    def finish_writes(self) -> None:
        """A step has ended: the copies that earlier steps began are complete."""
        for key in self._writing:
            chunk = self._chunks.get(key)
            if chunk is not None:
                chunk.ready = True
                self._events.append(self._announced(chunk, key))
        self._writing, self._begun = self._begun, []

    def reset(self) -> None:
        """Forgets everything. Like vLLM's, it announces nothing."""
        self._chunks.clear()
        self._begun.clear()
        self._writing.clear()
        self._pinned.clear()
        self._ended.clear()

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        taken, self._events = self._events, []
        return taken

    def _hits(self, group: Group, keys: Listed[Key], most: int) -> tuple[int, bool]:
        """How many of these chunks suit a group, and whether one of them is still being written."""
        moving = False
        if group.spec.kind == FULL:
            for hits, key in enumerate(keys):
                chunk = self._chunks.get(key)
                if chunk is None:
                    return hits, moving
                moving = moving or not chunk.ready
            return len(keys), moving
        # The last chunk may be there in part only: then one more may be needed.
        needed = self._window(group, most)
        run = 0
        for place in reversed(range(len(keys))):
            chunk = self._chunks.get(keys[place])
            if chunk is None:
                run, moving, needed = 0, False, self._window(group, 0)
                continue
            run += 1
            moving = moving or not chunk.ready
            if run == needed:
                return place + run, moving
        return run, moving

    def _window(self, group: Group, end_token: int) -> int:
        """Chunks that a window before `end_token` touches."""
        size = self.chunk_tokens
        window = group.spec.window
        return max(-(-window // size), -(-(window - 1 + -end_token % size) // size))

    def _needed(self, group: Group, keys: Listed[Key], first: int, end_token: int) -> Listed[Key]:
        keys = keys[first : -(-end_token // self.chunk_tokens)]
        return keys if group.spec.kind == FULL else keys[-self._window(group, end_token) :]

    def _kept(
        self, sequence: Sequence, group: Group, lane: Lane, first: int, end: int
    ) -> Iterator[int]:
        """Of these chunks those that hold a block which its group keeps, and has."""
        size = self.chunk_blocks
        boundaries = sequence.boundaries(self.block_size)
        places = group.kept(first * size, end * size, boundaries)
        for index in sorted({place // size for place in places}):
            if lane.blocks[(index + 1) * size - 1] != NULL_BLOCK:
                yield index

    def _note(self, sequence: Sequence, keys: Iterable[Key]) -> None:
        places = {
            key: place
            for group in self._groups
            for place, key in enumerate(self._keys(sequence, group))
        }
        sequence.chunks.update((key, places[key]) for key in keys)

    def _make_room(self, count: int, kept: Collection[Key]) -> bool:
        excess = len(self._chunks) + count - self.capacity
        if excess <= 0:
            return True
        gone: list[Key] = []
        for key, chunk in self._chunks.items():
            if len(gone) == excess:
                break
            if chunk.ready and key not in kept and key not in self._pinned:
                gone.append(key)
        if len(gone) < excess:
            return False
        hashes: dict[int, list[bytes]] = {}
        for key in gone:
            chunk = self._chunks.pop(key)
            hashes.setdefault(key[0], []).extend(self._announced(chunk, key).hashes)
        for group, removed in hashes.items():
            self._events.append(Removed(tuple(removed), CPU, group))
        return True

    def _keys(self, sequence: Sequence, group: Group) -> Listed[Key]:
        return [
            (group.number, digest)
            for digest in sequence.hashes[self.chunk_blocks - 1 :: self.chunk_blocks]
        ]

    def _stored(self, sequence: Sequence, group: Group, index: int) -> Stored:
        first = index * self.chunk_blocks
        end = first + self.chunk_blocks
        return Stored(
            hashes=tuple(sequence.hashes[first:end]),
            parent=sequence.hashes[first - 1] if first else None,
            tokens=tuple(sequence.tokens[first * self.block_size : end * self.block_size]),
            block_size=self.block_size,
            medium=CPU,
            adapter=sequence.asked.adapter,
            adapter_number=sequence.asked.adapter_number,
            group=group.number,
            kind=group.spec.kind,
        )

    def _announced(self, chunk: _Chunk, key: Key) -> Stored:
        group, digest = key
        if self.described and chunk.stored.kind == FULL:
            return chunk.stored
        return Stored((digest,), None, (), 0, CPU, described=False, group=group)
