"""The emulator is held to a real engine: fed the same prompts, it must announce the same, in the same order.

The recordings are one life of one engine, in the order a, a2, c, b. Given to the emulator are the prompts, the tokens
that the engine answered with, the resets, and, where requests overlapped, in which step each one joined: a recording
holds arrival times, not steps. Compared are every batch of events, with hashes up to renaming, and the reported reuse.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from servingfleet_sim.emulator.events import encode, generation
from servingfleet_sim.emulator.groups import STATE, WINDOW, LayerGroup
from servingfleet_sim.emulator.scheduler import Scheduler
from servingfleet_sim.emulator.sequence import Asked, Sequence
from servingfleet_sim.emulator.steps import Limits
from servingfleet_sim.recordings import read
from tests.recordings import recordings_dir

LIFE = ("a-shared-prefix", "a2-text-chat", "c-reset", "b-eviction")
ENGINE = Limits(blocks=32, block_size=32, max_sequences=4, max_step_tokens=2048, max_model_len=960)

JOINED: dict[str, tuple[tuple[tuple[int, ...], ...], ...]] = {
    "b-eviction": (
        ((30,), (31, 32, 33)),
        ((34,), (35, 36), (37,)),
        # The order of arrival, not that of sending: the prompts of the first events name the first two.
        ((47, 48), (49, 50)),
    ),
    **dict.fromkeys(("x6-conc-gemma3", "x7-conc-qwen3next"), (((0, 1, 2, 3),), ((4, 5),))),
}
"""Requests that overlapped: for each group of them, the lines that joined in each step."""

OTHERS = {
    "z-inproc-base": ENGINE,
    "d2-replay-rollover": ENGINE,
    "g-lora-salt": ENGINE,
    "m-bytes-hash-sha256cbor": ENGINE,
    "x1-full-mode-evict": Limits(8, 32, 4, 2048),
    "x4-prompt-logprobs": ENGINE,
}
"""Engines without a host tier, each with a life of its own."""

WINDOWS = (LayerGroup(WINDOW, 64), LayerGroup())
STATES = (LayerGroup(STATE),) * 3 + (LayerGroup(),)

HYBRIDS = {
    "f1-gemma3-swa-hybrid": Limits(64, 32, 4, 2048, 960, groups=WINDOWS),
    "f2-gemma3-hybrid-manager-off": Limits(64, 32, 4, 2048, 960),
    "f3-mistral-all-swa": Limits(32, 32, 4, 2048, 960, groups=WINDOWS[:1]),
    "f5-qwen3next-gdn": Limits(64, 384, 4, 2048, 960, groups=STATES),
    "f5b-qwen3next-gdn-align": Limits(64, 288, 4, 2048, 960, groups=STATES),
    "f5c-qwen3next-gdn-block32": Limits(160, 32, 4, 2048, 960, groups=STATES),
    "x6-conc-gemma3": Limits(64, 32, 4, 2048, 960, groups=WINDOWS),
    "x7-conc-qwen3next": Limits(160, 32, 4, 2048, 960, groups=STATES),
}
"""Models whose layers do not all keep every token. Their settings are in each recording's engine.json."""

HOST_TIERS = {
    "x3-offload-gemma3-placeholder": Limits(36, 32, 4, 2048, 384, host_chunks=48, groups=WINDOWS),
    "i-cpu-offload-default-events": Limits(20, 32, 4, 2048, 384, host_chunks=48),
    "i2-cpu-offload-self-describing": Limits(
        20, 32, 4, 2048, 384, host_chunks=48, host_described=True
    ),
    "x2-offload-placeholder-chunk64": Limits(20, 32, 4, 2048, 384, 24, 2),
    "x2e-chunk64-cpu-evict-selfdesc": Limits(14, 32, 4, 2048, 384, 8, 2, host_described=True),
}
"""Engines with a host tier. Its sizes are not in the recordings' events, but in their settings."""

ADAPTERS = {"adapter-a": 1, "adapter-b": 2}

RESET_AFTER_TOKENS = {5: 200, 8: 150}
"""c: line of a reset under load, and tokens that the running request had answered with at most."""


@dataclass
class Played:
    """What one recording brought: batches, and the reported reuse by line of the request."""

    batches: list[list[dict[str, Any]]] = field(default_factory=list)
    reused: dict[int, int] = field(default_factory=dict)
    resets: dict[int, bool] = field(default_factory=dict)


class Life:
    """One engine, and the hashes by which it and the recorded one call the same block."""

    def __init__(self, limits: Limits = ENGINE) -> None:
        self.scheduler = Scheduler(limits, b"any seed")
        self._numbers = 0

    def play(self, name: str) -> Played:
        rows = dict(_rows(name))
        played = Played()
        groups = {line: group for group in JOINED.get(name, ()) for step in group for line in step}
        done: set[int] = set()
        for line, row in rows.items():
            if line in done:
                continue
            if "control" in row:
                played.resets[line] = self._reset(row)
                continue
            joining = groups.get(line, ((line,),))
            during = {
                n: r
                for n, r in rows.items()
                if "control" in r and row["t"] < r["t"] < row.get("t_done", row["t"])
            }
            self._run([[(n, rows[n]) for n in step] for step in joining], during, played)
            done.update(during, *joining)
        return played

    def _run(
        self,
        joining: list[list[tuple[int, dict[str, Any]]]],
        controls: dict[int, dict[str, Any]],
        played: Played,
    ) -> None:
        joins = iter(joining)
        admitted: list[tuple[int, Sequence]] = []
        while True:
            for line, row in next(joins, []):
                for sequence in self._sequences(row):
                    self.scheduler.add(sequence)
                    admitted.append((line, sequence))
            for line, row in controls.items():
                reached = admitted[0][1].output_tokens >= RESET_AFTER_TOKENS[line]
                if line not in played.resets and reached:
                    played.resets[line] = self._reset(row)
            step = self.scheduler.schedule(0.0)
            if step is None:
                break
            events = self.scheduler.complete(step).events
            if events:
                payload = encode(events, 0.0, 0, generation("0.33.0"))
                played.batches.append(msgpack.unpackb(payload)[1])
        for line, sequence in admitted:
            # One usage a request: the engine reports the reuse of its last prompt.
            assert sequence.cached_tokens is not None
            played.reused[line] = sequence.cached_tokens

    def _sequences(self, row: dict[str, Any]) -> Iterator[Sequence]:
        asked = row["request"]
        prompt = row.get("prompt_token_ids") or asked["prompt"]
        xargs = asked.get("vllm_xargs") or asked.get("extra_args") or {}
        adapter = asked.get("lora")
        for tokens in prompt if isinstance(prompt[0], list) else [prompt]:
            self._numbers += 1
            wanted = Asked(
                prompt=tuple(tokens),
                max_tokens=asked["max_tokens"],
                cache_salt=asked.get("cache_salt"),
                adapter=adapter,
                adapter_number=None if adapter is None else ADAPTERS[adapter],
                # One recording tells it by its label only.
                prompt_logprobs=row["label"].startswith("prompt_logprobs"),
                session=asked.get("session_id"),
                report_reused=xargs.get("kv_cache_report_mode") == "full",
                outputs=tuple(row.get("output_token_ids", ())),
            )
            yield Sequence(self._numbers, wanted)

    def _reset(self, row: dict[str, Any]) -> bool:
        return self.scheduler.reset(
            running="reset_running_requests=true" in row["control"],
            host="reset_connector=True" in row["control"],
        )


class Renaming:
    """A bijection between the hashes of two engines, learned as they appear."""

    def __init__(self) -> None:
        self._theirs: dict[int, int] = {}
        self._ours: dict[int, int] = {}

    def same(self, recorded: list[dict[str, Any]], emulated: list[dict[str, Any]]) -> bool:
        """Whether two batches are equal once the hashes are renamed."""
        recorded = _sorted_copies(recorded, lambda digest: self._theirs.get(digest, -1))
        emulated = _sorted_copies(emulated, lambda digest: digest)
        return len(recorded) == len(emulated) and all(
            self._rest(a) == self._rest(b) and self._match(self._hashes(a), self._hashes(b))
            for a, b in zip(recorded, emulated, strict=True)
        )

    def _match(self, recorded: list[int | None], emulated: list[int | None]) -> bool:
        if len(recorded) != len(emulated):
            return False
        for a, b in zip(recorded, emulated, strict=True):
            if a is None or b is None:
                if a is not b:
                    return False
            elif self._theirs.setdefault(a, b) != b or self._ours.setdefault(b, a) != a:
                return False
        return True

    @staticmethod
    def _hashes(event: dict[str, Any]) -> list[int | None]:
        return [event.get("parent_block_hash"), *event.get("block_hashes", ())]

    @staticmethod
    def _rest(event: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in event.items() if k not in ("parent_block_hash", "block_hashes")}


def _sorted_copies(batch: list[dict[str, Any]], name: Callable[[int], int]) -> list[dict[str, Any]]:
    """The batch with its host copies by name: vLLM announces those of a step in the order of a set."""
    first = next((n for n, event in enumerate(batch) if _is_copy(event)), len(batch))
    copies = sorted(
        batch[first:], key=lambda event: (name(event["block_hashes"][-1]), event["group_idx"])
    )
    return [*batch[:first], *copies]


def _is_copy(event: dict[str, Any]) -> bool:
    return bool(event["type"] == "BlockStored" and event["medium"] == "CPU")


def _rows(name: str) -> list[tuple[int, dict[str, Any]]]:
    lines = (recordings_dir() / name / "requests.jsonl").read_text().splitlines()
    rows = [row for row in enumerate(map(json.loads, lines)) if {"request", "control"} & {*row[1]}]
    return sorted(rows, key=lambda numbered: float(numbered[1]["t"]))


def _recorded(name: str) -> list[list[dict[str, Any]]]:
    return [
        msgpack.unpackb(message.frames[-1])[1] for message in read(recordings_dir() / name).messages
    ]


@pytest.fixture(scope="module")
def life() -> dict[str, Played]:
    """The whole life of the recorded engine, lived again."""
    engine = Life()
    return {name: engine.play(name) for name in LIFE}


def test_the_events_of_one_engine_life_are_the_recorded_ones(life: dict[str, Played]) -> None:
    renaming = Renaming()
    for name in LIFE:
        recorded = _recorded(name)
        for place, (theirs, ours) in enumerate(zip(recorded, life[name].batches, strict=False)):
            assert renaming.same(theirs, ours), (name, place, theirs, ours)
        assert len(life[name].batches) == len(recorded), name


@pytest.mark.parametrize("name", LIFE)
def test_the_reported_reuse_is_the_recorded_one(life: dict[str, Played], name: str) -> None:
    recorded = {line: row["cached_tokens"] for line, row in _rows(name) if "cached_tokens" in row}
    assert life[name].reused == recorded


@pytest.mark.parametrize("name", ["b-eviction", "c-reset"])
def test_a_reset_succeeds_when_the_recorded_one_did(life: dict[str, Played], name: str) -> None:
    recorded = {line: row["resp"]["success"] for line, row in _rows(name) if "control" in row}
    assert recorded
    assert life[name].resets == recorded


@pytest.mark.parametrize("name", [*OTHERS, *HYBRIDS, *HOST_TIERS])
def test_other_engines_tell_and_reuse_what_the_recorded_ones_did(name: str) -> None:
    """Those with a host tier too, but for the order in which a step's copies are announced."""
    played = Life((OTHERS | HYBRIDS | HOST_TIERS)[name]).play(name)
    renaming = Renaming()
    recorded = _recorded(name)
    for place, (theirs, ours) in enumerate(zip(recorded, played.batches, strict=False)):
        assert renaming.same(theirs, ours), (name, place, theirs, ours)
    assert len(played.batches) == len(recorded)
    assert played.reused == {
        line: row["cached_tokens"] for line, row in _rows(name) if "cached_tokens" in row
    }
