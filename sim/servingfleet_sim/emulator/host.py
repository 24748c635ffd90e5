"""The host tier of one rank: copies of runs of full blocks in main memory, like vLLM's offloading connector.

Pure. A chunk is a run of blocks that is stored, loaded and evicted as one, and known by the hash of its last block.
Its events name every block of it; a placeholder names the last hash only, and no tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Listed
from dataclasses import dataclass

from .events import CPU, Event, Removed, Stored
from .sequence import Sequence


@dataclass(eq=False, slots=True)
class _Chunk:
    stored: Stored
    ready: bool = False


class HostTier:
    """At most `chunks` chunks of `chunk_blocks` blocks each; the least recently used goes first, tails before heads."""

    def __init__(self, chunks: int, chunk_blocks: int, block_size: int, *, described: bool) -> None:
        self.capacity = chunks
        self.chunk_blocks = chunk_blocks
        self.block_size = block_size
        self.described = described
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()
        self._begun: list[bytes] = []
        self._writing: list[bytes] = []
        self._pinned: dict[bytes, int] = {}
        self._ended: list[Listed[bytes]] = []
        self._events: list[Event] = []

    @property
    def chunk_tokens(self) -> int:
        """Tokens in a chunk."""
        return self.chunk_blocks * self.block_size

    @property
    def writing(self) -> bool:
        """Whether copies are under way that the next step will announce."""
        return bool(self._begun or self._writing)

    def content(self) -> dict[bytes, int]:
        """Every hash by which its events name what it holds, and how often."""
        held: dict[bytes, int] = {}
        for key, chunk in self._chunks.items():
            if chunk.ready:
                for digest in self._announced(chunk, key).hashes:
                    held[digest] = held.get(digest, 0) + 1
        return held

    def match(self, sequence: Sequence, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that it can load; None: a copy is still being moved, ask again.

        Up to the end of a chunk, which may be that of the prompt: unlike the GPU's, its hit may cover every token. Less
        than a chunk is not worth a load.
        """
        if sequence.asked.prompt_logprobs:
            return 0
        first = local_tokens // self.chunk_tokens
        end = first
        for key in self._keys(sequence)[first:]:
            chunk = self._chunks.get(key)
            if chunk is None:
                break
            if not chunk.ready or key in self._pinned:
                return None
            end += 1
        found = end * self.chunk_tokens - local_tokens
        return found if found >= self.chunk_tokens else 0

    def pin(self, sequence: Sequence, first_token: int, end_token: int) -> None:
        """Begins to load these tokens: their chunks stay until `unpin`, and need not be offered."""
        for key in self._between(sequence, first_token, end_token):
            self._pinned[key] = self._pinned.get(key, 0) + 1
        sequence.chunks_seen_from = first_token // self.chunk_tokens
        sequence.chunks_seen = end_token // self.chunk_tokens

    def unpin(self, sequence: Sequence, first_token: int, end_token: int) -> None:
        """Ends a `pin` of the same tokens."""
        for key in self._between(sequence, first_token, end_token):
            left = self._pinned.get(key, 0) - 1
            if left > 0:
                self._pinned[key] = left
            else:
                self._pinned.pop(key, None)

    def offer(self, sequence: Sequence, tokens: int) -> None:
        """Begins to copy the chunks that the first `tokens` tokens fill and that it lacks."""
        keys = self._keys(sequence)[: tokens // self.chunk_tokens]
        offered = keys[sequence.chunks_seen :]
        if not offered:
            return
        first, sequence.chunks_seen = sequence.chunks_seen, len(keys)
        missing = {key for key in offered if key not in self._chunks}
        if not self._make_room(len(missing), frozenset(offered)):
            return
        for index, key in enumerate(offered, first):
            if key in missing and key not in self._chunks:
                self._chunks[key] = _Chunk(self._stored(sequence, index))
                self._begun.append(key)

    def used(self, sequence: Sequence) -> None:
        """The sequence has ended: with the next `settle` its chunks are the ones used last."""
        keys = self._keys(sequence)[sequence.chunks_seen_from : sequence.chunks_seen]
        if keys:
            self._ended.append(keys)

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

    def _make_room(self, count: int, kept: frozenset[bytes]) -> bool:
        excess = len(self._chunks) + count - self.capacity
        if excess <= 0:
            return True
        gone: list[bytes] = []
        for key, chunk in self._chunks.items():
            if len(gone) == excess:
                break
            if chunk.ready and key not in kept and key not in self._pinned:
                gone.append(key)
        if len(gone) < excess:
            return False
        hashes: list[bytes] = []
        for key in gone:
            chunk = self._chunks.pop(key)
            hashes.extend(self._announced(chunk, key).hashes)
        self._events.append(Removed(tuple(hashes), CPU))
        return True

    def _between(self, sequence: Sequence, first_token: int, end_token: int) -> Listed[bytes]:
        first, end = first_token // self.chunk_tokens, end_token // self.chunk_tokens
        return self._keys(sequence)[first:end]

    def _keys(self, sequence: Sequence) -> Listed[bytes]:
        return sequence.hashes[self.chunk_blocks - 1 :: self.chunk_blocks]

    def _stored(self, sequence: Sequence, index: int) -> Stored:
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
        )

    def _announced(self, chunk: _Chunk, key: bytes) -> Stored:
        if self.described:
            return chunk.stored
        return Stored((key,), None, (), 0, CPU, described=False)
