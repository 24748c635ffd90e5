"""Targets: what clients may send. Only domain errors are raised, answers are sane, nothing undone changes anything."""

# ruff: noqa: PT017 - a target must take either way

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from servingfleet_protos.v1 import fleet_pb2, routing_pb2
from servingfleet_scheduler.errors import SchedulerError
from servingfleet_scheduler.service import Scheduler
from servingfleet_scheduler.tokens import MAX_ID_BYTES, BadToken, Decision, ForeignToken, Tokens
from servingfleet_sim.recordings import Recording, RecordingError, read
from tests.fuzz.feed import Feed
from tests.fuzz.relays import check_prediction, merged
from tests.unit.scheduler.helpers import (
    KEY,
    MODEL,
    FakeRelay,
    finished,
    hashes,
    make_scheduler,
    route_request,
)

PROMPT = 64


def _scheduler() -> Scheduler:
    """One replica that holds a prompt, two that nothing is known of."""
    scheduler = make_scheduler(static=("s1", "s2"), ranks=2)
    FakeRelay(scheduler, "warm").hello(ranks=(0, 1)).snapshot(hashes(PROMPT // 16))
    return scheduler


def route(data: bytes) -> None:
    """Any RouteRequest: routed or refused, and explained alike."""
    feed = Feed(data)
    scheduler = _scheduler()
    request = route_request(PROMPT) if feed.flag() else routing_pb2.RouteRequest()
    merged(request, feed.rest())
    try:
        explained = scheduler.explain(request, 1.0)
    except SchedulerError as error:
        refused = error.reason
        assert refused != "INTERNAL"
    else:
        refused = ""
        for candidate in explained.candidates:
            check_prediction(candidate.prediction)
            assert math.isfinite(candidate.estimated_ttft_s), candidate
    assert not len(scheduler.decisions), "explain changes nothing"
    assert not len(scheduler.credits), "explain changes nothing"
    try:
        response = scheduler.route(request, 1.0)
    except SchedulerError as error:
        assert error.reason != "INTERNAL"
        assert not len(scheduler.decisions)
        assert not len(scheduler.credits)
        # Explain lists what no target can do, where route refuses.
        assert refused in ("", error.reason)
        return
    assert not refused
    assert len(response.decision_id) <= MAX_ID_BYTES
    check_prediction(response.prediction)
    chosen = [each.target for each in explained.candidates if each.chosen]
    assert chosen == [response.target], "explain shows what route does"
    if request.request_id:
        assert scheduler.route(request, 1.0).decision_id == response.decision_id
    ended = finished(response.decision_id, prompt=response.prediction.prompt_tokens)
    if response.prediction.prompt_tokens:
        answer = scheduler.report(ended, 2.0)
        assert answer.disposition == routing_pb2.ReportResponse.DISPOSITION_JOINED, answer


def report(data: bytes) -> None:
    """Any outcomes of two decisions: counted once, and the figures stay possible."""
    feed = Feed(data)
    scheduler = _scheduler()
    decided = [scheduler.route(route_request(PROMPT), 1.0).decision_id for _ in range(2)]
    now = 1.0
    while feed:
        now += feed.below(64)
        request = finished(feed.pick(decided), cached=feed.pick((0, 48, 64)))
        request.stage = feed.pick((0, 1, 2, 3, 4, 5, 9))  # type: ignore[assignment]
        merged(request, feed.blob())
        try:
            scheduler.report(request, now)
        except SchedulerError as error:
            assert error.reason != "INTERNAL"
    window = fleet_pb2.GetReuseRequest(by_replica=feed.flag())
    for each in scheduler.get_reuse(window, now).reports:
        sums = each.sums
        assert sums.pairs <= len(decided)
        assert sums.agreed + sums.erroneous == sums.predicted <= sums.prompt
        assert max(sums.actual, sums.best) <= sums.prompt
        assert sums.interval_hits <= sums.pairs
    scheduler.tick(now + 10_000.0)
    assert not len(scheduler.credits)
    assert not len(scheduler.decisions)


def reuse(data: bytes) -> None:
    """Any GetReuseRequest and ListReplicasRequest."""
    scheduler = _scheduler()
    asked, listed = fleet_pb2.GetReuseRequest(), fleet_pb2.ListReplicasRequest()
    merged(asked, data)
    merged(listed, data)
    try:
        assert scheduler.get_reuse(asked, 5.0).window_s >= 0.0
    except SchedulerError as error:
        assert error.reason != "INTERNAL"
    scheduler.list_replicas(listed, 5.0)


def decision_ids(data: bytes) -> None:
    """Any text is no id; an id that was written reads back, and any other bytes of it don't."""
    tokens = Tokens(KEY)
    feed = Feed(data)
    if not feed.flag():
        text = feed.rest().decode(errors="surrogateescape")
        try:
            tokens.read(text, (MODEL,))
        except (BadToken, ForeignToken):
            return
        raise AssertionError("nobody wrote it")
    words = [feed.take(feed.byte()).decode(errors="ignore") for _ in range(4)]
    owner, model, replica = words[0], words[1] * (1 + feed.below(3)), words[2]
    counts = [feed.number() % 2**32 for _ in range(6)]
    prompt, predicted, lower, upper, best = counts[1:]
    decision = Decision(
        *(owner[:32], model[:512], replica[:253], counts[0], 5.0, 7),
        *(prompt, predicted, lower, upper, best),
        expected=counts[0],
        owner_address=words[3],
    )
    written = tokens.write(decision)
    assert len(written) <= MAX_ID_BYTES
    assert written.isascii()
    assert tokens.read(written, (model[:512],)) == decision
    at = (feed.byte() * 256 + feed.byte()) % len(written)
    other = written[:at] + chr(feed.byte() % 128) + written[at + 1 - feed.below(2) :]
    if other != written:
        try:
            tokens.read(other, (model[:512],))
        except (BadToken, ForeignToken):
            return
        raise AssertionError("nobody wrote it")


def recording(data: bytes) -> None:
    """A folder of anything is a recording or RecordingError."""
    feed = Feed(data)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("events.jsonl", "requests.jsonl", "engine.json"):
            if feed.byte() % 8 != 7:
                (folder / file).write_bytes(_lines(feed) if feed.flag() else feed.blob())
        try:
            found = read(folder)
        except RecordingError as error:
            assert str(error)
        else:
            assert isinstance(found, Recording)
            assert found.ranks >= 1


ROWS: tuple[dict[str, Any], ...] = (
    {"t": 1.0, "src": "tcp://h:5557", "frames": ["", "AAAAAAAAAAA=", ""]},
    {"t": 2.0, "prompt_tokens": 2, "cached_tokens": 0, "request": {"prompt": [1, 2]}},
    {"t": 2.5, "control": "reset_prefix_cache", "resp": "True"},
    {"op": "request", "tokens": [1, 2], "matched": 0, "n_events": 1},
    {"op": "reset"},
    {"sglang": "0.5.23"},
)
KEYS = tuple(sorted({key for row in ROWS for key in row} | {"headers", "t_done", "extra_key"}))


def _lines(feed: Feed) -> bytes:
    """Rows that are almost right."""
    rows = []
    for _ in range(feed.below(4)):
        row = dict(feed.pick(ROWS))
        for _ in range(feed.pick((0, 0, 1, 2))):
            row[feed.pick(KEYS)] = feed.value()
        if feed.byte() % 8 == 7:
            row.pop(feed.pick(KEYS), None)
        rows.append(json.dumps(row, default=repr, skipkeys=True))
    return "\n".join(rows).encode(errors="replace")


REQUESTS: Mapping[str, Callable[[bytes], None]] = {
    "route": route,
    "report": report,
    "reuse": reuse,
    "decision_ids": decision_ids,
    "recording": recording,
}
