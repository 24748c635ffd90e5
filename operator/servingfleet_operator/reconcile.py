"""One fleet: what its namespace should hold is applied, what it shows is read, and its status says both.

Nothing is remembered here that could not be found again: a replica that takes over, or starts anew, goes on where the
cluster stands.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from . import names, upgrades
from .asking import Asking
from .certificates import Certificates, Material
from .children import AnotherOperator, Children
from .cluster import Cluster
from .desired import children as desired_children
from .errors import (
    Conflict,
    ForeignObject,
    Invalid,
    NotFound,
    NotLeading,
    OperatorError,
    Refused,
    Terminating,
)
from .images import ImageNotAllowed, relay_image
from .kinds import DEPLOYMENT, POD, POD_MONITOR, SECRET, kind_of
from .metrics import Metrics
from .observed import Observed, Trouble
from .pods import EnginePods, Observer
from .settings import OperatorSettings
from .spec import BadSpec, Fleet
from .statuses import Statuses
from .store import Body, Key, Store

log = logging.getLogger(__name__)

RESYNC_S = 600.0
"""Everything is looked at, and sent, again."""
TROUBLE_S = 60.0
"""Until the next try where a person has to act first."""
SOON_S = 0.2
TERMINATING_S = 30.0


class Shared(NamedTuple):
    """What a fleet contributes to objects that all fleets share."""

    fleet: Fleet
    injects: bool
    """Pods may be given its relay: the image can be pulled, as far as can be known."""


@dataclass
class _Memory:
    """What one process knows of one fleet while it leads."""

    uid: str
    term: int
    resync_at: float = 0.0
    changes: int = 1
    """Counts what somebody did to the fleet: it may concern what is not watched."""
    checked: int = 0
    """The change up to which that was looked at."""
    proven_image: str = ""
    """The relay's image for which the scheduler was seen running."""
    patched: upgrades.Patched | None = None
    told: str = ""
    """The warning that was logged last."""


class Reconciler:
    """Brings fleets to what their specs say."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        store: Store,
        settings: OperatorSettings,
        children: Children,
        certificates: Certificates,
        observer: Observer,
        asking: Asking,
        statuses: Statuses,
        metrics: Metrics,
        leads: Callable[[], bool],
        term: Callable[[], int],
        knows: Callable[[str], bool],
        shared_changed: Callable[[], None],
        clock: Callable[[], float],
        today: Callable[[], datetime],
    ) -> None:
        """term: counts the times that this replica began to lead. knows: whether the pods of a namespace are known. clock: monotonic seconds."""
        self._cluster = cluster
        self._store = store
        self._settings = settings
        self._children = children
        self._certificates = certificates
        self._observer = observer
        self._asking = asking
        self._statuses = statuses
        self._metrics = metrics
        self._leads = leads
        self._term = term
        self._knows = knows
        self._shared_changed = shared_changed
        self._clock = clock
        self._today = today
        self._memories: dict[Key, _Memory] = {}
        self._shared: dict[Key, Shared] = {}
        self._pod_monitors: tuple[float, bool] = (float("-inf"), False)

    def distrust(self, key: Key) -> None:
        """Somebody changed something of the fleet: what isn't watched is looked at too, next time."""
        memory = self._memories.get(key)
        if memory is not None:
            memory.changes += 1

    def shared(self) -> list[Shared]:
        """What every fleet contributes, as of its last reconcile."""
        return [self._shared[key] for key in sorted(self._shared)]

    def forget_gone(self) -> None:
        """Forgets fleets that are gone, all that was remembered of them."""
        for key in [key for key in self._memories if self._store.fleets.get(key) is None]:
            del self._memories[key]
        for key in [key for key in self._shared if self._store.fleets.get(key) is None]:
            del self._shared[key]
        uids = {memory.uid for memory in self._memories.values()}
        self._children.keep_only(uids)
        self._certificates.keep_only(uids)
        self._observer.keep_only(uids)
        self._asking.keep_only(self._memories)

    async def reconcile(self, key: Key) -> float | None:
        """Brings one fleet up to date. Returns the seconds until it wants another look; None: when something changes.

        Raises OperatorError for what is to be tried again.
        """
        resource = self._store.fleets.get(key)
        if not self._leads():
            return None
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            # The children go with it: garbage collection follows their owner references.
            if self._shared.pop(key, None) is not None:
                self._shared_changed()
            return None
        if not self._knows(key.namespace):
            return SOON_S
        began = self._clock()
        outcome = "failed"
        try:
            again_s = await self._one(key, resource)
            outcome = "done"
        except NotLeading:
            outcome, again_s = "not_leading", None
        except (Terminating, NotFound):
            # Its objects go in any order: the fleet may be the last of them.
            outcome, again_s = "namespace_terminating", TERMINATING_S
        except AnotherOperator as error:
            outcome, again_s = "another_operator", RESYNC_S
            self._warn_once(key, "fleet is another operator's", str(error))
        finally:
            self._metrics.reconciles.labels(outcome).inc()
            self._metrics.reconcile_duration.observe(self._clock() - began)
        return again_s

    async def _one(self, key: Key, resource: Body) -> float:
        memory = self._memory(key, resource["metadata"]["uid"])
        try:
            fleet = self._store.fleet(key)
        except BadSpec as error:
            await self._statuses.refuse(resource, Trouble("SpecNotReadable", str(error)))
            return RESYNC_S
        assert fleet is not None, "it was there a moment ago, and nothing was awaited"
        now = self._clock()
        resync = now >= memory.resync_at
        if resync:
            self._children.distrust(fleet)
        changes = memory.changes
        trust = not resync and memory.checked == changes
        engines = await self._look(fleet)
        troubles: list[Trouble] = []
        material = await self._apply(fleet, engines, troubles, trust=trust)
        upgrading = await self._upgrade(fleet, memory, troubles)
        self._share(key, fleet, memory)
        pods = self._store.scheduler_pods(key)
        answers = self._asking.answers(key, pods, engines.draining)
        wait_s = await self._statuses.write(
            Observed(
                fleet=fleet,
                deployment=self._deployment(fleet),
                scheduler_pods=pods,
                pods=engines.pods,
                reports=None if answers is None else answers.reports,
                unanswered=() if answers is None else answers.unanswered,
                troubles=troubles,
            )
        )
        if resync:
            memory.resync_at = now + (TROUBLE_S if troubles else RESYNC_S)
        if not troubles:
            memory.checked = changes
        waits = [TROUBLE_S if troubles else memory.resync_at - now]
        if wait_s is not None:
            waits.append(wait_s)
        if upgrading:
            waits.append(upgrades.LOOK_S)
        if material is not None and material.due is not None:
            waits.append(max(0.0, (material.due - self._today()).total_seconds()))
        return min(waits)

    def _memory(self, key: Key, uid: str) -> _Memory:
        memory = self._memories.get(key)
        term = self._term()
        if memory is None or (memory.uid, memory.term) != (uid, term):
            # Another may have led in between, and done what is not watched.
            memory = self._memories[key] = _Memory(uid, term)
        return memory

    async def _look(self, fleet: Fleet) -> EnginePods:
        # On a thread, as the status: nothing of it is changed in place.
        return await asyncio.to_thread(
            self._observer.look,
            fleet,
            list(self._store.pods.of(fleet.namespace)),
            list(self._store.policies.of(fleet.namespace)),
            self._store.readable_fleets(fleet.namespace),
        )

    async def _apply(
        self, fleet: Fleet, engines: EnginePods, troubles: list[Trouble], *, trust: bool
    ) -> Material | None:
        """Applies all that can be applied; the rest is told in `troubles`."""
        try:
            material = await self._certificates.of(fleet, trust=trust)
            wanted = [
                *desired_children(
                    fleet,
                    self._settings,
                    material.certificates,
                    material.decision_key,
                    pod_monitor=await self._serves_pod_monitors(fleet),
                ),
                *engines.policies,
            ]
        except _FOR_PEOPLE as error:
            troubles.append(_trouble(error))
            return None
        for child in wanted:
            try:
                await self._children.apply(child, fleet, trust=trust)
            except _FOR_PEOPLE as error:
                troubles.append(_trouble(error))
            except NotFound:
                if kind_of(child) != POD_MONITOR:
                    raise
                # Its definition is gone since we looked: it is optional.
                self._pod_monitors = (float("-inf"), False)
        try:
            await self._children.prune(wanted, fleet)
            if not trust:
                await self._prune_unwatched(fleet)
        except _FOR_PEOPLE as error:
            troubles.append(_trouble(error))
        return material

    async def _prune_unwatched(self, fleet: Fleet) -> None:
        if not fleet.secured:
            await self._children.prune_unwatched(SECRET, names.tls(fleet.name), fleet)
        if not fleet.scheduler.pod_monitor:
            await self._children.prune_unwatched(POD_MONITOR, names.scheduler(fleet.name), fleet)

    async def _serves_pod_monitors(self, fleet: Fleet) -> bool:
        if not fleet.scheduler.pod_monitor:
            return False
        looked_at, served = self._pod_monitors
        now = self._clock()
        if now - looked_at > RESYNC_S:
            served = await self._cluster.serves(POD_MONITOR)
            self._pod_monitors = (now, served)
        return served

    async def _upgrade(self, fleet: Fleet, memory: _Memory, troubles: list[Trouble]) -> bool:
        """Takes one step of replacing relays in place. Returns whether there is more to do."""
        try:
            step = upgrades.step(
                fleet,
                self._store.pods.of(fleet.namespace),
                self._settings,
                memory.patched,
                self._clock(),
            )
            if step.trouble is not None:
                troubles.append(step.trouble)
            if step.pod is not None and step.patch is not None:
                metadata = step.pod["metadata"]
                await self._cluster.patch(POD, metadata["name"], fleet.namespace, step.patch)
                memory.patched = upgrades.Patched(
                    metadata["uid"], self._clock(), step.patch, undone=step.trouble is not None
                )
                log.info(
                    "relay replaced",
                    extra={
                        "fleet": fleet.name,
                        "namespace": fleet.namespace,
                        "replica": metadata["name"],
                    },
                )
        except NotFound:
            return True  # the pod is gone; the next is seen to then
        except _FOR_PEOPLE as error:
            troubles.append(_trouble(error))
            return False
        return step.waiting

    def _deployment(self, fleet: Fleet) -> Body | None:
        return self._store.children[DEPLOYMENT].get(
            Key(fleet.namespace, names.scheduler(fleet.name))
        )

    def _share(self, key: Key, fleet: Fleet, memory: _Memory) -> None:
        """Tells whoever keeps the shared objects what this fleet needs there."""
        try:
            image = relay_image(fleet, self._settings)
        except ImageNotAllowed:
            image = ""
        if image and memory.proven_image != image:
            deployment = self._deployment(fleet)
            if deployment is not None and _has_run(deployment):
                memory.proven_image = image
        injects = bool(image) and fleet.relay.inject and memory.proven_image == image
        shared = Shared(fleet, injects)
        if self._shared.get(key) != shared:
            self._shared[key] = shared
            self._shared_changed()

    def _warn_once(self, key: Key, event: str, error: str) -> None:
        memory = self._memories.get(key)
        if memory is None or error == memory.told:
            return
        memory.told = error
        log.warning(event, extra={"fleet": key.name, "namespace": key.namespace, "error": error})


_FOR_PEOPLE = (ForeignObject, Invalid, Refused, Conflict, ImageNotAllowed)
"""What doesn't go away by itself: the fleet's status tells it, and the rest is done all the same."""

_REASONS: dict[type[OperatorError], str] = {
    ForeignObject: "ForeignObject",
    Invalid: "Invalid",
    Refused: "NotPermitted",
    Conflict: "Conflict",
    ImageNotAllowed: "ImageNotAllowed",
}


def _trouble(error: OperatorError) -> Trouble:
    return Trouble(_REASONS[type(error)], str(error))


def _has_run(deployment: Body) -> bool:
    """A pod of the newest revision was available once, so that its image could be pulled."""
    found = deployment.get("status") or {}
    if found.get("observedGeneration", 0) < deployment["metadata"].get("generation", 0):
        return False
    updated = found.get("updatedReplicas") or 0
    outdated = (found.get("replicas") or 0) - updated
    if updated > 0 and (found.get("availableReplicas") or 0) > outdated:
        return True
    # Stays so when its pods fail later.
    return any(
        condition.get("type") == "Progressing"
        and condition.get("reason") == "NewReplicaSetAvailable"
        for condition in found.get("conditions") or ()
    )
