"""Four engines, offered half as much again as they can compute, by a scheduler that turns away what would be late."""

from __future__ import annotations

import heapq
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from servingfleet_protos.v1 import routing_pb2, stream_pb2
from servingfleet_scheduler.errors import NotAdmitted
from servingfleet_scheduler.policy.speeds import Speeds
from servingfleet_scheduler.settings import AdmissionSettings

from .helpers import FakeRelay, finished, make_scheduler, route_request

ENGINES = 4
DEADLINE_S = 2.0
SECONDS = 60
SPEEDS = Speeds(step_s=0.002, token_s=0.0016, attention_s=0.0, step_tokens=64, noise_share=0.15)
MEAN_TOKENS = 100
MEAN_S = SPEEDS.step_s * 2 + SPEEDS.token_s * MEAN_TOKENS
ERROR_SHARE = 0.15
"""Of an estimate, against what the engine then takes."""
FIRST_TOKEN = routing_pb2.ReportRequest.STAGE_FIRST_TOKEN


@dataclass
class Result:
    on_time: int = 0
    late: int = 0
    waits: list[float] = field(default_factory=list)
    """To first token, of those admitted."""
    offered: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    refused: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By second."""

    @property
    def refused_shares(self) -> list[float]:
        """By second, once the queues have filled."""
        return [self.refused[second] / n for second, n in self.offered.items() if second >= 10]


class Engines:
    """First come, first served, one after the other; what they take differs from what was estimated."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._free = [0.0] * ENGINES
        self._waiting: list[list[float]] = [[] for _ in range(ENGINES)]

    def compute(self, engine: int, tokens: int, now: float) -> float:
        steps = -(-tokens // SPEEDS.step_tokens)
        takes = SPEEDS.step_s * steps + SPEEDS.token_s * tokens
        begins = max(now, self._free[engine])
        self._waiting[engine].append(begins)
        self._free[engine] = begins + takes * self._rng.lognormvariate(0.0, ERROR_SHARE)
        return self._free[engine]

    def load(self, engine: int, now: float) -> stream_pb2.EngineLoad:
        self._waiting[engine] = [begins for begins in self._waiting[engine] if begins > now]
        return stream_pb2.EngineLoad(
            running_requests=int(self._free[engine] > now),
            waiting_requests=len(self._waiting[engine]),
        )


def overload(*, z: float = 1.0, reopen_share: float = 0.9, poll_s: float | None = None) -> Result:
    """`poll_s`: the engines' own metrics come so often; None: never."""
    rng = random.Random(5)
    scheduler = make_scheduler(
        speeds=SPEEDS, learn=False, admission=AdmissionSettings(z=z, reopen_share=reopen_share)
    )
    relays = [FakeRelay(scheduler, f"r{number}").hello() for number in range(ENGINES)]
    for relay in relays:
        relay.snapshot()  # else nothing speaks against a prompt being cached there
    engines, result = Engines(rng), Result()
    events: list[tuple[float, int, Callable[[float], None]]] = []
    numbers: Iterator[int] = iter(range(10**6))

    def later(at: float, do: Callable[[float], None]) -> None:
        heapq.heappush(events, (at, next(numbers), do))

    def poll(now: float) -> None:
        for number, relay in enumerate(relays):
            relay.now = now
            relay.tell(load=engines.load(number, now))
        assert poll_s is not None
        later(now + poll_s, poll)

    def arrive(now: float) -> None:
        later(now + rng.expovariate(1.5 * ENGINES / MEAN_S), arrive)
        tokens = min(500, 1 + int(rng.expovariate(1 / (MEAN_TOKENS - 1))))
        request = route_request(tokens, first=1000 * next(numbers), deadline_s=DEADLINE_S)
        result.offered[int(now)] += 1
        try:
            response = scheduler.route(request, now)
        except NotAdmitted:
            result.refused[int(now)] += 1
            return
        begun = engines.compute(int(response.target.replica[1:]), tokens, now)
        result.waits.append(begun - now)
        if begun - now <= DEADLINE_S:
            result.on_time += 1
        else:
            result.late += 1

        def first_token(at: float) -> None:
            report = routing_pb2.ReportRequest(decision_id=response.decision_id, stage=FIRST_TOKEN)
            scheduler.report(report, at)
            scheduler.report(finished(response.decision_id, prompt=tokens), at)

        later(begun, first_token)

    later(0.0, arrive)
    if poll_s is not None:
        later(0.0, poll)
    while events[0][0] < SECONDS:
        now, _, do = heapq.heappop(events)
        do(now)
    return result


def test_leaving_room_for_errors_brings_more_prompts_in_time() -> None:
    bold, careful = overload(z=0.0, reopen_share=1.0), overload()
    assert careful.on_time > 1.02 * bold.on_time
    assert 2 * careful.late < bold.late
    assert careful.late < 0.05 * careful.on_time


def test_admission_does_not_swing_with_the_interval_of_the_engines_metrics() -> None:
    results = [overload(poll_s=poll_s) for poll_s in (None, 0.2, 1.0, 5.0)]
    for result in results:
        shares = result.refused_shares
        assert statistics.pstdev(shares) < 0.13
        assert abs(statistics.correlation(shares[:-1], shares[1:])) < 0.3
        assert sorted(result.waits)[int(0.99 * len(result.waits))] < 1.1 * DEADLINE_S
    on_time = [result.on_time for result in results]
    assert min(on_time) > 0.95 * max(on_time)
