"""A scheduler that does all right: replays what a relay sends into an index, and refuses what the protocol forbids."""

from __future__ import annotations

from servingfleet_core import Index
from servingfleet_protos.v1.stream_pb2 import Delta, Hello, RelayMessage
from servingfleet_scheduler.hello import check_hello, core_profile, lanes_agree


class Follower:
    """One relay's holdings, as a scheduler would know them."""

    def __init__(self, block_tokens: int) -> None:
        self.seq = 0
        self._block_tokens = block_tokens
        self._hello = Hello()
        self._incarnations: dict[int, int] = {}

    @property
    def lanes(self) -> list[int]:
        return [lane.lane for lane in self._hello.profile.lanes]

    def hello(self, hello: Hello, *, resumed: bool) -> None:
        """A connection begins. Not resumed: nothing is known any more."""
        check_hello(hello, block_tokens=self._block_tokens, max_ranks=16)
        profile = core_profile(hello.profile, block_tokens=self._block_tokens)
        if resumed:
            assert hello.resume_from <= self.seq + 1, "the relay can't send what is missing"
            return
        self.seq = 0
        self._hello = hello
        self._index = Index(self._block_tokens)
        self._replica = self._index.add_replica(profile)
        self._incarnations = {state.rank: state.incarnation for state in hello.ranks}
        for rank in self._incarnations:
            self._index.set_rank(self._replica, rank, trusted=True, complete=True)

    def receive(self, message: RelayMessage) -> None:
        body = message.WhichOneof("body")
        if body in ("load", "counters"):
            assert not message.seq
            return
        if message.seq <= self.seq:
            return  # sent again
        assert message.seq == self.seq + 1, f"message {message.seq} after {self.seq}"
        self.seq = message.seq
        match body:
            case "profile":
                assert lanes_agree(self._hello.profile, message.profile)
                core = core_profile(message.profile, block_tokens=self._block_tokens)
                self._hello.profile.CopyFrom(message.profile)
                self._index.set_profile(self._replica, core)
            case "rank_state":
                self._incarnation(message.rank_state.rank, message.rank_state.incarnation)
            case "snapshot_begin":
                self._incarnation(message.snapshot_begin.rank, message.snapshot_begin.incarnation)
                self._index.clear(self._replica, message.snapshot_begin.rank)
            case "delta":
                self._delta(message.delta)

    def holdings(self, rank: int, lane: int, confidence: int) -> bytes:
        return self._index.holdings(self._replica, rank, lane, confidence)

    def _incarnation(self, rank: int, incarnation: int) -> None:
        if incarnation > self._incarnations[rank]:
            self._incarnations[rank] = incarnation
            self._index.clear(self._replica, rank)

    def _delta(self, delta: Delta) -> None:
        where = (self._replica, delta.rank, delta.lane)
        if delta.op == Delta.OP_HOLD:
            self._index.hold(*where, delta.confidence, delta.parent, delta.hashes)
        elif delta.op == Delta.OP_DROP:
            self._index.drop(*where, delta.hashes)
        else:
            assert delta.op == Delta.OP_CLEAR
            assert not delta.hashes
            self._index.clear(*where)
