"""What schedulers said is kept while it stands, and somebody always says something."""

from __future__ import annotations

import pytest

from servingfleet_operator.asking import GRACE_S, Asking
from servingfleet_operator.errors import ClusterError, NotFound, Refused, Unreachable
from servingfleet_operator.reports import Answers

from .test_reconcile import DEMO, Rig, scheduler_pod

SAID = Answers((), ("demo-scheduler-a: as before",))


@pytest.fixture
async def rig() -> Rig:
    """A fleet whose scheduler is ready and has not answered for a while."""
    made = Rig()
    made.apply_fleet()
    made.api.put(scheduler_pod())
    made.watch()
    await made.reconcile()
    made.now += GRACE_S
    return made


def asking(rig: Rig) -> Asking:
    return rig.reconciler._asking


def answers(rig: Rig) -> Answers | None:
    return asking(rig).answers(DEMO, rig.store.scheduler_pods(DEMO), {})


@pytest.mark.parametrize("error", [Refused("no right"), NotFound("gone"), Unreachable("away")])
async def test_a_token_that_can_t_be_had_is_an_answer_too(rig: Rig, error: ClusterError) -> None:
    rig.api.refuse(verb="token", kind="operator", error=error)
    await asking(rig)._one(DEMO)
    assert answers(rig) == Answers((), (str(error),))


async def test_an_api_server_that_is_away_takes_back_nothing_that_was_said(rig: Rig) -> None:
    asking(rig)._answers[DEMO] = SAID
    rig.api.refuse(verb="token", kind="operator", error=Unreachable("away"))
    with pytest.raises(Unreachable):
        await asking(rig)._one(DEMO)
    assert answers(rig) == SAID


async def test_schedulers_are_told_at_once_when_a_pod_begins_or_ends_to_drain(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asking(rig)
    queued: list[object] = []
    monkeypatch.setattr(asked._queue, "add", queued.append)
    pods = rig.store.scheduler_pods(DEMO)
    for draining in ({"u": False}, {"u": True}, {"u": True, "v": False}, {"u": False}, {}):
        asked.answers(DEMO, pods, draining)
    assert queued == [DEMO, DEMO], "when u began, and when it ended"


async def test_with_the_lead_goes_what_was_said(rig: Rig) -> None:
    asking(rig)._answers[DEMO] = SAID
    rig.api.leads = False
    assert await asking(rig)._one(DEMO) is None
    assert (asking(rig)._asked, asking(rig)._answers) == ({}, {})


async def test_nothing_is_kept_of_fleets_that_are_gone(rig: Rig) -> None:
    asking(rig)._answers[DEMO] = SAID
    asking(rig)._asked.clear()
    asking(rig).keep_only(())
    assert asking(rig)._answers == {}
