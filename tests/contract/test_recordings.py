"""The truth: what real engines published must predict what they reported."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from servingfleet_relay.adapters.claims import Replayed
from servingfleet_relay.adapters.registry import ADAPTERS
from servingfleet_sim.recordings import Recording, read
from servingfleet_sim.verify import Cause, verify
from tests.recordings import recordings_dir

RECORDINGS: dict[str, dict[Cause, int]] = {
    "a-shared-prefix": {},
    "a2-text-chat": {},
    "b-eviction": {},
    "c-reset": {Cause.RESET_UNANNOUNCED: 1},
    "d2-replay-rollover": {},
    "e-data-parallel": {Cause.RESET_UNANNOUNCED: 2},
    "f1-gemma3-swa-hybrid": {Cause.RESET_UNANNOUNCED: 1},
    "f2-gemma3-hybrid-manager-off": {Cause.RESET_UNANNOUNCED: 1},
    "f3-mistral-all-swa": {Cause.RESET_UNANNOUNCED: 1},
    "f5-qwen3next-gdn": {},
    "f5b-qwen3next-gdn-align": {},
    "f5c-qwen3next-gdn-block32": {Cause.RESET_UNANNOUNCED: 1},
    "g-lora-salt": {},
    "h-ngram-spec": {},
    "i-cpu-offload-default-events": {Cause.RESET_UNANNOUNCED: 1},
    "i2-cpu-offload-self-describing": {Cause.RESET_UNANNOUNCED: 1},
    "j-restart": {},
    "m-bytes-hash-sha256cbor": {Cause.RESET_UNANNOUNCED: 1},
    "s1-sglang-page16": {},
    "s2-sglang-page1": {Cause.PART_OF_BLOCK: 3},
    "s3-sglang-eagle-bigram-page16": {},
    "sx-eagle": {},
    "x1-full-mode-evict": {},
    "x2-offload-placeholder-chunk64": {},
    "x2e-chunk64-cpu-evict-selfdesc": {},
    "x3-offload-gemma3-placeholder": {},
    "x4-prompt-logprobs": {},
    "x6-conc-gemma3": {},
    "x7-conc-qwen3next": {},
    "z-inproc-base": {},
}
"""Folder, and its misses: each has a cause that no event could have told."""

UNTOLD_FLAGS = {("x4-prompt-logprobs", 1): "prompt_logprobs: skips reading"}
"""Requests that asked for `prompt_logprobs`, as their labels say; their recorded lines lack the option, which a router is
told like any other."""


def recording(name: str) -> Recording:
    """A recording whose requests say all that was asked for."""
    found = read(recordings_dir() / name)
    requests = []
    for request in found.requests:
        if UNTOLD_FLAGS.get((name, request.number)) == request.label:
            assert not request.prompt_logprobs, (
                "the recording tells it by now: drop it from UNTOLD_FLAGS"
            )
            request = replace(request, prompt_logprobs=True)
        requests.append(request)
    return replace(found, requests=tuple(requests))


@pytest.mark.parametrize("name", RECORDINGS)
def test_predicted_reuse_equals_what_the_engine_reported(name: str) -> None:
    result = verify(recording(name))
    misses = [
        (v.request.number, v.request.label, v.lower, v.predicted, v.upper, v.request.cached_tokens)
        for v in result.verdicts
        if v.wrong
    ]
    assert misses == []
    assert Counter(v.cause for v in result.verdicts if v.cause) == RECORDINGS[name]


@pytest.mark.parametrize("name", RECORDINGS)
def test_reported_reuse_lies_within_the_stated_bounds(name: str) -> None:
    result = verify(recording(name))
    outside = [
        (v.request.number, v.request.label, v.lower, v.upper, v.request.cached_tokens, v.cause)
        for v in result.verdicts
        if not v.in_bounds
        # Beyond any bound: the reset took effect unseen.
        and v.cause is not Cause.RESET_UNANNOUNCED
    ]
    assert outside == []


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_relay_drops_nothing_of_a_healthy_stream(name: str) -> None:
    result = verify(recording(name))
    dropped = {key: n for key, n in result.counters.items() if key.startswith("drop_") and n}
    assert dropped == {}


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_invariant_holds_of_a_healthy_stream(name: str) -> None:
    result = verify(recording(name))
    # What a relay is told of, or joins, is no failure of the stream.
    ours = {"late_join", "replay_failed"}
    failed = {each.reason for rank in result.states for each in rank.failures} - ours
    # SGLang's own cache was asked with an extra_key, which shares hashes with plain requests.
    keyed = {"s1-sglang-page16", "s2-sglang-page1", "s3-sglang-eagle-bigram-page16"}
    assert failed == ({"shared_hashes"} if name in keyed else set())


def test_every_recording_of_requests_is_held_to_its_reports() -> None:
    folders = {path.parent.name for path in recordings_dir().glob("*/requests.jsonl")}
    assert folders == set(RECORDINGS)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_is_claimed_of_an_engines_recordings_is_so(engine: str) -> None:
    recorded = [found for name in RECORDINGS if (found := recording(name)).adapter == engine]
    verdicts = [verdict for each in recorded for verdict in verify(each).verdicts]
    others = Counter(str(verdict.cause) for verdict in verdicts if not verdict.hit)
    exact = len(verdicts) - others.total()
    assert ADAPTERS[engine].profile.replayed == Replayed(
        len(verdicts), exact, tuple(others.most_common())
    )


def test_a_model_of_nothing_but_windows_is_fully_known_where_its_prompts_are() -> None:
    result = verify(recording("f3-mistral-all-swa"))
    assert [rank.state for rank in result.states] == ["live"]


def test_pages_of_one_token_are_predicted_to_the_token_in_blocks_of_one() -> None:
    result = verify(read(recordings_dir() / "s2-sglang-page1"), block_tokens=1)
    assert (result.exact, len(result.verdicts)) == (11, 11)
