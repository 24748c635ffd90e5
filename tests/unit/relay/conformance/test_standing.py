"""What is held against a stream, and until when."""

from __future__ import annotations

from collections import Counter

import pytest

from servingfleet_protos.v1.common_pb2 import TIER_HOST
from servingfleet_relay.adapters.events import Doubt
from servingfleet_relay.conformance.standing import (
    MEDIA_NAMED,
    PROBATION_EVENTS,
    Condition,
    Failures,
    Finding,
    Standing,
    told,
)


@pytest.fixture
def totals() -> Counter[str]:
    return Counter()


@pytest.fixture
def standing(totals: Counter[str]) -> Standing:
    return Standing(Failures(totals))


def finding(reason: str, doubt: Doubt, tier: int = 0) -> Finding:
    return Finding(reason, "seen", doubt, tier)


def doubt(standing: Standing) -> Doubt:
    return standing.worst[0]


def test_failures_are_counted_by_invariant_over_all_lives(totals: Counter[str]) -> None:
    failures = Failures(totals)
    Standing(failures).note(finding("token_count", Doubt.QUARANTINED))
    Standing(failures).note(Finding("token_count", "seen again", Doubt.QUARANTINED))
    (failure,) = failures.all
    assert (failure.invariant, failure.count, failure.detail) == ("C11", 2, "seen")
    assert totals == {"invariant_c11": 2}


def test_what_was_lost_counts_until_the_cache_is_cleared(standing: Standing) -> None:
    standing.note(finding("token_range", Doubt.INCOMPLETE))
    assert doubt(standing) is Doubt.INCOMPLETE
    standing.cleared()
    assert standing.worst == (Doubt.NONE, "")


@pytest.mark.parametrize("grave", [Doubt.AMBIGUOUS, Doubt.UNTRUSTED, Doubt.QUARANTINED])
def test_a_changed_meaning_lasts_beyond_a_clear(standing: Standing, grave: Doubt) -> None:
    standing.note(finding("hash_conflict", grave))
    standing.cleared()
    assert doubt(standing) is grave


def test_the_first_text_of_the_gravest_stays(standing: Standing) -> None:
    standing.note(Finding("group_unsupported", "first", Doubt.UNTRUSTED))
    standing.note(Finding("hash_conflict", "graver", Doubt.QUARANTINED))
    standing.note(Finding("hash_conflict", "later", Doubt.QUARANTINED))
    assert "graver" in standing.worst[1]


def test_a_message_says_what_a_person_can_do() -> None:
    text = told(Finding("wrong_rank", "the socket of rank 0 sends rank 3", Doubt.QUARANTINED))
    assert "wrong_rank: the socket of rank 0" in text
    assert "C10" in text
    assert "--first-rank" in text


def test_a_tier_is_held_to_account_by_itself(standing: Standing) -> None:
    standing.note(finding("token_count", Doubt.QUARANTINED, tier=TIER_HOST))
    assert standing.quarantined(TIER_HOST)
    assert standing.tiers[TIER_HOST][0] is Condition.QUARANTINED
    # Hits from there are possible and can't be told.
    assert doubt(standing) is Doubt.INCOMPLETE
    standing.cleared()
    assert doubt(standing) is Doubt.INCOMPLETE


def test_a_tier_that_is_quarantined_stays_so(standing: Standing) -> None:
    standing.note(finding("token_count", Doubt.QUARANTINED, tier=TIER_HOST))
    standing.note(finding("shared_hashes", Doubt.AMBIGUOUS, tier=TIER_HOST))
    assert standing.quarantined(TIER_HOST)
    assert not standing.ambiguous


def test_unknown_media_are_told_apart_and_bounded(standing: Standing) -> None:
    for number in range(MEDIA_NAMED + 3):
        standing.medium(f"'M{number}'", finding("unknown_medium", Doubt.INCOMPLETE), stored=True)
    assert len(standing.media) == MEDIA_NAMED
    assert standing.known_medium("'M0'")
    standing.medium("'R'", finding("unknown_medium", Doubt.STALE), stored=False)
    assert not standing.known_medium("'R'")
    standing.cleared()
    assert doubt(standing) is Doubt.INCOMPLETE


def test_a_condition_ends_as_it_began(standing: Standing, totals: Counter[str]) -> None:
    silent = finding("silent", Doubt.UNTRUSTED)
    assert standing.begin(silent)
    assert not standing.begin(silent)
    assert doubt(standing) is Doubt.UNTRUSTED
    assert standing.end("silent")
    assert not standing.end("silent")
    assert doubt(standing) is Doubt.NONE
    assert totals["invariant_c34"] == 1


def test_an_unknown_field_is_believed_after_many_clean_stores_and_trusted_when_outcomes_agree(
    standing: Standing,
) -> None:
    standing.note(finding("unknown_field", Doubt.UNTRUSTED))
    for _ in range(PROBATION_EVENTS - 1):
        standing.stored()
    assert doubt(standing) is Doubt.UNTRUSTED
    standing.agreed()
    assert doubt(standing) is Doubt.UNTRUSTED
    standing.stored()
    assert doubt(standing) is Doubt.INCOMPLETE
    # That it is there is no news any more.
    standing.note(finding("unknown_field", Doubt.UNTRUSTED))
    assert doubt(standing) is Doubt.INCOMPLETE
    standing.agreed()
    assert doubt(standing) is Doubt.NONE


def test_any_failure_begins_a_probation_anew(standing: Standing) -> None:
    standing.note(finding("unknown_field", Doubt.UNTRUSTED))
    for _ in range(PROBATION_EVENTS - 1):
        standing.stored()
    standing.note(finding("token_range", Doubt.INCOMPLETE))
    standing.stored()
    assert doubt(standing) is Doubt.UNTRUSTED
