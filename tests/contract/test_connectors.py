"""Host tiers behind an engine: what vLLM's connectors and SGLang's HiCache announce, in every order."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from servingfleet_relay.settings import LayerGroup
from tests.contract.constructed import Constructed
from tests.unit.relay import pages
from tests.unit.relay.batches import CLEARED, removed, stored, tokens

PROMPT = tokens(4)
ASKED = [*PROMPT, 9_999]
GPU = stored([1, 2, 3, 4], PROMPT)
GONE = [removed([each]) for each in (4, 3, 2, 1)]


def mooncake(*numbers: int, ids: list[int] | None = None, **fields: Any) -> list[dict[str, Any]]:
    """Mooncake's store connector: a block an event, the parent from the request, nothing of salts."""
    events = []
    for number in numbers:
        at = (number - 1) * 16
        event = stored(
            [number],
            PROMPT[at : at + 16] if ids is None else ids,
            parent=number - 1 or None,
            medium="cpu",
            group_idx=0,
        )
        events.append(event | fields)
    return events


def test_mooncakes_blocks_extend_what_the_gpu_has_lost() -> None:
    engine = Constructed().publishes(GPU, *mooncake(1, 2, 3, 4), *GONE)
    assert engine.reuse(ASKED)[:2] == (0, 64)
    assert engine.failed() == set()


def test_mooncakes_blocks_without_tokens_are_placed_by_the_gpus() -> None:
    engine = Constructed().publishes(GPU, *mooncake(1, 2, 3, 4, ids=[]), *GONE)
    assert engine.reuse(ASKED)[:2] == (0, 64)
    unknown = Constructed().publishes(*mooncake(1, 2, ids=[])).waits(10)
    assert unknown.reuse(ASKED)[:2] == (0, 0)


def test_what_announces_no_removals_is_never_promised() -> None:
    engine = Constructed().publishes(GPU, *mooncake(1, 2, 3, 4))
    # What the GPU holds is; it cannot report the whole prompt of which the host holds all.
    assert engine.reuse(PROMPT)[0] == 48
    engine.publishes(*GONE)
    assert engine.reuse(ASKED).lower == 0


def test_a_salted_prompts_blocks_are_the_salts_on_every_tier() -> None:
    salted = stored([1, 2, 3, 4], PROMPT, extra_keys=[["s"], None, None, None])
    engine = Constructed().publishes(salted, *mooncake(1, 2, 3, 4), *GONE)
    assert engine.reuse(ASKED)[:2] == (0, 0)
    assert engine.reuse(ASKED, salt="s").predicted == 64


def lmcache(first: int, length: int, *, hash_: int, parent: int | None, **fields: Any) -> Any:
    """LMCache in the engine's process: chunks under hashes of its own."""
    return stored(
        [hash_],
        tokens(64)[first : first + length],
        block=length,
        parent=parent,
        medium="cpu",
        **fields,
    )


def test_lmcaches_chunks_are_claimed_whole_and_never_promised() -> None:
    prompt = tokens(64)
    engine = Constructed().publishes(
        stored([1], tokens(1, start=5000)),
        lmcache(0, 256, hash_=901, parent=None),
        lmcache(256, 256, hash_=902, parent=901),
    )
    assert engine.reuse([*prompt[:600], 9])[:2] == (0, 512)
    assert engine.reuse(prompt[:400])[:2] == (0, 256)
    assert engine.failed() == set()


def test_lmcaches_last_chunk_is_a_part_and_costs_only_itself() -> None:
    engine = Constructed().publishes(
        stored([1], tokens(1, start=5000)),
        lmcache(0, 256, hash_=901, parent=None),
        stored([902], tokens(64)[256:304], block=48, parent=901, medium="cpu"),
    )
    assert engine.reuse([*tokens(64)[:304], 9])[:2] == (0, 256)
    assert engine.reuse([*tokens(64)[:304], 9]).upper >= 304
    assert engine.failed() == {"partial_block"}


def test_lmcaches_server_announces_removals_and_says_cpu_in_capitals() -> None:
    chunk = stored([901], tokens(16), block=256, medium="CPU")
    engine = Constructed().publishes(stored([1], tokens(1, start=5000)), chunk)
    assert engine.reuse([*tokens(16), 9]) == (256, 256, 256)
    assert engine.publishes(removed([901], medium="CPU")).reuse([*tokens(16), 9]) == (0, 0, 0)


def test_a_hosts_chunk_that_is_repeated_is_one_and_a_repeat_in_a_removal_too() -> None:
    host = stored([1, 2, 3, 4], [], block=0, medium="CPU")
    engine = Constructed().publishes(GPU, host, host, *GONE)
    assert engine.reuse(ASKED) == (64, 64, 64)
    engine.publishes(removed([4, 3, 4, 2], medium="CPU"))
    assert engine.reuse(ASKED) == (16, 16, 16)
    assert engine.failed() == set()


def test_a_storage_tier_is_possible_and_never_expected() -> None:
    engine = Constructed().publishes(
        GPU, stored([1, 2, 3, 4], [], block=0, medium="STORAGE"), *GONE
    )
    assert engine.reuse(ASKED)[:2] == (0, 0)
    assert engine.reuse(ASKED).upper == 64


HASHES = pages.page_hashes(PROMPT, 16)
ON_GPU, ON_HOST = pages.stored(PROMPT), pages.stored(PROMPT, medium="CPU_PINNED")
OFF_GPU = pages.removed(HASHES)


def hicache(*events: Any) -> Constructed:
    engine = Constructed(engine="sglang", engine_version="0.5.23")
    return engine.publishes(pages.stored(tokens(1, start=900)), *events)


@pytest.mark.parametrize(
    ("events", "reused"),
    [
        ([ON_GPU], 64),
        ([ON_GPU, ON_HOST], 64),
        ([ON_GPU, ON_HOST, OFF_GPU], 64),
        ([ON_GPU, OFF_GPU, ON_HOST], 64),
        ([ON_GPU, ON_HOST, OFF_GPU, ON_GPU], 64),
        ([ON_GPU, ON_HOST, OFF_GPU, pages.removed(HASHES, "CPU_PINNED")], 0),
        ([ON_GPU, OFF_GPU], 0),
        ([ON_HOST], 64),
        ([ON_GPU, ON_HOST, CLEARED], 0),
        ([ON_GPU, ON_HOST, pages.removed(HASHES[2:]), pages.removed(HASHES[3:], "CPU_PINNED")], 48),
    ],
)
def test_hicaches_moves_and_copies_end_where_they_end(events: list[Any], reused: int) -> None:
    assert hicache(*events).reuse(ASKED) == (reused, reused, reused)


def test_a_copy_that_is_announced_late_is_told_and_costs_nothing() -> None:
    engine = hicache(ON_GPU, OFF_GPU, ON_HOST)
    assert engine.failed() == {"copy_late"}
    assert engine.status().state == "live"
    assert hicache(ON_GPU, ON_HOST, OFF_GPU).failed() == set()


@pytest.mark.parametrize("order", list(permutations([OFF_GPU, ON_HOST])))
def test_a_move_is_the_same_in_either_order_and_in_one_batch(order: tuple[Any, Any]) -> None:
    engine = hicache(ON_GPU)
    engine.publishes(*order)
    assert engine.reuse(ASKED) == (64, 64, 64)


@pytest.mark.parametrize("page", [1, 2, 4, 8, 16, 32, 64])
def test_pages_of_every_size_are_held_and_removed(page: int) -> None:
    prompt = tokens(8)
    hashes = pages.page_hashes(prompt, page)
    engine = Constructed(engine="sglang", engine_version="0.5.23")
    engine.publishes(pages.stored(prompt, page))
    assert engine.reuse([*prompt, 9]) == (128, 128, 128)
    engine.publishes(pages.removed(hashes[len(hashes) // 2 :]))
    lower, predicted, upper = engine.reuse([*prompt, 9])
    assert (lower, predicted) == (64, 64)
    # Of pages smaller than a block a part of the next may be there.
    assert 64 <= upper < 64 + 16


def test_the_dynamo_format_tells_namespaces_apart_by_their_hashes() -> None:
    keyed = pages.in_namespace(HASHES, extra_key="ek")
    engine = hicache(pages.stored(PROMPT[:32]), pages.stored(PROMPT, hashes=keyed))
    assert engine.reuse(ASKED) == (32, 32, 32)
    engine.publishes(pages.removed(keyed))
    assert engine.reuse(ASKED) == (32, 32, 32)
    assert engine.failed() == {"namespace_unknown"}
    assert engine.status().state == "live"


def test_chunked_local_layers_are_expected_within_a_chunk_they_certainly_hold() -> None:
    local = {"group_idx": 0, "kv_cache_spec_kind": "chunked_local_attention"}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    groups = (LayerGroup("chunked_local_attention", 16, 32), LayerGroup("full_attention", 16))
    events = [stored([3, 4], PROMPT, **local), stored([1, 2, 3, 4], PROMPT, **full)]
    engine = Constructed(layer_groups=groups).publishes(*events)
    assert engine.reuse(ASKED)[:2] == (64, 64)
    assert engine.reuse(PROMPT[:33])[:2] == (0, 0)
    assert engine.reuse(PROMPT[:33]).upper >= 32
    assert engine.status().state == "history_lost"
    unknown = Constructed().publishes(*events)
    assert unknown.status().state == "unproven"


def test_what_one_replica_stored_in_a_shared_store_any_other_can_load() -> None:
    teller = Constructed(shared_store="pool")
    teller.publishes(GPU, *mooncake(1, 2, 3, 4))
    other = teller.joined_by("other", shared_store="pool")
    other.publishes(stored([77], tokens(1, start=900)))
    assert teller.reuse(ASKED, replica="other") == (0, 64, 64)
    stranger = teller.joined_by("stranger", shared_store="another pool")
    stranger.publishes(stored([77], tokens(1, start=900)))
    assert teller.reuse(ASKED, replica="stranger") == (0, 0, 0)
    # Its own memory is its own.
    teller.publishes(stored([9], tokens(1, start=64), parent=4))
    assert teller.reuse([*tokens(5), 9], replica="other").predicted == 64


def test_a_store_that_nobody_shares_is_the_replicas_own() -> None:
    teller = Constructed().publishes(GPU, *mooncake(1, 2, 3, 4))
    teller.joined_by("other").publishes(stored([77], tokens(1, start=900)))
    assert teller.reuse(ASKED, replica="other") == (0, 0, 0)


def test_what_lies_elsewhere_is_loaded_only_by_those_who_share_it() -> None:
    remote = stored([1, 2, 3, 4], PROMPT, medium="STORAGE", locality="REMOTE")
    alone = Constructed().publishes(stored([77], tokens(1, start=900)), remote)
    assert alone.reuse(ASKED)[:2] == (0, 0)
    assert alone.reuse(ASKED).upper >= 64
    assert alone.failed() == {"remote_medium"}
    attached = Constructed(shared_store="pool").publishes(
        stored([77], tokens(1, start=900)), remote
    )
    assert attached.reuse(ASKED) == (0, 64, 64)


def test_a_replica_that_is_not_believed_is_not_believed_of_a_store() -> None:
    teller = Constructed(shared_store="pool").publishes(GPU, *mooncake(1, 2, 3, 4))
    other = teller.joined_by("other", shared_store="pool")
    other.publishes(stored([77], tokens(1, start=900)))
    teller.publishes({"type": "BlocksEvicted"})
    assert teller.status().state == "quarantined"
    assert teller.reuse(ASKED, replica="other").predicted == 0
