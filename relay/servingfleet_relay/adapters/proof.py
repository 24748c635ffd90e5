"""Tells stores from reports of a hit (vLLM's kv_cache_report_mode "full"), where a batch shows which it is.

Pure. All groups of layers tell of either, one after the other, with the tokens of the same range. A store leaves out the
blocks that a group does not keep; a report names all, even those that are not there.
"""

from __future__ import annotations

from dataclasses import replace

from servingfleet_protos.v1.common_pb2 import TIER_GPU

from .events import Batch, Event, Stored

__all__ = ["with_proof"]


def with_proof(batch: Batch) -> Batch:
    """Marks the stores from the prompt's start on that are proven to be some. Those of later blocks are never reports."""
    runs: list[list[Event]] = []
    for event in batch.events:
        if runs and _continues(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    if not any(map(_leaves_out, batch.events)):
        return batch
    return replace(batch, events=tuple(event for run in runs for event in _marked(run)))


def _marked(run: list[Event]) -> list[Event]:
    if not any(map(_leaves_out, run)):
        return run
    return [replace(event, computed=True) for event in run if isinstance(event, Stored)]


def _continues(before: Event, event: Event) -> bool:
    """Whether two events tell of one range in two groups."""
    tokens = _from_start(event)
    if tokens is None or tokens != _from_start(before):
        return False
    assert isinstance(before, Stored)
    assert isinstance(event, Stored)
    return (before.group.index or 0) < (event.group.index or 0)


def _leaves_out(event: Event) -> bool:
    tokens = _from_start(event)
    if tokens is None or not isinstance(event, Stored) or event.span is None:
        return False
    return len(tokens) > 4 * event.unit_tokens * event.count


def _from_start(event: Event) -> bytes | None:
    """The tokens of a range on the GPU that begins with the prompt. None: the event tells of none."""
    if not isinstance(event, Stored) or event.tier != TIER_GPU:
        return None
    if event.span is not None:
        return event.span.tokens if event.span.parent is None else None
    return event.tokens or None if event.parent is None else None
