"""Plays a recorded stream through relay, index and router, and holds every prediction to the engine's report.

The very code of the two processes, under the recording's own clock: before each request a Route pinned to its replica
and rank, at its end the Report. The relay gets only what it would have seen in place: bytes and the state of sockets,
never the controls that an operator sent to the engine.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter

from servingfleet_protos.v1 import routing_pb2
from servingfleet_relay.adapters.events import Cleared, Event, Stored
from servingfleet_relay.adapters.registry import ADAPTERS
from servingfleet_relay.frames import END_OF_REPLAY
from servingfleet_relay.pipeline import Pipeline, RankStatus
from servingfleet_relay.settings import PipelineSettings
from servingfleet_scheduler.service import Scheduler
from servingfleet_scheduler.settings import SchedulerSettings

from .recordings import Control, Message, Recording, Request

REPLICA = "recorded"
MODEL = "recorded"
LINK = "verify"


class Cause(StrEnum):
    """Why no relay could have known better."""

    IN_FLIGHT = "in flight at the same moment"
    RESET_UNANNOUNCED = "a cache reset that the idle engine had not announced"
    SHARED_USAGE = "several prompts in one usage"
    PART_OF_BLOCK = "a part of a canonical block, of which only whole ones are known"


@dataclass(frozen=True)
class Verdict:
    """One request: what was predicted, what the engine reported, and why they differ where they do. Tokens."""

    request: Request
    rank: int
    predicted: int
    lower: int
    upper: int
    cause: Cause | None
    """Set where the prediction or a bound missed the report and the recording shows why."""

    @property
    def exact(self) -> bool:
        return self.predicted == self.request.cached_tokens

    @property
    def in_bounds(self) -> bool:
        return self.lower <= self.request.cached_tokens <= self.upper

    @property
    def hit(self) -> bool:
        return self.exact and self.in_bounds

    @property
    def wrong(self) -> bool:
        """Missed, with nothing in the recording that explains it."""
        return not self.hit and self.cause is None


@dataclass(frozen=True)
class Verification:
    """A whole recording."""

    recording: Recording
    verdicts: tuple[Verdict, ...]
    counters: dict[str, int]
    """The relay's totals, drops by reason among them."""
    states: tuple[RankStatus, ...]
    """Of the relay's ranks, at the end."""

    @property
    def exact(self) -> int:
        return sum(verdict.hit for verdict in self.verdicts)

    @property
    def wrong(self) -> int:
        return sum(verdict.wrong for verdict in self.verdicts)

    @property
    def explained(self) -> int:
        return len(self.verdicts) - self.exact - self.wrong


@dataclass(frozen=True)
class End:
    """A request ended: its outcome is known from here on."""

    request: Request


Step = Message | Request | Control | End


def timeline(recording: Recording) -> Iterator[tuple[float, Step]]:
    """Everything that happened, in order; at one moment: messages, ends, controls, starts."""
    steps: list[tuple[float, int, Step]] = [(m.time, 0, m) for m in recording.messages]
    for request in recording.requests:
        steps.append((request.end, 1, End(request)))
        steps.append((request.start, 3, request))
    steps += [(control.time, 2, control) for control in recording.controls]
    for time, _, step in sorted(steps, key=itemgetter(0, 1)):
        yield time, step


def verify(recording: Recording, block_tokens: int = 16) -> Verification:
    """Plays one recording, in canonical blocks of so many tokens. Raises ValueError if it holds no requests."""
    if not recording.requests:
        raise ValueError(f"{recording.name}: no requests to hold the predictions to")
    play = _Play(recording, block_tokens)
    for time, step in timeline(recording):
        play.step(time, step)
    return Verification(
        recording, tuple(play.verdicts), play.relay.counters(), play.relay.status().ranks
    )


def judge(
    recording: Recording,
    request: Request,
    rank: int,
    prediction: routing_pb2.Prediction,
    block_tokens: int = 16,
) -> Verdict:
    """Holds a prediction to the report; a miss gets its cause, where the recording shows one."""
    seen = (prediction.predicted, prediction.lower, prediction.upper)
    verdict = Verdict(request, rank, *seen, cause=None)
    if verdict.hit:
        return verdict
    cause = _cause(recording, request, rank)
    if cause is None and verdict.in_bounds:
        part = request.cached_tokens % block_tokens
        unit = recording.engine.get("page_size", block_tokens)
        if unit < block_tokens and prediction.predicted == request.cached_tokens - part:
            cause = Cause.PART_OF_BLOCK
    return Verdict(request, rank, *seen, cause=cause)


def _cause(recording: Recording, request: Request, rank: int) -> Cause | None:
    if len(request.prompts) > 1:
        return Cause.SHARED_USAGE
    resets = [c.time for c in recording.controls if c.is_reset and c.time <= request.start]
    announced = [
        message.time
        for message in recording.messages
        if message.rank == rank and message.time <= request.start and _clears(recording, message)
    ]
    if resets and max(announced, default=0.0) < max(resets):
        return Cause.RESET_UNANNOUNCED
    others = (other for other in recording.requests if other is not request)
    if any(other.start <= request.end and request.start <= other.end for other in others):
        return Cause.IN_FLIGHT
    return None


def rank_of(recording: Recording, request: Request) -> int:
    """The rank that ran a request: the one it named, else the one whose events store its prompt.

    The hindsight of a recording: where no rank stored it, rank 0.
    """
    if request.rank is not None or recording.ranks == 1:
        return request.rank or 0
    prompt = struct.pack(f"<{len(request.prompts[-1])}I", *request.prompts[-1])
    for message in recording.messages:
        if message.time <= request.start:
            continue
        for event in _events(recording, message):
            if not isinstance(event, Stored) or event.parent is not None:
                continue
            if event.tokens and prompt.startswith(event.tokens):
                return message.rank
    return 0


def route_request(
    request: Request, prompt: Sequence[int], model: str, replica: str, rank: int
) -> routing_pb2.RouteRequest:
    """The request for one of its prompts, pinned to where it ran."""
    wanted = routing_pb2.RouteRequest(
        model=model,
        prompt=routing_pb2.Prompt(
            tokens_le32=struct.pack(f"<{len(prompt)}I", *prompt),
            adapter=request.adapter,
            cache_salt=request.cache_salt,
            prompt_logprobs=request.prompt_logprobs,
        ),
    )
    wanted.only.add(replica=replica, rank=rank)
    return wanted


def outcome(request: Request, decision_id: str) -> routing_pb2.ReportRequest:
    """What the engine reported at the request's end."""
    return routing_pb2.ReportRequest(
        decision_id=decision_id,
        stage=routing_pb2.ReportRequest.STAGE_FINISHED,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        prompts_in_usage=len(request.prompts),
    )


class _Play:
    """The two processes, wired to one another without a network."""

    def __init__(self, recording: Recording, block_tokens: int) -> None:
        self.recording = recording
        self.block_tokens = block_tokens
        start, _ = next(timeline(recording))
        ranks = tuple(range(recording.ranks))
        self.relay = Pipeline(
            PipelineSettings(
                replica=REPLICA,
                model=MODEL,
                ranks=ranks,
                stream_id=LINK,
                engine=recording.adapter,
                engine_version=str(recording.engine.get(recording.adapter, "")),
                block_tokens=block_tokens,
                host_unit_tokens=recording.host_unit_tokens,
                layer_groups=recording.layer_groups,
                engine_block_tokens=recording.pulled_unit_tokens,
                pull=bool(recording.pulled_unit_tokens),
            ),
            start,
        )
        self.scheduler = Scheduler(
            SchedulerSettings(block_tokens=block_tokens),
            instance_id=LINK,
            now=start,
            rng=random.Random(0),
            token_key=b"the key of one verification",
        )
        self.session = self.scheduler.open_session(start)
        self.session.receive(self.relay.open_link(LINK, start), start)
        self.ring: dict[int, list[Message]] = {rank: [] for rank in ranks}
        self.ring_whole = dict.fromkeys(ranks, False)
        self.decisions: dict[int, list[str]] = {}
        self.verdicts: list[Verdict] = []
        for rank in ranks:
            self.relay.socket_up(rank, start)
        self._settle(start)

    def step(self, now: float, step: Step) -> None:
        self.relay.tick(now)
        self.scheduler.tick(now)
        match step:
            case Message():
                self._publish(step)
            case Request():
                self._route(step)
            case End():
                for decision in self.decisions.pop(step.request.number):
                    self.scheduler.report(outcome(step.request, decision), now)
            case Control():
                self._control(step)
        self._settle(now)

    def _publish(self, message: Message) -> None:
        ring = self.ring[message.rank]
        if message.seq == 0:
            ring.clear()
            self.ring_whole[message.rank] = True
        ring.append(message)
        self.relay.live(message.rank, message.frames, message.time)

    def _control(self, control: Control) -> None:
        for rank in self.ring if control.socket is not None else ():
            if control.socket:
                # A new engine: that it has published nothing yet is known.
                self.ring[rank].clear()
                self.ring_whole[rank] = True
                self.relay.socket_up(rank, control.time)
            else:
                self.relay.socket_down(rank, control.time)

    def _route(self, request: Request) -> None:
        rank = rank_of(self.recording, request)
        answers = [
            self.scheduler.route(
                route_request(request, prompt, MODEL, REPLICA, rank), request.start
            )
            for prompt in request.prompts
        ]
        self.decisions[request.number] = [answer.decision_id for answer in answers]
        # An engine that answers several prompts at once reports the reuse of the last.
        prediction = answers[-1].prediction
        self.verdicts.append(judge(self.recording, request, rank, prediction, self.block_tokens))

    def _settle(self, now: float) -> None:
        """Carries messages both ways until neither side has more to say."""
        busy = True
        while busy:
            busy = False
            for ask in self.relay.take_replay_requests():
                busy = True
                self._replay(ask.rank, ask.start_seq, now)
            for message in self.relay.take(LINK, 1024):
                busy = True
                self.session.receive(message, now)
            for answer in self.session.take():
                busy = True
                self.relay.receive(LINK, answer, now)

    def _replay(self, rank: int, start: int, now: float) -> None:
        """Answers as the engine's replay socket would, where the recording tells how."""
        ring = self.ring[rank]
        if not self.ring_whole[rank] and not (ring and start >= (ring[0].seq or 0)):
            self.relay.replay_failed(rank, "not in the recording", now)
            return
        for message in ring:
            if (message.seq or 0) >= start:
                self.relay.replayed(rank, [b"", *message.frames], now)
        self.relay.replayed(rank, [b"", b"", END_OF_REPLAY.to_bytes(8, "big"), b""], now)


def _clears(recording: Recording, message: Message) -> bool:
    return any(isinstance(event, Cleared) for event in _events(recording, message))


def _events(recording: Recording, message: Message) -> Sequence[Event]:
    adapter, unit = ADAPTERS[recording.adapter], recording.pulled_unit_tokens
    decode = adapter.pulled(unit) if unit and adapter.pulled is not None else adapter.decode
    return decode(message.frames[-1]).events
