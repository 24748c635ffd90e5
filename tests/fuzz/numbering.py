"""Target: one rank's numbering under any order of calls. Never raises, keeps its bounds, applies without holes."""

from __future__ import annotations

from servingfleet_protos.v1.common_pb2 import StreamState
from servingfleet_relay.batches import Apply, Lost, Restarted, Step
from servingfleet_relay.frames import END_OF_REPLAY
from servingfleet_relay.sequence import Sequence
from tests.fuzz.feed import Feed

MAX_HELD, MAX_BYTES = 6, 64


class _Watcher:
    """Holds that nothing is applied twice or after an unannounced hole in one life of the engine."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.last: int | None = None
        self.restarts = 0

    def see(self, steps: list[Step]) -> None:
        lost = False
        for step in steps:
            if isinstance(step, Restarted):
                self.restarts += 1
                self.last, lost = None, False
            elif isinstance(step, Lost):
                lost = True
            elif isinstance(step, Apply):
                if self.last is not None:
                    assert step.seq == self.last + 1 or (lost and step.seq > self.last), step
                self.last, lost = step.seq, False
        assert not lost, "a loss is told before the batch after it"
        assert self.sequence.applied == self.last
        assert self.sequence.incarnation == 1 + self.restarts
        state, _ = self.sequence.state
        assert state in StreamState.values()


def sequence(data: bytes) -> None:
    """Each byte is a call, arguments after it."""
    feed = Feed(data)
    subject = Sequence(
        replay=feed.flag(),
        deadline_s=5.0,
        probe_s=10.0,
        max_held_batches=MAX_HELD,
        max_held_bytes=MAX_BYTES,
    )
    watcher = _Watcher(subject)
    now, at = 100.0, 0
    while feed:
        match feed.below(12):
            case 0 | 1 | 2:
                watcher.see(subject.live(at, bytes([at % 256]), now))
                at += 1
            case 3:
                at = feed.number() % 2**63
            case 4:
                watcher.see(subject.live(max(0, at - feed.byte()), feed.take(feed.below(80)), now))
            case 5:
                watcher.see(subject.socket_up(now))
            case 6:
                subject.socket_down()
            case 7:
                start = subject.take_request()
                assert subject.take_request() is None, "a request is handed out once"
                if start is not None:
                    shift = feed.pick((0, 0, 0, 1, 5))
                    for seq in range(start + shift, min(at, start + shift + feed.below(9))):
                        watcher.see(subject.replayed(seq, bytes([seq % 256]), now))
            case 8:
                seq = END_OF_REPLAY if feed.flag() else feed.number() % 2**63
                watcher.see(subject.replayed(seq, feed.take(feed.below(4)), now))
            case 9:
                watcher.see(subject.replay_failed("silent", now))
            case 10:
                now += feed.below(30)
                watcher.see(subject.tick(now))
            case 11:
                if feed.flag():
                    subject.cleared()
                else:
                    watcher.see(subject.process_started(now - feed.below(20), now))
        assert len(subject._held) <= MAX_HELD, "more is held than allowed"
        # A single batch is held whatever its size: the socket bounds it.
        assert len(subject._held) <= 1 or not subject._held.full
