"""What simulated schedules have found, each held for itself."""

from __future__ import annotations

from servingfleet_protos.v1 import common_pb2
from servingfleet_protos.v1.stream_pb2 import (
    Delta,
    GrantSnapshot,
    RelayMessage,
    SchedulerMessage,
    Welcome,
)
from servingfleet_relay.batches import Restarted
from servingfleet_relay.pipeline import Pipeline
from servingfleet_relay.sequence import Sequence as Numbering
from servingfleet_relay.settings import PipelineSettings
from servingfleet_sim.simulation.script import Engine, Kind, Script, Step
from servingfleet_sim.simulation.shrinking import failure_of
from tests.unit.relay.batches import live, removed, stored

LINK = "scheduler"


def relay() -> Pipeline:
    """A relay without replay, its engine's socket up."""
    settings = PipelineSettings(
        replica="r", model="m", ranks=(0,), stream_id="s", block_tokens=4, replay=False
    )
    pipeline = Pipeline(settings, 0.0)
    pipeline.socket_up(0, 0.0)
    return pipeline


def store(seq: int, *hashes: int, salt: int = 0) -> list[bytes]:
    """Prompts of one block each."""
    events = [stored([each], [salt + each] * 4, block=4) for each in hashes]
    return live(seq, *events)


def connect(pipeline: Pipeline) -> list[RelayMessage]:
    """Returns what a new session begins with."""
    pipeline.open_link(LINK, 0.0)
    welcome = Welcome(instance_id="i", resumed=False, expected_seq=1, window=1000)
    pipeline.receive(LINK, SchedulerMessage(welcome=welcome), 0.0)
    return pipeline.take(LINK, 1000)


def held(messages: list[RelayMessage]) -> set[bytes]:
    """What a scheduler holds that has read these."""
    blocks: set[bytes] = set()
    for message in messages:
        delta = message.delta
        hashes = {delta.hashes[at : at + 8] for at in range(0, len(delta.hashes), 8)}
        if message.HasField("snapshot_begin") or delta.op == Delta.OP_CLEAR:
            blocks.clear()
        elif delta.op == Delta.OP_HOLD:
            blocks |= hashes
        elif delta.op == Delta.OP_DROP:
            blocks -= hashes
    return blocks


def place(messages: list[RelayMessage], state: int) -> int:
    """Where a rank's state is told."""
    found = [n for n, each in enumerate(messages) if each.rank_state.state == state]
    return found[0]


def clearing(messages: list[RelayMessage]) -> int:
    """Where a lane is cleared."""
    return next(n for n, each in enumerate(messages) if each.delta.op == Delta.OP_CLEAR)


def test_a_block_removed_between_two_messages_of_a_snapshot_part_stays_removed() -> None:
    pipeline = relay()
    pipeline.live(0, store(0, 1, 2, 3), 0.0)
    opening = connect(pipeline)
    grant = SchedulerMessage(grant_snapshot=GrantSnapshot(ranks=[0]))
    pipeline.receive(LINK, grant, 0.0)
    # Three prompts are three messages, read together: the connection takes one of them.
    begun = pipeline.take(LINK, 2)
    pipeline.live(0, live(1, removed([1, 2, 3])), 0.0)
    rest = pipeline.take(LINK, 1000)
    assert held(opening + begun)
    assert held(opening + begun + rest) == set()


def test_a_rank_that_lost_its_history_says_so_before_its_blocks_go() -> None:
    pipeline = relay()
    connect(pipeline)
    pipeline.live(0, store(0, 1, 2), 0.0)
    pipeline.take(LINK, 1000)
    pipeline.live(0, store(2, 3), 0.0)
    told = pipeline.take(LINK, 1000)
    # Else it would for a moment be complete and empty: no reuse possible, which is not so.
    assert place(told, common_pb2.STREAM_STATE_HISTORY_LOST) < clearing(told)


def test_a_restarted_rank_says_so_before_its_blocks_go() -> None:
    pipeline = relay()
    connect(pipeline)
    pipeline.live(0, store(0, 1), 0.0)
    pipeline.live(0, store(1, 2), 0.0)
    pipeline.take(LINK, 1000)
    pipeline.live(0, store(0, 3, salt=9), 0.0)
    told = pipeline.take(LINK, 1000)
    restarted = [n for n, each in enumerate(told) if each.rank_state.incarnation == 2]
    assert restarted[0] < clearing(told)


def test_the_schedule_that_kept_blocks_of_an_overtaken_snapshot() -> None:
    steps = (
        Step(0.52, Kind.LOCAL, engine=1, prompt=(2, 5, 9), outputs=9, own=3),
        Step(0.60, Kind.REQUEST, engine=1, scheduler=1, prompt=(0, 8, 2), pinned=True),
        Step(0.84, Kind.REQUEST, scheduler=1, prompt=(1, 0, 4), own=1),
        Step(1.33, Kind.JUMP_RELAY, engine=1, own=665),
        Step(1.55, Kind.REQUEST, engine=1, prompt=(2, 2, 3), outputs=9),
        Step(1.84, Kind.REQUEST, engine=1, prompt=(2, 6, 7), own=2),
    )
    engines = (
        Engine(ranks=2, blocks=8, ring=2, version="0.10.2", new_seed=True),
        Engine(blocks=8, version="0.10.2", wide_hashes=True),
    )
    for seed in range(20_637, 20_657):
        script = Script(
            seed, engines, steps, slots=2, window=4, outbox=12, delta_hashes=64, delay_s=0.5
        )
        assert failure_of(script) is None


def test_the_schedule_that_promised_too_little_after_a_loss() -> None:
    steps = (
        Step(1.89, Kind.REQUEST, scheduler=1, prompt=(1, 14, 8), outputs=3, pinned=True, own=3),
        Step(2.95, Kind.REQUEST, prompt=(0, 7, 12), outputs=3, own=3),
        Step(3.16, Kind.LOCAL, scheduler=1, prompt=(1, 17, 10), own=2),
        Step(5.80, Kind.HOLE, amount=1),
        Step(6.45, Kind.LOCAL, prompt=(0, 4, 8), outputs=3, own=2),
        Step(6.53, Kind.REQUEST, prompt=(0, 7, 11), own=2),
    )
    engines = (Engine(blocks=14, replay=False),)
    for seed in range(3_581, 3_601):
        script = Script(seed, engines, steps, window=64, outbox=12, delta_hashes=64, delay_s=0.1)
        assert failure_of(script) is None


def test_the_schedule_in_which_a_new_lifes_snapshot_overtakes_blocks_of_the_old() -> None:
    steps = (
        Step(0.30, Kind.STALL, span=6.2),
        Step(1.40, Kind.LOCAL, prompt=(2, 8, 10), outputs=9, own=6),
        Step(2.00, Kind.RESTART_ENGINE),
    )
    engines = (Engine(blocks=40), Engine())
    for seed in range(20):
        script = Script(seed, engines, steps, window=4, outbox=200, delta_hashes=1, delay_s=0.3)
        assert failure_of(script) is None


def test_a_newer_process_that_no_replay_denies_is_a_restart() -> None:
    numbering = Numbering(
        replay=True, deadline_s=1.0, probe_s=10.0, max_held_batches=9, max_held_bytes=999
    )
    numbering.socket_up(0.0)
    numbering.replay_failed("no answer", 0.0)
    numbering.live(0, b"old 0", 0.0)
    numbering.live(1, b"old 1", 0.0)
    numbering.socket_down()
    # Its start is told once, while the socket is down and the replay can't answer.
    numbering.process_started(5.0, 5.0)
    numbering.socket_up(6.0)
    steps = numbering.replay_failed("no answer", 7.0)
    # The new process has counted just as far: its next batch would look like the old one's next.
    steps += numbering.live(2, b"new 2", 8.0)
    assert any(isinstance(step, Restarted) for step in steps)
    assert numbering.incarnation == 2
