"""From bytes of an engine to messages for schedulers."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from servingfleet_core import block_hashes, namespace_root
from servingfleet_protos.v1 import common_pb2, stream_pb2
from servingfleet_protos.v1.stream_pb2 import (
    Ack,
    CreditOpened,
    Delta,
    EngineLoad,
    GrantSnapshot,
    PrefillEnded,
    RelayMessage,
    Resync,
    SchedulerMessage,
    Welcome,
)
from servingfleet_relay.adapters import vllm
from servingfleet_relay.adapters.events import Dropped
from servingfleet_relay.pipeline import Pipeline, ReplayRequest
from servingfleet_relay.settings import LayerGroup, PipelineSettings
from tests.unit.relay.batches import CLEARED, END, live, payload, removed, reply, stored, tokens

NOW = 1000.0
LINK = "scheduler:1"
CONFIRMED, UPPER = 1, 2
MAMBA = {"group_idx": 0, "kv_cache_spec_kind": "mamba"}


def packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def canonical(ids: list[int], *, adapter: str = "", salt: str = "") -> bytes:
    return block_hashes(namespace_root("m", adapter, salt), packed(ids), 16)


def pipeline(**fields: Any) -> Pipeline:
    values = {"replica": "r", "model": "m", "ranks": (0,), "stream_id": "s"} | fields
    return Pipeline(PipelineSettings(**values), NOW)


def proven(**fields: Any) -> Pipeline:
    """Connected to an engine that has published nothing yet."""
    relay = pipeline(**fields)
    for rank in relay.settings.ranks:
        relay.socket_up(rank, NOW)
        relay.take_replay_requests()
        relay.replayed(rank, END, NOW)
    return relay


def linked(relay: Pipeline, link: str = LINK, instance: str = "i") -> list[RelayMessage]:
    """Opens a new session; returns its opening."""
    relay.open_link(link, NOW)
    answer(relay, link, welcome=Welcome(instance_id=instance))
    return take(relay, link)


def answer(relay: Pipeline, link: str = LINK, **body: Any) -> None:
    relay.receive(link, SchedulerMessage(**body), NOW)


def take(relay: Pipeline, link: str = LINK) -> list[RelayMessage]:
    taken = []
    while part := relay.take(link, 7):
        taken += part
        numbered = [m.seq for m in part if m.seq]
        if numbered:
            answer(relay, link, ack=Ack(seq=numbered[-1]))
    return [m for m in taken if not m.HasField("counters")]


def kinds(messages: Iterable[RelayMessage]) -> list[str | None]:
    return [m.WhichOneof("body") for m in messages]


def deltas(messages: Iterable[RelayMessage]) -> list[Delta]:
    return [m.delta for m in messages if m.HasField("delta")]


def state(relay: Pipeline, rank: int = 0) -> str:
    return next(status.state for status in relay.status().ranks if status.rank == rank)


def held(relay: Pipeline, lane: int = 0, rank: int = 0) -> tuple[bytes, bytes]:
    return relay.holdings(rank, lane, CONFIRMED), relay.holdings(rank, lane, UPPER)


def ascending(hashes: bytes) -> bytes:
    values = sorted(struct.unpack(f"<{len(hashes) // 8}Q", hashes))
    return struct.pack(f"<{len(values)}Q", *values)


def number(hash_: bytes) -> int:
    return int.from_bytes(hash_, "little")


def test_the_hello_says_who_speaks_and_by_which_rules() -> None:
    relay = pipeline(ranks=(0, 1), labels={"zone": "a"}, endpoint="e:1")
    hello = relay.open_link(LINK, NOW).hello
    assert (hello.protocol_version, hello.replica, hello.model) == (1, "r", "m")
    assert (hello.stream_id, hello.profile.engine, hello.hash_version) == ("s", "vllm", "sf1")
    assert (hello.block_tokens, hello.endpoint, dict(hello.labels)) == (16, "e:1", {"zone": "a"})
    assert [r.rank for r in hello.ranks] == [0, 1]
    assert {r.state for r in hello.ranks} == {common_pb2.STREAM_STATE_UNPROVEN}
    assert (hello.resume_instance, hello.resume_from) == ("", 0)
    caps = {rule.tier: rule.cap for rule in hello.profile.tiers}
    assert caps[common_pb2.TIER_GPU] == stream_pb2.TierRule.CAP_PROMPT_MINUS_ONE
    host = next(rule for rule in hello.profile.tiers if rule.tier == common_pb2.TIER_HOST)
    assert (host.overlap, host.always_loads) == (stream_pb2.TierRule.OVERLAP_QUEUE, True)
    assert 0.0 < host.overlap_share < 1.0
    assert hello.profile.mixed_steps


def test_a_store_becomes_a_profile_then_its_canonical_blocks_then_progress() -> None:
    relay = proven()
    linked(relay)
    relay.live(0, live(0, stored([1, 2], tokens(4, 16), block=32)), NOW)
    messages = take(relay)
    assert kinds(messages) == ["profile", "delta", "rank_state"]
    (lane,) = messages[0].profile.lanes
    assert (lane.tier, lane.unit_tokens) == (common_pb2.TIER_GPU, 32)
    (delta,) = deltas(messages)
    assert (delta.op, delta.parent, delta.lane) == (Delta.OP_HOLD, 0, lane.lane)
    assert delta.hashes == canonical(tokens(4))
    assert messages[-1].rank_state.engine_seq == 0
    assert messages[-1].rank_state.state == common_pb2.STREAM_STATE_LIVE


def test_a_removal_drops_the_blocks() -> None:
    relay = proven()
    linked(relay)
    relay.live(0, live(0, stored([1, 2], tokens(2))), NOW)
    relay.live(0, live(1, removed([2])), NOW)
    assert deltas(take(relay))[-1].op == Delta.OP_DROP
    assert held(relay) == (canonical(tokens(1)), b"")


def test_removals_of_one_batch_share_messages() -> None:
    relay = proven(delta_hashes=3)
    linked(relay)
    relay.live(0, live(0, stored(list(range(1, 5)), tokens(4))), NOW)
    take(relay)
    relay.live(0, live(1, *(removed([hash_]) for hash_ in (4, 3, 2, 1))), NOW)
    assert [len(delta.hashes) // 8 for delta in deltas(take(relay))] == [3, 1]
    assert held(relay) == (b"", b"")


def test_a_new_engine_life_may_have_another_block_size() -> None:
    relay = proven(replay=False)
    linked(relay)
    relay.live(0, live(0, stored([1], tokens(1))), NOW)
    relay.live(0, live(0, stored([1], tokens(1, 32), block=32), time=9.0), NOW)
    profiles = [m.profile for m in take(relay) if m.HasField("profile")]
    assert [profile.lanes[0].unit_tokens for profile in profiles] == [16, 32]
    assert held(relay)[0] == ascending(canonical(tokens(2)))


def test_adapter_and_salt_enter_the_namespace() -> None:
    relay = proven()
    keys = [["ad", "salt"]]
    relay.live(0, live(0, stored([1], tokens(1), lora_name="ad", extra_keys=keys)), NOW)
    assert held(relay)[0] == canonical(tokens(1), adapter="ad", salt="salt")


def test_a_clear_empties_the_gpu_and_doubts_the_host() -> None:
    relay = proven()
    relay.live(
        0,
        live(0, stored([1], tokens(1)), stored([1], [], block=0, medium="CPU"), CLEARED),
        NOW,
    )
    assert held(relay, 0) == (b"", b"")
    assert held(relay, 1) == (b"", canonical(tokens(1)))


def test_blocks_whose_removal_is_never_told_are_an_upper_bound() -> None:
    relay = proven()
    relay.live(0, live(0, stored([1], tokens(1), medium="STORAGE")), NOW)
    assert held(relay) == (b"", canonical(tokens(1)))


def test_only_blocks_whose_removal_is_never_told_are_doubted() -> None:
    relay = proven()
    certain, doubtful = tokens(1), tokens(1, start=100)
    relay.live(0, live(0, stored([1], certain, medium="CPU")), NOW)
    relay.live(0, live(1, stored([2], doubtful, medium="cpu")), NOW)
    assert held(relay) == (canonical(certain), canonical(doubtful))


def test_a_window_group_gets_a_lane_and_its_place_from_the_attention_group() -> None:
    relay = proven()
    linked(relay)
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 16}
    relay.live(
        0,
        live(
            0,
            stored([2], tokens(2), group_idx=0, **window),
            stored([1, 2], tokens(2), group_idx=1, kv_cache_spec_kind="full_attention"),
        ),
        NOW,
    )
    messages = take(relay)
    profile = messages[0].profile
    assert [(lane.group, lane.window_tokens) for lane in profile.lanes] == [(0, 16), (1, 0)]
    assert held(relay, 0) == (canonical(tokens(2))[8:], b"")
    assert state(relay) == "live"


def test_recurrent_groups_alone_leave_their_blocks_unplaced() -> None:
    relay = proven()
    relay.live(0, live(0, stored([2], tokens(2), group_idx=0, kv_cache_spec_kind="mamba")), NOW)
    assert state(relay) == "history_lost"
    assert held(relay) == (b"", b"")


def test_groups_that_are_configured_are_declared_before_the_first_event() -> None:
    groups = (LayerGroup("sliding_window", 32, 64), LayerGroup("full_attention", 32))
    relay = proven(layer_groups=groups)
    profile = relay.open_link(LINK, NOW).hello.profile
    assert [(lane.group, lane.window_tokens, lane.unit_tokens) for lane in profile.lanes] == [
        (0, 64, 32),
        (1, 0, 32),
    ]
    told = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    relay.live(0, live(0, stored([1], tokens(1, 32), block=32, **told)), NOW)
    assert held(relay, 1) == (canonical(tokens(2)), b"")
    assert state(relay) == "live"


def test_an_event_of_another_kind_than_configured_is_quarantined() -> None:
    relay = proven(layer_groups=(LayerGroup("mamba", 16),))
    relay.live(0, live(0, stored([1], tokens(1), group_idx=0)), NOW)
    relay.live(
        0, live(1, stored([1], tokens(1), group_idx=0, kv_cache_spec_kind="full_attention")), NOW
    )
    assert state(relay) == "quarantined"


def test_a_group_of_unknown_kind_is_not_trusted() -> None:
    relay = proven()
    kinds = [
        {"group_idx": 0, "kv_cache_spec_kind": "full_attention"},
        {"group_idx": 1, "kv_cache_spec_kind": "chunked_local_attention"},
    ]
    events = [stored([at + 1], tokens(1), **kind) for at, kind in enumerate(kinds)]
    relay.live(0, live(0, *events), NOW)
    assert state(relay) == "unproven"
    assert relay.counters()["drop_group_unsupported"] == 1
    assert held(relay)[0] == canonical(tokens(1))


def test_a_lost_store_opens_the_upper_bound_until_a_clear() -> None:
    relay = proven()
    relay.live(0, live(0, stored([1], [2**40] * 16), stored([2], tokens(1))), NOW)
    assert relay.counters()["drop_token_range"] == 1
    assert state(relay) == "history_lost"
    assert held(relay)[0] == canonical(tokens(1))
    relay.live(0, live(1, CLEARED), NOW)
    assert state(relay) == "live"


def test_an_event_that_may_have_been_a_removal_makes_what_is_held_uncertain() -> None:
    relay = proven()
    relay.live(0, live(0, stored([1], tokens(1))), NOW)
    relay.live(0, live(1, {"type": "BlockMoved"}, stored([2], tokens(1, start=500))), NOW)
    assert held(relay) == (canonical(tokens(1, start=500)), canonical(tokens(1)))
    assert relay.counters()["drop_unknown_event"] == 1
    assert state(relay) == "history_lost"


@pytest.mark.parametrize("tag", ["BlockEvicted", "BlocksRemoved", "PrefixInvalidated"])
def test_a_removal_that_nobody_knows_stops_the_stream(tag: str) -> None:
    relay = proven()
    relay.live(0, live(0, stored([1], tokens(1))), NOW)
    relay.live(0, live(1, {"type": tag}), NOW)
    assert state(relay) == "quarantined"
    assert tag in relay.status().ranks[0].reason
    assert held(relay) == (b"", b"")


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored([5], tokens(1), parent=5), "self_parent"),
        (stored([5, 5], tokens(2)), "duplicate_in_event"),
        (stored([5], tokens(1, 8), block=8), "partial_block"),
        (stored([5], [], block=0, medium="CPU", group_idx=9), "group_unknown"),
    ],
)
def test_a_store_that_can_not_be_is_dropped_and_nothing_else_is_disturbed(
    event: Any, reason: str
) -> None:
    relay = proven()
    relay.live(0, live(0, stored([1], tokens(1))), NOW)
    relay.live(0, live(1, event, stored([2], tokens(1, start=500))), NOW)
    assert relay.counters()[f"drop_{reason}"] == 1
    assert held(relay)[0] == ascending(canonical(tokens(1)) + canonical(tokens(1, start=500)))
    assert state(relay) == "history_lost"


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (["BlockRemoved", [1]], "odd_form_changed"),
        (stored([5], tokens(1, 32), block=32), "drop_block_size"),
        (stored([5], tokens(2)), "drop_token_count"),
        (removed([1], medium=7), "drop_field_type"),
        ({"type": "BlockRemoved", "block_hashes": [1]}, "drop_field_missing"),
        (removed([b"\x01" * 32]), "odd_hash_kind_changed"),
        (stored([1], tokens(1, start=900)), "drop_hash_conflict"),
        (stored([9], tokens(1), **MAMBA), "drop_group_changed"),
    ],
)
def test_a_stream_that_changes_its_meaning_is_quarantined_until_the_engine_restarts(
    event: Any, reason: str
) -> None:
    relay = proven(replay=True)
    linked(relay)
    named = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    first = named if reason == "drop_group_changed" else {}
    relay.live(0, live(0, stored([1, 2], tokens(2), **first)), NOW)
    relay.live(0, live(1, event), NOW)
    assert relay.counters()[reason] == 1
    assert state(relay) == "quarantined"
    assert deltas(take(relay))[-1].op == Delta.OP_CLEAR
    relay.live(0, live(2, stored([3], tokens(1), **first)), NOW)
    assert held(relay) == (b"", b"")
    relay.socket_down(0, NOW)
    relay.socket_up(0, NOW)
    relay.take_replay_requests()
    relay.replayed(0, END, NOW)
    relay.take_replay_requests()
    relay.replayed(0, reply(0, stored([3], tokens(1))), NOW)
    relay.replayed(0, END, NOW)
    assert state(relay) == "live"
    assert held(relay)[0] == canonical(tokens(1))


def test_a_unit_that_fits_no_canonical_block_is_refused_aloud() -> None:
    relay = proven()
    relay.live(0, live(0, stored([1], tokens(1, 24), block=24)), NOW)
    assert state(relay) == "quarantined"
    assert "24" in relay.status().ranks[0].reason


def test_a_configured_block_size_binds() -> None:
    relay = proven(engine_block_tokens=32)
    relay.live(0, live(0, stored([1], tokens(1))), NOW)
    assert relay.counters()["drop_partial_block"] == 1
    relay.live(0, live(1, stored([2, 3], tokens(2))), NOW)
    assert relay.counters()["drop_block_size"] == 1
    assert state(relay) == "quarantined"


def test_parts_of_a_block_that_come_first_do_not_set_its_size() -> None:
    relay = proven()
    relay.live(0, live(0, stored([1], tokens(1))), NOW)
    relay.live(0, live(1, stored([2], tokens(1, 64, start=500), block=64)), NOW)
    assert relay.open_link(LINK, NOW).hello.profile.lanes[0].unit_tokens == 64
    assert relay.counters()["odd_partial_block"] == 1
    assert state(relay) == "history_lost"


def test_batches_of_another_rank_are_not_indexed() -> None:
    relay = proven()
    relay.live(0, live(0, stored([1], tokens(1)), rank=3), NOW)
    assert state(relay) == "quarantined"
    assert relay.counters()["odd_wrong_rank"] == 1


def test_a_field_of_a_newer_release_takes_the_trust_away() -> None:
    relay = proven()
    relay.live(0, live(0, stored([1], tokens(1), novelty=1)), NOW)
    assert state(relay) == "unproven"
    assert held(relay)[0] == canonical(tokens(1))


def test_hashes_that_cover_later_tokens_give_one_block_less_and_no_promise() -> None:
    relay = proven()
    relay.live(0, live(0, stored([1], tokens(1), lookahead_token_ids=[[1]])), NOW)
    profile = relay.open_link(LINK, NOW).hello.profile
    assert profile.lanes[0].upper_in_predicted
    less = {rule.tier: rule.less_units for rule in profile.tiers}
    assert (less[common_pb2.TIER_GPU], less[common_pb2.TIER_HOST]) == (1, 0)
    assert held(relay) == (b"", canonical(tokens(1)))
    assert "C4" in relay.status().ranks[0].reason
    assert state(relay) == "history_lost"


def test_wrong_frames_are_counted_and_change_nothing() -> None:
    relay = proven()
    relay.live(0, [b"topic", bytes(8)], NOW)
    relay.replayed(0, [b""], NOW)
    assert relay.counters()["drop_frame_count"] == 2
    assert state(relay) == "live"


def test_ranks_are_kept_apart() -> None:
    relay = proven(ranks=(0, 1))
    relay.live(0, live(0, stored([1], tokens(1))), NOW)
    relay.live(1, live(5, stored([1], tokens(1)), rank=1), NOW)
    assert relay.take_replay_requests() == [ReplayRequest(1, 0)]
    assert (state(relay, 0), state(relay, 1)) == ("live", "resyncing")
    assert held(relay)[0] == canonical(tokens(1))


def test_a_new_engine_life_is_told_before_what_it_holds() -> None:
    relay = proven(replay=False)
    linked(relay)
    relay.live(0, live(0, stored([1], tokens(1))), NOW)
    take(relay)
    relay.live(0, live(1, stored([2], tokens(1, start=50))), NOW)
    relay.live(0, live(0, stored([3], tokens(1, start=90)), time=9.0), NOW)
    messages = take(relay)
    incarnations = [m.rank_state.incarnation for m in messages if m.HasField("rank_state")]
    assert incarnations[0] == 2
    at = kinds(messages).index("rank_state")
    after = deltas(messages[at:])
    assert [(d.op, d.hashes) for d in after] == [
        (Delta.OP_CLEAR, b""),
        (Delta.OP_HOLD, canonical(tokens(1, start=90))),
    ]


def test_a_lost_history_clears_before_it_rebuilds() -> None:
    relay = proven(replay=False)
    linked(relay)
    relay.live(0, live(0, stored([1], tokens(1))), NOW)
    relay.live(0, live(5, stored([2], tokens(1, start=50))), NOW)
    ops = [delta.op for delta in deltas(take(relay))]
    assert ops == [Delta.OP_HOLD, Delta.OP_CLEAR, Delta.OP_HOLD]
    assert state(relay) == "history_lost"


def test_orphans_that_no_parent_claims_open_the_upper_bound() -> None:
    relay = proven(orphan_ttl_s=5.0)
    relay.live(0, live(0, stored([2], tokens(1), parent=1)), NOW)
    relay.tick(NOW + 1)
    assert state(relay) == "live"
    relay.tick(NOW + 10)
    assert (state(relay), relay.counters()["drop_orphan_expired"]) == ("history_lost", 1)


def test_a_new_session_gets_states_at_once_and_a_snapshot_when_granted() -> None:
    relay = proven()
    relay.live(0, live(0, stored([1, 2], tokens(2))), NOW)
    opening = linked(relay)
    assert kinds(opening) == ["delta", "rank_state"]
    assert deltas(opening)[0].op == Delta.OP_CLEAR
    relay.live(0, live(1, stored([3], tokens(1, start=500))), NOW)
    assert deltas(take(relay))[0].hashes == canonical(tokens(1, start=500))
    answer(relay, grant_snapshot=GrantSnapshot(ranks=[0, 77]))
    messages = take(relay)
    assert kinds(messages)[0] == "snapshot_begin"
    assert kinds(messages)[-1] == "snapshot_end"
    hashes = b"".join(delta.hashes for delta in deltas(messages))
    assert ascending(hashes) == held(relay)[0]


def test_a_snapshot_shows_what_is_held_when_it_is_sent() -> None:
    relay = proven()
    linked(relay)
    relay.live(0, live(0, stored([1], tokens(1))), NOW)
    answer(relay, grant_snapshot=GrantSnapshot(ranks=[0]))
    relay.live(0, live(1, removed([1])), NOW)
    applied: set[bytes] = set()
    for message in take(relay):
        if message.HasField("snapshot_begin"):
            applied.clear()
        for delta in deltas([message]):
            blocks = {delta.hashes[at : at + 8] for at in range(0, len(delta.hashes), 8)}
            applied = applied | blocks if delta.op == Delta.OP_HOLD else applied - blocks
    assert applied == set()


def test_a_large_store_is_cut_into_messages_that_name_what_is_before() -> None:
    relay = proven(delta_hashes=4)
    linked(relay)
    relay.live(0, live(0, stored(list(range(1, 11)), tokens(10))), NOW)
    parts = deltas(take(relay))
    whole = canonical(tokens(10))
    assert [len(part.hashes) // 8 for part in parts] == [4, 4, 2]
    assert b"".join(part.hashes for part in parts) == whole
    assert [part.parent for part in parts] == [0, number(whole[24:32]), number(whole[56:64])]


def test_credits_are_echoed_to_every_scheduler() -> None:
    relay = proven()
    linked(relay, "a")
    linked(relay, "b")
    answer(relay, "a", credit_opened=CreditOpened(decision_id="d", origin="i"))
    for link in ("a", "b"):
        (message,) = take(relay, link)
        assert message.credit_opened.decision_id == "d"


def test_the_end_of_a_prefill_is_echoed_after_what_came_before_it() -> None:
    relay = proven()
    linked(relay, "a")
    linked(relay, "b")
    answer(relay, "a", credit_opened=CreditOpened(decision_id="d", origin="i"))
    answer(relay, "b", prefill_ended=PrefillEnded(decision_id="d", origin="i"))
    for link in ("a", "b"):
        opened, ended = take(relay, link)
        assert opened.seq + 1 == ended.seq
        assert ended.prefill_ended == PrefillEnded(decision_id="d", origin="i")


def test_one_scheduler_that_does_not_keep_up_disturbs_no_other() -> None:
    relay = proven(outbox_messages=5)
    linked(relay, "slow")
    linked(relay, "fast")
    for seq in range(10):
        relay.live(0, live(seq, stored([seq + 1], tokens(1, start=100 * seq))), NOW)
        assert len(deltas(take(relay, "fast"))) == 1
    assert relay.broken("slow")
    assert not relay.broken("fast")
    relay.close_link("slow")
    assert relay.open_link("slow", NOW).hello.resume_instance == ""


def test_a_broken_connection_resumes_where_it_was() -> None:
    relay = proven()
    linked(relay)
    relay.live(0, live(0, stored([1], tokens(1))), NOW)
    take(relay)
    relay.close_link(LINK)
    relay.live(0, live(1, stored([2], tokens(1, start=50))), NOW)
    hello = relay.open_link(LINK, NOW).hello
    assert hello.resume_instance == "i"
    answer(relay, welcome=Welcome(instance_id="i", resumed=True, expected_seq=hello.resume_from))
    messages = take(relay)
    assert messages[0].seq == hello.resume_from
    assert deltas(messages)[0].hashes == canonical(tokens(1, start=50))


def test_a_forgotten_scheduler_costs_nothing_more() -> None:
    relay = proven()
    linked(relay)
    relay.forget_link(LINK)
    relay.forget_link(LINK)
    relay.live(0, live(0, stored([1], tokens(1))), NOW)
    assert relay.status().links == {}


def test_load_and_totals_reach_every_scheduler() -> None:
    relay = proven()
    linked(relay)
    relay.load(EngineLoad(rank=0, running_requests=3))
    relay.tick(NOW + 60)
    load, counters = relay.take(LINK, 10)
    assert load.load.running_requests == 3
    assert len(counters.counters.totals) <= 128


def test_a_resync_is_counted_and_waits_for_its_grant() -> None:
    relay = proven()
    linked(relay)
    answer(relay, resync=Resync(rank=0, reason="x"))
    assert take(relay) == []
    assert relay.counters()["resyncs"] == 1


def test_capacity_enters_the_profile() -> None:
    relay = proven()
    linked(relay)
    relay.live(0, live(0, stored([1], tokens(1))), NOW)
    take(relay)
    relay.engine_capacity(100)
    (message,) = take(relay)
    assert message.profile.lanes[0].capacity_tokens == 1600


def test_an_engine_that_nobody_wrote_an_adapter_for_is_refused() -> None:
    with pytest.raises(ValueError, match="known: vllm"):
        pipeline(engine="other")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.binary(max_size=40).map(lambda b: payload(CLEARED)[:-9] + b))
def test_a_payload_that_is_no_batch_never_adds_to_what_is_held(body: bytes) -> None:
    assume(all(isinstance(event, Dropped) for event in vllm.decode_payload(body).events))
    assume(vllm.decode_payload(body).rank in (None, 0))
    relay = proven()
    relay.live(0, live(0, stored([1, 2], tokens(2))), NOW)
    relay.live(0, [b"", (1).to_bytes(8, "big"), body], NOW)
    confirmed, upper = held(relay)
    known = b"" if state(relay) == "quarantined" else ascending(canonical(tokens(2)))
    assert ascending(confirmed + upper) == known
    assert relay.status().ranks[0].engine_seq == 1


@settings(deadline=None)
@given(st.lists(st.binary(max_size=12), max_size=5))
def test_no_frames_raise(frames: list[bytes]) -> None:
    relay = proven()
    relay.live(0, frames, NOW)
    relay.replayed(0, frames, NOW)


hashes = st.lists(st.integers(0, 5) | st.sampled_from([-1, 2**64 - 1, b"\x07" * 32]), max_size=3)
stores = st.builds(
    lambda names, parent, block, start, fields: stored(
        names, tokens(len(names), block, start), parent=parent, block=block, **fields
    ),
    hashes,
    st.none() | st.integers(0, 5),
    st.sampled_from([0, 8, 16, 32]),
    st.sampled_from([0, 16, 500]),
    st.fixed_dictionaries(
        {},
        optional={
            "medium": st.sampled_from(["GPU", "CPU", "STORAGE", "cpu", "?"]),
            "group_idx": st.integers(0, 2),
            "kv_cache_spec_kind": st.sampled_from(["full_attention", "mamba", "sliding_window"]),
            "kv_cache_spec_sliding_window": st.sampled_from([0, 64]),
            "extra_keys": st.lists(st.none() | st.just(["x"]), max_size=3),
        },
    ),
)
removals = st.builds(removed, hashes, medium=st.sampled_from(["GPU", "CPU", "?"]))


@settings(deadline=None)
@given(st.lists(stores | removals | st.just(CLEARED), max_size=12))
def test_no_sequence_of_plausible_events_raises_and_schedulers_end_up_with_what_is_held(
    events: list[Any],
) -> None:
    relay = proven()
    linked(relay)
    mirrored: dict[tuple[int, bytes], int] = {}
    for seq, event in enumerate(events):
        relay.live(0, live(seq, event), NOW)
        for delta in deltas(take(relay)):
            blocks = [delta.hashes[at : at + 8] for at in range(0, len(delta.hashes), 8)]
            if delta.op == Delta.OP_HOLD:
                mirrored |= {(delta.lane, block): delta.confidence for block in blocks}
            elif delta.op == Delta.OP_DROP:
                for block in blocks:
                    mirrored.pop((delta.lane, block), None)
            else:
                mirrored = {key: value for key, value in mirrored.items() if key[0] != delta.lane}
    for lane in range(len(relay.status().lanes)):
        for confidence in (CONFIRMED, UPPER):
            told = [block for (at, block), c in mirrored.items() if (at, c) == (lane, confidence)]
            assert ascending(b"".join(told)) == relay.holdings(0, lane, confidence)
