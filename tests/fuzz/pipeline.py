"""Target: a relay's pipeline between an engine and schedulers that may send anything.

Never raises; bounds hold; a scheduler that does all right knows exactly what the mirrors hold.
"""

from __future__ import annotations

import re
from collections import defaultdict

from google.protobuf.message import DecodeError

from servingfleet_protos.v1.stream_pb2 import (
    Ack,
    EngineLoad,
    GrantSnapshot,
    Outcome,
    SchedulerMessage,
    Welcome,
)
from servingfleet_relay.adapters import registry
from servingfleet_relay.conformance.fingerprint import FITTING_KEPT
from servingfleet_relay.conformance.invariants import BY_REASON, OURS
from servingfleet_relay.conformance.standing import MEDIA_NAMED
from servingfleet_relay.pipeline import MAX_COUNTERS, Pipeline
from servingfleet_relay.rank import MAX_REASON_BYTES
from servingfleet_relay.settings import PipelineSettings
from tests.fuzz.decoders import WORDS, packed_batch
from tests.fuzz.feed import Feed
from tests.fuzz.follower import Follower

RANKS = (0, 1)
ENGINES = ("vllm", "vllm", "sglang", "trtllm", registry.AUTO)
STRANGERS = ("stranger", "other")
GOOD = "good"
MAX_UNITS, MAX_ORPHANS = 24, 4
MAX_UNKNOWN = 16
MAX_WAITING = 256
MAX_NAMES = 200
"""Names of counters, over all that can happen: bounded, whatever an engine sends."""

END = [b"", b"", b"\xff" * 8, b""]


class _Drive:
    """The pipeline, an engine that remembers what it published, and the links."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.now = 1000.0
        self.settings = PipelineSettings(
            replica="r",
            model="m",
            ranks=RANKS,
            stream_id="s",
            engine=feed.pick(ENGINES),
            replay=feed.byte() % 8 != 7,
            hybrid=feed.byte() % 16 == 15,
            max_units=MAX_UNITS,
            max_orphans=MAX_ORPHANS,
            max_held_batches=6,
            max_held_bytes=4096,
            resend_window_messages=8,
            resend_window_bytes=4096,
            outbox_messages=MAX_WAITING,
            outbox_bytes=16384,
            delta_hashes=3,
        )
        self.pipeline = Pipeline(self.settings, self.now)
        self.follower = Follower(self.settings.block_tokens)
        self.published: dict[int, list[bytes]] = defaultdict(list)
        self.strangers: set[str] = set()
        self.connect_good(resume=False)
        for rank in RANKS:
            self.pipeline.socket_up(rank, self.now)

    # The engine.

    def publish(self, *, lost: bool) -> None:
        rank = self.rank()
        payload = self.feed.blob() if self.feed.byte() % 8 == 7 else packed_batch(self.feed)
        seq = len(self.published[rank])
        self.published[rank].append(payload)
        if not lost:
            self.pipeline.live(rank, [b"", seq.to_bytes(8, "big"), payload], self.now)

    def frames(self, *, reply: bool) -> None:
        parts = [self.feed.blob() for _ in range(self.feed.below(5))]
        receive = self.pipeline.replayed if reply else self.pipeline.live
        receive(self.rank(), parts, self.now)

    def replay(self) -> None:
        for request in self.pipeline.take_replay_requests():
            batches = self.published[request.rank]
            end = len(batches) - self.feed.pick((0, 0, 0, 1, 3))
            for seq in range(request.start_seq + self.feed.pick((0, 0, 0, 1)), end):
                reply = [b"", b"", seq.to_bytes(8, "big"), batches[seq]]
                self.pipeline.replayed(request.rank, reply, self.now)
            if self.feed.byte() % 8 != 7:
                self.pipeline.replayed(request.rank, END, self.now)

    def restart(self) -> None:
        rank = self.rank()
        del self.published[rank][:]
        if self.feed.flag():
            self.pipeline.socket_down(rank, self.now)
            self.pipeline.socket_up(rank, self.now)

    def socket(self) -> None:
        rank = self.rank()
        match self.feed.below(4):
            case 0:
                self.pipeline.socket_down(rank, self.now)
            case 1:
                self.pipeline.socket_up(rank, self.now)
            case 2:
                self.pipeline.replay_failed(rank, "no socket", self.now)
            case 3:
                self.pipeline.engine_started(self.now - self.feed.below(30), self.now)

    def answers(self) -> None:
        match self.feed.below(8):
            case 0:
                self.pipeline.engine_version(self.feed.text())
            case 1:
                self.pipeline.engine_capacity(self.feed.byte(), gpu_tokens=self.feed.byte())
            case 2:
                self.pipeline.engine_hybrid()
            case 3:
                self.pipeline.engine_found(self.feed.pick(ENGINES[:4]), "0.20.0", self.now)
            case 4:
                usage = self.feed.byte() / 255
                self.pipeline.load(EngineLoad(rank=self.rank(), kv_usage=usage), self.now)
            case 5:
                told = (self.feed.byte(), 64 * self.feed.byte())
                self.pipeline.engine_progress(self.rank(), *told, self.now)
            case 6:
                self.pipeline.engine_unit(self.feed.byte(), certain=self.feed.flag())
            case 7:
                said = Outcome(
                    rank=self.rank(), predicted=self.feed.byte(), reported=self.feed.byte()
                )
                self.pipeline.receive(GOOD, SchedulerMessage(outcome=said), self.now)

    # The schedulers.

    def connect_good(self, *, resume: bool) -> None:
        """A new connection of the scheduler that does all right."""
        hello = self.pipeline.open_link(GOOD, self.now).hello
        resumed = resume and bool(hello.resume_instance)
        self.follower.hello(hello, resumed=resumed)
        welcome = Welcome(
            instance_id="good", resumed=resumed, expected_seq=self.follower.seq + 1, window=16
        )
        self.pipeline.receive(GOOD, SchedulerMessage(welcome=welcome), self.now)
        if not resumed:
            grant = SchedulerMessage(grant_snapshot=GrantSnapshot(ranks=RANKS))
            self.pipeline.receive(GOOD, grant, self.now)

    def reconnect_good(self) -> None:
        for message in self.pipeline.take(GOOD, self.feed.below(8)):
            if self.feed.flag():
                break  # written, and lost with the connection, with all that follows
            self.follower.receive(message)
        self.pipeline.close_link(GOOD)
        self.connect_good(resume=self.feed.flag())

    def drain(self) -> None:
        """Takes everything, in one go or in small parts."""
        while True:
            if self.pipeline.broken(GOOD):
                self.pipeline.close_link(GOOD)
                self.connect_good(resume=True)
            taken = self.pipeline.take(GOOD, 5)
            if not taken:
                break
            for message in taken:
                self.follower.receive(message)
            ack = SchedulerMessage(ack=Ack(seq=self.follower.seq))
            self.pipeline.receive(GOOD, ack, self.now)

    def regrant(self) -> None:
        """A snapshot in the middle, partly taken before more happens."""
        grant = SchedulerMessage(grant_snapshot=GrantSnapshot(ranks=[self.rank()]))
        self.pipeline.receive(GOOD, grant, self.now)
        for message in self.pipeline.take(GOOD, self.feed.below(4)):
            self.follower.receive(message)

    def stranger(self) -> None:
        """A scheduler that sends anything, in any order."""
        link = self.feed.pick(STRANGERS)
        if link not in self.strangers:
            self.strangers.add(link)
            self.pipeline.open_link(link, self.now)
        match self.feed.below(6):
            case 0:
                self.pipeline.close_link(link)
            case 1:
                self.strangers.discard(link)
                self.pipeline.forget_link(link)
            case 2:
                self.pipeline.open_link(link, self.now)
            case 3:
                assert len(self.pipeline.take(link, limit := self.feed.below(20))) <= limit
            case 4:
                welcome = Welcome(
                    instance_id=self.feed.text().encode(errors="ignore").decode(),
                    resumed=self.feed.flag(),
                    expected_seq=self.feed.number() % 2**64,
                    window=self.feed.byte(),
                )
                self.pipeline.receive(link, SchedulerMessage(welcome=welcome), self.now)
            case 5:
                message = SchedulerMessage()
                try:
                    message.ParseFromString(self.feed.blob())
                except DecodeError:
                    return
                self.pipeline.receive(link, message, self.now)

    def rank(self) -> int:
        return RANKS[self.feed.byte() % 8 == 7]

    def step(self) -> None:
        match self.feed.below(16):
            case 0 | 1 | 2 | 3:
                self.publish(lost=False)
            case 4:
                self.publish(lost=True)
            case 5 | 6:
                self.replay()
            case 7:
                self.frames(reply=self.feed.flag())
            case 8:
                self.restart()
            case 9:
                self.socket()
            case 10:
                self.answers()
            case 11:
                self.reconnect_good()
            case 12:
                self.regrant()
            case 13:
                self.stranger()
            case 14:
                self.now += self.feed.below(30) / 2
                self.pipeline.tick(self.now)
            case 15:
                self.drain()

    # What must hold.

    def check_bounds(self) -> None:
        status = self.pipeline.status()
        for rank in status.ranks:
            sizes = rank.mirror
            held, placed, orphans = sizes["units_held"], sizes["units_placed"], sizes["orphans"]
            assert max(held, placed + orphans + sizes["opaque_units"]) <= MAX_UNITS, sizes
            assert orphans <= MAX_ORPHANS, sizes
            assert len(rank.reason.encode()) <= MAX_REASON_BYTES
        assert len(status.totals) <= MAX_NAMES
        for name, count in status.totals.items():
            # Invariants are counted under their number.
            assert re.fullmatch(r"invariant_C\d{1,2}", name) or WORDS.fullmatch(name), name
            assert count >= 0
        for source in self.pipeline._ranks.values():
            held = source.holdings.mirror.counts()["units_held"]
            assert all(len(first) <= held for first in source.holdings._firsts._held.values())
            assert len(source.monitor.fingerprint._unknown) <= MAX_UNKNOWN
            assert len(source.monitor.fingerprint._fitting) <= FITTING_KEPT
            assert len(source.monitor.standing.media) <= MEDIA_NAMED
            assert {each.reason for each in source.monitor.failures.all} <= {*BY_REASON, *OURS}
        for link in (GOOD, *self.strangers):
            assert self.pipeline.unacknowledged(link) <= self.settings.resend_window_messages

    def check_holdings(self) -> None:
        self.drain()
        for rank in RANKS:
            for lane in self.follower.lanes:
                for confidence in (1, 2):
                    told = self.follower.holdings(rank, lane, confidence)
                    held = self._held(rank, lane, confidence)
                    assert told == held, f"rank {rank} lane {lane}: {told.hex()} {held.hex()}"

    def _held(self, rank: int, lane: int, confidence: int) -> bytes:
        try:
            return self.pipeline.holdings(rank, lane, confidence)
        except KeyError:
            return b""  # the other rank has declared it


def pipeline(data: bytes) -> None:
    """A script of what the engine and the schedulers do."""
    drive = _Drive(Feed(data))
    while drive.feed:
        drive.step()
        drive.check_bounds()
    drive.check_holdings()
    hello = drive.pipeline.open_link("late", drive.now).hello
    assert len(hello.profile.lanes) <= 64
    assert len(drive.pipeline.counters()) <= MAX_NAMES
    assert MAX_COUNTERS <= MAX_NAMES
