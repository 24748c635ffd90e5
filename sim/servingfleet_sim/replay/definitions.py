"""What each figure of a replay is: docs/measures.md in a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from servingfleet_core.figures import RATIOS

Better = Literal["less", "more", "neither"]


@dataclass(frozen=True, slots=True)
class Definition:
    """What a figure is."""

    unit: str
    better: Better
    text: str


def _times(prefix: str, what: str) -> dict[str, Definition]:
    found = {f"{prefix}_mean_s": Definition("s", "less", f"{what}, mean")}
    for of_100 in (50, 95, 99):
        text = f"{what}; {of_100} of 100 requests don't exceed it"
        found[f"{prefix}_p{of_100}_s"] = Definition("s", "less", text)
    return found


_BETTER: Mapping[str, Better] = {
    "erroneous_credit": "less",
    "erroneous_credit_per_prompt": "less",
    "expected_over_actual": "neither",
}
"""Of the ledger's ratios; of the others more is better."""

DEFINITIONS: Mapping[str, Definition] = MappingProxyType(
    {
        **_times("ttft", "first ask to first token, of requests that got one"),
        **_times("e2e", "first ask to last token, of finished requests"),
        "goodput": Definition(
            "share",
            "more",
            "requests whose first token came within their target / requests that name one",
        ),
        "late_share": Definition(
            "share", "less", "finished requests beyond their target / requests that name one"
        ),
        "rejected_share": Definition("share", "less", "rejected requests / requests"),
        "failed_share": Definition(
            "share", "less", "requests that failed or never ended / requests"
        ),
        "finished_per_s": Definition("1/s", "more", "finished requests / simulated second"),
        **{
            each.name: Definition("share", _BETTER.get(each.name, "more"), each.definition)
            for each in RATIOS
        },
        "interval_hit": Definition(
            "share", "more", "pairs with lower <= reported reuse <= upper / pairs"
        ),
        "join_rate": Definition(
            "share",
            "more",
            "decisions that the schedulers' ledgers joined to an outcome / decisions",
        ),
        "unseen_reuse": Definition(
            "share",
            "less",
            "tokens more that another rank truly held when routed / prompt tokens",
        ),
        "tier_misplacement": Definition(
            "share", "less", "tokens predicted right but in another tier / tokens predicted"
        ),
        "ceiling_u1": Definition("share", "neither", "reuse of one endless cache / prompt tokens"),
        "ceiling_u2": Definition(
            "share", "neither", "reuse of one cache of all memory, Belady / prompt tokens"
        ),
        "ceiling_u3": Definition(
            "share", "neither", "reuse of one cache of all memory, LRU / prompt tokens"
        ),
        "ceiling_u4": Definition(
            "share", "neither", "reuse of greedy placement by perfect knowledge / prompt tokens"
        ),
        "imbalance_max": Definition("ratio", "less", "busiest rank's seconds in steps / mean"),
        "imbalance_cv": Definition(
            "ratio", "less", "standard deviation of ranks' seconds in steps / mean"
        ),
        "expected_bias": Definition(
            "share", "neither", "(tokens expected - tokens reused) / prompt tokens"
        ),
        "predicted_bias": Definition(
            "share", "neither", "(tokens predicted - tokens reused) / prompt tokens"
        ),
        "expected_error": Definition(
            "share", "less", "|tokens expected - tokens reused| / prompt tokens"
        ),
        "predicted_error": Definition(
            "share", "less", "|tokens predicted - tokens reused| / prompt tokens"
        ),
        "estimate_bias_s": Definition(
            "s", "neither", "estimated less real seconds to first token, mean"
        ),
        "estimate_bias": Definition(
            "ratio", "neither", "(seconds estimated - seconds real) / seconds real, of sums"
        ),
        "estimate_error": Definition(
            "ratio", "less", "|seconds estimated - seconds real| / seconds real, median"
        ),
        "estimate_within_sd": Definition(
            "share",
            "neither",
            "estimates within their standard deviation of what came (68% if honest)",
        ),
        "disagreement": Definition(
            "share",
            "less",
            "tokens by which schedulers' predictions of a prompt differ / prompt tokens",
        ),
        "other_choice": Definition(
            "share", "less", "sampled prompts that another scheduler would have sent elsewhere"
        ),
        "requests_per_wall_s": Definition(
            "1/s", "neither", "requests simulated per second of this machine"
        ),
    }
)
"""All figures of a run, in the order they are shown in."""

OF_POOLS = (
    *("ttft_mean_s", "ttft_p95_s", "reused_fraction", "index_coverage", "erroneous_credit"),
    *("interval_hit", "expected_bias", "expected_error", "estimate_bias_s", "estimate_bias"),
    *("estimate_error", "estimate_within_sd"),
)
"""Those that are told of each pool, too."""
