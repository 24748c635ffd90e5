"""The HTTP side of an emulated SGLang, where it differs from vLLM's."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from .api import BadRequest, usage
from .rank import Ticket
from .server import Server

_GAUGES = {
    "num_running_reqs": "Requests in the running batch.",
    "num_queue_reqs": "Requests that wait.",
    "token_usage": "Share of the pages in use, 0 to 1.",
    "max_total_num_tokens": "Tokens that the cache holds.",
}


class SglangServer(Server):
    """Serves one engine as SGLang does with --enable-cache-report and --enable-metrics."""

    owner = "sglang"
    stop_key = "matched_stop"

    def _own_routes(self) -> list[web.RouteDef]:
        return [
            web.get("/server_info", self._server_info),
            web.get("/get_server_info", self._server_info),
            web.get("/flush_cache", self._flush),
            web.post("/flush_cache", self._flush),
        ]

    def _usage(self, tickets: list[Ticket]) -> dict[str, Any]:
        # Of several prompts the sum, and where nothing was reused nothing is said.
        cached = sum(ticket.sequence.cached_tokens or 0 for ticket in tickets)
        return usage(
            sum(ticket.sequence.prompt_tokens for ticket in tickets),
            sum(ticket.sequence.output_tokens for ticket in tickets),
            {"cached_tokens": cached} if cached else None,
        )

    def _page(self) -> bytes:
        # Its metrics come from several processes, so that none tells when it started.
        registry = CollectorRegistry(auto_describe=False)
        names = ("model_name", "engine_type", "dp_rank")
        gauges = {
            name: Gauge(f"sglang:{name}", text, names, registry=registry)
            for name, text in _GAUGES.items()
        }
        for rank in self._engine.ranks:
            scheduler = rank.scheduler
            values = (
                scheduler.running_count,
                scheduler.waiting_count,
                scheduler.usage,
                self._settings.limits.longest,
            )
            for gauge, value in zip(gauges.values(), values, strict=True):
                gauge.labels(self._settings.model, "unified", str(rank.number)).set(value)
        return generate_latest(registry)

    def _error(self, wrong: BadRequest) -> dict[str, Any]:
        return {
            "object": "error",
            "message": str(wrong),
            "type": wrong.kind,
            "param": None,
            "code": wrong.status,
        }

    async def _server_info(self, _: web.Request) -> web.StreamResponse:
        settings, endpoints = self._settings, self._engine.endpoints
        return web.json_response(
            {
                "model_path": settings.model,
                "served_model_name": settings.model,
                "page_size": settings.limits.block_size,
                "dp_size": settings.ranks,
                "max_total_num_tokens": settings.limits.longest,
                "kv_events": {
                    "publisher": "zmq",
                    "endpoint_host": settings.host,
                    "endpoint_port_base": endpoints.events_port,
                    "topic": settings.topic,
                    "block_size": settings.limits.block_size,
                    "dp_size": settings.ranks,
                    "replay_endpoint_port_base": endpoints.replay_port or None,
                },
                "internal_states": [{} for _ in self._engine.ranks],
                "version": settings.engine_version,
            }
        )

    async def _flush(self, _: web.Request) -> web.StreamResponse:
        done = [rank.reset(running=False, host=False) for rank in self._engine.ranks]
        if all(done):
            return web.Response(text="Cache flushed.\n")
        return web.Response(
            text="Flush cache failed: there are requests that run or wait.\n", status=400
        )
