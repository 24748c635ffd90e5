"""What is this stream, and what is wrong with it? The relay's own code, over messages from a file or a socket.

Pure: messages in, findings out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from servingfleet_relay.adapters.events import Dropped
from servingfleet_relay.adapters.registry import ADAPTERS
from servingfleet_relay.pipeline import Pipeline, RankStatus
from servingfleet_relay.settings import PipelineSettings

from .recordings import Message

MAX_EXAMPLES = 20

# Totals that tell of trouble; the others count what went well.
_TROUBLE = ("drop_", "odd_", "histories_lost", "events_quarantined", "mirror_removed_unknown")


@dataclass(frozen=True)
class StreamReport:
    """All that the messages tell."""

    messages: int
    ranks: tuple[RankStatus, ...]
    lanes: tuple[str, ...]
    """What would be indexed: tier, state class, group, unit."""
    kinds: dict[str, int]
    """Events by kind."""
    troubles: dict[str, int]
    """Trouble by its bounded reason."""
    examples: tuple[str, ...]
    """The first of each kind of trouble, in words."""

    @property
    def sound(self) -> bool:
        """Nothing was dropped, nothing was odd, and every rank can be predicted from."""
        states = {rank.state for rank in self.ranks}
        return not self.troubles and states <= {"live", "history_lost"}


def check(
    messages: Iterable[Message],
    ranks: int,
    block_tokens: int,
    host_unit_tokens: int = 0,
    engine: str = "vllm",
) -> StreamReport:
    """Runs the messages through a relay that has no replay socket. Numbers in tokens.

    Raises ValueError for an engine without an adapter.
    """
    adapter = ADAPTERS.get(engine)
    if adapter is None:
        raise ValueError(f"engine {engine!r} is not known; known: {', '.join(ADAPTERS)}")
    settings = PipelineSettings(
        replica="checked",
        model="checked",
        ranks=tuple(range(ranks)),
        stream_id="check",
        engine=engine,
        block_tokens=block_tokens,
        host_unit_tokens=host_unit_tokens,
        replay=False,
    )
    pipeline: Pipeline | None = None
    count = 0
    kinds: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for message in messages:
        if pipeline is None:
            pipeline = Pipeline(settings, message.time)
            for rank in settings.ranks:
                pipeline.socket_up(rank, message.time)
        count += 1
        for event in adapter.decode(message.frames[-1] if message.frames else b"").events:
            kinds[type(event).__name__.lower()] += 1
            if isinstance(event, Dropped) and len(examples) < MAX_EXAMPLES:
                where = f"rank {message.rank}, sequence {message.seq}"
                examples.setdefault(event.reason, f"{where}: {event.reason}: {event.detail}")
        pipeline.live(message.rank, message.frames, message.time)
        pipeline.tick(message.time)
    if pipeline is None:
        return StreamReport(0, (), (), {}, {}, ())
    status = pipeline.status()
    troubles = {
        name: total
        for name, total in sorted(status.totals.items())
        if total and name.startswith(_TROUBLE)
    }
    return StreamReport(
        count, status.ranks, status.lanes, dict(kinds), troubles, tuple(examples.values())
    )
