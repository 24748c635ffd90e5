"""The emulated SGLang is held to SGLang's own cache: the same operations, the same messages, hash for hash."""

from __future__ import annotations

import json
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from servingfleet_sim.emulator.radix import RadixTree, Space
from servingfleet_sim.emulator.sglang_events import SglangForm
from servingfleet_sim.recordings import read_events
from tests.recordings import recordings_dir

CACHES = {
    "s1-sglang-page16": (16, False),
    "s2-sglang-page1": (1, False),
    "s3-sglang-eagle-bigram-page16": (16, True),
    "sx-eagle": (16, True),
}
"""Page, and whether keys are pairs."""


def done(tree: RadixTree, row: dict[str, Any]) -> None:
    """One operation; what it found or freed must be what SGLang did."""
    match row["op"]:
        case "request":
            space = Space(cache_salt=row["cache_salt"], extra_key=row["extra_key"])
            assert tree.find(row["tokens"], space)[0] == row["matched"], row["label"]
            before, _ = tree.insert(row["tokens"], space)
            assert before * tree.page == row["insert_prefix_len"], row["label"]
        case "evict":
            assert tree.evict(-(-row["n"] // tree.page)) * tree.page == row["evicted"], row["label"]
        case "reset":
            tree.reset()


@pytest.mark.parametrize("name", CACHES)
def test_operations_bring_the_recorded_messages(name: str) -> None:
    page, pairs = CACHES[name]
    tree = RadixTree(page, pairs=pairs)
    folder = recordings_dir() / name
    messages = iter(read_events(folder)[0])
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        done(tree, row)
        events = tree.take_events()
        # The first line stands for the making of the cache, which tells that it is empty.
        if row["n_events"] or number == 0:
            expected = msgpack.unpackb(next(messages).frames[-1])
            assert msgpack.unpackb(SglangForm().encode(events, expected[0], 0)) == expected
        else:
            assert events == []
    assert next(messages, None) is None
