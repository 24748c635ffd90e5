"""Target: a scheduler whose relays may send anything.

Only SessionRefused is raised; another replica's holdings, state and credits stay as they are; what is kept is bounded,
and nothing stays once everybody is gone.
"""

# ruff: noqa: PT017 - a target must take either way

from __future__ import annotations

from google.protobuf.message import DecodeError, Message

from servingfleet_protos.v1 import fleet_pb2, routing_pb2, stream_pb2
from servingfleet_scheduler.errors import SchedulerError, SessionRefused
from servingfleet_scheduler.sessions import Session
from tests.fuzz.feed import Feed
from tests.unit.scheduler.helpers import (
    BLOCK,
    LIVE,
    MODEL,
    FakeRelay,
    hashes,
    hello,
    make_scheduler,
    profile,
    route_request,
)

CALM = "calm"
SECRET = "a stream id that nobody else knows"
CALM_BLOCKS = 4
MAX_REPLICAS, MAX_CREDITS, MAX_OUTBOX = 4, 8, 16
TTL_S = 600.0
MAX_REASONS = 64
HOURS = 3600.0 * 10


def merged(base: Message, blob: bytes) -> None:
    """Overwrites and adds fields, as far as the bytes are any."""
    try:
        base.MergeFromString(blob)
    except DecodeError:
        return


class _Drive:
    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.now = 0.0
        self.scheduler = make_scheduler(
            max_replicas=MAX_REPLICAS,
            max_ranks=3,
            max_credits=MAX_CREDITS,
            outbox_messages=MAX_OUTBOX,
            replica_ttl_s=TTL_S,
            snapshot_slots=1,
        )
        self.calm = FakeRelay(self.scheduler, CALM).hello(stream_id=SECRET)
        self.calm.snapshot(hashes(CALM_BLOCKS))
        self.calm.send(
            credit_opened=stream_pb2.CreditOpened(
                decision_id="calm's",
                hashes=hashes(CALM_BLOCKS + 2),
                prompt_tokens=(CALM_BLOCKS + 2) * BLOCK,
                origin="another scheduler",
                expires_s=3600.0,
            )
        )
        self.before = self.seen()
        self.sessions: list[Session] = []
        self.numbers: list[int] = []

    def seen(self) -> object:
        """What the scheduler knows of the calm replica, and says of a prompt there."""
        replica = self.scheduler.fleet.get(CALM)
        assert replica is not None
        index = self.scheduler.fleet.index(MODEL)
        assert index is not None
        rank = replica.ranks[0]
        held = [index.holdings(replica.number, 0, 0, confidence) for confidence in (1, 2)]
        answers = [
            (match.lower, match.predicted, match.upper, match.tiers, match.credited)
            for match in index.match(hashes(CALM_BLOCKS + 3), (CALM_BLOCKS + 3) * BLOCK + 5)
            if (match.replica, match.rank) == (replica.number, 0)
        ]
        credits = index.credits(replica.number, 0)
        return held, answers, credits, replica.connected, rank.state, rank.warm, rank.incarnation

    def open(self) -> None:
        if len(self.sessions) < 6:
            session = self.scheduler.open_session(self.now)
            self.sessions.append(session)
            self.numbers.append(0)
            if self.feed.byte() % 8:
                said = hello(self.feed.pick(("a", "a", "b", "c")), ranks=range(self.feed.below(4)))
                merged(said, self.feed.blob())
                self.send(len(self.sessions) - 1, stream_pb2.RelayMessage(hello=said))

    def close(self) -> None:
        if self.sessions:
            at = self.feed.below(len(self.sessions))
            self.numbers.pop(at)
            self.sessions.pop(at).close(self.now)

    def send(self, at: int, message: stream_pb2.RelayMessage) -> None:
        if message.hello.stream_id == SECRET:
            return  # a secret that a fuzzer reads out of memory
        try:
            self.sessions[at].receive(message, self.now)
        except SessionRefused as refusal:
            assert refusal.reason
            assert refusal.code
            self.numbers.pop(at)
            self.sessions.pop(at).close(self.now)
        else:
            self.numbers[at] = max(self.numbers[at], message.seq)

    def message(self) -> stream_pb2.RelayMessage:
        feed = self.feed
        message = stream_pb2.RelayMessage()
        rank, packed = feed.below(3), hashes(feed.below(8), first=16 * feed.below(2))
        match feed.below(11):
            case 0:
                message.profile.CopyFrom(profile(feed.pick((16, 8, 32, 7))))
            case 1:
                message.rank_state.rank = rank
                message.rank_state.incarnation = feed.below(3)
                message.rank_state.state = feed.pick((LIVE, LIVE, 2, 3, 4, 5, 0))  # type: ignore[assignment]
            case 2:
                message.snapshot_begin.rank = rank
                message.snapshot_begin.incarnation = feed.below(3)
            case 3:
                message.snapshot_end.rank = rank
            case 4 | 5:
                message.delta.rank = rank
                message.delta.op = feed.pick((1, 1, 2, 3, 0))  # type: ignore[assignment]
                message.delta.hashes = packed
                message.delta.parent = feed.below(2) * 77
            case 6:
                message.credit_opened.decision_id = feed.pick(("x", "y", "calm's", ""))
                message.credit_opened.rank = rank
                message.credit_opened.hashes = packed
                message.credit_opened.prompt_tokens = feed.byte()
                message.credit_opened.origin = feed.pick(("another scheduler", "scheduler-1", ""))
                message.credit_opened.expires_s = feed.byte()
                message.credit_opened.work_s = feed.byte() / 16
                message.credit_opened.predicted = feed.byte()
            case 7:
                message.credit_ended.decision_id = feed.pick(("x", "y", "calm's", ""))
                message.credit_ended.origin = feed.pick(("another scheduler", "scheduler-1", ""))
            case 8:
                message.load.rank = rank
                message.load.running_requests = feed.byte()
                message.load.waiting_requests = feed.byte()
                message.load.age_s = feed.byte() / 16
            case 9:
                message.prefill_ended.decision_id = feed.pick(("x", "y", "calm's", ""))
                message.prefill_ended.origin = feed.pick(("another scheduler", "scheduler-1", ""))
            case 10:
                pass
        return message

    def speak(self) -> None:
        if not self.sessions:
            return
        at = self.feed.below(len(self.sessions))
        message = self.message()
        if message.WhichOneof("body") not in ("load", "counters"):
            message.seq = self.numbers[at] + 1
        if self.feed.byte() % 4 == 3:
            merged(message, self.feed.blob())
        self.send(at, message)

    def raw(self) -> None:
        if self.sessions:
            message = stream_pb2.RelayMessage()
            merged(message, self.feed.blob())
            self.send(self.feed.below(len(self.sessions)), message)

    def route(self) -> None:
        """Requests go on meanwhile, never to the calm replica."""
        request = route_request(64, first=16 * self.feed.below(4))
        request.exclude.add(replica=CALM)
        try:
            response = self.scheduler.route(request, self.now)
        except SchedulerError:
            return
        check_prediction(response.prediction)
        if self.feed.flag():
            ended = routing_pb2.ReportRequest(decision_id=response.decision_id)
            self.scheduler.report(ended, self.now)

    def step(self) -> None:
        match self.feed.below(10):
            case 0:
                self.open()
            case 1:
                self.close()
            case 2 | 3 | 4 | 5 | 6:
                self.speak()
            case 7:
                self.raw()
            case 8:
                self.route()
            case 9:
                self.now = min(self.now + self.feed.below(20), 3000.0)
                self.calm.now = self.now
                self.calm.tell(load=stream_pb2.EngineLoad(rank=0))
                self.calm.session.take()
                self.scheduler.tick(self.now)

    def check_bounds(self) -> None:
        scheduler = self.scheduler
        assert len(list(scheduler.fleet)) <= MAX_REPLICAS
        assert len(scheduler.credits) <= MAX_CREDITS
        assert len(scheduler.streams.drops) + len(scheduler.streams.refusals) <= MAX_REASONS
        assert scheduler.streams.open == len(self.sessions) + 1
        for session in self.sessions:
            # Credits are bounded, welcome, grants and resyncs are few.
            assert len(session._outbox) <= MAX_OUTBOX + 16, len(session._outbox)

    def check_calm(self) -> None:
        assert self.seen() == self.before, "another relay has changed it"
        scheduler = self.scheduler
        assert self.calm.session.refused is None
        scheduler.list_replicas(fleet_pb2.ListReplicasRequest(), self.now)

    def check_end(self) -> None:
        """Everybody leaves, and time passes: nothing stays."""
        for session in (*self.sessions, self.calm.session):
            session.close(self.now)
        for _ in range(3):
            self.now += HOURS
            self.scheduler.tick(self.now)
        scheduler = self.scheduler
        assert not list(scheduler.fleet)
        assert not scheduler.fleet.models
        assert not len(scheduler.credits)
        assert not len(scheduler.decisions)
        assert scheduler.streams.open == 0
        assert scheduler.streams.slots.in_use == scheduler.streams.slots.waiting == 0


def check_prediction(prediction: routing_pb2.Prediction) -> None:
    """lower <= predicted <= upper <= prompt, and the tiers add up."""
    assert prediction.lower <= prediction.predicted <= prediction.upper <= prediction.prompt_tokens
    assert sum(tier.tokens for tier in prediction.tiers) == prediction.predicted


def session(data: bytes) -> None:
    """A script of what relays send, beside one that stays calm."""
    drive = _Drive(Feed(data))
    while drive.feed:
        drive.step()
        drive.check_bounds()
    drive.check_calm()
    drive.check_end()
