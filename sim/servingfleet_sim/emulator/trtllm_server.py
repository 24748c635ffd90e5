"""The HTTP side of an emulated TensorRT-LLM, where it differs from vLLM's."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from .api import BadRequest, usage
from .rank import Ticket
from .server import Server

_GAUGES = {
    "num_requests_running": "Number of active requests",
    "num_requests_waiting": "Number of queued requests",
    "kv_cache_utilization": "KV cache utilization",
    "kv_cache_max_blocks": "Maximum number of KV cache blocks",
    "kv_cache_tokens_per_block": "Tokens per KV cache block",
}


class TrtllmServer(Server):
    """Serves one engine as trtllm-serve does, with event_buffer_max_size and return_perf_metrics set."""

    owner = "tensorrt_llm"

    def _own_routes(self) -> list[web.RouteDef]:
        return [
            web.post("/kv_cache_events", self._events),
            web.get("/version", self._version),
            web.get("/prometheus/metrics", self._gauges),
        ]

    def _usage(self, tickets: list[Ticket]) -> dict[str, Any]:
        return usage(
            sum(ticket.sequence.prompt_tokens for ticket in tickets),
            sum(ticket.sequence.output_tokens for ticket in tickets),
            {"cached_tokens": sum(ticket.sequence.cached_tokens or 0 for ticket in tickets)},
        )

    def _error(self, wrong: BadRequest) -> dict[str, Any]:
        return {
            "object": "error",
            "message": str(wrong),
            "type": wrong.kind,
            "param": None,
            "code": wrong.status,
        }

    async def _events(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(self._engine.pulled.drain())

    async def _gauges(self, _: web.Request) -> web.StreamResponse:
        # Of the whole engine: no figure names a rank.
        schedulers = [rank.scheduler for rank in self._engine.ranks]
        values = (
            sum(each.running_count for each in schedulers),
            sum(each.waiting_count for each in schedulers),
            sum(each.usage for each in schedulers) / len(schedulers),
            (self._settings.limits.blocks - 1) * len(schedulers),
            self._settings.limits.block_size,
        )
        registry = CollectorRegistry(auto_describe=False)
        labels = {"model_name": self._settings.model, "engine_type": "trtllm"}
        for (name, text), value in zip(_GAUGES.items(), values, strict=True):
            gauge = Gauge(f"trtllm_{name}", text, labels.keys(), registry=registry)
            gauge.labels(**labels).set(value)
        return web.Response(
            body=generate_latest(registry), content_type="text/plain", charset="utf-8"
        )

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        # Statistics of iterations, as JSON.
        schedulers = [rank.scheduler for rank in self._engine.ranks]
        blocks = (self._settings.limits.blocks - 1) * len(schedulers)
        used = sum(scheduler.usage for scheduler in schedulers) / len(schedulers)
        return web.json_response(
            [
                {
                    "numActiveRequests": sum(each.running_count for each in schedulers),
                    "numQueuedRequests": sum(each.waiting_count for each in schedulers),
                    "kvCacheStats": {
                        "maxNumBlocks": blocks,
                        "usedNumBlocks": round(blocks * used),
                        "freeNumBlocks": blocks - round(blocks * used),
                        "tokensPerBlock": self._settings.limits.block_size,
                    },
                }
            ]
        )
