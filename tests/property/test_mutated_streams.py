"""One key changed in one recorded event: it is noticed, named, and gives not one token of wrong credit.

Each run takes a sample with every kind of change in it; SERVINGFLEET_MUTATIONS=all takes every event (an hour).
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from servingfleet_sim.recordings import Recording
from servingfleet_sim.verify import Verification, verify
from tests.contract.test_recordings import RECORDINGS, recording
from tests.property.mutations import Mutation, as_arrays, mutations

ARRAYS = ("b-eviction", "f1-gemma3-swa-hybrid", "g-lora-salt", "i2-cpu-offload-self-describing")
"""Recordings that are also played as their events were written before 0.24, by position."""
SAMPLE = 1
"""Of each kind of change in each recording."""

CASES = [*((name, "maps") for name in RECORDINGS), *((name, "arrays") for name in ARRAYS)]


@dataclass(frozen=True)
class Run:
    """A changed recording beside the one it was made from."""

    mutation: Mutation
    before: Verification
    after: Verification

    @property
    def where(self) -> tuple[str, int, int | None]:
        return self.mutation.what, self.mutation.message, self.mutation.event

    @property
    def messages(self) -> str:
        """All that people are told of the changed stream."""
        failures = [each for rank in self.after.states for each in rank.failures]
        return " | ".join(f"{each.reason}: {each.detail}" for each in failures)

    def overstated(self) -> Iterator[tuple[str, int, int, int]]:
        """Requests that were promised or expected more than the engine gave, and more than without the change."""
        for before, after in zip(self.before.verdicts, self.after.verdicts, strict=True):
            reported = after.request.cached_tokens
            if after.lower > max(reported, before.lower):
                yield "lower", after.request.number, after.lower, reported
            if after.predicted > max(reported, before.predicted):
                yield "predicted", after.request.number, after.predicted, reported

    def understated(self) -> Iterator[tuple[str, int, int, int]]:
        """Requests of which more was reused than is called possible."""
        for before, after in zip(self.before.verdicts, self.after.verdicts, strict=True):
            reported = after.request.cached_tokens
            if after.upper < min(reported, before.upper):
                yield "upper", after.request.number, after.upper, reported


def subject(name: str, form: str) -> Recording:
    found = recording(name)
    return as_arrays(found) if form == "arrays" else found


def sampled(recording: Recording) -> Sequence[Mutation]:
    kinds: dict[str, list[Mutation]] = defaultdict(list)
    for mutation in mutations(recording):
        kinds[mutation.what].append(mutation)
    if os.environ.get("SERVINGFLEET_MUTATIONS") == "all":
        return [mutation for kind in kinds.values() for mutation in kind]
    rng = random.Random(recording.name)
    return [each for kind in kinds.values() for each in rng.sample(kind, min(SAMPLE, len(kind)))]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def mutated(request: pytest.FixtureRequest) -> list[Run]:
    """One recording with each of its changes."""
    found = subject(*request.param)
    before = verify(found)
    return [Run(each, before, verify(each.applied(found))) for each in sampled(found)]


def test_no_change_gives_wrong_credit(mutated: list[Run]) -> None:
    assert [(run.where, *found) for run in mutated for found in run.overstated()] == []


def test_no_change_makes_what_happened_impossible(mutated: list[Run]) -> None:
    assert [(run.where, *found) for run in mutated for found in run.understated()] == []


def test_every_change_is_told_by_its_name(mutated: list[Run]) -> None:
    unnamed = [
        (run.where, run.messages)
        for run in mutated
        if not any(name in run.messages for name in run.mutation.names)
    ]
    assert unnamed == []


def test_every_change_leaves_the_stream_degraded_or_quarantined(mutated: list[Run]) -> None:
    """If only until the cache was cleared or the engine restarted, which the recordings do."""
    unmoved = [run.where for run in mutated if run.messages == _healthy(run.before)]
    assert unmoved == []


def _healthy(before: Verification) -> str:
    failures = [each for rank in before.states for each in rank.failures]
    return " | ".join(f"{each.reason}: {each.detail}" for each in failures)


def test_the_changes_are_those_of_every_field_that_is_ever_sent() -> None:
    whats = {what.what for name in RECORDINGS for what in mutations(recording(name))}
    for field in ("block_hashes", "token_ids", "medium", "extra_keys", "group_idx", "cache_salt"):
        assert f"BlockStored: {field} renamed" in whats
        assert f"BlockStored: {field} dropped" in whats
    assert len(whats) > 150
