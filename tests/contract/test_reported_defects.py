"""What was publicly reported of engines' event streams, each as the smallest stream that shows it.

Numbers in `@report` are those of the engines' trackers; each test is named after the kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from servingfleet_relay.adapters.registry import REFUSED, named
from servingfleet_relay.conformance.watches import OUTCOMES, SILENCE_S
from servingfleet_relay.settings import LayerGroup
from tests.contract.constructed import Constructed
from tests.unit.relay import entries, pages
from tests.unit.relay.batches import (
    CLEARED,
    END,
    END_WITHOUT_TOPIC,
    live,
    removed,
    reply,
    stored,
    stored_array,
    tokens,
)

PROMPT = tokens(4)
"""Four blocks; asked with one token more, so that all four may be reused."""
ASKED = [*PROMPT, 9_999]
SHOWN: dict[int, str] = {}
"""Reports that a test shows, by their number in the list of reports, with where they were made."""

NOT_IN_A_STREAM = {
    12: "two ranks on one wildcard port: an address that is never reached sends nothing (tests of the options)",
    19: "wrong content in a store after preemption: no event tells, and hits are counted as hits",
}

Test = TypeVar("Test", bound=Callable[..., object])


def report(number: int, where: str) -> Callable[[Test], Test]:
    """Marks the test of a report."""

    def mark(test: Test) -> Test:
        SHOWN[number] = where
        return test

    return mark


# vLLM


@report(1, "vLLM #48933, #55092")
def test_a_removal_while_another_copy_of_the_block_stays() -> None:
    twice = stored([2], tokens(1, start=16), parent=1)
    engine = Constructed().publishes(stored([1], tokens(1)), twice, twice, removed([2]))
    assert engine.reuse([*tokens(2), 9]) == (32, 32, 32)
    assert engine.publishes(removed([2])).reuse([*tokens(2), 9]) == (16, 16, 16)


WINDOW: dict[str, Any] = {
    "group_idx": 0,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 17,
}
FULL: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
GROUPS = (LayerGroup("sliding_window", 16, 17), LayerGroup("full_attention", 16))


@report(2, "vLLM #44451, #44488")
def test_tokens_that_cover_blocks_which_the_hashes_leave_out() -> None:
    engine = Constructed(layer_groups=GROUPS)
    engine.publishes(stored([4], PROMPT, **WINDOW), stored([1, 2, 3, 4], PROMPT, **FULL))
    # Only the last block's window is kept: resumable there, and nowhere before.
    assert engine.reuse(ASKED) == (64, 64, 64)
    assert engine.reuse(PROMPT[:50]) == (0, 0, 0)
    engine.publishes(stored([], tokens(2, start=500), **WINDOW))
    assert engine.failed() == set()


@report(3, "vLLM #58119, #58121")
def test_a_part_of_a_block_after_a_parent_that_was_never_announced() -> None:
    engine = Constructed().publishes(
        stored([1, 2], tokens(2)), stored([7], tokens(1, 8, start=32), parent=99, block=8)
    )
    assert engine.reuse([*tokens(2), 9])[:2] == (32, 32)
    assert engine.reuse([*tokens(3), 9])[:2] == (32, 32)
    assert engine.waits(10).failed() == {"partial_block"}


@report(4, "vLLM #57159")
def test_blocks_of_a_chunk_that_are_announced_singly_and_loaded_together() -> None:
    engine = Constructed(host_unit_tokens=64)
    engine.publishes(
        stored([1, 2, 3, 4], PROMPT),
        stored([1, 2, 3, 4], PROMPT, medium="CPU"),
        *(removed([each]) for each in (4, 3, 2, 1)),
    )
    assert engine.reuse([*PROMPT[:32], 9]) == (0, 0, 0)
    assert engine.reuse(ASKED) == (64, 64, 64)


@report(5, "vLLM #45174, #45177")
def test_replies_to_a_replay_without_their_topic() -> None:
    engine = Constructed(joined_late=True)
    engine.relay.socket_down(0, engine.now)
    engine.relay.socket_up(0, engine.now)
    engine.relay.take_replay_requests()
    engine.relay.replayed(0, reply(0, stored([1, 2], tokens(2)), topic=False), engine.now)
    engine.relay.replayed(0, END_WITHOUT_TOPIC, engine.now)
    engine.settle()
    assert engine.reuse([*tokens(2), 9]) == (32, 32, 32)


@report(6, "vLLM #42892")
def test_events_that_turn_from_arrays_into_maps() -> None:
    engine = Constructed().publishes(stored_array(12, [1], tokens(1)))
    engine.publishes(stored([2], tokens(1, start=16), parent=1))
    assert engine.status().state == "quarantined"
    assert "got BlockStored as map" in engine.status().reason
    # The next engine process may write as it likes.
    engine.restarts().publishes(stored([8], tokens(1)))
    assert engine.reuse([*tokens(1), 9]) == (16, 16, 16)
    assert "fingerprint_changed" in engine.failed()


@report(7, "vLLM #23673, #26265")
def test_hashes_that_turn_from_integers_into_bytes() -> None:
    engine = Constructed().publishes(stored([1], tokens(1)))
    engine.publishes(stored([b"\x07" * 32], tokens(1, start=500)))
    assert engine.status().state == "quarantined"
    assert "expected block_hashes and parent_block_hash of 8 bytes, got 32 bytes" in (
        engine.status().reason
    )
    plain = Constructed().publishes(stored([b"\x07" * 32], tokens(1)))
    assert plain.reuse([*tokens(1), 9]) == (16, 16, 16)


@report(8, "vLLM #57296")
def test_a_clear_that_leaves_the_host_tier_as_it_is() -> None:
    engine = Constructed().publishes(
        stored([1, 2, 3, 4], PROMPT), stored([1, 2, 3, 4], PROMPT, medium="CPU"), CLEARED
    )
    assert engine.reuse(ASKED)[:2] == (0, 64)
    assert engine.reuse(ASKED).upper >= 64


@report(9, "vLLM #43569")
def test_blocks_of_a_request_that_died_are_held_until_they_are_removed() -> None:
    engine = Constructed().publishes(stored([1, 2], tokens(2)))
    assert engine.reuse([*tokens(2), 9]) == (32, 32, 32)
    engine.publishes(removed([2]), removed([1]))
    assert engine.reuse([*tokens(2), 9]) == (0, 0, 0)


@report(10, "vLLM #43258, #49537")
@pytest.mark.parametrize(("unit", "state"), [(528, "live"), (16, "unproven")])
def test_silence_is_right_where_prompts_are_shorter_than_a_block(unit: int, state: str) -> None:
    engine = Constructed(engine_block_tokens=unit)
    engine.relay.engine_progress(0, 0, 0, engine.now)
    engine.relay.engine_progress(0, 30, 30 * 400, engine.now + SILENCE_S)
    assert engine.status().state == state


@report(11, "vLLM #37688, #38237")
def test_a_hybrid_model_without_groups_is_one_group_of_full_attention() -> None:
    engine = Constructed().publishes(stored_array(9, [1, 2, 3, 4], PROMPT))
    assert engine.reuse([*PROMPT[:32], 9]) == (32, 32, 32)


@report(13, "vLLM #39275, #43468, #48679")
def test_host_blocks_without_tokens_parent_or_size() -> None:
    named = stored([1, 2, 3, 4], [], block=0, medium="CPU")
    engine = Constructed().publishes(stored([1, 2, 3, 4], PROMPT), named)
    engine.publishes(*(removed([each]) for each in (4, 3, 2, 1)))
    assert engine.reuse(ASKED) == (64, 64, 64)
    unknown = Constructed().publishes(stored([8], tokens(1, start=900)), named).waits(10)
    assert unknown.reuse(ASKED)[:2] == (0, 0)
    assert unknown.reuse(ASKED).upper >= 64


@report(14, "vLLM #51614")
def test_host_blocks_that_are_smaller_than_the_gpus() -> None:
    engine = Constructed().publishes(
        stored([4, 8], tokens(8), block=64),
        stored([1, 2, 3, 4], PROMPT, medium="CPU"),
        removed([4]),
    )
    assert engine.reuse([*PROMPT[:40], 9]) == (32, 32, 32)
    assert engine.failed() == set()


@report(15, "vLLM #30931, #44701")
def test_an_adapter_and_a_salt_of_the_same_name_are_two_things() -> None:
    engine = Constructed().publishes(
        stored([1, 2], tokens(2), lora_name="x", extra_keys=[["x"], ["x"]]),
        stored([3], tokens(1), extra_keys=[["x"]]),
    )
    assert engine.reuse([*tokens(2), 9], adapter="x") == (32, 32, 32)
    assert engine.reuse([*tokens(2), 9], salt="x") == (16, 16, 16)
    assert engine.reuse([*tokens(2), 9]) == (0, 0, 0)


@report(16, "vLLM #45261")
def test_blocks_that_were_stored_before_we_came_are_never_announced() -> None:
    engine = Constructed(joined_late=True)
    engine.relay.live(0, live(7, stored([9], tokens(1, start=900))), engine.now)
    engine.settle()
    assert engine.reuse(ASKED)[:2] == (0, 0)
    assert engine.reuse(ASKED).upper >= 64
    assert engine.status().state == "history_lost"


@report(17, "vLLM #44607, #47136")
def test_a_decoding_replica_that_reports_nearly_the_whole_prompt_as_reused() -> None:
    engine = Constructed().publishes(stored([1, 2, 3, 4], PROMPT), removed([4]), removed([3]))
    engine.publishes(removed([2]), removed([1]))
    engine.reports(ASKED, len(ASKED) - 1, times=OUTCOMES)
    assert engine.status().state == "history_lost"
    assert engine.failed() == {"feedback_off"}
    assert engine.reuse(ASKED).upper >= 64


@report(18, "vLLM #50438")
def test_a_drafting_engine_that_drops_the_last_block_of_a_match() -> None:
    engine = Constructed(less_units=1).publishes(stored([1, 2, 3, 4], PROMPT))
    assert engine.reuse(ASKED) == (48, 48, 48)


@report(20, "vLLM #55487")
def test_an_extra_key_without_a_type_is_a_salt_only_where_salts_are() -> None:
    engine = Constructed().publishes(
        stored([1], tokens(1), extra_keys=[["x"]]),
        stored([2], tokens(1, start=16), parent=1, extra_keys=[["y"]]),
    )
    assert engine.reuse([*tokens(2), 9], salt="x") == (16, 16, 16)
    assert engine.reuse([*tokens(2), 9], salt="y") == (0, 0, 0)


# SGLang


def sglang(**settings: Any) -> Constructed:
    return Constructed(**({"engine": "sglang", "engine_version": "0.5.23"} | settings))


def page_array(
    hashes: list[int], ids: list[int], size: int, parent: int | None = None
) -> list[Any]:
    return ["BlockStored", hashes, parent, ids, size, None]


@report(21, "SGLang #6824")
def test_blocks_as_long_as_a_node_of_the_tree() -> None:
    engine = sglang(engine_version="0.4.7")
    engine.relay.live(0, live(0, page_array([7], tokens(1, 7), 7), length=2), engine.now)
    assert engine.status().state == "quarantined"
    assert "0.5.6 or newer" in engine.status().reason
    newer = sglang().publishes(pages.stored(tokens(1)), pages.stored(tokens(2, start=64), 32))
    assert newer.status().state == "quarantined"
    assert "block_size 32" in newer.status().reason


def page_hashes_of(ids: list[int]) -> list[int]:
    return pages.page_hashes(ids, 16)


@report(22, "SGLang #13488")
def test_pages_hashed_without_what_is_before_them() -> None:
    alone = page_hashes_of(tokens(1, start=16))
    engine = sglang(engine_version="").publishes(
        pages.stored(tokens(1)),
        pages.stored(tokens(2), skip=1, hashes=[*page_hashes_of(tokens(1)), *alone]),
        pages.stored(tokens(1, start=500)),
        pages.stored(
            [*tokens(1, start=500), *tokens(1, start=16)],
            skip=1,
            hashes=[*page_hashes_of(tokens(1, start=500)), *alone],
        ),
    )
    assert engine.status().state == "quarantined"
    assert "hash_conflict" in engine.failed()


@report(23, "SGLang #29211, #29491")
def test_two_ranks_on_one_port() -> None:
    engine = sglang().publishes(pages.stored(tokens(1)))
    engine.publishes(pages.stored(tokens(1, start=500)), names=1)
    assert engine.status().state == "quarantined"
    assert "the socket of rank 0 sends batches of rank 1" in engine.status().reason
    assert "--ranks" in engine.status().reason


@report(24, "SGLang #29750")
def test_pages_freed_without_a_removal_show_in_what_is_reported() -> None:
    engine = sglang().publishes(pages.stored(PROMPT))
    engine.reports(ASKED, 0, times=OUTCOMES)
    assert engine.status().state == "quarantined"
    assert engine.failed() == {"feedback_wrong"}
    assert engine.reuse(ASKED).predicted == 0


@report(25, "SGLang #32537")
def test_pages_computed_again_while_the_host_still_has_them() -> None:
    hashes = page_hashes_of(PROMPT)
    engine = sglang().publishes(
        pages.stored(PROMPT), pages.stored(PROMPT, medium="CPU_PINNED"), pages.removed(hashes)
    )
    # That the GPU has them again is not told: the tokens are the same.
    assert engine.reuse(ASKED) == (64, 64, 64)


@report(26, "SGLang #24568, #24579, #30827")
def test_salts_that_do_not_enter_the_hash() -> None:
    engine = sglang(engine_version="0.5.17").publishes(
        pages.stored_array(7, PROMPT), pages.stored_array(7, PROMPT)
    )
    assert engine.failed() == {"shared_hashes"}
    assert engine.reuse(ASKED) == (0, 64, 64)


@report(27, "SGLang #37271")
def test_the_eighth_element_is_a_salt_in_one_engine_and_an_adapter_in_the_other() -> None:
    engine = sglang(engine_version="0.5.19").publishes(
        pages.stored_array(8, PROMPT, salt="s"), pages.stored_array(7, tokens(1))
    )
    assert engine.reuse(ASKED, salt="s")[:2] == (64, 64)
    assert engine.reuse(ASKED) == (16, 16, 16)
    numbered = stored_array(8, [1], tokens(1))
    numbered[5], numbered[7] = 3, "ad"
    vllm = Constructed().publishes(numbered)
    assert vllm.reuse([*tokens(1), 9], adapter="ad") == (16, 16, 16)


@report(28, "SGLang #26387")
def test_an_engine_that_works_and_announces_nothing() -> None:
    engine = sglang(engine_block_tokens=16)
    engine.relay.engine_progress(0, 0, 0, engine.now)
    engine.relay.engine_progress(0, 30, 30_000, engine.now + SILENCE_S)
    engine.settle()
    assert engine.status().state == "unproven"
    assert "30 requests finished" in engine.status().reason
    assert engine.reuse(ASKED).upper >= 64


@report(29, "SGLang #23667, #26579")
def test_window_state_that_is_evicted_in_silence() -> None:
    engine = sglang(hybrid=True).publishes(pages.stored(PROMPT))
    assert engine.reuse(ASKED) == (0, 0, 64)


@report(30, "SGLang #38945")
def test_a_replay_that_loses_replies_is_asked_again_and_then_given_up() -> None:
    engine = sglang(joined_late=True)
    engine.relay.socket_down(0, engine.now)
    engine.relay.socket_up(0, engine.now)
    page = pages.stored
    asked = 0
    for request in iter(lambda: engine.relay.take_replay_requests(), []):
        asked += 1
        assert request[0].start_seq == 0
        engine.relay.replayed(0, reply(0, page(tokens(1))), engine.now)
        engine.relay.replayed(0, reply(5, page(tokens(1, start=900))), engine.now)
    engine.relay.replayed(0, END, engine.now)
    engine.settle()
    assert asked == 3
    assert engine.status().state == "history_lost"
    assert engine.reuse([*tokens(1), 9])[:2] == (0, 0)
    assert engine.reuse([*tokens(1, start=900), 9]).predicted == 16


@report(31, "SGLang #29265")
def test_one_removal_of_many_pages() -> None:
    prompt = tokens(64)
    hashes = page_hashes_of(prompt)
    engine = sglang().publishes(pages.stored(prompt), pages.removed(hashes[8:]))
    assert engine.reuse([*prompt, 9]) == (128, 128, 128)


@report(32, "SGLang #29709")
def test_a_storage_tier_that_is_never_announced_shows_in_what_is_reported() -> None:
    engine = sglang().publishes(pages.stored(tokens(1)))
    engine.reports(ASKED, 64, times=OUTCOMES)
    assert engine.failed() == {"feedback_off"}
    assert engine.reuse(ASKED).predicted == 16
    assert engine.reuse(ASKED).upper >= 64


@report(33, "SGLang #39604, #39620")
def test_a_demotion_and_a_loss_look_alike_and_differ_by_what_is_left() -> None:
    hashes = page_hashes_of(PROMPT)
    lost = sglang().publishes(pages.stored(PROMPT), pages.removed(hashes))
    assert lost.reuse(ASKED) == (0, 0, 0)
    moved = sglang().publishes(
        pages.stored(PROMPT), pages.stored(PROMPT, medium="CPU_PINNED"), pages.removed(hashes)
    )
    assert moved.reuse(ASKED).predicted == 64


# TensorRT-LLM


def trtllm() -> Constructed:
    engine = Constructed(engine="trtllm", pull=True, engine_block_tokens=32)
    return engine.answers(entries.created())


FIRST, SECOND = PROMPT[:32], PROMPT[32:]


@report(34, "TensorRT-LLM #3543")
def test_a_parent_that_no_block_ever_had() -> None:
    engine = trtllm().answers(
        entries.stored(1, entries.block(1, FIRST)),
        entries.stored(2, entries.block(2, SECOND), parent=77),
    )
    engine.waits(10)
    assert engine.reuse(ASKED)[:2] == (0, 32)
    assert engine.reuse(ASKED).upper >= 64
    assert "orphan_expired" in engine.failed()


@report(35, "TensorRT-LLM #4666")
def test_an_update_of_nothing_but_the_priority() -> None:
    engine = trtllm().answers(
        entries.stored(1, entries.block(1, FIRST)), entries.updated(2, 1, None, None)
    )
    assert engine.failed() == set()
    assert engine.reuse(ASKED).predicted == 32


@report(36, "TensorRT-LLM #16335")
def test_blocks_that_leave_the_reuse_tree_in_silence_show_in_what_is_reported() -> None:
    engine = trtllm().answers(entries.stored(1, entries.block(1, FIRST), entries.block(2, SECOND)))
    assert engine.reuse(ASKED)[:2] == (0, 64)
    engine.reports(ASKED, 0, times=OUTCOMES)
    assert engine.status().state == "quarantined"


@report(37, "TensorRT-LLM #5580")
def test_pools_of_several_windows_that_store_one_hash_each() -> None:
    small = {"window_size": 128}
    engine = trtllm().answers(
        entries.stored(1, entries.block(1, FIRST)),
        entries.stored(2, entries.block(1, FIRST), **small),
        entries.removed(3, 1, **small),
    )
    assert engine.reuse(ASKED).predicted == 32
    assert engine.answers(entries.removed(4, 1)).reuse(ASKED).predicted == 0


@report(38, "TensorRT-LLM #11883")
def test_a_store_before_the_removal_of_its_older_life_is_not_called_impossible() -> None:
    engine = trtllm().answers(
        entries.stored(1, entries.block(1, FIRST)),
        entries.stored(2, entries.block(1, FIRST)),
        entries.removed(3, 1),
    )
    assert engine.reuse(ASKED)[:2] == (0, 0)
    assert engine.reuse(ASKED).upper >= 32


@report(39, "TensorRT-LLM #13589")
def test_another_hash_algorithm_is_read_from_the_start_and_refused_in_the_middle() -> None:
    engine = Constructed(engine="trtllm", pull=True, engine_block_tokens=32)
    engine.answers(
        entries.created(hash_algo="v2_sha256_64"),
        entries.stored(1, entries.block(1, FIRST), hash_algo="v2_sha256_64"),
    )
    assert engine.reuse(ASKED).predicted == 32
    engine.answers(entries.stored(2, entries.block(2, SECOND), parent=1))
    assert engine.status().state == "quarantined"
    assert "hash_algo" in engine.status().reason


# LMCache


@report(40, "LMCache #3532")
def test_hits_from_a_host_tier_that_announces_nothing_show_in_what_is_reported() -> None:
    engine = Constructed().publishes(stored([1], tokens(1)))
    engine.reports(ASKED, 64, times=OUTCOMES)
    assert engine.failed() == {"feedback_off"}
    assert engine.reuse(ASKED).upper >= 64


@report(41, "LMCache #2441")
def test_a_chunk_with_a_token_too_many_and_a_parent_of_zero() -> None:
    chunk = tokens(16)
    engine = Constructed().publishes(
        stored([1], tokens(1, start=900)),
        stored([71], [*chunk, 5], block=256, medium="cpu", lora_name=None),
        stored([72], [*tokens(16, start=256), 6], block=256, medium="cpu", parent=0),
    )
    assert engine.reuse([*chunk, 9])[:2] == (0, 256)
    assert engine.reuse([*tokens(32), 9])[:2] == (0, 256)
    assert engine.failed() == {"one_token_more", "parent_zero"}
    assert engine.reuse([*tokens(1, start=900), 9]).predicted == 16


@report(42, "LMCache #5076")
def test_a_host_tier_that_announces_stores_only_is_never_promised() -> None:
    engine = Constructed().publishes(
        stored([1], tokens(1, start=900)), stored([71], tokens(16), block=256, medium="cpu")
    )
    assert engine.reuse([*tokens(16), 9])[:2] == (0, 256)


@report(49, "vLLM #44250")
def test_chunks_that_do_not_tell_their_adapter_are_never_an_adapters() -> None:
    engine = Constructed().publishes(
        stored([1], tokens(1, start=900)),
        stored([71], tokens(16), block=256, medium="cpu", lora_id=3),
    )
    assert engine.reuse([*tokens(16), 9], adapter="b")[:2] == (0, 0)
    assert engine.reuse([*tokens(16), 9])[:2] == (0, 0)


@report(51, "LMCache 0.5.6, found by reading")
def test_hashes_in_the_place_of_tokens() -> None:
    engine = Constructed().publishes(
        stored([1, 2], tokens(2)),
        stored([71], [2**40 + at for at in range(256)], block=256, medium="cpu"),
    )
    assert engine.failed() == {"token_range"}
    assert engine.reuse([*tokens(2), 9])[:2] == (32, 32)
    assert engine.status().state == "history_lost"


# Consumers


@report(43, "Dynamo #5096, #6872")
def test_pairs_of_tokens_are_keys_in_one_engine_and_nonsense_in_the_other() -> None:
    engine = sglang().publishes(pages.stored(ASKED, pairs=True))
    assert engine.reuse([*ASKED, 1]) == (64, 64, 64)
    pairs = [[each, each + 1] for each in tokens(1)]
    vllm = Constructed().publishes(stored([1], pairs))
    assert vllm.status().state == "quarantined"
    assert "token_ids" in vllm.status().reason


@report(44, "Dynamo #866")
def test_a_block_that_is_not_full_is_no_block() -> None:
    engine = trtllm().answers(entries.stored(1, entries.block(1, FIRST[:5])))
    assert engine.reuse(ASKED)[:2] == (0, 0)
    assert engine.answers(entries.removed(2, 1)).failed() == set()


@report(45, "Dynamo #5873")
def test_numbers_are_followed_rank_by_rank() -> None:
    engine = Constructed(ranks=(0, 1))
    for at in range(6):
        engine.publishes(stored([at + 1], tokens(1, start=at * 16), parent=at or None))
    engine.publishes(stored([1], tokens(1)), rank=1)
    assert engine.relay.counters()["gaps"] == 0
    assert engine.reuse([*tokens(6), 9]) == (96, 96, 96)
    assert engine.reuse([*tokens(6), 9], rank=1) == (16, 16, 16)


@report(46, "llm-d-router #2853")
def test_numbers_that_fall_back_are_a_new_engine() -> None:
    engine = Constructed(joined_late=True, replay=False)
    for seq in (100, 101):
        engine.relay.live(0, live(seq, stored([seq], tokens(1, start=seq * 16))), engine.now)
    for seq in (0, 1):
        engine.relay.live(0, live(seq, stored([seq + 1], tokens(1, start=seq * 16))), engine.now)
    engine.settle()
    assert engine.status().incarnation == 2
    assert engine.reuse([*tokens(1, start=1600), 9]) == (0, 0, 0)
    assert engine.reuse([*tokens(1), 9]) == (16, 16, 16)


@report(47, "llm-d-router #2927")
def test_an_adapters_name_among_the_extra_keys_is_no_image() -> None:
    engine = Constructed().publishes(
        stored([1], tokens(1), lora_name="my-lora", extra_keys=[["my-lora"]])
    )
    assert engine.reuse([*tokens(1), 9], adapter="my-lora") == (16, 16, 16)


@report(48, "AIBrix #2287, #2385")
def test_a_clear_that_comes_with_the_next_step() -> None:
    engine = Constructed().publishes(stored([1, 2, 3, 4], PROMPT))
    body = [CLEARED, stored([9], tokens(1, start=900))]
    engine.relay.live(0, live(1, *body), engine.now)
    engine.settle()
    assert engine.reuse(ASKED) == (0, 0, 0)
    assert engine.reuse([*tokens(1, start=900), 9]) == (16, 16, 16)


@report(50, "SGLang 0.5.23, found by running it")
def test_plain_prompts_and_prompts_with_a_key_that_share_a_hash() -> None:
    engine = sglang().publishes(pages.stored(PROMPT), pages.stored(PROMPT))
    engine.publishes(pages.removed(page_hashes_of(PROMPT)))
    assert engine.reuse(ASKED)[0] == 0
    assert engine.reuse(ASKED).upper >= 64
    assert engine.failed() >= {"shared_hashes"}


def test_every_report_is_shown_or_is_none_of_a_streams() -> None:
    assert set(SHOWN) | set(NOT_IN_A_STREAM) == set(range(1, 52))
    assert not set(SHOWN) & set(NOT_IN_A_STREAM)


@pytest.mark.parametrize("feed", REFUSED)
def test_a_feed_that_places_nothing_is_refused_by_its_name(feed: str) -> None:
    with pytest.raises(ValueError, match=r"Read it|read the engines"):
        named(feed)
