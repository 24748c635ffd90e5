"""Predictions hold an engine to its stream only where the scheduler that made them knew all of the stream."""

from __future__ import annotations

from servingfleet_relay.conformance.watches import OUTCOMES_LEAST
from tests.contract.constructed import Constructed
from tests.unit.relay.batches import removed, stored, tokens

BLOCKS = 20
HASHES = list(range(1, BLOCKS + 1))
PROMPT = [*tokens(BLOCKS), 7]


def holding() -> Constructed:
    return Constructed().publishes(stored(HASHES, PROMPT[:-1]))


def test_a_scheduler_that_lags_is_no_witness_against_an_engine() -> None:
    engine = holding()
    engine.lags = True
    engine.publishes(removed(HASHES)).waits(5.0)
    assert engine.reuse(PROMPT).predicted == 320, "it does not know better"
    engine.reports(PROMPT, cached=0, times=2 * OUTCOMES_LEAST)
    assert engine.status().state == "live"
    assert engine.relay.counters()["outcomes_lagging"] == 2 * OUTCOMES_LEAST
    engine.lags = False
    engine.settle()
    assert engine.reuse(PROMPT).predicted == 0


def test_one_that_knows_all_is() -> None:
    engine = holding().waits(5.0)
    engine.reports(PROMPT, cached=0, times=OUTCOMES_LEAST)
    assert engine.status().state == "quarantined"
    assert engine.failed() == {"feedback_wrong"}


def test_what_a_scheduler_hears_at_the_same_moment_it_may_not_know_yet() -> None:
    engine = holding()
    engine.lags = True
    engine.publishes(removed(HASHES))
    engine.reports(PROMPT, cached=0, times=OUTCOMES_LEAST)
    # For as long as news may be on their way nobody can tell who is right.
    assert engine.relay.counters().get("outcomes_lagging", 0) == 0
