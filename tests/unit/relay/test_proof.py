"""What a batch of vLLM's shows of its stores: that they were computed, or that they may be reports of a hit."""

from __future__ import annotations

from typing import Any

import pytest

from servingfleet_relay.adapters import vllm
from servingfleet_relay.adapters.events import Stored

from .batches import payload, removed, stored

TOKENS = list(range(64))
WINDOW = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 32}
STATE = {"kv_cache_spec_kind": "mamba"}


def full(*hashes: int, **fields: Any) -> dict[str, Any]:
    group = fields.pop("group_idx", 1)
    tokens = TOKENS[: 16 * len(hashes)]
    kind = {"kv_cache_spec_kind": "full_attention", "group_idx": group}
    return stored(list(hashes), tokens, **kind, **fields)


def other(*hashes: int, group_idx: int = 0, **fields: Any) -> dict[str, Any]:
    return stored(list(hashes), TOKENS, group_idx=group_idx, **(WINDOW | fields))


def computed(*events: dict[str, Any]) -> list[bool]:
    batch = vllm.decode_payload(payload(*events))
    return [event.computed for event in batch.events if isinstance(event, Stored)]


@pytest.mark.parametrize("kind", [WINDOW, STATE])
@pytest.mark.parametrize("hashes", [(), (4,), (3, 4)])
def test_a_group_that_leaves_out_blocks_proves_the_store_of_all_groups(
    kind: dict[str, Any], hashes: tuple[int, ...]
) -> None:
    assert computed(other(*hashes, **kind), full(1, 2, 3, 4)) == [True, True]


def test_the_order_of_the_groups_does_not_matter() -> None:
    assert computed(full(1, 2, 3, 4, group_idx=0), other(4, group_idx=1)) == [True, True]


def test_a_report_names_all_blocks_in_all_groups() -> None:
    assert computed(other(1, 2, 3, 4), full(1, 2, 3, 4)) == [False, False]


def test_full_attention_alone_proves_nothing() -> None:
    assert computed(full(1, 2, 3, 4)) == [False]


def test_another_range_proves_nothing() -> None:
    assert computed(other(4), full(1, 2, 3)) == [True, False]


def test_what_begins_later_in_one_group_was_loaded_and_is_no_report() -> None:
    tail = stored([3, 4], TOKENS[32:], parent=2, group_idx=0, **WINDOW)
    assert computed(tail, full(1, 2, 3, 4)) == [True, True]
    apart = stored([3, 4], TOKENS[16:48], parent=2, group_idx=0, **WINDOW)
    assert computed(apart, full(1, 2, 3, 4)) == [False, False]


def test_a_report_of_what_was_just_stored_is_none_of_the_store() -> None:
    store = (other(3, 4), full(1, 2, 3, 4))
    report = (other(1, 2, 3, 4), full(1, 2, 3, 4))
    assert computed(*store, *report) == [True, True, False, False]
    assert computed(*report, *store) == [False, False, True, True]


def test_what_lies_between_ends_a_store() -> None:
    assert computed(other(4), removed([8]), full(1, 2, 3, 4)) == [True, False]
