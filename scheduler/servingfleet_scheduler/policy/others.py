"""What a choice costs others: seconds that later prompts will wait because of this one. No part of its own estimate.

Each prompt that comes to a rank before it is idle again meets this one's work, too. It waits for it, or leaves, whichever
costs it less; what leaves takes time of the other ranks. So the price has two parts.

- Who stays: `arrivals * until idle * min(work, gap)`, with `until idle = (queue + work) / (1 - busy)`, as in any queue with one
  server. `gap` is what prompts of that rank lose elsewhere: much where they are conversations that its cache holds.
- Who leaves, the share `1 - gap / work`: the ranks as one server, as fast as all together. Prompts of all ranks wait longer
  by `work * share of all speed`, until the shortest queue is worked off.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from .candidate import Estimate

BUSIEST_SHARE = 0.8
"""Share of its time that one rank counts as busy at most: beyond it prompts go elsewhere instead of queueing on."""
FULL_SHARE = 0.95
"""The same of all ranks together: beyond it there is no elsewhere, and queues would be taken to last for ever."""


def others_seconds(estimates: Sequence[Estimate]) -> list[float]:
    """For each of the targets among which a prompt may choose."""
    arrivals_per_s = sum(each.candidate.arrivals_per_s for each in estimates)
    if not arrivals_per_s:
        return [0.0] * len(estimates)
    rates = [1.0 / (each.candidate.speeds.token_s * each.candidate.scale) for each in estimates]
    whole = sum(rates)
    busy = sum(rate * each.candidate.busy for rate, each in zip(rates, estimates, strict=True))
    full = 1.0 / (1.0 - min(FULL_SHARE, busy / whole))
    shortest_s = min(each.candidate.queue_s for each in estimates)
    found = []
    for rate, each in zip(rates, estimates, strict=True):
        candidate, work_s = each.candidate, each.engine_s
        if not work_s:
            found.append(0.0)
            continue
        gap_s = min(work_s, candidate.gap_s)
        idle_s = (candidate.queue_s + work_s) / (1.0 - min(BUSIEST_SHARE, candidate.busy))
        staying = candidate.arrivals_per_s * idle_s * gap_s
        pooled_s = work_s * rate / whole
        leaving = arrivals_per_s * (shortest_s + pooled_s) * full * pooled_s
        found.append(staying + (1.0 - gap_s / work_s) * leaving)
    return found
