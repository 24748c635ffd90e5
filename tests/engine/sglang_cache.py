# mypy: disable-error-code="import-not-found"
"""SGLang's own radix cache and event publisher, from its wheel, without a model. Runs in the engine's environment.

Prompts come as lines of JSON on standard input, in the order of SGLang's scheduler: look for all but the last token, make
room, insert, publish. Everything is the wheel's but the allocator, which has nothing to allocate. Each answer is a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from typing import Any

import torch
from sglang.srt.disaggregation.kv_events import KVEventBatch, ZmqEventPublisher
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


class Allocator:
    """Of memory that is not there: the tree's numbers of slots are never used."""

    device = "cpu"

    def __init__(self, page: int) -> None:
        self.page_size = page

    def free(self, *_: Any, **__: Any) -> None:
        """Nothing was allocated."""

    free_segment = free


class Cache:
    """One rank's tree, and the publisher of its events."""

    def __init__(
        self, page: int, capacity: int, pairs: bool, events_port: int, replay_port: int
    ) -> None:
        """`capacity`: tokens. `pairs`: keys are those of EAGLE."""
        self._page = page
        self._capacity = capacity
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=Allocator(page),
                page_size=page,
                is_eagle=pairs,
                enable_kv_cache_events=True,
                tree_components=(ComponentType.FULL,),
            )
        )
        self._publisher = ZmqEventPublisher(
            0, f"tcp://*:{events_port}", f"tcp://*:{replay_port}", topic="kv-events"
        )
        self._batches = 0
        self.publish()

    def ask(self, prompt: list[int], output: list[int], salt: str) -> tuple[int, int]:
        """Runs a prompt. Returns the tokens of it that were there, and those that were evicted for it."""
        found = self.tree.match_prefix(MatchPrefixParams(key=self._key(prompt[:-1], salt)))
        held = self.tree.lock(found.last_device_node)
        # The last token of an answer is sampled, and never computed.
        tokens = (prompt + output)[:-1]
        size, *_ = self.tree.total_size()
        excess = size + len(tokens) - found.device_prefix_len - self._capacity
        evicted = 0
        if excess > 0:
            evicted = self.tree.evict(EvictParams(num_tokens=excess)).num_tokens_evicted
        slots = torch.arange(len(tokens), dtype=torch.int64)
        self.tree.insert(InsertParams(key=self._key(tokens, salt), value=slots))
        self.tree.unlock(held)
        self.publish()
        return found.device_prefix_len, evicted

    def publish(self) -> None:
        """Publishes what has come since the last call, if anything."""
        events = self.tree.take_events()
        if events:
            self._publisher.publish(KVEventBatch(ts=time.time(), events=events))
            self._batches += 1

    @property
    def last_sequence(self) -> int:
        """Number of the last batch."""
        return self._batches - 1

    @staticmethod
    def _key(tokens: list[int], salt: str) -> Any:
        return RadixKey(array("q", tokens), None, cache_salt=salt or None)


def main() -> None:
    """Reads the settings from the first line, then one operation from each."""
    cache = Cache(**json.loads(sys.stdin.readline()))
    core = type(cache.tree.tree_core).__name__
    answer: dict[str, Any] = {"core": core, "seq": cache.last_sequence}
    while True:
        print(json.dumps(answer), flush=True)
        line = sys.stdin.readline()
        if not line:
            break
        asked = json.loads(line)
        if asked.get("reset"):
            cache.tree.reset()
            cache.publish()
            answer = {}
        else:
            cached, evicted = cache.ask(asked["prompt"], asked["output"], asked["salt"])
            answer = {"cached": cached, "evicted": evicted}
        answer["seq"] = cache.last_sequence
    # Its libraries' threads need not be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
