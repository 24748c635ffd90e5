"""Prometheus metrics. Labels are bounded: verbs, kinds that the operator touches, HTTP statuses, fixed words."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .kinds import Kind

PREFIX = "servingfleet_operator_"


class Metrics:
    """The registry of one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            f"{PREFIX}reconciles",
            "Reconciles ended, by what became of them.",
            ["outcome"],
            registry=self.registry,
        )
        self.reconcile_duration = Histogram(
            f"{PREFIX}reconcile_duration_seconds",
            "Time of one fleet's reconcile.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=self.registry,
        )
        self.applies = Counter(
            f"{PREFIX}applies",
            "Objects sent by server-side apply, by what it changed.",
            ["kind", "outcome"],
            registry=self.registry,
        )
        self.watch_events = Counter(
            f"{PREFIX}watch_events",
            "Objects that the watches told of.",
            ["kind"],
            registry=self.registry,
        )
        self.admissions = Counter(
            f"{PREFIX}admissions",
            "Pods that the webhook was asked about, by what became of them.",
            ["outcome"],
            registry=self.registry,
        )
        self.admission_duration = Histogram(
            f"{PREFIX}admission_duration_seconds",
            "Time of one answer of the webhook.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
            registry=self.registry,
        )
        self.scheduler_reports = Counter(
            f"{PREFIX}scheduler_reports",
            "Scheduler pods asked for their figures.",
            ["outcome"],
            registry=self.registry,
        )
        self.events = Counter(
            f"{PREFIX}events",
            "Events about fleets: posted, counted on an earlier one, held back as too many, refused.",
            ["outcome"],
            registry=self.registry,
        )
        self._watch_requests = Counter(
            f"{PREFIX}watch_requests",
            "Requests to the API server that the watches made; code 0: no answer.",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self._requests = Counter(
            f"{PREFIX}api_requests",
            "Requests to the API server, those of the watches aside; code 0: no answer.",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self._lacking = Counter(
            f"{PREFIX}api_rights_lacking",
            "Requests to the API server refused for lack of a right; not those that came too late to a namespace that is "
            "being deleted.",
            ["verb", "resource"],
            registry=self.registry,
        )
        self._request_duration = Histogram(
            f"{PREFIX}api_request_duration_seconds",
            "Time of one request to the API server.",
            ["verb"],
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=self.registry,
        )

    def request(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Counts one request to the API server."""
        self._requests.labels(verb, resource, str(code)).inc()
        self._request_duration.labels(verb).observe(seconds)

    def lacking(self, verb: str, resource: str) -> None:
        """Counts one request that was refused for lack of a right."""
        self._lacking.labels(verb, resource).inc()

    def watch_request(self, verb: str, resource: Kind, code: int) -> None:
        """Counts one request of a watch."""
        self._watch_requests.labels(verb, resource.plural, str(code)).inc()

    def gauge(self, name: str, description: str, value: Callable[[], float]) -> None:
        """A number that is read when scraped."""
        Gauge(f"{PREFIX}{name}", description, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)
