"""Window groups without a full-attention group: the dispatched prompts tell where their blocks belong."""

from __future__ import annotations

import struct
from typing import Any

from servingfleet_core import block_hashes, namespace_root
from servingfleet_protos.v1.stream_pb2 import CreditEnded, CreditOpened, SchedulerMessage, Welcome
from servingfleet_relay.dispatches import LINGER_S, MAX_BYTES, MAX_DISPATCHES, Dispatches, Stretch
from servingfleet_relay.pipeline import Pipeline
from servingfleet_relay.settings import PipelineSettings
from tests.unit.relay.batches import CLEARED, END, live, stored, tokens

NOW = 1000.0
BLOCK = 16
LINK = "s"


def packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def canonical(ids: list[int], *, adapter: str = "", salt: str = "") -> bytes:
    return block_hashes(namespace_root("m", adapter, salt), packed(ids), BLOCK)


def stretch(ids: list[int], units: int | None = None) -> Stretch:
    """Up to the end of these tokens, the last so many units of them."""
    chain = int.from_bytes(canonical(ids)[-8:], "little")
    return Stretch(chain, len(ids), len(ids) // BLOCK if units is None else units, BLOCK)


def sent(*prompts: list[int]) -> Dispatches:
    dispatches = Dispatches("m", BLOCK)
    for number, prompt in enumerate(prompts):
        dispatches.opened(f"d{number}", canonical(prompt), len(prompt), 60.0, NOW)
    return dispatches


PROMPT = tokens(6)


def test_the_window_before_the_last_token_is_kept() -> None:
    assert sent([*PROMPT[:80], 7]).masked(stretch(PROMPT[:80]), 2, 2) == 3
    # The last block of a prompt of whole blocks is computed again anyway.
    assert sent(PROMPT[:80]).masked(stretch(PROMPT[:80]), 2, 2) == 2
    assert sent(PROMPT[:80]).masked(stretch(PROMPT[:80], units=4), 2, 2) == 1


def test_a_part_of_a_longer_prompt_keeps_what_it_has_of_the_window() -> None:
    assert sent([*PROMPT, 7]).masked(stretch(PROMPT[:80]), 1, 2) == 4
    assert sent([*PROMPT, 7]).masked(stretch(PROMPT[:48]), 1, 2) is None


def test_other_tokens_or_another_number_of_blocks_tell_nothing() -> None:
    assert sent([9, *PROMPT[1:81]]).masked(stretch(PROMPT[:80]), 2, 2) is None
    assert sent(PROMPT[:80]).masked(stretch(PROMPT[:80]), 3, 2) is None
    assert sent().masked(stretch(PROMPT[:80]), 2, 2) is None


def test_prompts_that_tell_different_places_tell_none() -> None:
    both = sent(PROMPT[:80], [*PROMPT[:80], 7])
    assert both.masked(stretch(PROMPT[:80]), 2, 2) is None


def test_a_prompt_whose_prefill_was_seen_tells_nothing_of_the_next() -> None:
    both = sent([*PROMPT[:80], 7])
    assert both.masked(stretch(PROMPT[:80]), 2, 2) == 3
    both.opened("next", canonical(PROMPT[:80]), 80, 60.0, NOW)
    assert both.masked(stretch(PROMPT[:80]), 2, 2) == 2


def test_a_prompt_is_remembered_a_while_after_its_end() -> None:
    dispatches = sent(PROMPT)
    dispatches.ended("d0", NOW)
    dispatches.ended("unknown", NOW)
    dispatches.expire(NOW + LINGER_S)
    assert len(dispatches) == 1
    dispatches.expire(NOW + LINGER_S + 0.1)
    assert len(dispatches) == 0


def test_a_prompt_without_an_end_expires() -> None:
    dispatches = sent(PROMPT)
    dispatches.expire(NOW + 60.0 + LINGER_S + 0.1)
    assert len(dispatches) == 0


def test_what_is_remembered_is_bounded_by_number_and_by_size() -> None:
    dispatches = Dispatches("m", BLOCK)
    for number in range(MAX_DISPATCHES + 1):
        dispatches.opened(str(number), b"", 5, 60.0, NOW)
    assert len(dispatches) == MAX_DISPATCHES
    dispatches.opened("huge", bytes(MAX_BYTES), 5, 60.0, NOW)
    assert len(dispatches) == MAX_DISPATCHES
    dispatches.opened("too much", bytes(8), 5, 60.0, NOW)
    assert len(dispatches) == 1


# The same through the whole relay.

WINDOW = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 32}


def relay(**fields: Any) -> Pipeline:
    """Of a model with nothing but sliding windows, two blocks each; it has published nothing yet."""
    made = Pipeline(PipelineSettings("r", "m", (0,), "s", **fields), NOW)
    made.open_link(LINK, NOW)
    made.receive(LINK, SchedulerMessage(welcome=Welcome(instance_id="i")), NOW)
    made.socket_up(0, NOW)
    made.take_replay_requests()
    made.replayed(0, END, NOW)
    return made


def window(hashes: list[int], ids: list[int], **fields: Any) -> dict[str, Any]:
    return stored(hashes, ids, group_idx=0, **WINDOW, **fields)


def dispatch(made: Pipeline, prompt: list[int], *, salt: str = "", decision: str = "d") -> None:
    opened = CreditOpened(
        decision_id=decision,
        hashes=canonical(prompt, salt=salt),
        prompt_tokens=len(prompt),
        expires_s=60.0,
    )
    made.receive(LINK, SchedulerMessage(credit_opened=opened), NOW)


def held(made: Pipeline) -> bytes:
    return bytes(made.holdings(0, 0, 1))


def state(made: Pipeline) -> str:
    return made.status().ranks[0].state


def blocks(ids: list[int], *numbers: int) -> set[bytes]:
    hashes = canonical(ids)
    return {hashes[8 * n : 8 * n + 8] for n in numbers}


def as_set(hashes: bytes) -> set[bytes]:
    return {hashes[at : at + 8] for at in range(0, len(hashes), 8)}


def test_a_dispatched_prompt_places_the_blocks_that_its_window_keeps() -> None:
    made = relay()
    dispatch(made, PROMPT[:80])
    made.receive(LINK, SchedulerMessage(credit_ended=CreditEnded(decision_id="d")), NOW)
    made.live(0, live(0, window([3, 4], PROMPT[:80])), NOW)
    assert as_set(held(made)) == blocks(PROMPT, 2, 3)
    made.live(0, live(1, window([5, 6], PROMPT[64:], parent=4)), NOW)
    assert as_set(held(made)) == blocks(PROMPT, 2, 3, 4, 5)
    assert state(made) == "live"


def test_without_a_dispatch_nothing_is_claimed_and_the_upper_bound_is_open() -> None:
    made = relay()
    made.live(0, live(0, window([3, 4], PROMPT[:80])), NOW)
    assert (held(made), state(made)) == (b"", "history_lost")
    made.tick(NOW + 6.0)
    assert (held(made), state(made)) == (b"", "history_lost")
    assert made.counters()["odd_unplaced"] == 1
    made.live(0, live(1, CLEARED), NOW + 7.0)
    assert state(made) == "live"


def test_a_dispatch_that_comes_after_its_event_places_it_still() -> None:
    made = relay()
    made.live(0, live(0, window([3, 4], PROMPT[:80])), NOW)
    made.live(0, live(1, window([5, 6], PROMPT[64:], parent=4)), NOW)
    dispatch(made, PROMPT[:80])
    assert as_set(held(made)) == blocks(PROMPT, 2, 3, 4, 5)
    assert state(made) == "live"


def test_a_prompt_of_a_salt_that_is_not_told_is_not_placed() -> None:
    made = relay()
    dispatch(made, PROMPT[:80], salt="s")
    made.live(0, live(0, window([3, 4], PROMPT[:80])), NOW)
    assert (held(made), state(made)) == (b"", "history_lost")


def test_keys_that_nobody_can_compute_are_not_placed() -> None:
    made = relay()
    dispatch(made, PROMPT[:80])
    made.live(0, live(0, window([3, 4], PROMPT[:80], extra_keys=[["image"], None])), NOW)
    assert (held(made), state(made)) == (b"", "history_lost")


def test_a_known_block_that_is_stored_again_needs_no_dispatch() -> None:
    made = relay()
    dispatch(made, PROMPT[:80])
    made.live(0, live(0, window([3, 4], PROMPT[:80])), NOW)
    made.live(0, live(1, CLEARED, window([3, 4], PROMPT[:80])), NOW)
    assert as_set(held(made)) == blocks(PROMPT, 2, 3)
    assert state(made) == "live"
