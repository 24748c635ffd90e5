from __future__ import annotations

import math

import pytest

from servingfleet_protos.v1 import routing_pb2, stream_pb2
from servingfleet_scheduler.backlog import Ahead, Load
from servingfleet_scheduler.room import Room

from .helpers import FakeRelay, finished, make_scheduler, profile, route_request

CAPACITY = 100_000


def room(**load: float) -> Room:
    """95% in use; a request stays for 9.5 s, so that 10,000 tokens are freed each second."""
    made = Room()
    made.ended("earlier", 9.5)
    made.report(Load(**{"read_at": 10.0, "kv_usage": 0.95} | load))  # type: ignore[arg-type]
    return made


def wait_s(of: Room, tokens: int, now: float = 10.0) -> float:
    return of.wait_s(now, tokens, CAPACITY, stale_s=10.0)


def test_a_prompt_waits_until_running_requests_have_freed_what_it_lacks() -> None:
    assert wait_s(room(), 25_000) == pytest.approx(2.0)
    assert wait_s(room(), 25_000, now=11.5) == pytest.approx(0.5)
    assert wait_s(room(), 25_000, now=13.0) == 0.0


def test_a_prompt_that_fits_does_not_wait() -> None:
    assert wait_s(room(), 5_000) == 0.0
    assert not room(kv_usage=0.4).crowded


def test_prompts_that_come_before_take_their_room_first() -> None:
    crowded = room()
    crowded.sent("a", 10.0, 10_000)
    crowded.sent("a", 10.0, 10_000)
    assert wait_s(crowded, 25_000) == pytest.approx(3.0)
    crowded.ended("a")
    assert wait_s(crowded, 25_000) == pytest.approx(2.0)


def test_what_had_begun_when_the_engine_was_read_is_in_its_usage() -> None:
    crowded = room()
    for name in ("a", "b"):
        crowded.sent(name, 10.0, 10_000)
    crowded.sent("c", 19.99, 10_000)
    crowded.report(Load(20.0, kv_usage=0.95, waiting_requests=1))
    # b waits, c has come since.
    assert wait_s(crowded, 5_000, now=20.0) == pytest.approx(2.0)


def test_nothing_is_waited_for_of_which_nothing_is_known() -> None:
    assert wait_s(Room(), 90_000) == 0.0
    assert wait_s(room(), 90_000, now=20.1) == 0.0
    assert room().wait_s(10.0, 90_000, 0, stale_s=10.0) == 0.0
    untold = Room()
    untold.report(Load(10.0, kv_usage=0.95))
    assert wait_s(untold, 90_000) == 0.0


def test_how_long_requests_stay_is_smoothed() -> None:
    crowded = room()
    crowded.ended("long", 9.5 * 17)
    assert wait_s(crowded, 25_000) == pytest.approx(4.0)


def test_the_longer_of_two_waits_counts_and_the_difference_may_be_all_wrong() -> None:
    assert Ahead(2.0, 0.3, 0.3).at_least(1.0) == Ahead(2.0, 0.3, 0.3)
    longer = Ahead(1.0, 0.3, 0.4).at_least(4.0)
    assert longer == pytest.approx((4.0, math.hypot(0.3, 3.0), math.hypot(0.4, 3.0)))


def test_a_full_cache_sends_the_next_prompt_elsewhere() -> None:
    scheduler = make_scheduler()
    full = profile()
    full.lanes[0].capacity_tokens = 10_000
    relays = {name: FakeRelay(scheduler, name).hello(profile=full) for name in ("r1", "r2")}

    def tell(now: float) -> None:
        for name, relay in relays.items():
            relay.now = now
            usage = 0.99 if name == "r1" else 0.1
            relay.tell(load=stream_pb2.EngineLoad(running_requests=9, kv_usage=usage))

    tell(0.0)
    for name, relay in relays.items():
        relay.snapshot()
        request = route_request(64, first=10_000)
        request.only.add(replica=name)
        decision_id = scheduler.route(request, 0.0).decision_id
        stage = routing_pb2.ReportRequest.STAGE_FIRST_TOKEN
        scheduler.report(finished(decision_id, stage=stage), 0.5)
        scheduler.report(finished(decision_id), 5.5)
    tell(5.5)
    chosen = [scheduler.route(route_request(1000, first=n), 5.5) for n in range(0, 8000, 2000)]
    assert {each.target.replica for each in chosen} == {"r2"}
