"""What schedulers are told of one rank: changes of the mirror, cut and joined into messages, and its state.

Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence

from servingfleet_core import Delta as CoreDelta
from servingfleet_protos.v1.stream_pb2 import Delta, RankState, RelayMessage


class Messages:
    """Messages of one rank, in order, until they are taken."""

    def __init__(self, rank: int, delta_hashes: int) -> None:
        """`delta_hashes`: most hashes in one message."""
        self._rank = rank
        self._step = delta_hashes * 8
        self._waiting: deque[RelayMessage] = deque()
        self._told = RankState()

    def take(self) -> list[RelayMessage]:
        """What there is since the last call."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    def announce(self, state: RankState) -> None:
        """A changed state is told in its place among the deltas; that batches were applied is not."""
        told = self._told
        if (state.state, state.reason, state.incarnation) != (
            told.state,
            told.reason,
            told.incarnation,
        ):
            self._told = state
            self._waiting.append(RelayMessage(rank_state=state))

    def known(self, state: RankState) -> None:
        """A state that needs no telling: the hello has it."""
        self._told = state

    def tell(self, deltas: Sequence[CoreDelta]) -> None:
        """Changes of the mirror."""
        for delta in deltas:
            if not self._joined(delta):
                self._waiting.extend(self.of(delta))

    def of(self, delta: CoreDelta) -> Generator[RelayMessage, None, None]:
        """A delta of the mirror, cut to the size of messages; each part names the block before it."""
        parent = delta.parent
        for start in range(0, len(delta.hashes), self._step) or (0,):
            part = delta.hashes[start : start + self._step]
            yield RelayMessage(
                delta=Delta(
                    rank=self._rank,
                    lane=delta.lane,
                    op=delta.op,  # type: ignore[arg-type]
                    confidence=delta.confidence,  # type: ignore[arg-type]
                    parent=parent,
                    hashes=part,
                )
            )
            parent = int.from_bytes(part[-8:], "little")

    def _joined(self, delta: CoreDelta) -> bool:
        """Adds drops to the drops before them: vLLM removes each block by an event of its own."""
        if delta.op != Delta.OP_DROP or not self._waiting:
            return False
        last = self._waiting[-1].delta
        size = len(last.hashes) + len(delta.hashes)
        if (last.op, last.lane) != (delta.op, delta.lane) or size > self._step:
            return False
        last.hashes += delta.hashes
        return True
