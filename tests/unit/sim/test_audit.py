"""Why a prediction missed, from an engine's account of a few blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servingfleet_protos.v1 import common_pb2, routing_pb2
from servingfleet_sim.audit import Account, Cause, misses, read_account
from servingfleet_sim.clients import End, Request

PROMPT = tuple(range(100, 113))  # three blocks of four tokens, and one token more
ROUTED, SCHEDULED = 10.0, 12.0


def stored(t: float, *blocks: int, rank: int = 0, medium: str = "GPU") -> dict[str, Any]:
    first = blocks[0]
    return {
        "what": "stored",
        "t": t,
        "rank": rank,
        "seq": 0,
        "medium": medium,
        "hashes": [f"h{block}" for block in blocks],
        "parent": f"h{first - 1}" if first else None,
        "tokens": [token for block in blocks for token in PROMPT[4 * block : 4 * block + 4]],
    }


def removed(t: float, *blocks: int, rank: int = 0) -> dict[str, Any]:
    hashes = [f"h{block}" for block in blocks]
    return {"what": "removed", "t": t, "rank": rank, "seq": 0, "medium": "GPU", "hashes": hashes}


def windowed(row: dict[str, Any]) -> dict[str, Any]:
    """The same of another group of layers, whose tokens are those of the whole prompt."""
    if row["what"] == "stored":
        row = {**row, "kind": "sliding_window", "parent": None, "tokens": list(PROMPT[:12])}
    return {**row, "group": 1}


def account(folder: Path, *events: dict[str, Any]) -> Account:
    path = folder / "truth.jsonl"
    rows = [
        {"what": "started", "t": 0.0, "ranks": 2, "blocks": 9, "block_size": 4, "model": "m"},
        *events,
        {"what": "scheduled", "t": SCHEDULED, "id": "s1-t0-0", "rank": 0},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_account(path)


def request(predicted: int, cached: int, lower: int | None = None) -> Request:
    made = Request(1, 0, "m", PROMPT, late_s=0.0, asked=ROUTED, routed=ROUTED, end=End.FINISHED)
    made.prompt_tokens, made.cached_tokens = len(PROMPT), cached
    made.answer = routing_pb2.RouteResponse(
        target=common_pb2.Target(replica="r", rank=0),
        prediction=routing_pb2.Prediction(
            prompt_tokens=len(PROMPT),
            predicted=predicted,
            lower=predicted if lower is None else lower,
            upper=predicted,
        ),
    )
    return made


def cause(made: Request, told: Account) -> tuple[Cause, int]:
    (miss,) = misses([made], {"r": told})
    return miss.cause, miss.block


def test_a_prediction_that_was_met_is_no_miss(tmp_path: Path) -> None:
    assert not list(misses([request(8, 8)], {"r": account(tmp_path, stored(1, 0, 1))}))


def test_a_block_removed_after_routing_was_evicted_meanwhile(tmp_path: Path) -> None:
    told = account(tmp_path, stored(1, 0, 1, 2), removed(11, 1))
    assert cause(request(12, 4), told) == (Cause.EVICTED, 1)


def test_a_step_evicts_when_it_is_scheduled_and_tells_when_it_ends(tmp_path: Path) -> None:
    told = account(tmp_path, stored(1, 0, 1, 2), removed(SCHEDULED + 0.4, 2))
    assert cause(request(12, 8), told) == (Cause.EVICTED, 2)


def test_a_block_removed_just_before_routing_was_not_known_yet(tmp_path: Path) -> None:
    told = account(tmp_path, stored(1, 0, 1, 2), removed(9.9, 2))
    assert cause(request(12, 8), told) == (Cause.EVICTION_UNDER_WAY, 2)


def test_a_block_removed_long_before_routing_is_an_error(tmp_path: Path) -> None:
    told = account(tmp_path, stored(1, 0, 1, 2), removed(5, 2))
    assert cause(request(12, 8), told) == (Cause.UNEXPLAINED, 2)


def test_a_copy_that_is_left_excuses_nothing(tmp_path: Path) -> None:
    told = account(tmp_path, stored(1, 0, 1, 2), stored(2, 2, medium="CPU"), removed(11, 2))
    assert cause(request(12, 8), told) == (Cause.UNEXPLAINED, 2)


def test_another_ranks_eviction_excuses_nothing(tmp_path: Path) -> None:
    told = account(tmp_path, stored(1, 0, 1, 2), stored(1, 2, rank=1), removed(11, 2, rank=1))
    assert cause(request(12, 8), told) == (Cause.UNEXPLAINED, 2)


def test_a_credit_that_was_not_filled_in_time_is_one_in_flight(tmp_path: Path) -> None:
    told = account(tmp_path, stored(1, 0), stored(15, 1, 2))
    assert cause(request(12, 4, lower=4), told) == (Cause.IN_FLIGHT, 1)
    assert cause(request(12, 4, lower=12), told) == (Cause.UNEXPLAINED, 1)


@pytest.mark.parametrize(
    ("block", "expected"), [(2, Cause.EVICTED), (1, Cause.EVICTED), (0, Cause.UNEXPLAINED)]
)
def test_of_layer_groups_any_may_have_lost_what_was_needed_further_along(
    tmp_path: Path, block: int, expected: Cause
) -> None:
    window = windowed(stored(1, 0, 1, 2))
    told = account(tmp_path, window, stored(1, 0, 1, 2), windowed(removed(11, block)))
    assert list(told.names(PROMPT)) == ["h0", "h1", "h2"]
    assert cause(request(12, 4), told) == (expected, 1)


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (11.0, Cause.STORED),
        (9.9, Cause.STORE_UNDER_WAY),
        (5.0, Cause.UNEXPLAINED),
    ],
)
def test_reuse_beyond_the_prediction_is_told_by_when_it_was_stored(
    tmp_path: Path, at: float, expected: Cause
) -> None:
    told = account(tmp_path, stored(1, 0), stored(at, 1))
    assert cause(request(4, 8), told) == (expected, 1)
