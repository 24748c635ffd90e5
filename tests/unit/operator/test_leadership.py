"""At most one replica leads at any moment, by monotonic clocks that are never compared."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from servingfleet_operator.errors import Conflict, Unreachable
from servingfleet_operator.kinds import Kind
from servingfleet_operator.leadership import Leadership, LeaseSettings

SETTINGS = LeaseSettings(lease_s=15, renew_deadline_s=10, period_s=2, request_s=5)
START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Server:
    """The lease as an API server keeps it."""

    clock: Clock
    lease: dict[str, Any] | None = None
    version: int = 0
    away: bool = False
    delay_s: float = 0.0
    """Clock time that each request takes."""
    writes: list[str] = field(default_factory=list)

    async def find(self, kind: Kind, name: str, namespace: str = "") -> dict[str, Any] | None:
        self._answer()
        return copy.deepcopy(self.lease)

    async def create(
        self, body: dict[str, Any], *, elected: bool, deadline_s: float
    ) -> dict[str, Any]:
        self._answer()
        if self.lease is not None:
            raise Conflict("there is one already")
        return self._keep(body)

    async def replace(
        self, body: dict[str, Any], *, elected: bool, deadline_s: float
    ) -> dict[str, Any]:
        self._answer()
        if body["metadata"].get("resourceVersion") != str(self.version):
            raise Conflict("the object has been modified")
        return self._keep(body)

    def _answer(self) -> None:
        if self.away:
            raise Unreachable("no answer")
        self.clock.now += self.delay_s

    def _keep(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        self.writes.append(body["spec"]["holderIdentity"])
        return copy.deepcopy(self.lease)

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        return dict(self.lease["spec"])


def replica(server: Server, identity: str, clock: Clock | None = None) -> Leadership:
    own = clock or server.clock
    return Leadership(
        server,
        name="operator",
        namespace="system",
        identity=identity,
        clock=own,
        today=lambda: START + timedelta(seconds=own.now),
        settings=SETTINGS,
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> Server:
    return Server(clock)


async def test_the_first_that_looks_leads_and_the_second_does_not(server: Server) -> None:
    one, two = replica(server, "one"), replica(server, "two")
    await one.look()
    await two.look()
    assert one.leads()
    assert not two.leads()
    assert server.spec["holderIdentity"] == "one"
    assert server.spec["leaseTransitions"] == 1


async def test_a_lease_that_is_renewed_is_never_taken(server: Server, clock: Clock) -> None:
    one, two = replica(server, "one"), replica(server, "two")
    for _ in range(100):
        await one.look()
        await two.look()
        assert one.leads()
        assert not two.leads()
        clock.now += 2


async def test_a_silent_holder_loses_the_lease_after_its_length(
    server: Server, clock: Clock
) -> None:
    one, two = replica(server, "one"), replica(server, "two")
    await one.look()
    await two.look()
    clock.now += 14.9
    await two.look()
    assert not two.leads()
    clock.now += 0.2
    await two.look()
    assert two.leads()
    assert server.spec["holderIdentity"] == "two"
    assert server.spec["leaseTransitions"] == 2


async def test_a_holder_that_thaws_finds_its_time_gone_before_anybody_else_wrote(
    server: Server, clock: Clock
) -> None:
    one, two = replica(server, "one"), replica(server, "two")
    await one.look()
    await two.look()
    clock.now += 10.0
    assert not one.leads(), "five seconds before the other may lead"
    clock.now += 5.1
    await two.look()
    assert two.leads()
    assert not one.leads()
    await one.look()
    assert not one.leads()
    assert server.spec["holderIdentity"] == "two"


async def test_the_holder_s_time_counts_from_before_its_request(
    server: Server, clock: Clock
) -> None:
    server.delay_s = 2.0
    one = replica(server, "one")
    await one.look()
    assert clock.now == 4.0
    clock.now = 9.9
    assert one.leads()
    clock.now = 10.0
    assert not one.leads()


async def test_a_holder_that_can_t_renew_leads_to_its_deadline_and_no_longer(
    server: Server, clock: Clock
) -> None:
    one = replica(server, "one")
    await one.look()
    server.away = True
    for _ in range(4):
        clock.now += 2
        await one.look()
    assert one.leads()
    assert one.elected.is_set()
    clock.now += 2
    await one.look()
    assert not one.leads()
    assert not one.elected.is_set()


async def test_it_leads_again_once_the_server_is_back_and_nobody_took_the_lease(
    server: Server, clock: Clock
) -> None:
    one = replica(server, "one")
    await one.look()
    server.away = True
    clock.now += 12
    await one.look()
    server.away = False
    clock.now += 2
    await one.look()
    assert one.leads()
    assert server.spec["leaseTransitions"] == 1, "it was its lease all the time"


async def test_the_clock_on_the_wall_decides_nothing(server: Server) -> None:
    one = replica(server, "one")
    await one.look()
    ahead = replica(server, "two", Clock(1_000_000.0))
    await ahead.look()
    assert not ahead.leads(), "it has only just seen the lease"


async def test_of_two_that_reach_for_it_at_once_one_gets_it(server: Server, clock: Clock) -> None:
    old, one, two = (replica(server, name) for name in ("old", "one", "two"))
    await old.look()
    await one.look()
    await two.look()
    clock.now += 20
    await asyncio.gather(one.look(), two.look())
    assert [one.leads(), two.leads()].count(True) == 1
    assert server.writes.count("one") + server.writes.count("two") == 1


async def test_somebody_who_touches_the_lease_does_not_unseat_its_holder(
    server: Server, clock: Clock
) -> None:
    one = replica(server, "one")
    await one.look()
    found = server.find

    async def touched(kind: Kind, name: str, namespace: str = "") -> dict[str, Any] | None:
        seen = await found(kind, name, namespace)
        server.version += 1
        assert server.lease is not None
        server.lease["metadata"]["resourceVersion"] = str(server.version)
        return seen

    server.find = touched  # type: ignore[method-assign]
    clock.now += 2
    await one.look()
    assert one.leads()


async def test_each_time_it_begins_to_lead_is_a_term_of_its_own(
    server: Server, clock: Clock
) -> None:
    one = replica(server, "one")
    for _ in range(3):
        await one.look()
        clock.now += 2
    assert one.term == 1
    clock.now += 9
    await one.look()
    assert one.term == 2


async def test_a_released_lease_is_taken_at_the_next_look(server: Server) -> None:
    one, two = replica(server, "one"), replica(server, "two")
    await one.look()
    await two.look()
    await one.release()
    assert not one.leads()
    await two.look()
    assert two.leads()


async def test_a_replica_that_does_not_lead_releases_nothing(server: Server) -> None:
    one, two = replica(server, "one"), replica(server, "two")
    await one.look()
    await two.look()
    await two.release()
    assert server.spec["holderIdentity"] == "one"


async def test_a_holder_that_says_it_needs_longer_is_left_longer(
    server: Server, clock: Clock
) -> None:
    one, two = replica(server, "one"), replica(server, "two")
    await one.look()
    assert server.lease is not None
    server.lease["spec"]["leaseDurationSeconds"] = 60
    await two.look()
    clock.now += 59
    await two.look()
    assert not two.leads()
    clock.now += 2
    await two.look()
    assert two.leads()


async def test_the_lease_tells_people_who_holds_it_since_when(server: Server, clock: Clock) -> None:
    one = replica(server, "one")
    await one.look()
    clock.now += 2
    await one.look()
    assert server.spec == {
        "holderIdentity": "one",
        "leaseDurationSeconds": 15,
        "acquireTime": "2026-01-01T00:00:00.000000Z",
        "renewTime": "2026-01-01T00:00:02.000000Z",
        "leaseTransitions": 1,
    }
