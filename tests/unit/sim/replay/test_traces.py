"""Tests of `servingfleet_sim.replay.traces`."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import pytest

from servingfleet_sim.replay.traces import BadTrace, Blocks, Names, Request, read_trace, shaped
from tests.recordings import traces_dir

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 10, "hash_ids": [0, 1, 2]},
    {"timestamp": 2500, "input_length": 1024, "output_length": 0, "hash_ids": [0, 5]},
]
AGENTIC = [
    {"id": "a", "tool": 1, "sys": 1, "r": [[0.0, 200, 5, 2.0, "1-3"], [10, 300, 5, 1.0, "1-2,7"]]},
    {"id": "b", "tool": 1, "sys": 1, "r": [[0.0, 64, 5, 2.0, "1"], [1000, 64, 5, 1.0, "1"]]},
]


def lines(rows: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def written(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def test_a_mooncake_row_is_a_request_of_its_full_blocks(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "trace.jsonl", lines(MOONCAKE)))
    assert trace.block_tokens == 512
    first, second = trace.requests
    assert (first.at, first.prompt_tokens, first.output_tokens) == (0.0, 1100, 10)
    # The third id is for the 76 tokens that fill no block.
    assert first.blocks.runs == ((0, 2),)
    assert (second.at, second.output_tokens, second.blocks.runs) == (2.5, 1, ((0, 1), (5, 6)))
    assert first.blocks.packed()[:8] == second.blocks.packed()[:8]
    assert first.blocks.packed()[8:] != second.blocks.packed()[8:]


def test_an_agentic_row_is_a_conversation_with_blocks_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    trace = read_trace(
        written(path, gzip.compress(lines(AGENTIC))), start_every_s=5.0, longest_pause_s=60.0
    )
    assert trace.block_tokens == 64
    by_session = {name: [r for r in trace.requests if r.session == name] for name in "ab"}
    a, b = by_session["a"], by_session["b"]
    assert [each.at for each in a] == [0.0, 10.0]
    # The answer took 2 of the 10 seconds.
    assert [each.think_s for each in a] == [0.0, 8.0]
    assert a[1].blocks.runs == ((1, 3), (7, 8))
    assert b[1].at == pytest.approx(b[0].at + 2.0 + 60.0)
    assert a[0].blocks.packed()[:8] != b[0].blocks.packed()[:8]


def test_a_trace_may_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(lines(MOONCAKE))

    monkeypatch.setattr(sys, "stdin", Stdin())
    assert len(read_trace("-").requests) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no rows"),
        (b"{}\n", "line 1: has ; expected hash_ids"),
        (b"not json\n", "line 1"),
        (lines(MOONCAKE) + b'{"timestamp": 1}\n', "line 3: .*missing required field"),
        (
            lines(MOONCAKE)
            + b'\n{"timestamp": 1, "input_length": 2000, "output_length": 1, "hash_ids": [1]}',
            "line 4: 2000 tokens and 1 hash_ids; expected 3",
        ),
        (
            b'{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": []}',
            "line 1: .*>= 0",
        ),
        (b'{"id": "a", "r": [[0, 100, 1, 1, "3-x"]]}', "line 1: run '3-x'"),
        (b'{"id": "a", "r": [[0, 100, 1, 1, "5-3"]]}', "line 1: run '5-3'"),
        (b'{"id": "a", "r": [[0, 100, 1, 1, "1-2"]]}', "turn 0: 2 blocks, but 100 tokens"),
        (b'{"id": "a", "r": [[5, 9, 1, 1, ""], [4, 9, 1, 1, ""]]}', "turn 1 begins at 4.0 s"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(BadTrace, match=said):
        read_trace(written(tmp_path / "trace.jsonl", content))


def test_a_file_that_is_cut_short_is_said_to_be(tmp_path: Path) -> None:
    whole = gzip.compress(lines(MOONCAKE * 50))
    with pytest.raises(BadTrace, match="not gzip to its end"):
        read_trace(written(tmp_path / "trace.jsonl.gz", whole[:-20]))


def test_names_of_more_blocks_begin_like_those_of_fewer() -> None:
    few, many = Names("space"), Names("space")
    few.reach(3)
    many.reach(1000)
    assert many.packed[:32] == few.packed
    assert len({many.packed[at : at + 8] for at in range(0, 8008, 8)}) == 1001


def test_a_slice_is_taken_before_arrivals_are_made_faster() -> None:
    requests = [Request(at, 1, 1, Blocks(Names(""), ())) for at in (0.0, 10.0, 20.0, 30.0)]
    assert [each.at for each in shaped(requests, rate=2.0, seconds=20.0)] == [0.0, 5.0, 10.0]
    assert [each.at for each in shaped(requests, first=2)] == [0.0, 10.0]


def test_the_shared_traces_have_the_reuse_that_their_readme_tells() -> None:
    from servingfleet_sim.replay.ceilings import endless

    for name, requests, reuse in (
        ("mooncake_conversation.jsonl", 12_031, 0.374),
        ("mooncake_synthetic.jsonl", 3_993, 0.651),
        ("agentic_weka_sample.jsonl.gz", 6_110, 0.961),
    ):
        trace = read_trace(str(traces_dir() / name))
        assert len(trace.requests) == requests
        assert all(a.at <= b.at for a, b in zip(trace.requests, trace.requests[1:], strict=False))
        hits = sum(endless(trace.requests)) * trace.block_tokens
        # Theirs counts the last, part-filled block too.
        assert hits / sum(each.prompt_tokens for each in trace.requests) == pytest.approx(
            reuse, abs=0.002
        )
