"""The truth: what real engines published must predict what they reported."""

from __future__ import annotations

import pytest

from servingfleet_sim.recordings import read
from servingfleet_sim.verify import Cause, verify
from tests.recordings import recordings_dir

RECORDINGS = {
    "a-shared-prefix": {Cause.SHARED_USAGE},
    "a2-text-chat": set(),
    "b-eviction": {Cause.IN_FLIGHT},
    "c-reset": {Cause.RESET_UNANNOUNCED},
    "d2-replay-rollover": set(),
    "e-data-parallel": {Cause.RESET_UNANNOUNCED, Cause.IN_FLIGHT},
    "g-lora-salt": set(),
    "h-ngram-spec": set(),
    "j-restart": set(),
    "m-bytes-hash-sha256cbor": {Cause.RESET_UNANNOUNCED},
    "s1-sglang-page16": set(),
    "s2-sglang-page1": {Cause.PART_OF_BLOCK},
    "s3-sglang-eagle-bigram-page16": set(),
    "sx-eagle": set(),
    "z-inproc-base": set(),
}
"""Folder, and the causes that a miss in it may have."""


@pytest.mark.parametrize("name", RECORDINGS)
def test_predicted_reuse_equals_what_the_engine_reported(name: str) -> None:
    result = verify(read(recordings_dir() / name))
    misses = [
        (v.request.number, v.request.label, v.lower, v.predicted, v.upper, v.request.cached_tokens)
        for v in result.verdicts
        if v.wrong
    ]
    assert misses == []
    assert {v.cause for v in result.verdicts if v.cause} <= RECORDINGS[name]


@pytest.mark.parametrize("name", RECORDINGS)
def test_reported_reuse_lies_within_the_stated_bounds(name: str) -> None:
    result = verify(read(recordings_dir() / name))
    outside = [
        (v.request.number, v.request.label, v.lower, v.upper, v.request.cached_tokens, v.cause)
        for v in result.verdicts
        if not v.in_bounds
        # Both are beyond any bound: the reset took effect unseen; the usage is of one prompt in three.
        and v.cause not in (Cause.RESET_UNANNOUNCED, Cause.SHARED_USAGE)
    ]
    assert outside == []


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_relay_drops_nothing_of_a_healthy_stream(name: str) -> None:
    result = verify(read(recordings_dir() / name))
    dropped = {key: n for key, n in result.counters.items() if key.startswith("drop_") and n}
    assert dropped == {}


def test_pages_of_one_token_are_predicted_to_the_token_in_blocks_of_one() -> None:
    result = verify(read(recordings_dir() / "s2-sglang-page1"), block_tokens=1)
    assert (result.exact, len(result.verdicts)) == (11, 11)
