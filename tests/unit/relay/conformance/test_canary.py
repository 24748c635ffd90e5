"""A prompt of our own proves what an engine's events mean."""

from __future__ import annotations

import random
from typing import Any

import pytest

from servingfleet_relay.adapters import sglang, vllm
from servingfleet_relay.adapters.events import Doubt
from servingfleet_relay.conformance.canary import BLOCKS, MOST_TOKENS, Canary, prompt_of
from tests.unit.relay import pages
from tests.unit.relay.batches import payload, stored

UNIT = 16
PROMPT = prompt_of(UNIT, random.Random(1))


def seen(*events: Any, unit: int = UNIT, engine: Any = vllm) -> Canary:
    canary = Canary(PROMPT, unit, engine.PROFILE)
    for event in events:
        canary.observe(engine.decode_payload(payload(event)))
    return canary


def blocks(first: int, last: int, **fields: Any) -> dict[str, Any]:
    hashes: list[Any] = list(range(first + 1, last + 1))
    parent = first or None
    return stored(hashes, PROMPT[first * UNIT : last * UNIT], parent=parent, **fields)


def test_a_prompt_is_three_blocks_and_a_token_that_nobody_has_sent() -> None:
    assert len(PROMPT) == BLOCKS * UNIT + 1
    assert prompt_of(UNIT, random.Random(2)) != PROMPT


@pytest.mark.parametrize("unit", [0, MOST_TOKENS])
def test_no_prompt_is_made_of_blocks_that_are_not_known_or_too_large(unit: int) -> None:
    with pytest.raises(ValueError, match="blocks of"):
        prompt_of(unit, random.Random(1))


@pytest.mark.parametrize(
    "events", [[blocks(0, 3)], [blocks(0, 1), blocks(1, 3)], [blocks(0, 2), blocks(2, 3)]]
)
def test_an_engine_that_does_as_expected_passes(events: list[Any]) -> None:
    canary = seen(*events)
    assert canary.announced
    assert canary.differences(0, 3 * UNIT) == ()
    assert canary.finding(0, 3 * UNIT) is None


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([], "0 of 3 blocks"),
        ([blocks(0, 2)], "2 of 3 blocks"),
        ([blocks(0, 1), stored([2, 3], PROMPT[16:48])], "1 of 3 blocks"),
        ([blocks(0, 1), stored([2, 3], PROMPT[16:48], parent=9)], "1 of 3 blocks"),
        ([stored([1, 2, 3], PROMPT[:48][::-1])], "1 stores of something else"),
        ([stored([1, 2, 3], PROMPT[1:49])], "0 of 3 blocks"),
        ([stored([1], PROMPT[:48], block=48)], "blocks of 48 tokens"),
    ],
)
def test_events_that_are_not_the_prompts_are_told(events: list[Any], told: str) -> None:
    assert told in "; ".join(seen(*events).differences(0, 3 * UNIT))


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (16, 48, "first answer reports 16"),
        (0, 0, "second answer reports 0 cached tokens; expected 48"),
        (0, 49, "second answer reports 49"),
        (
            0,
            None,
            "second answer reports no cached tokens: the engine needs --enable-prompt-tokens",
        ),
        (0, 32, "--less-units 1"),
    ],
)
def test_reports_that_do_not_fit_are_told(first: int | None, second: int | None, told: str) -> None:
    assert told in "; ".join(seen(blocks(0, 3)).differences(first, second))


def test_an_engine_may_leave_out_that_it_reused_nothing() -> None:
    canary = seen(pages.stored(PROMPT), engine=sglang)
    assert canary.differences(None, 48) == ()
    told = canary.differences(None, None)
    assert (
        "second answer reports no cached tokens: the engine needs --enable-cache-report" in told[1]
    )


def test_a_difference_stops_the_stream() -> None:
    found = seen(blocks(0, 3)).finding(0, 0)
    assert found is not None
    assert (found.reason, found.doubt) == ("canary", Doubt.QUARANTINED)


@pytest.mark.parametrize("second", [32, 48])
def test_of_pairs_the_last_may_be_missing(second: int) -> None:
    canary = seen(pages.stored(PROMPT, pairs=True), engine=sglang)
    assert canary.announced
    assert canary.differences(0, second) == ()


def test_other_prompts_events_and_other_tiers_are_none_of_its_business() -> None:
    others = stored([7, 8], list(range(300, 332)))
    host = stored([1], [], block=0, medium="CPU")
    assert seen(others, blocks(0, 3), host).differences(0, 48) == ()
