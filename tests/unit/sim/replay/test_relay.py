"""Tests of `servingfleet_sim.replay.relay`, over the production scheduler."""

from __future__ import annotations

import random

from servingfleet_protos.v1 import common_pb2
from servingfleet_scheduler.service import Scheduler
from servingfleet_sim.replay.fleet import EventsSpec, FailureSpec, FleetSpec, TierSpec
from servingfleet_sim.replay.options import Options, settings
from servingfleet_sim.replay.playing import Playing
from servingfleet_sim.replay.relay import MODEL, Relay
from servingfleet_sim.replay.world import KEY

from .worlds import BLOCK, fleet, pool, trace

OPTIONS = Options(block_tokens=BLOCK, jitter_s=0.0)
SPEC = fleet(
    pool(gpu_tokens=10 * BLOCK, tiers=(TierSpec(tier="host", tokens=40 * BLOCK),)),
    events=EventsSpec(lag_s=0.5),
)
PROMPTS = ["abcde", "abxyz", "klmno", "abcfg", "pqrst"]
ROWS = [(float(at), len(p) * BLOCK, 1, p) for at, p in enumerate(PROMPTS)]


def scheduler(spec: FleetSpec) -> Scheduler:
    return Scheduler(
        settings(OPTIONS, spec), instance_id="late", now=0.0, rng=random.Random(1), token_key=KEY
    )


def pump(relay: Relay, late: Scheduler) -> None:
    for session in list(late.streams):
        for message in session.take():
            relay.hear(session, message)


def holdings(of: Scheduler, lane: int) -> bytes:
    index = of.fleet.index(MODEL)
    replica = of.fleet.get("plain-0")
    assert index is not None
    assert replica is not None
    return index.holdings(replica.number, 0, lane, 1)


def test_a_scheduler_that_comes_late_learns_by_a_snapshot_what_the_others_know() -> None:
    playing = Playing(trace(ROWS), SPEC, OPTIONS, seed=1)
    late = scheduler(SPEC)
    relay = playing.world.relays["plain-0"]

    def comes() -> None:
        # While events are on their way.
        assert playing.world.engines[0].memory.gpu.size
        relay.attach(late.open_session(playing.clock.now))
        pump(relay, late)

    playing.clock.at(3.1, comes)
    warm: list[float | None] = []
    for at in (3.5, 3.7):
        playing.clock.at(at, lambda: warm.append(late.ready().warm))
    playing.play()
    assert warm == [0.0, 1.0]
    for lane in (0, 1):
        assert holdings(late, lane) == holdings(playing.world.schedulers[0], lane) != b""
    assert not late.streams.drops


def test_a_rank_whose_batches_were_lost_is_resyncing_until_they_came_again() -> None:
    spec = fleet(pool(), events=EventsSpec(lag_s=0.1, loss=0.5, replay_s=0.3))
    playing = Playing(trace(ROWS), spec, OPTIONS, seed=3)
    states: list[tuple[float, int]] = []
    replica = playing.world.schedulers[0].fleet.get("plain-0")
    assert replica is not None

    def look() -> None:
        states.append((round(playing.clock.now, 2), replica.ranks[0].state))

    for tenth in range(70):
        playing.clock.at(tenth / 10 + 0.05, look)
    playing.play()
    resyncing = [at for at, state in states if state == common_pb2.STREAM_STATE_RESYNCING]
    assert playing.counters["event_replays"] >= 1
    # Three looks in 0.3 s, give or take one.
    assert len(resyncing) / playing.counters["event_replays"] in (2.5, 3.0, 3.5, 4.0)
    assert states[-1][1] == common_pb2.STREAM_STATE_LIVE


def test_an_engine_that_was_away_comes_back_as_a_new_life_with_nothing_held() -> None:
    failures = (FailureSpec(at=4.5, replica="plain-0", for_s=1.0),)
    spec = FleetSpec(pools=SPEC.pools, events=SPEC.events, failures=failures)
    playing = Playing(trace([*ROWS, (7.0, 16, 1, "")]), spec, OPTIONS, seed=1)
    replica = playing.world.schedulers[0].fleet.get("plain-0")
    assert replica is not None
    seen: list[tuple[int, int, bool]] = []

    def look() -> None:
        rank = replica.ranks[0]
        held = bool(holdings(playing.world.schedulers[0], 0))
        seen.append((rank.state, rank.incarnation, held))

    for at in (4.4, 5.1, 6.1):
        playing.clock.at(at, look)
    playing.play()
    live, away = common_pb2.STREAM_STATE_LIVE, common_pb2.STREAM_STATE_UNPROVEN
    assert seen == [(live, 1, True), (away, 1, True), (live, 2, False)]
