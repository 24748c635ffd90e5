"""Events tell of transitions only, and a condition that flaps writes no more than one in five minutes."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from servingfleet_operator.cluster import Cluster
from servingfleet_operator.errors import Refused
from servingfleet_operator.events import QUIET_S, SERIES_S, Events, Happening, happenings
from servingfleet_operator.metrics import Metrics

from .api import FakeCluster, Object

FLEET = {"metadata": {"name": "demo", "namespace": "serving", "uid": "u-1"}}
DOWN = Happening("SchedulerNotReady", "No scheduler pod is ready.", good=False)


def condition(kind: str, status: str, reason: str = "Because") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": f"{reason}."}


def test_a_status_that_changes_is_told_for_better_and_for_worse() -> None:
    down, up = condition("Ready", "False", "Down"), condition("Ready", "True", "Up")
    assert happenings([down], [up]) == [Happening("Up", "Up.", good=True)]
    assert happenings([up], [down]) == [Happening("Down", "Down.", good=False)]
    assert happenings([up], [up]) == []


def test_another_reason_is_told_only_while_something_is_wrong() -> None:
    one, two = (condition("Ready", "False", reason) for reason in ("One", "Two"))
    assert [each.reason for each in happenings([one], [two])] == ["Two"]
    one, two = (condition("Ready", "True", reason) for reason in ("One", "Two"))
    assert happenings([one], [two]) == []


def test_what_gets_well_by_waiting_is_no_news_of_a_new_fleet() -> None:
    starting = condition("SchedulerAvailable", "False", "Starting")
    assert happenings([], [starting]) == []
    assert [each.reason for each in happenings([], [condition("Reconciled", "False", "No")])] == [
        "No"
    ]
    assert happenings([starting], [condition("SchedulerAvailable", "True", "Available")])


def test_what_can_t_be_told_is_no_news_and_well_after_it_neither() -> None:
    unknown = condition("StreamsConformant", "Unknown")
    assert happenings([condition("StreamsConformant", "True")], [unknown]) == []
    assert happenings([unknown], [condition("StreamsConformant", "True")]) == []
    assert happenings([unknown], [condition("StreamsConformant", "False")])


def test_exposed_events_are_bad_where_the_condition_is_true() -> None:
    closed, opened = (condition("EventsExposed", status) for status in ("False", "True"))
    assert [each.good for each in happenings([closed], [opened])] == [False]
    assert [each.good for each in happenings([opened], [closed])] == [True]


@dataclass
class Rig:
    api: FakeCluster = field(default_factory=FakeCluster)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.metrics = Metrics()
        self.events = Events(
            cast("Cluster", self.api),
            self.metrics,
            reporter="pod-0",
            clock=lambda: self.now,
            today=lambda: datetime.fromtimestamp(self.now, UTC),
        )

    async def post(self, happening: Happening = DOWN) -> None:
        await self.events.post(FLEET, happening)

    def made(self) -> list[Object]:
        return [body for (kind, _, _), body in self.api.objects.items() if kind == "Event"]

    def counted(self, outcome: str) -> float | None:
        return self.metrics.registry.get_sample_value(
            "servingfleet_operator_events_total", {"outcome": outcome}
        )


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_an_event_says_about_whom_by_whom_and_why(rig: Rig) -> None:
    await rig.post()
    [event] = rig.made()
    assert event["regarding"]["uid"] == "u-1"
    assert event["reportingInstance"] == "pod-0"
    assert (event["type"], event["reason"]) == ("Warning", "SchedulerNotReady")
    assert event["note"] == DOWN.note


async def test_the_same_is_not_told_again_for_five_minutes(rig: Rig) -> None:
    for _ in range(50):
        await rig.post()
        rig.now += QUIET_S / 60
    assert len(rig.api.writes()) == 1
    assert rig.counted("held_back") == 49


async def test_another_reason_or_fleet_is_told_at_once(rig: Rig) -> None:
    await rig.post()
    await rig.post(DOWN._replace(reason="Other"))
    await rig.events.post({"metadata": {**FLEET["metadata"], "uid": "u-2"}}, DOWN)
    assert len(rig.made()) == 3


async def test_what_recurs_counts_on_the_event_that_is_there(rig: Rig) -> None:
    await rig.post()
    await rig.post()
    rig.now += QUIET_S
    await rig.post()
    [event] = rig.made()
    assert event["series"] == {"count": 3, "lastObservedTime": "1970-01-01T00:05:00.000000Z"}


async def test_an_event_too_old_to_be_there_is_made_anew(rig: Rig) -> None:
    await rig.post()
    rig.now += SERIES_S
    await rig.post()
    assert len(rig.made()) == 2


async def test_an_event_that_is_refused_is_counted_and_hinders_nothing(rig: Rig) -> None:
    rig.api.refuse(verb="create", kind="Event", error=Refused("events is forbidden"))
    await rig.post()
    assert rig.counted("refused") == 1
    rig.api.fails = lambda verb, kind, name: None
    await rig.post()
    assert len(rig.made()) == 1


async def test_a_long_message_is_cut_to_what_the_api_server_takes(rig: Rig) -> None:
    await rig.post(DOWN._replace(note="x" * 5000))
    [event] = rig.made()
    assert len(event["note"]) == 1024
