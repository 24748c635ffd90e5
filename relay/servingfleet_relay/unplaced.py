"""Stores of window groups in a model without a full-attention group, whose place only a prompt that was sent here tells.

Pure. Such a store may overtake the word of its dispatch: it waits for it, and not for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from servingfleet_core import Mirror
from servingfleet_protos.v1.stream_pb2 import CreditOpened

from .adapters.events import Doubt, Stored
from .conformance.standing import Finding
from .dispatches import Dispatches
from .lanes import Lane

MAX_UNPLACED = 1024
UNPLACED = "no full-attention group, and no prompt that was sent here tells where a block belongs"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A store whose place is not known yet."""

    event: Stored
    lane: Lane
    until: float


class Unplaced:
    """The prompts that were sent to one rank, and the stores that wait for one."""

    def __init__(self, dispatches: Dispatches, ttl_s: float) -> None:
        """`ttl_s`: how long a store waits."""
        self._dispatches = dispatches
        self._ttl_s = ttl_s
        self._waiting: deque[Waiting] = deque()

    def __bool__(self) -> bool:
        """Some stores wait."""
        return bool(self._waiting)

    def infer(self, event: Stored, lane: Lane, mirror: Mirror) -> tuple[Stored, int]:
        """The store as a prompt that was sent here explains it, and the masked blocks before its first."""
        return self._dispatches.infer(event, lane.window_tokens, mirror)

    def wait(self, event: Stored, lane: Lane, now: float) -> list[Finding]:
        """A store that nothing explains yet. Findings: the oldest is given up for it."""
        found = [self._give_up()] if len(self._waiting) == MAX_UNPLACED else []
        self._waiting.append(Waiting(event, lane, now + self._ttl_s))
        return found

    def dispatched(self, credit: CreditOpened, now: float) -> Iterator[Waiting]:
        """A prompt is sent here. Yields what has waited for one: `again` takes back what still does."""
        self._dispatches.opened(
            credit.decision_id, credit.hashes, credit.prompt_tokens, credit.expires_s, now
        )
        waiting, self._waiting = self._waiting, deque()
        yield from waiting

    def again(self, waiting: Waiting) -> None:
        """It still waits."""
        self._waiting.append(waiting)

    def ended(self, decision: str, now: float) -> None:
        """A prompt that was sent is done with. Unknown ones are fine."""
        self._dispatches.ended(decision, now)

    def expire(self, now: float) -> list[Finding]:
        """What waited too long is given up."""
        self._dispatches.expire(now)
        found = []
        while self._waiting and self._waiting[0].until < now:
            found.append(self._give_up())
        return found

    def forget_prompts(self) -> None:
        """A full-attention group places the blocks: no prompt has to."""
        self._dispatches.clear()

    def clear(self) -> None:
        """Nothing is held any more, so that nothing waits."""
        self._waiting.clear()

    def _give_up(self) -> Finding:
        self._waiting.popleft()
        return Finding("unplaced", UNPLACED, Doubt.INCOMPLETE)
