"""The form of a stream: learned, held to, compared with its release and with the life before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from servingfleet_relay.adapters import sglang, vllm
from servingfleet_relay.adapters.events import Doubt, Shape
from servingfleet_relay.conformance.fingerprint import Fingerprint, release_numbers

MAP = Shape("BlockStored", "map", hash_width=8, high=True, pairs=False)


def held_to(version: str) -> Fingerprint:
    fingerprint = Fingerprint()
    fingerprint.release(vllm.PROFILE, version)
    return fingerprint


@pytest.mark.parametrize(
    ("version", "form"),
    [
        ("0.9.0", "array 6"),
        ("0.10.1.post1", "array 6"),
        ("0.10.2", "array 7"),
        ("0.16.3", "array 8"),
        ("v0.19.0", "array 9"),
        ("0.21.0", "array 10"),
        ("0.23.1", "array 12"),
        ("0.24.0+cpu", "map"),
        ("0.33.0", "map"),
        ("1.0.0", "map"),
    ],
)
def test_a_release_is_held_to_the_form_that_it_writes(version: str, form: str) -> None:
    for written in ("array 6", "array 7", "array 8", "array 9", "array 10", "array 12", "map"):
        found = held_to(version).event(Shape("BlockStored", written))
        assert [each.reason for each in found] == ([] if written == form else ["form_of_release"])


@pytest.mark.parametrize("version", ["", "0.24.0rc1", "0.23.1.dev12+g123abc", "main"])
def test_builds_between_releases_may_write_either_way(version: str) -> None:
    assert release_numbers(version) is None
    assert held_to(version).event(Shape("BlockStored", "array 6")) == []


def test_batches_of_two_are_the_oldest_releases_only() -> None:
    assert held_to("0.9.0").batch(2) is None
    found = held_to("0.9.1").batch(2)
    assert found is not None
    assert (found.reason, found.doubt) == ("form_of_release", Doubt.UNTRUSTED)
    fingerprint = Fingerprint()
    fingerprint.release(sglang.PROFILE, "0.5.23")
    assert fingerprint.batch(3) is None


def test_maps_in_batches_of_two_are_no_release() -> None:
    fingerprint = Fingerprint()
    assert fingerprint.batch(2) is None
    (found,) = fingerprint.event(MAP)
    assert found.doubt is Doubt.QUARANTINED


@pytest.mark.parametrize(
    ("change", "reason", "named"),
    [
        ({"form": "array 12"}, "form_changed", "array 12"),
        ({"hash_width": 32}, "hash_kind_changed", "32 bytes"),
        ({"low": True, "high": False}, "hash_kind_changed", "block_hashes"),
        ({"pairs": True}, "key_form_changed", "token_ids"),
    ],
)
def test_a_trait_that_changes_stops_the_stream(
    change: dict[str, object], reason: str, named: str
) -> None:
    fingerprint = Fingerprint()
    assert fingerprint.event(MAP) == []
    (found,) = fingerprint.event(replace(MAP, **change))  # type: ignore[arg-type]
    assert (found.reason, found.doubt) == (reason, Doubt.QUARANTINED)
    assert named in found.detail


def test_optional_fields_that_come_and_go_are_named() -> None:
    fingerprint = Fingerprint()
    every = replace(MAP, told=frozenset({"group_idx", "kv_cache_spec_kind"}))
    assert fingerprint.event(every) == []
    assert fingerprint.event(replace(MAP, told=None)) == []
    assert fingerprint.event(replace(every, variant="placeholder", told=frozenset())) == []
    (found,) = fingerprint.event(replace(MAP, told=frozenset({"kv_cache_spec_kind"})))
    assert (found.reason, found.doubt, found.tier) == ("fields_changed", Doubt.QUARANTINED, 0)
    assert "group_idx" in found.detail
    assert "kv_cache_spec_kind" not in found.detail
    other = fingerprint.event(replace(every, told=frozenset()), tier=2)
    assert other == [], "another tier has habits of its own"


def test_an_upgrade_across_a_restart_is_told_and_no_failure_of_the_stream() -> None:
    before = Fingerprint()
    before.event(MAP)
    after = Fingerprint(before.describe())
    found = after.event(replace(MAP, hash_width=32, high=False))
    assert [(each.reason, each.doubt) for each in found] == [("fingerprint_changed", Doubt.NONE)]
    assert "hashes: 32 bytes" in found[0].detail
    assert after.event(replace(MAP, hash_width=32, high=False)) == []


def test_a_restart_into_the_same_form_is_no_news() -> None:
    before = Fingerprint()
    before.event(MAP)
    after = Fingerprint(before.describe())
    # That the first hashes are small shows nothing of their sign yet.
    assert after.event(replace(MAP, high=False)) == []
    assert after.event(MAP) == []
