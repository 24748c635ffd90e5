"""Constructed SGLang streams through relay, index and router: what an engine would reuse, predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from servingfleet_sim.recordings import Message, Recording, Request
from servingfleet_sim.verify import verify
from tests.unit.relay.batches import live, tokens
from tests.unit.relay.pages import in_namespace, page_hashes, removed, stored

PROMPT = tokens(4)


def asked(*requests: Request, events: list[Any], version: str = "0.5.23") -> list[tuple[int, ...]]:
    """Events in batches of their own, then the requests. Returns (lower, predicted, upper) of each."""
    requests = tuple(
        replace(each, number=at, start=100.0 + at, end=100.5 + at)
        for at, each in enumerate(requests)
    )
    messages = tuple(
        Message(1.0 + at, 0, tuple(live(at, event))) for at, event in enumerate(events)
    )
    recording = Recording(
        "constructed", 1, messages, requests, (), {"sglang": version}, adapter="sglang"
    )
    return [(v.lower, v.predicted, v.upper) for v in verify(recording).verdicts]


def request(prompt: list[int], *, adapter: str = "", salt: str = "") -> Request:
    return Request(0, "", 0.0, 0.0, (tuple(prompt),), len(prompt), 0, adapter, salt)


@pytest.mark.parametrize(
    ("length", "reused"), [(16, 0), (17, 0), (18, 16), (33, 16), (34, 32), (49, 32), (50, 48)]
)
def test_of_pairs_the_last_but_one_token_is_the_last_that_counts(length: int, reused: int) -> None:
    # The engine looks for all tokens but the last, of which there is one pair less.
    prompt = [*PROMPT, 1]
    (seen,) = asked(request(prompt[:length]), events=[stored(prompt, pairs=True)])
    assert seen == (reused, reused, reused)


@pytest.mark.parametrize("page", [1, 4, 8, 16])
@pytest.mark.parametrize("length", [16, 17, 48, 64])
def test_of_tokens_the_last_is_computed_anew(page: int, length: int) -> None:
    (seen,) = asked(request(PROMPT[:length]), events=[stored(PROMPT, page)])
    reported = (length - 1) // page * page
    assert seen == (reported, reported, reported)


def test_of_a_block_that_is_held_in_part_only_the_upper_bound_speaks() -> None:
    (seen,) = asked(request(PROMPT), events=[stored(PROMPT[:40], 4)])
    assert seen == (32, 32, 44)


def test_a_page_larger_than_a_block_is_claimed_as_a_whole() -> None:
    prompt = tokens(12)
    events = [stored(prompt, 64)]
    assert asked(request(prompt[:150]), request(prompt[:64]), events=events) == [
        (128, 128, 128),
        (0, 0, 0),
    ]


def test_the_host_extends_what_the_gpu_has_lost() -> None:
    pages = page_hashes(PROMPT, 16)
    events = [stored(PROMPT), stored(PROMPT, medium="CPU_PINNED"), removed(pages[1:])]
    assert asked(request([*PROMPT, 1]), events=events) == [(64, 64, 64)]


def test_an_unknown_namespace_is_never_claimed_for_the_plain_one() -> None:
    hashes = in_namespace(page_hashes(PROMPT, 16), extra_key="ek")
    events = [stored(PROMPT[:32]), stored(PROMPT, hashes=hashes)]
    assert asked(request([*PROMPT, 1]), events=events) == [(32, 32, 32)]


def test_twins_under_one_hash_leave_nothing_certain_and_nothing_impossible() -> None:
    pages = page_hashes(PROMPT, 16)
    events = [stored(PROMPT), stored(PROMPT), removed(pages[2:])]
    # One of the two lost half of its pages, and the wire does not say which.
    assert asked(request([*PROMPT, 1]), events=events) == [(0, 32, 64)]


def test_adapters_that_share_hashes_with_the_base_model_open_what_is_possible() -> None:
    events = [stored(PROMPT), stored(PROMPT, lora_name="ad")]
    seen = asked(request([*PROMPT, 1], adapter="ad"), events=events, version="0.5.22")
    assert seen == [(0, 0, 65)]


def test_an_adapters_own_pages_are_expected_not_promised() -> None:
    hashes = in_namespace(page_hashes(PROMPT, 16), extra_key="0123")
    events = [stored(PROMPT, hashes=hashes, lora_name="ad")]
    assert asked(request([*PROMPT, 1], adapter="ad"), request([*PROMPT, 1]), events=events) == [
        (0, 64, 64),
        (0, 0, 0),
    ]


def test_salts_keep_prompts_apart() -> None:
    events = [stored(PROMPT, salt="a")]
    seen = asked(request([*PROMPT, 1], salt="a"), request([*PROMPT, 1]), events=events)
    assert seen == [(64, 64, 64), (0, 0, 0)]
