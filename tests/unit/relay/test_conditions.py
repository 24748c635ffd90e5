"""What the relay makes of failures while it runs: tiers, conditions, the history read again."""

from __future__ import annotations

from typing import Any

import pytest

from servingfleet_protos.v1.common_pb2 import TIER_GPU, TIER_HOST
from servingfleet_protos.v1.stream_pb2 import EngineLoad, Outcome, SchedulerMessage
from servingfleet_relay.adapters.registry import ADAPTERS
from servingfleet_relay.adapters.vllm import PROFILE
from servingfleet_relay.conformance.canary import Canary
from servingfleet_relay.conformance.watches import OUTCOMES, OUTCOMES_LEAST, SILENCE_S
from servingfleet_relay.pipeline import Pipeline, RankStatus
from tests.unit.relay import pages
from tests.unit.relay.batches import CLEARED, END, live, removed, reply, stored, tokens
from tests.unit.relay.test_pipeline import (
    LINK,
    NOW,
    answer,
    ascending,
    canonical,
    held,
    linked,
    pipeline,
    proven,
    state,
)

PROMPT = tokens(2)


def status(relay: Pipeline) -> RankStatus:
    (rank,) = relay.status().ranks
    return rank


def fed(relay: Pipeline, *events: Any, first: int = 0) -> Pipeline:
    for seq, event in enumerate(events, start=first):
        relay.live(0, live(seq, event), NOW)
    return relay


def failed(relay: Pipeline) -> dict[str, int]:
    return {each.reason: each.count for each in status(relay).failures}


def test_a_healthy_stream_is_live_and_nothing_failed() -> None:
    relay = fed(proven(), stored([1, 2], PROMPT), removed([2]), CLEARED)
    assert (status(relay).condition, status(relay).tiers, failed(relay)) == ("live", {}, {})
    assert not any(name.startswith("invariant_") for name in relay.counters())


def test_an_unknown_medium_is_quarantined_by_itself() -> None:
    relay = fed(proven(), stored([1, 2], PROMPT), stored([3], tokens(1), medium="HBM"))
    condition, why = status(relay).tiers["medium 'HBM'"]
    assert condition == "quarantined"
    assert "C22" in why
    assert held(relay)[0] == ascending(canonical(PROMPT))
    assert (state(relay), status(relay).condition) == ("history_lost", "degraded")
    assert relay.counters()["invariant_c22"] == 1
    # Removals from there are of nothing that we hold, and a clear of the GPU empties nothing there.
    fed(relay, removed([1], medium="HBM"), first=2)
    assert held(relay)[0] == ascending(canonical(PROMPT))
    fed(relay, CLEARED, first=3)
    assert state(relay) == "history_lost"


def test_a_removal_from_a_medium_that_nothing_was_stored_to_may_be_the_gpus() -> None:
    relay = fed(proven(), stored([1, 2], PROMPT), removed([1], medium="HBM"))
    assert held(relay) == (b"", ascending(canonical(PROMPT)))


def test_what_is_wrong_with_the_host_tier_costs_the_host_tier_alone() -> None:
    relay = proven()
    fed(relay, stored([1, 2], PROMPT), stored([1], [], block=0, medium="CPU"))
    host = next(lane for lane in relay.status().lanes if lane.startswith("host"))
    assert host
    fed(relay, stored(["x"], [], block=0, medium="CPU"), first=2)
    assert status(relay).tiers["host"][0] == "quarantined"
    assert held(relay, 0)[0] == ascending(canonical(PROMPT))
    assert held(relay, 1) == (b"", b"")
    fed(relay, stored([2], [], block=0, medium="CPU"), first=3)
    assert held(relay, 1) == (b"", b"")
    assert relay.counters()["events_tier_quarantined"] == 1


def test_a_removal_that_may_have_been_lost_takes_back_what_was_expected() -> None:
    # On SGLang what is perhaps held counts as expected: a lost removal must not leave it there.
    relay = proven(engine="sglang")
    fed(relay, pages.stored(PROMPT))
    assert held(relay)[0] == ascending(canonical(PROMPT))
    fed(relay, {"type": "BlockMoved"}, first=1)
    assert held(relay) == (b"", b"")
    assert state(relay) == "history_lost"


def unread(relay: Pipeline, count: int) -> None:
    for _ in range(count):
        relay.live(0, [b"only"], NOW)


def test_frames_that_are_none_stop_a_stream_only_in_a_row() -> None:
    relay = proven()
    unread(relay, 2)
    fed(relay, stored([1], tokens(1)))
    unread(relay, 2)
    assert state(relay) == "live"
    unread(relay, 1)
    assert state(relay) == "quarantined"


def test_stores_that_name_a_block_twice_stop_the_stream_when_they_go_on() -> None:
    relay = fed(proven(), *[stored([5, 5], tokens(2))] * 2)
    assert state(relay) == "history_lost"
    fed(relay, stored([5, 5], tokens(2)), first=2)
    assert state(relay) == "quarantined"
    assert failed(relay)["cycles"] == 1


def test_a_removal_of_what_is_not_held_is_counted_where_all_is_known() -> None:
    relay = fed(proven(), stored([1, 2], PROMPT), removed([9]))
    assert failed(relay) == {"removed_unknown": 1}
    assert state(relay) == "live"
    late = pipeline(replay=False)
    late.socket_up(0, NOW)
    late.live(0, live(7, removed([9])), NOW)
    assert "removed_unknown" not in failed(late)


def test_a_removal_from_the_wrong_tier_removes_nothing_elsewhere() -> None:
    relay = fed(
        proven(),
        stored([1, 2], PROMPT),
        stored([2], [], block=0, medium="CPU"),
        removed([1], medium="CPU"),
    )
    assert failed(relay) == {"removed_elsewhere": 1}
    assert held(relay)[0] == ascending(canonical(PROMPT))


def test_a_store_after_a_block_that_is_gone_opens_what_is_possible() -> None:
    relay = fed(proven(), stored([1], tokens(1)), removed([1]))
    fed(relay, stored([2], tokens(1, start=16), parent=1), first=2)
    assert failed(relay) == {"parent_gone": 1}
    assert state(relay) == "history_lost"


def test_too_much_for_the_cache_is_read_again_and_then_an_upper_bound() -> None:
    relay = proven()
    events = [
        stored([at + 1, at + 2], tokens(2, start=at * 16), parent=at or None) for at in (0, 2, 4)
    ]
    fed(relay, *events)
    relay.engine_capacity(gpu_blocks=4)
    relay.tick(NOW + 2)
    assert state(relay) == "resyncing"
    (asked,) = relay.take_replay_requests()
    assert asked.start_seq == 0
    for seq, event in enumerate(events):
        relay.replayed(0, reply(seq, event), NOW + 2)
    relay.replayed(0, END, NOW + 2)
    assert state(relay) == "live"
    assert held(relay)[0] == ascending(canonical(tokens(6)))
    relay.tick(NOW + 4)
    assert state(relay) == "history_lost"
    assert held(relay) == (b"", ascending(canonical(tokens(6))))
    assert relay.counters()["rebuilds"] == 1


def test_a_replay_that_puts_it_right_ends_the_suspicion() -> None:
    relay = proven()
    fed(relay, stored([1, 2], PROMPT), stored([3, 4], tokens(2, start=32)))
    relay.engine_capacity(gpu_blocks=2)
    relay.tick(NOW + 2)
    relay.take_replay_requests()
    relay.replayed(0, reply(0, stored([1, 2], PROMPT)), NOW + 2)
    relay.replayed(0, reply(1, removed([1]), removed([2])), NOW + 2)
    relay.replayed(0, reply(2, stored([3, 4], tokens(2, start=32))), NOW + 2)
    relay.replayed(0, END, NOW + 2)
    relay.tick(NOW + 4)
    assert state(relay) == "live"


def test_without_a_replay_socket_all_is_forgotten_and_built_anew() -> None:
    relay = pipeline(replay=False)
    relay.socket_up(0, NOW)
    fed(relay, stored([1, 2], PROMPT))
    relay.engine_capacity(gpu_blocks=1)
    relay.tick(NOW + 2)
    assert held(relay) == (b"", b"")
    assert state(relay) == "history_lost"
    fed(relay, stored([3], tokens(1, start=500)), first=1)
    assert held(relay)[0] == canonical(tokens(1, start=500))


def test_an_engine_that_works_in_silence_is_not_believed_until_it_speaks() -> None:
    relay = fed(proven(), stored([1, 2], PROMPT))
    relay.engine_progress(0, 0, 0, NOW)
    relay.engine_progress(0, 50, 50_000, NOW + SILENCE_S)
    assert state(relay) == "unproven"
    assert "C34" in status(relay).reason
    fed(relay, stored([3], tokens(1, start=500)), first=1)
    assert state(relay) == "live"


def test_prompts_shorter_than_a_block_leave_nothing_to_announce() -> None:
    relay = proven(engine_block_tokens=528)
    relay.engine_progress(0, 0, 0, NOW)
    relay.engine_progress(0, 50, 50 * 400, NOW + SILENCE_S)
    assert state(relay) == "live"


def test_a_cache_that_turns_over_without_removals_is_an_upper_bound_until_one_comes() -> None:
    relay = proven()
    linked(relay)
    for hour in range(4):
        fed(relay, stored([hour + 1], tokens(1, start=hour * 16)), first=hour)
        for usage, at in ((0.95, 0.0), (0.3, 1.0)):
            relay.load(EngineLoad(rank=0, kv_usage=usage), NOW + hour * 1200 + at)
    assert held(relay)[0] == b""
    assert "C21" in status(relay).reason
    fed(relay, removed([1]), first=4)
    assert state(relay) == "live"


def outcomes(relay: Pipeline, predicted: int, reported: int, count: int) -> None:
    for _ in range(count):
        answer(relay, LINK, outcome=Outcome(rank=0, predicted=predicted, reported=reported))


def test_predictions_that_never_come_true_stop_the_stream() -> None:
    relay = fed(proven(), stored([1, 2], PROMPT))
    linked(relay)
    outcomes(relay, 320, 0, OUTCOMES_LEAST)
    assert state(relay) == "quarantined"
    assert "C31" in status(relay).reason


def test_predictions_that_are_off_are_held_against_it_until_they_agree() -> None:
    relay = fed(proven(), stored([1, 2], PROMPT))
    linked(relay)
    outcomes(relay, 0, 320, OUTCOMES_LEAST)
    assert state(relay) == "history_lost"
    outcomes(relay, 320, 320, OUTCOMES)
    assert state(relay) == "live"


def test_predictions_of_a_scheduler_that_lags_say_nothing_of_the_stream() -> None:
    relay = fed(proven(), stored([1, 2], PROMPT))
    linked(relay)
    fed(relay, removed([2]), first=1)
    later = NOW + 60.0
    for known, expected in ((0, "live"), (1, "quarantined")):
        said = Outcome(predicted=320, incarnation=1, engine_seq=known, age_s=5.0)
        for _ in range(OUTCOMES_LEAST):
            relay.receive(LINK, SchedulerMessage(outcome=said), later)
        assert state(relay) == expected
    assert relay.counters()["outcomes_lagging"] == OUTCOMES_LEAST


def test_a_canary_that_fails_stops_the_stream_and_says_why() -> None:
    relay = proven(engine_block_tokens=16)
    canary = Canary(list(range(49)), relay.unit_tokens, PROFILE)
    relay.canary(0, canary)
    fed(relay, stored([1, 2], tokens(2)))
    different = relay.canary_answered(0, canary, 0, 48)
    assert "2 of 3 blocks" in different[0]
    assert state(relay) == "quarantined"
    assert "C35" in status(relay).reason


def test_a_canary_that_passes_changes_nothing() -> None:
    relay = proven(engine_block_tokens=16)
    canary = Canary(list(range(49)), relay.unit_tokens, PROFILE)
    relay.canary(0, canary)
    fed(relay, stored([1, 2, 3], tokens(3)))
    assert relay.canary_answered(0, canary, 0, 48) == ()
    assert (state(relay), relay.counters()["canaries"]) == ("live", 1)


def test_times_in_milliseconds_are_another_source() -> None:
    relay = proven()
    relay.live(0, live(0, stored([1], tokens(1)), time=1.7e12), NOW)
    assert state(relay) == "quarantined"
    assert "--engine" in status(relay).reason


def test_a_clock_that_is_wrong_is_told_and_costs_nothing() -> None:
    relay = proven()
    relay.tick(NOW, 1.7e9)
    relay.live(0, live(0, stored([1], tokens(1)), time=1.6e9), NOW)
    assert failed(relay) == {"time_far": 1}
    assert state(relay) == "live"


def test_a_batch_without_a_rank_is_rank_0s_alone() -> None:
    relay = proven(ranks=(0, 1))
    for rank in (0, 1):
        relay.live(rank, live(0, stored([1], tokens(1)), rank=None), NOW)
    assert [each.state for each in relay.status().ranks] == ["live", "quarantined"]


def test_a_release_that_writes_another_form_is_not_trusted() -> None:
    relay = proven(engine_version="0.23.1")
    fed(relay, stored([1], tokens(1)))
    assert state(relay) == "unproven"
    assert "0.23.1 writes BlockStored as array 12; got map" in status(relay).reason


def test_connectors_that_leave_the_salt_out_never_place_a_salted_prompt() -> None:
    relay = proven()
    salted = stored([1, 2], PROMPT, extra_keys=[["pepper"], None])
    fed(relay, salted, stored([1, 2], PROMPT, medium="CPU"))
    assert failed(relay) == {}
    assert ascending(held(relay, 1)[0]) == ascending(canonical(PROMPT, salt="pepper"))


def test_what_a_connector_placed_by_tokens_alone_is_placed_anew_when_that_was_wrong() -> None:
    relay = proven()
    gpu = [stored([8], tokens(1, start=900)), stored([1, 2], PROMPT, extra_keys=[["pepper"], None])]
    described = stored([1, 2], PROMPT, medium="CPU")
    fed(relay, gpu[0], described, gpu[1])
    assert failed(relay)["keys_untold"] == 1
    assert state(relay) == "resyncing"
    relay.take_replay_requests()
    for seq, event in enumerate((gpu[0], described, gpu[1])):
        relay.replayed(0, reply(seq, event), NOW)
    relay.replayed(0, END, NOW)
    host = next(at for at, name in enumerate(relay.status().lanes) if name.startswith("host"))
    assert ascending(held(relay, host)[0]) == ascending(canonical(PROMPT, salt="pepper"))
    assert state(relay) == "live"


@pytest.mark.parametrize("tier", [TIER_GPU, TIER_HOST])
def test_every_tier_of_every_engine_has_its_traits(tier: int) -> None:
    assert all(tier in adapter.profile.tiers for adapter in ADAPTERS.values())
