"""Puts the scheduler on its ports: gRPC services, health, reflection, HTTP; ticks it; drains it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from http import HTTPStatus

import grpc
from google.rpc import code_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CONTENT_TYPE_LATEST

from servingfleet_protos.v1 import (
    fleet_pb2,
    fleet_pb2_grpc,
    routing_pb2,
    routing_pb2_grpc,
    stream_pb2,
    stream_pb2_grpc,
)

from .clock import Clock
from .errors import SessionRefused
from .intake import RelayIntakeServicer
from .metrics import Metrics
from .reports import FleetServicer
from .routing import RouterServicer
from .service import Scheduler
from .settings import SchedulerSettings, ServerSettings
from .web import Page, Web, json_page

log = logging.getLogger(__name__)

SERVICES = (
    stream_pb2.DESCRIPTOR.services_by_name["RelayIntake"].full_name,
    routing_pb2.DESCRIPTOR.services_by_name["Router"].full_name,
    fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name,
)
"""Health is told for each; the router's is the readiness of the whole."""

KEEPALIVE_MS = 10_000
"""A relay whose machine is gone is noticed within two of these."""


@dataclass(frozen=True, slots=True)
class Running:
    """A scheduler on its ports."""

    scheduler: Scheduler
    port: int
    http_port: int


@contextlib.asynccontextmanager
async def serve(settings: SchedulerSettings, ports: ServerSettings) -> AsyncIterator[Running]:
    """Serves until the block ends, then drains. Raises OSError if a port can't be had."""
    clock = Clock()
    scheduler = Scheduler(
        settings,
        instance_id=secrets.token_urlsafe(12),
        now=clock(),
        rng=random.Random(),
        token_key=ports.token_key or secrets.token_bytes(32),
    )
    metrics = Metrics(scheduler, clock)
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", ports.max_message_bytes),
            ("grpc.max_send_message_length", ports.max_message_bytes),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
            ("grpc.so_reuseport", 0),
        ]
    )
    stream_pb2_grpc.add_RelayIntakeServicer_to_server(RelayIntakeServicer(scheduler, clock), server)
    routing_pb2_grpc.add_RouterServicer_to_server(RouterServicer(scheduler, clock, metrics), server)
    fleet_pb2_grpc.add_FleetServicer_to_server(FleetServicer(scheduler, clock), server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection(
        (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    try:
        port = server.add_insecure_port(ports.listen)
    except RuntimeError as error:
        raise OSError(f"can't listen on {ports.listen}: taken, or not of this machine") from error
    web = Web(ports.http_host, ports.http_port, _pages(scheduler, metrics))
    await server.start()
    ticker = asyncio.create_task(_tick(scheduler, clock, ports.tick_s))
    for name in ("", *SERVICES):
        await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
    log.info(
        "listening",
        extra={
            "port": port,
            "http_port": web.port,
            "instance": scheduler.instance_id,
            "policy": settings.policy,
        },
    )
    try:
        yield Running(scheduler, port, web.port)
    finally:
        log.info("draining", extra={"seconds": ports.drain_s})
        await healthy.enter_graceful_shutdown()
        ticker.cancel()
        await asyncio.gather(ticker, return_exceptions=True)
        scheduler.streams.end(
            SessionRefused(
                code_pb2.UNAVAILABLE, "SHUTTING_DOWN", "this scheduler stops: reconnect elsewhere"
            )
        )
        await server.stop(ports.drain_s)
        await web.close()


async def _tick(scheduler: Scheduler, clock: Clock, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            scheduler.tick(clock())
        except Exception:
            # One defect must not end acknowledgements and expiries for good.
            log.exception("defect in a tick")


def _pages(scheduler: Scheduler, metrics: Metrics) -> dict[str, Callable[[], Page]]:
    return {
        "/metrics": lambda: Page(HTTPStatus.OK, CONTENT_TYPE_LATEST, metrics.text()),
        "/healthz": lambda: json_page(HTTPStatus.OK, {"status": "ok"}),
        # Ready from the first second: a cold index costs time, a lost request costs trust.
        "/readyz": lambda: json_page(HTTPStatus.OK, scheduler.ready()),
    }
