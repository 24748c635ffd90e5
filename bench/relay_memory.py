"""Memory of a relay that mirrors a large cache, in a process of its own: `relay_memory.py --width 8 --blocks 100000`.

Prints a JSON object: what the process took more once it knew the blocks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]

from figures import Row, less_is_better
from servingfleet_protos.v1.stream_pb2 import Ack, SchedulerMessage, Welcome
from servingfleet_relay.pipeline import Pipeline
from servingfleet_relay.settings import PipelineSettings

BLOCK_TOKENS = 16
EVENT_BLOCKS = 128
PROMPT_BLOCKS = 1024
BLOCKS = 100_000
CANONICAL_BYTES = 8
LINK = "scheduler"
END = [b"", b"", b"\xff" * 8, b""]


def rows() -> list[Row]:
    """Beside the bytes of the hashes alone, which no mirror can do without: the engine's and the canonical one."""
    found = []
    for width in (8, 32):
        command = [sys.executable, __file__, "--width", str(width), "--blocks", str(BLOCKS)]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        taken = json.loads(run.stdout)
        name = f"relay, {BLOCKS:,} blocks, engine hashes of {width} bytes"
        limit = BLOCKS * (width + CANONICAL_BYTES) / 2**20
        found += [
            less_is_better(f"{name}, whole process / its hashes", taken["rss"], limit, "MiB"),
            less_is_better(f"{name}, mirror alone / its hashes", taken["mirror"], limit, "MiB"),
        ]
    return found


def batches(rng: random.Random, width: int, blocks: int) -> Iterator[list[bytes]]:
    """Frames of a vLLM that fills its cache, prompt after prompt, a prefill step in each batch."""

    def new_hash() -> int | bytes:
        return rng.getrandbits(64) if width == 8 else rng.randbytes(width)

    parent: int | bytes | None = None
    for seq, at in enumerate(range(0, blocks, EVENT_BLOCKS)):
        if at % PROMPT_BLOCKS == 0:
            parent = None
        hashes = [new_hash() for _ in range(min(EVENT_BLOCKS, blocks - at))]
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": list(array("H", rng.randbytes(2 * BLOCK_TOKENS * len(hashes)))),
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        parent = hashes[-1]
        payload: bytes = msgpack.packb([float(seq), [event], 0])
        yield [b"kv-events", seq.to_bytes(8, "big"), payload]


def filled(width: int, blocks: int) -> Pipeline:
    """A relay that has told one scheduler all that its engine holds."""
    settings = PipelineSettings(replica="r", model="m", ranks=(0,), stream_id="s")
    pipeline = Pipeline(settings, 0.0)
    pipeline.open_link(LINK, 0.0)
    welcome = Welcome(instance_id="i", expected_seq=1, window=4096)
    pipeline.receive(LINK, SchedulerMessage(welcome=welcome), 0.0)
    pipeline.socket_up(0, 0.0)
    pipeline.take_replay_requests()
    pipeline.replayed(0, END, 0.0)
    for number, frames in enumerate(batches(random.Random(3), width, blocks)):
        pipeline.live(0, frames, float(number))
        for message in pipeline.take(LINK, 1000):
            pipeline.receive(LINK, SchedulerMessage(ack=Ack(seq=message.seq)), float(number))
    return pipeline


def rss_bytes() -> int:
    """Resident memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, choices=(8, 32), required=True)
    parser.add_argument("--blocks", type=int, required=True)
    arguments = parser.parse_args()
    # First a small one: what decoding needs for a moment is not what a cache needs.
    filled(arguments.width, 8 * EVENT_BLOCKS)
    before = rss_bytes()
    pipeline = filled(arguments.width, arguments.blocks)
    status: Any = pipeline.status().ranks[0]
    if status.mirror["units_held"] != arguments.blocks or status.state != "live":
        sys.exit(f"the mirror holds {status.mirror['units_held']}, state {status.state}")
    taken = {
        "rss": (rss_bytes() - before) / 2**20,
        "mirror": status.mirror["memory_bytes"] / 2**20,
    }
    print(json.dumps(taken))


if __name__ == "__main__":
    main()
