"""Puts the scheduler on its ports: gRPC services, health, reflection, HTTP; ticks it; drains it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
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
from .doorkeeper import Doorkeeper
from .errors import SessionRefused
from .gate import Gate, Reviews
from .intake import RelayIntakeServicer
from .metrics import Metrics
from .peers import Peers, peer_address
from .reports import FleetServicer
from .routing import RouterServicer
from .service import Scheduler
from .settings import AccessSettings, SchedulerSettings, ServerSettings
from .tls import ServerCertificate
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
async def serve(
    settings: SchedulerSettings, ports: ServerSettings, reviews: Reviews | None = None
) -> AsyncIterator[Running]:
    """Serves until the block ends, then drains. `reviews`: who is asked about callers, instead of Kubernetes.

    Raises OSError if a port can't be had, BadCertificate, and NoApiServer.
    """
    clock = Clock()
    gate = _gate(ports.access, reviews, clock)
    server = grpc.aio.server(
        interceptors=[] if gate is None else [Doorkeeper(gate)],
        options=[
            ("grpc.max_receive_message_length", ports.max_message_bytes),
            ("grpc.max_send_message_length", ports.max_message_bytes),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
            ("grpc.so_reuseport", 0),
        ],
    )
    port = _listen(server, ports)
    scheduler = Scheduler(
        settings,
        instance_id=secrets.token_urlsafe(12),
        now=clock(),
        rng=random.Random(),
        token_key=ports.token_key or secrets.token_bytes(32),
        address=peer_address(ports.advertise, port),
    )
    metrics = Metrics(scheduler, clock, gate)
    peers = Peers(ports.peers, metrics)
    stream_pb2_grpc.add_RelayIntakeServicer_to_server(
        RelayIntakeServicer(scheduler, clock, gate), server
    )
    routing_pb2_grpc.add_RouterServicer_to_server(
        RouterServicer(scheduler, clock, metrics, peers), server
    )
    fleet_pb2_grpc.add_FleetServicer_to_server(FleetServicer(scheduler, clock), server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    if gate is None:
        reflection.enable_server_reflection(
            (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
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
            "tls": ports.tls_files is not None,
            "callers_checked": gate is not None,
        },
    )
    if gate is None and not _loopback(ports.listen):
        log.warning("open to whoever reaches the port", extra={"listen": ports.listen})
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
        await peers.close()
        if gate is not None:
            await gate.close()
        await web.close()


def _gate(access: AccessSettings | None, reviews: Reviews | None, clock: Clock) -> Gate | None:
    if access is None:
        return None
    if reviews is None:
        # Only here: the Kubernetes client takes memory, and is not installed everywhere.
        from .reviews import KubernetesReviews

        reviews = KubernetesReviews(access)
    return Gate(access, reviews, clock)


def _listen(server: grpc.aio.Server, ports: ServerSettings) -> int:
    try:
        if ports.tls_files is None:
            return server.add_insecure_port(ports.listen)
        certificate = ServerCertificate(*ports.tls_files)
        return server.add_secure_port(ports.listen, certificate.credentials())
    except RuntimeError as error:
        raise OSError(f"can't listen on {ports.listen}: taken, or not of this machine") from error


def _loopback(listen: str) -> bool:
    """Only this machine reaches the address. A name that is not known counts as reached by others."""
    host = listen.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or listen.startswith("unix:")


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
