"""Runs the parts together: what starts when, what happens on which change, and how it ends.

Every replica watches and serves the webhook; the leading one writes as well. When anything ends that should not, the whole
process does, and is started anew: but not before the webhook has served what was on its way.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kopf

from . import changes, crd, health, names
from .asking import Asking
from .certificates import Certificates
from .children import Children
from .cluster import Cluster
from .errors import ClusterError, NotLeading
from .events import Events
from .health import Health
from .informer import Informer
from .injection import OLDEST_KUBERNETES
from .kinds import FLEET, NETWORK_POLICY, POD, Kind
from .leadership import Leadership
from .metrics import Metrics
from .pods import Observer
from .queue import QueueSettings, WorkQueue
from .reconcile import Reconciler
from .reports import Tokens
from .settings import OperatorSettings
from .shared import SharedObjects
from .spec import BadSpec, Fleet
from .statuses import Statuses
from .store import Body, Key, Store, keep_child, keep_fleet, keep_pod, keep_policy
from .watching import Source
from .webhook import Webhook

log = logging.getLogger(__name__)

SHARED = Key("", "")
"""In the queue: the objects that all fleets share."""
DRAIN_S = 5.0
"""The webhook serves on for so long after the signal to stop: nodes still send requests here for a moment."""
END_S = 5.0
"""For what is going on to stop. With the drain, and the lease's release, less than 20 s."""
RETRY_S = 5.0
CERTIFICATE_S = 60.0
"""Between two looks at the webhook's certificate, which is renewed ten days before its end."""
FIRST_CERTIFICATE_S = 1.0


@dataclass(frozen=True)
class Hosts:
    """Addresses to listen on; "": all."""

    webhook: str = ""
    http: str = ""


class Process:
    """One replica of the operator."""

    def __init__(
        self, settings: OperatorSettings, login: Callable[[], kopf.ConnectionInfo]
    ) -> None:
        self._settings = settings
        self._rng = random.Random()
        self._kubernetes = OLDEST_KUBERNETES
        self._metrics = Metrics()
        self._store = Store()
        self._cluster = Cluster(
            login,
            may_write=lambda: self._leadership.leads(),
            observe=self._metrics.request,
            lacking=self._metrics.lacking,
        )
        identity = f"{socket.gethostname()}_{secrets.token_hex(4)}"
        self._leadership = Leadership(
            self._cluster,
            name=settings.fullname,
            namespace=settings.namespace,
            identity=identity,
            clock=time.monotonic,
            today=_today,
        )
        self._children = Children(self._cluster, self._store, settings, self._metrics)
        self._certificates = Certificates(self._cluster, self._children, settings, _today)
        self._asking = Asking(
            store=self._store,
            certificates=self._certificates,
            tokens=Tokens(self._cluster),
            metrics=self._metrics,
            leads=self._leadership.leads,
            on_news=lambda key: self._queue.add(key),
            rng=self._rng,
            clock=time.monotonic,
        )
        self._observer = Observer(settings, self._kubernetes)
        self._main, self._around = self._informers(login)
        self._reconciler = Reconciler(
            cluster=self._cluster,
            store=self._store,
            settings=settings,
            children=self._children,
            certificates=self._certificates,
            observer=self._observer,
            asking=self._asking,
            statuses=Statuses(
                self._cluster,
                self._store,
                Events(
                    self._cluster,
                    self._metrics,
                    reporter=identity,
                    clock=time.monotonic,
                    today=_today,
                ),
                self._metrics,
                _today,
            ),
            metrics=self._metrics,
            leads=self._leadership.leads,
            term=lambda: self._leadership.term,
            knows=self._around.knows,
            shared_changed=lambda: self._queue.add(SHARED),
            clock=time.monotonic,
            today=_today,
        )
        self._webhook = Webhook(settings, self._fleet_of, lambda: self._kubernetes, self._metrics)
        self._shared = SharedObjects(
            cluster=self._cluster,
            store=self._store,
            settings=settings,
            certificates=self._certificates,
            reconciler=self._reconciler,
            metrics=self._metrics,
            on_certificate=lambda plan: self._webhook.use(plan.certificates),
        )
        self._queue: WorkQueue[Key] = WorkQueue(self._work, QueueSettings(), self._rng)
        self._gauges()

    async def run(self, stop: asyncio.Event, hosts: Hosts = Hosts()) -> bool:
        """Runs until `stop` is set. Returns whether that was why it ended. Raises OSError if a port can't be had."""
        answers = Health(self._cluster, self._can_answer, time.monotonic)
        self._metrics.gauge(
            "api_silence_seconds", "Since the API server last answered.", answers.silence_s
        )
        async with (
            self._cluster,
            health.serve(hosts.http, self._settings.http_port, answers, self._metrics) as http_port,
            self._webhook.serve(hosts.webhook, self._settings.webhook_port) as webhook_port,
        ):
            log.info("listening", extra={"http_port": http_port, "webhook_port": webhook_port})
            work = asyncio.create_task(self._work_for_ever(), name="work")
            asked = asyncio.create_task(stop.wait(), name="stop")
            await asyncio.wait([work, asked], return_when=asyncio.FIRST_COMPLETED)
            orderly = not work.done()
            asked.cancel()
            if not orderly:
                log.error("the operator's work broke off", exc_info=work.exception())
            log.info("stopping", extra={"orderly": orderly})
            work.cancel()
            await asyncio.wait([work], timeout=END_S)
            await self._leadership.release()
            await asyncio.sleep(DRAIN_S)
        return orderly

    def _can_answer(self) -> bool:
        # While the fleets are not known, every pod would pass without its relay.
        return self._webhook.serving and self._main.listed.is_set()

    async def _work_for_ever(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name, part in {
                "leadership": self._leadership.run(self._rng),
                "heartbeat": health.heartbeat(self._cluster, self._first_namespace),
                "certificate": self._serve_certificate(),
                "elections": self._on_elections(),
                "definition": self._keep_definition(),
                "version": self._keep_version(),
                "watches": self._watch(),
                "queue": self._queue.run(),
                "asking": self._asking.run(),
            }.items():
                group.create_task(part, name=name)

    async def _watch(self) -> None:
        await self._defined()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._main.run(), name="watch of fleets")
            await self._main.listed.wait()
            # Before the fleets are known, an empty list of them would empty what they share.
            self._queue.add(SHARED)
            group.create_task(self._around.run(), name="watch around fleets")

    async def _defined(self) -> None:
        """Waits until the API server serves fleets."""
        told = False
        while True:
            try:
                if await self._cluster.serves(FLEET):
                    return
                problem = f"{crd.NAME} is not defined: kubectl apply --server-side -f crds/"
            except ClusterError as error:
                problem = str(error)
            if not told:
                told = True
                log.warning("waiting for the definition of fleets", extra={"error": problem})
            await asyncio.sleep(1.0)

    async def _on_elections(self) -> None:
        """What a replica does each time that it begins to lead."""
        while True:
            await self._leadership.elected.wait()
            for key in self._store.fleets:
                self._queue.add(key)
            if self._main.listed.is_set():
                self._queue.add(SHARED)
            await self._leadership.lost.wait()

    async def _keep_definition(self) -> None:
        """By itself, so that a definition that can't be looked at holds up no fleet, and no election is missed."""
        folder = self._settings.crd_dir
        definition = crd.shipped(Path(folder)) if folder else None
        while definition is not None:
            await self._leadership.elected.wait()
            await self._define(definition)
            await self._leadership.lost.wait()

    async def _define(self, definition: Mapping[str, Any]) -> None:
        """Brings the definition up to date, or leaves it to the replica that leads next."""
        told = False
        while self._leadership.leads():
            try:
                await crd.bring_up_to_date(self._cluster, definition)
                return
            except (ClusterError, NotLeading) as error:
                level = logging.DEBUG if told else logging.WARNING
                log.log(level, "definition not looked at", extra={"error": str(error)})
                told = True
                await asyncio.sleep(RETRY_S)

    async def _serve_certificate(self) -> None:
        """Shows what the leading replica keeps in its Secret."""
        while True:
            try:
                served = await self._certificates.served()
                if served is not None:
                    self._webhook.use(served)
            except (ClusterError, ssl.SSLError) as error:
                # One that is damaged is mended by the leading replica.
                log.warning("webhook certificate not loaded", extra={"error": str(error)})
            await asyncio.sleep(CERTIFICATE_S if self._webhook.serving else FIRST_CERTIFICATE_S)

    async def _keep_version(self) -> None:
        """Kubernetes is upgraded under a running operator."""
        while True:
            try:
                self._kubernetes = await self._cluster.version()
                self._observer.kubernetes = self._kubernetes
            except ClusterError as error:
                log.warning("version not read", extra={"error": str(error)})
                await asyncio.sleep(RETRY_S)
                continue
            await asyncio.sleep(600.0)

    async def _work(self, key: Key) -> float | None:
        if key != SHARED:
            return await self._reconciler.reconcile(key)
        if not self._leadership.leads():
            return None
        try:
            return await self._shared.reconcile()
        except NotLeading:
            return None

    def _informers(self, login: Callable[[], kopf.ConnectionInfo]) -> tuple[Informer, Informer]:
        store, watched = self._store, self._settings.watch_namespaces
        operator = names.label_value(self._settings.instance)
        own = f"{names.MANAGED_BY_LABEL}={names.MANAGED_BY},{names.OPERATOR_LABEL}={operator}"
        main = Informer(
            self._cluster,
            [
                Source(FLEET, store.fleets, keep_fleet),
                *(Source(kind, table, keep_child, own) for kind, table in store.children.items()),
            ],
            login=login,
            namespaces=lambda: watched or ("",),
            on_change=self._on_change,
            on_request=self._metrics.watch_request,
            rng=self._rng,
        )
        around = Informer(
            self._cluster,
            [
                Source(POD, store.pods, keep_pod),
                Source(NETWORK_POLICY, store.policies, keep_policy),
            ],
            login=login,
            # Only where fleets are: most pods of a cluster are none of ours.
            namespaces=lambda: tuple(sorted({key.namespace for key in store.fleets})),
            on_change=self._on_change_around,
            on_request=self._metrics.watch_request,
            rng=self._rng,
        )
        return main, around

    def _on_change(self, kind: Kind, before: Body | None, after: Body | None) -> None:
        self._metrics.watch_events.labels(kind.name).inc()
        if kind is FLEET:
            self._around.look()
            concerned = changes.by_fleet(self._store, before, after)
            if after is None:
                self._queue.add(SHARED)
        else:
            concerned = changes.by_child(before, after)
        for key in concerned:
            if not changes.is_of_status(before, after):
                self._reconciler.distrust(key)
            self._queue.add(key)

    def _on_change_around(self, kind: Kind, before: Body | None, after: Body | None) -> None:
        self._metrics.watch_events.labels(kind.name).inc()
        for key in changes.around(self._store, kind, before, after):
            self._queue.add(key)

    def _fleet_of(self, namespace: str, name: str) -> Fleet | None:
        try:
            return self._store.fleet(Key(namespace, name))
        except BadSpec:
            return None

    @property
    def _first_namespace(self) -> str:
        return next(iter(self._settings.watch_namespaces), "")

    def _gauges(self) -> None:
        for name, description, value in (
            ("leading", "1: this replica writes.", lambda: float(self._leadership.leads())),
            (
                "queue_keys",
                "Fleets that wait for a reconcile or are in one.",
                lambda: len(self._queue),
            ),
            ("fleets", "Fleets known.", lambda: len(self._store.fleets)),
            (
                "pods",
                "Pods remembered, of all namespaces with fleets.",
                lambda: len(self._store.pods),
            ),
        ):
            self._metrics.gauge(name, description, value)


def _today() -> datetime:
    return datetime.now(UTC)
