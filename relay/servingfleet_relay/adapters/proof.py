"""Tells stores from reports of a hit (vLLM's kv_cache_report_mode "full"), where a batch shows which it is.

Pure. All groups of layers tell of either, one after the other, up to the same block. A report begins with the prompt in
all of them and names every block, even those that are not there. A store leaves out the blocks that a group does not keep,
and where a host tier has loaded a prompt's beginning it begins later in some groups.
"""

from __future__ import annotations

from dataclasses import replace

from servingfleet_protos.v1.common_pb2 import TIER_GPU

from .events import Batch, Event, Stored

__all__ = ["with_proof"]


def with_proof(batch: Batch) -> Batch:
    """Marks stores that are proven to be some."""
    runs: list[list[Event]] = []
    for event in batch.events:
        if runs and _continues(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    if not any(map(_proven, runs)):
        return batch
    return replace(batch, events=tuple(event for run in runs for event in _marked(run)))


def _marked(run: list[Event]) -> list[Event]:
    if not _proven(run):
        return run
    return [replace(event, computed=True) for event in run if isinstance(event, Stored)]


def _continues(before: Event, event: Event) -> bool:
    """Whether two events tell of ranges with one end in two groups."""
    earlier, tokens = _tokens(before), _tokens(event)
    if not earlier or not tokens:
        return False
    assert isinstance(before, Stored)
    assert isinstance(event, Stored)
    ascending = (before.group.index or 0) < (event.group.index or 0)
    return ascending and (earlier.endswith(tokens) or tokens.endswith(earlier))


def _proven(run: list[Event]) -> bool:
    return any(map(_leaves_out, run)) or len({len(_tokens(event)) for event in run}) > 1


def _leaves_out(event: Event) -> bool:
    if not isinstance(event, Stored) or event.span is None:
        return False
    return len(_tokens(event)) > 4 * event.unit_tokens * event.count


def _tokens(event: Event) -> bytes:
    """Those of a range on the GPU; none: the event tells of no such range."""
    if not isinstance(event, Stored) or event.tier != TIER_GPU:
        return b""
    return event.tokens if event.span is None else event.span.tokens
