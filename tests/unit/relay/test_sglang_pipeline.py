"""From SGLang's events to what schedulers are told."""

from __future__ import annotations

from typing import Any

import pytest

from servingfleet_core import block_hashes, namespace_root
from servingfleet_protos.v1 import common_pb2, stream_pb2
from servingfleet_relay.pipeline import Pipeline
from tests.unit.relay import test_pipeline as vllm_pipeline
from tests.unit.relay.batches import CLEARED, END, live, stored_array, tokens
from tests.unit.relay.batches import stored as vllm_stored
from tests.unit.relay.pages import in_namespace, page_hashes, removed, stored
from tests.unit.relay.test_pipeline import NOW, ascending, held, packed, state

PROMPT = tokens(4)
PAGES = page_hashes(PROMPT, 16)


def canonical(ids: list[int], *, adapter: str = "", salt: str = "", pairs: bool = False) -> bytes:
    root = namespace_root("m", adapter, salt, pairs)
    return ascending(block_hashes(root, packed(ids), 16, pairs=pairs))


def proven(**fields: Any) -> Pipeline:
    return vllm_pipeline.proven(engine="sglang", **fields)


def fed(relay: Pipeline, *events: Any, seq: int = 0) -> Pipeline:
    """Each event as a batch of its own."""
    for at, event in enumerate(events):
        relay.live(0, live(seq + at, event), NOW)
    return relay


def reason(relay: Pipeline) -> str:
    return relay.status().ranks[0].reason


def profile(relay: Pipeline) -> stream_pb2.Profile:
    return relay.open_link("other", NOW).hello.profile


def test_what_is_held_is_a_flag_however_often_it_is_stored() -> None:
    relay = fed(proven(), stored(PROMPT), stored(PROMPT, skip=2), removed(PAGES[2:]))
    assert held(relay)[0] == canonical(PROMPT[:32])
    assert state(relay) == "live"


def test_the_profile_says_what_a_hit_may_report() -> None:
    relay = fed(proven(engine_version="0.5.23"), stored(PROMPT, 64))
    told = profile(relay)
    assert {rule.tier: rule.cap for rule in told.tiers} == {
        common_pb2.TIER_GPU: stream_pb2.TierRule.CAP_PROMPT_MINUS_ONE,
        common_pb2.TIER_HOST: stream_pb2.TierRule.CAP_PROMPT_MINUS_ONE,
    }
    assert [lane.unit_tokens for lane in told.lanes] == [64]
    assert told.key_form == common_pb2.KEY_FORM_TOKEN
    assert list(told.rank_fields) == ["routed_dp_rank", "data_parallel_rank"]


def test_tiers_are_kept_apart_and_a_clear_empties_both() -> None:
    relay = fed(proven(), stored(PROMPT), stored(PROMPT, medium="CPU_PINNED"), removed(PAGES))
    assert held(relay, 0) == (b"", b"")
    assert held(relay, 1) == (canonical(PROMPT), b"")
    fed(relay, CLEARED, seq=3)
    assert held(relay, 1) == (b"", b"")
    assert state(relay) == "live"


def test_pages_smaller_than_a_block_make_one_when_all_are_held() -> None:
    pages = page_hashes(PROMPT, 4)
    relay = fed(proven(), stored(PROMPT[:20], 4), stored(PROMPT, 4, skip=5))
    assert held(relay)[0] == canonical(PROMPT)
    fed(relay, removed(pages[-1:]), seq=2)
    assert held(relay)[0] == canonical(PROMPT[:48])


@pytest.mark.parametrize("page", [1, 4, 16, 32])
def test_pairs_of_tokens_are_hashed_as_pairs_also_across_events(page: int) -> None:
    prompt = [*PROMPT, 900]
    first = stored(prompt[:33], page, pairs=True)
    relay = fed(proven(), first, stored(prompt, page, skip=32 // page, pairs=True))
    assert held(relay)[0] == canonical(prompt, pairs=True)
    assert profile(relay).key_form == common_pb2.KEY_FORM_PAIR


@pytest.mark.parametrize("first", [True, False])
def test_a_stream_that_changes_between_tokens_and_pairs_is_quarantined(first: bool) -> None:
    relay = fed(
        proven(), stored(PROMPT, pairs=first), stored(tokens(3, start=500), pairs=not first)
    )
    assert state(relay) == "quarantined"
    assert "key_form_changed" in reason(relay)
    assert held(relay) == (b"", b"")


def test_a_new_engine_life_may_have_keys_of_the_other_form() -> None:
    relay = fed(proven(replay=False), stored(PROMPT, pairs=True))
    before = relay.status().ranks[0].incarnation
    relay.live(0, live(0, stored(PROMPT)), NOW)
    assert relay.status().ranks[0].incarnation == before + 1
    assert held(relay)[0] == canonical(PROMPT)
    assert profile(relay).key_form == common_pb2.KEY_FORM_TOKEN


def test_ranks_of_one_replica_have_keys_of_one_form() -> None:
    relay = proven(ranks=(0, 1))
    relay.live(0, live(0, stored(PROMPT, pairs=True)), NOW)
    relay.live(1, live(0, stored(PROMPT), rank=1), NOW)
    assert (state(relay, 0), state(relay, 1)) == ("live", "quarantined")


def test_a_scheduler_hears_of_the_key_form_before_the_first_block() -> None:
    relay = proven()
    vllm_pipeline.linked(relay)
    fed(relay, stored([*PROMPT, 1], pairs=True))
    messages = vllm_pipeline.take(relay)
    assert vllm_pipeline.kinds(messages) == ["profile", "delta", "rank_state"]
    assert messages[0].profile.key_form == common_pb2.KEY_FORM_PAIR
    assert ascending(messages[1].delta.hashes) == canonical([*PROMPT, 1], pairs=True)


def test_another_page_size_in_one_life_is_quarantined() -> None:
    relay = fed(proven(), stored(PROMPT), stored(tokens(2, 32, start=500), 32))
    assert state(relay) == "quarantined"
    assert "block_size 32" in reason(relay)


def test_a_page_that_fits_no_canonical_block_is_refused_aloud() -> None:
    relay = fed(proven(), stored(list(range(48)), 24))
    assert state(relay) == "quarantined"
    assert "--block-tokens" in reason(relay)


def test_a_salt_is_a_namespace_of_its_own() -> None:
    relay = fed(proven(), stored(PROMPT, salt="a"), stored(PROMPT))
    assert held(relay)[0] == ascending(canonical(PROMPT, salt="a") + canonical(PROMPT))
    assert profile(relay).salts_separated


def test_an_unknown_namespace_is_held_and_never_matched() -> None:
    hashes = in_namespace(PAGES, extra_key="ek")
    plain = tokens(1, start=900)
    relay = fed(
        proven(),
        stored(plain),
        stored(PROMPT[:32], hashes=hashes[:2]),
        stored(PROMPT, skip=2, hashes=hashes),
    )
    assert held(relay) == (canonical(plain), b"")
    assert relay.status().ranks[0].mirror["opaque_units"] == 4
    assert state(relay) == "live"


def test_hashes_that_none_of_the_tokens_give_open_the_upper_bound_until_one_does() -> None:
    relay = fed(proven(), stored(PROMPT, hashes=[1, 2, 3, 4]))
    assert state(relay) == "history_lost"
    assert "newer release" in reason(relay)
    fed(relay, CLEARED, stored(PROMPT), stored(tokens(2, start=600), hashes=[7, 8]), seq=1)
    assert state(relay) == "live"


def test_namespaces_that_share_hashes_leave_an_upper_bound_for_this_life() -> None:
    relay = fed(proven(), stored(PROMPT), stored(PROMPT))
    assert state(relay) == "history_lost"
    assert "extra_key" in reason(relay)
    assert held(relay) == (b"", canonical(PROMPT))
    other = tokens(2, start=700)
    fed(relay, CLEARED, stored(other), seq=2)
    assert held(relay) == (b"", canonical(other))
    assert state(relay) == "history_lost"


def test_a_page_removed_twice_at_once_is_of_two_namespaces() -> None:
    relay = fed(proven(), stored(PROMPT), removed([PAGES[3], PAGES[3]]))
    assert state(relay) == "history_lost"
    assert held(relay) == (b"", canonical(PROMPT[:48]))
    assert relay.counters()["odd_shared_hashes"] == 1


def test_a_first_page_stored_again_after_its_removal_is_no_other_namespace() -> None:
    relay = fed(proven(), stored(PROMPT), removed(PAGES), stored(PROMPT), CLEARED, stored(PROMPT))
    assert state(relay) == "live"
    assert held(relay)[0] == canonical(PROMPT)


def test_a_first_page_on_the_host_too_is_no_other_namespace() -> None:
    relay = fed(proven(), stored(PROMPT), stored(PROMPT, medium="CPU_PINNED"))
    assert state(relay) == "live"


def test_declared_extra_keys_leave_an_upper_bound_from_the_start() -> None:
    relay = fed(proven(extra_keys=True), stored(PROMPT))
    assert state(relay) == "history_lost"
    assert held(relay) == (b"", canonical(PROMPT))


def test_an_adapters_pages_are_an_upper_bound_and_the_others_stay_certain() -> None:
    hashes = in_namespace(PAGES, extra_key="0123")
    relay = fed(
        proven(engine_version="0.5.23"),
        stored(PROMPT),
        stored(PROMPT, hashes=hashes, lora_name="ad"),
    )
    assert held(relay) == (canonical(PROMPT), canonical(PROMPT, adapter="ad"))
    assert state(relay) == "live"


@pytest.mark.parametrize(
    ("version", "apart"),
    [("0.5.23", True), ("0.6.0.dev1", True), ("0.5.22.post1", False), ("", False), ("main", False)],
)
def test_adapters_are_told_apart_since_0_5_23(version: str, apart: bool) -> None:
    relay = fed(proven(engine_version=version), stored(PROMPT))
    assert profile(relay).adapters_separated is apart


def test_a_hybrid_model_leaves_an_upper_bound_that_is_not_predicted() -> None:
    relay = fed(proven(hybrid=True), stored(PROMPT))
    assert held(relay) == (b"", canonical(PROMPT))
    assert [lane.upper_in_predicted for lane in profile(relay).lanes] == [False]
    assert state(relay) == "live"


def test_a_model_found_to_be_hybrid_makes_what_is_held_uncertain() -> None:
    relay = fed(proven(), stored(PROMPT))
    assert held(relay)[0] == canonical(PROMPT)
    relay.engine_hybrid()
    assert held(relay) == (b"", canonical(PROMPT))


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", [hash(tuple(PROMPT))], None, PROMPT, 64, None],
        vllm_stored([2**63 + 1], tokens(1)),
        stored(PROMPT, token_ids=PROMPT[1:]),
    ],
)
def test_what_means_something_else_is_never_indexed(event: Any) -> None:
    relay = fed(proven(), event)
    assert state(relay) == "quarantined"
    assert held_nothing(relay)


def held_nothing(relay: Pipeline) -> bool:
    return relay.status().ranks[0].mirror["units_held"] == 0


def test_an_engine_that_has_not_said_what_it_is_counts_for_nothing() -> None:
    relay = vllm_pipeline.pipeline(engine="auto")
    relay.socket_up(0, NOW)
    fed(relay, stored(PROMPT))
    assert relay.take_replay_requests() == []
    assert (state(relay), relay.counters()["batches_engine_unknown"]) == ("unproven", 1)
    relay.engine_unknown("no answer")
    assert reason(relay) == "engine unknown: no answer"
    assert relay.open_link("l", NOW).hello.profile.engine == ""


def test_an_engine_that_says_what_it_is_is_read_from_its_first_batch() -> None:
    relay = vllm_pipeline.pipeline(engine="auto")
    opening = vllm_pipeline.linked(relay)
    relay.socket_up(0, NOW)
    relay.engine_found("sglang", "0.5.23", NOW)
    (request,) = relay.take_replay_requests()
    assert request.start_seq == 0
    relay.replayed(0, [b"", *live(0, stored(PROMPT))], NOW)
    relay.replayed(0, END, NOW)
    assert state(relay) == "live"
    assert held(relay)[0] == canonical(PROMPT)
    assert relay.status().engine == "sglang"
    profiles = [m.profile for m in vllm_pipeline.take(relay) if m.HasField("profile")]
    assert opening
    told = profiles[-1]
    assert (told.engine, told.engine_version) == ("sglang", "0.5.23")
    assert [rule.tier for rule in told.tiers] == [common_pb2.TIER_GPU, common_pb2.TIER_HOST]


def test_an_engine_that_is_another_than_configured_is_not_trusted() -> None:
    relay = fed(proven(), stored(PROMPT))
    relay.engine_found("vllm", "0.32.0", NOW)
    assert state(relay) == "unproven"
    assert "says that it is vllm" in reason(relay)
    relay.engine_found("sglang", "0.5.23", NOW)
    assert state(relay) == "live"


def test_an_answer_of_an_engine_without_an_adapter_is_refused() -> None:
    with pytest.raises(ValueError, match="known: vllm, sglang"):
        vllm_pipeline.pipeline(engine="auto").engine_found("other", "1", NOW)


def test_vllms_arrays_are_not_taken_for_sglangs() -> None:
    relay = fed(proven(), stored_array(12, [1, 2], tokens(2)))
    assert held_nothing(relay)
    assert state(relay) != "live"
