"""Runs made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from servingfleet_core.figures import Sums
from servingfleet_sim.replay.figures import pair_sums
from servingfleet_sim.replay.results import Ceilings, Disagreement, Outcome, Run


def outcome(number: int = 0, **changed: Any) -> Outcome:
    """A finished request of 100 tokens, 60 reused as predicted, first token after 1 s as estimated."""
    values: dict[str, Any] = {
        "number": number,
        "at": float(number),
        "session": "s",
        "prompt": 100,
        "output": 10,
        "priority": 0,
        "replica": "a",
        "pool": "fast",
        "rank": 0,
        "policy_estimate_s": 1.0,
        "ttft_s": 1.0,
        "finished_s": number + 3.0,
        "lower": 50,
        "predicted": 60,
        "upper": 70,
        "expected": 60.0,
        "best_predicted": 60,
        "actual": 60,
        "actual_tiers": (60, 0, 0, 0),
        "predicted_tiers": (60, 0, 0, 0),
        "best_actual": 60,
        "seen": 60,
        "target_s": math.nan,
        "fate": "finished",
        "scheduler": 0,
    }
    return Outcome(**{**values, **changed})


def rejected(number: int = 0, **changed: Any) -> Outcome:
    """One that no scheduler sent anywhere."""
    values: dict[str, Any] = {
        "replica": "",
        "pool": "",
        "rank": -1,
        "policy_estimate_s": math.nan,
        "ttft_s": math.nan,
        "finished_s": math.nan,
        "actual": 0,
        "actual_tiers": (0, 0, 0, 0),
        "fate": "rejected",
        "reason": "deadline",
    }
    return outcome(number, **{**values, **changed})


def run(outcomes: Sequence[Outcome], seed: int = 1, **changed: Any) -> Run:
    """A run whose ledger joined all that finished."""
    sums = pair_sums(outcomes)
    sums.decisions = sum(each.rank >= 0 for each in outcomes)
    sums.joined = sums.pairs
    values: dict[str, Any] = {
        "policy": "cost",
        "seed": seed,
        "outcomes": list(outcomes),
        "wall_s": 0.5,
        "simulated_s": 10.0,
        "computed_tokens": {},
        "busy_s": {"a/0": 3.0, "b/0": 1.0},
        "scheduler_sums": [sums, Sums()],
        "ceilings": Ceilings(prompt=1000, u1=800, u2=700, u3=650, u4=500),
        "disagreement": Disagreement(samples=10, prompt=1000, tokens=20, other_choice=3),
    }
    return Run(**{**values, **changed})
