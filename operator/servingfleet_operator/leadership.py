"""Which replica writes: a Lease, held by at most one at any moment of the monotonic clock.

The holder renews every `period_s`, and trusts its lease for `renew_deadline_s` from *before* the request that renewed
it; others wait `lease_s` from when they *saw* the last change. No two clocks are compared, and a holder that was frozen
finds its time gone before it writes again. Losing the lease stops the writing only: the watches and the webhook go on.

A write that was on its way as the time ended may still land, `cluster.DEADLINE_S` later at most. Server-side apply makes
it harmless: both replicas send the same bytes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from .errors import ClusterError, Conflict
from .kinds import LEASE, Kind

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Seconds. `lease_s > renew_deadline_s > period_s`, or two might lead at once."""

    lease_s: float = 15.0
    """How long others leave a silent holder its lease."""
    renew_deadline_s: float = 10.0
    """How long a holder trusts a lease that it could not renew."""
    period_s: float = 2.0
    """Between two looks at the lease."""
    request_s: float = 5.0
    """Deadline of one look: two fit into the renewal deadline."""


class Leases(Protocol):
    """The part of `cluster.Cluster` that an election needs."""

    async def find(self, kind: Kind, name: str, namespace: str = "") -> dict[str, Any] | None: ...

    async def create(
        self, body: dict[str, Any], *, elected: bool, deadline_s: float
    ) -> dict[str, Any]: ...

    async def replace(
        self, body: dict[str, Any], *, elected: bool, deadline_s: float
    ) -> dict[str, Any]: ...


class Leadership:
    """One replica's part in the election."""

    def __init__(
        self,
        leases: Leases,
        *,
        name: str,
        namespace: str,
        identity: str,
        clock: Callable[[], float],
        today: Callable[[], datetime],
        settings: LeaseSettings | None = None,
    ) -> None:
        """identity: of this life of this replica, never used again.

        clock: monotonic seconds. today: the time that people will read in the Lease; nothing is decided by it.
        """
        self._leases = leases
        self._name = name
        self._namespace = namespace
        self._identity = identity
        self._clock = clock
        self._today = today
        self._settings = settings or LeaseSettings()
        self._leading_until = float("-inf")
        self._seen: tuple[object, ...] | None = None
        self._seen_at = clock()
        self._blind = False
        """The last look failed, and that was said."""
        self.term = 0
        """Counts the times that this replica began to lead: what it knew of before, another may have changed."""
        self.elected = asyncio.Event()
        """Set while this replica leads, as of the last look. `leads` is what counts."""
        self.lost = asyncio.Event()
        """Set while it does not."""
        self.lost.set()

    def leads(self) -> bool:
        """This replica may write now."""
        return self._clock() < self._leading_until

    async def run(self, rng: random.Random) -> None:
        """Takes and renews the lease for ever."""
        while True:
            await self.look()
            # Jitter, so that replicas started together don't go on asking at the same moment.
            await asyncio.sleep(self._settings.period_s * rng.uniform(0.8, 1.2))

    async def look(self) -> None:
        """Looks at the lease once: renews it, takes it if its time is over, or leaves it."""
        before = self._clock()
        try:
            async with asyncio.timeout(self._settings.request_s):
                held = await self._hold()
        except (ClusterError, TimeoutError) as error:
            # Nobody else can have it before our time ends: that stays as it is. On a Conflict the next look tells.
            told = self._blind or isinstance(error, Conflict)
            level = logging.DEBUG if told else logging.WARNING
            log.log(level, "lease not seen", extra={"lease": self._name, "error": str(error)})
            self._blind = True
        else:
            until = before + self._settings.renew_deadline_s
            if held and not self.leads():
                self.term += 1
            self._leading_until = until if held else float("-inf")
            self._blind = False
        self._tell(self.leads())

    async def release(self) -> None:
        """Gives the lease back, so that another need not wait for its end. Nothing may be written after."""
        led = self.leads()
        self._leading_until = float("-inf")
        self._tell(False)
        if not led:
            return
        try:
            async with asyncio.timeout(self._settings.request_s):
                lease = await self._leases.find(LEASE, self._name, self._namespace)
                if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                    lease["spec"] |= {"holderIdentity": "", "renewTime": self._stamp()}
                    await self._replace(lease)
        except (ClusterError, TimeoutError) as error:
            log.warning("lease not released", extra={"lease": self._name, "error": str(error)})

    async def _hold(self) -> bool:
        lease = await self._leases.find(LEASE, self._name, self._namespace)
        now = self._clock()
        if lease is None:
            lease = {
                "apiVersion": LEASE.api_version,
                "kind": LEASE.name,
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": self._claim({}),
            }
            await self._leases.create(lease, elected=True, deadline_s=self._settings.request_s)
            return True
        spec = lease.setdefault("spec", {})
        holder = spec.get("holderIdentity") or ""
        seen = (holder, spec.get("renewTime"), lease["metadata"].get("resourceVersion"))
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        # The holder may be of a version that holds longer than we would.
        lease_s = max(float(spec.get("leaseDurationSeconds") or 0), self._settings.lease_s)
        if holder not in ("", self._identity) and now < self._seen_at + lease_s:
            return False
        lease["spec"] = self._claim(spec)
        await self._replace(lease)
        return True

    def _claim(self, spec: dict[str, Any]) -> dict[str, Any]:
        ours = spec.get("holderIdentity") == self._identity
        stamp = self._stamp()
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self._settings.lease_s),
            "acquireTime": spec.get("acquireTime") or stamp if ours else stamp,
            "renewTime": stamp,
            "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (0 if ours else 1),
        }

    async def _replace(self, lease: dict[str, Any]) -> None:
        await self._leases.replace(lease, elected=True, deadline_s=self._settings.request_s)

    def _stamp(self) -> str:
        return self._today().strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def _tell(self, leading: bool) -> None:
        if leading == self.elected.is_set():
            return
        for event, happened in ((self.elected, leading), (self.lost, not leading)):
            if happened:
                event.set()
            else:
                event.clear()
        log.info(
            "leading" if leading else "not leading",
            extra={"lease": self._name, "identity": self._identity},
        )
