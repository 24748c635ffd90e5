"""Reading recorded streams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from servingfleet_sim.recordings import RecordingError, read

MESSAGE = {"t": 1.0, "src": "sub tcp://127.0.0.1:5557", "frames": ["YQ==", "AAAAAAAAAAU=", "kA=="]}
REQUEST = {
    "t": 0.5,
    "request": {"prompt": [1, 2], "cache_salt": "s"},
    "prompt_tokens": 2,
    "cached_tokens": 0,
}


def folder(at: Path, events: Sequence[object], requests: Sequence[object]) -> Path:
    (at / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    (at / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in requests))
    return at


def test_ranks_follow_the_order_of_ports(tmp_path: Path) -> None:
    other = {**MESSAGE, "src": "sub tcp://127.0.0.1:990"}
    recording = read(folder(tmp_path, [MESSAGE, other], []))
    assert [message.rank for message in recording.messages] == [1, 0]
    assert recording.messages[0].seq == 5


def test_a_request_without_an_end_ends_before_the_next_begins(tmp_path: Path) -> None:
    recording = read(folder(tmp_path, [MESSAGE], [REQUEST, {**REQUEST, "t": 2.0}]))
    assert [request.end for request in recording.requests] == [2.0, 3.0]
    assert recording.requests[0].cache_salt == "s"


def test_a_refused_reset_is_no_reset(tmp_path: Path) -> None:
    controls = [
        {"t": 1.0, "control": "/reset_prefix_cache", "resp": {"success": False}},
        {"t": 2.0, "control": "/reset_prefix_cache", "resp": {"success": True}},
        {"t": 3.0, "control": "engine 1 gone"},
    ]
    recording = read(folder(tmp_path, [MESSAGE], controls))
    assert [control.is_reset for control in recording.controls] == [False, True, False]
    assert [control.socket for control in recording.controls] == [None, None, False]


@pytest.mark.parametrize("unit", [{}, {"tokens_per_block": "x"}, {"tokens_per_block": 0}])
def test_what_was_pulled_is_not_read_without_the_size_of_its_blocks(
    tmp_path: Path, unit: dict[str, object]
) -> None:
    (tmp_path / "engine.json").write_text(json.dumps({"trtllm": "1.2.1", "pulled": True, **unit}))
    recording = read(folder(tmp_path, [MESSAGE], []))
    with pytest.raises(RecordingError, match="tokens_per_block of engine\\.json"):
        assert recording.pulled_unit_tokens


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([{**MESSAGE, "frames": ["%"]}], "events.jsonl:1: a frame is not base64"),
        ([MESSAGE, {**MESSAGE, "t": "x"}], "events.jsonl:2: 't' is 'x', expected a number"),
        ([{**MESSAGE, "src": None}], "'src' is None, expected a string"),
        ([{**MESSAGE, "frames": 3}], "'frames' is 3"),
        ([[]], "events.jsonl:1: list, expected an object"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, events: list[object], says: str) -> None:
    with pytest.raises(RecordingError, match=says):
        read(folder(tmp_path, events, []))


def test_a_folder_that_holds_no_recording_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"no events\.jsonl"):
        read(tmp_path)


def operation(op: str, published: int = 0, **fields: object) -> dict[str, object]:
    return {"op": op, "n_events": published, **fields}


def test_operations_on_a_bare_cache_lie_between_the_messages_that_they_caused(
    tmp_path: Path,
) -> None:
    messages = [{**MESSAGE, "t": time} for time in (1.0, 2.0, 3.0)]
    rows = [
        operation("none"),
        operation("request", tokens=[1, 2], matched=0),
        operation("request", 1, tokens=[1, 2], matched=2, extra_key="k", cache_salt="s"),
        operation("reset", 1),
        operation("request", tokens=[1], matched=0),
    ]
    recording = read(folder(tmp_path, messages, rows))
    assert recording.adapter == "sglang"
    first, second, last = recording.requests
    assert 1.0 < first.start < first.end < second.start < second.end == 2.0
    assert 3.0 < last.start < last.end
    assert [2.0 < control.time < 3.0 for control in recording.controls] == [True]
    assert recording.controls[0].is_reset
    assert (second.cached_tokens, second.adapter, second.cache_salt) == (2, "k", "s")
    # The engine would have left the last token of a prompt out.
    assert [len(request.prompts[0]) for request in recording.requests] == [3, 3, 2]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([operation("request", tokens=[1])], "requests.jsonl:1: expected a list of tokens"),
        ([operation("grow")], "op is 'grow', expected none, request, evict or reset"),
        ([operation("evict", 1), operation("evict", 1)], "2 operations published"),
    ],
)
def test_operations_that_do_not_add_up_are_named(
    tmp_path: Path, rows: list[object], says: str
) -> None:
    with pytest.raises(RecordingError, match=says):
        read(folder(tmp_path, [MESSAGE], rows))
