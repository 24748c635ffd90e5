from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from google.rpc import code_pb2

from servingfleet_scheduler.access import EXPLAIN, REPORT, ROUTE, Caller
from servingfleet_scheduler.clock import Clock
from servingfleet_scheduler.errors import AccessRefused
from servingfleet_scheduler.gate import Gate
from servingfleet_scheduler.settings import AccessSettings

from .reviewers import ACCESS, FakeReviews, pod
from .test_access import jwt

TOKEN = "token of jane"
ROUTE_METHOD = "/servingfleet.v1.Router/Route"
EXPLAIN_METHOD = "/servingfleet.v1.Router/Explain"


class FakeClock(Clock):
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A gate, whom it asks, and what time it is."""

    def __init__(self, settings: AccessSettings = ACCESS) -> None:
        self.clock = FakeClock()
        self.reviews = FakeReviews()
        self.reviews.callers[TOKEN] = Caller("jane")
        self.reviews.rights["jane"] = {ROUTE, REPORT}
        self.gate = Gate(settings, self.reviews, self.clock)

    async def call(self, token: str = TOKEN, method: str = ROUTE_METHOD) -> str:
        """The reason of the refusal; "" if there is none."""
        metadata = [("authorization", f"Bearer {token}")] if token else []
        try:
            await self.gate.check(method, metadata)
        except AccessRefused as refused:
            return refused.reason
        return ""

    async def settled(self) -> None:
        """What is asked in the background has been answered."""
        async with asyncio.timeout(5):
            while running := list(self.gate._running.values()):
                await asyncio.gather(*running, return_exceptions=True)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    await made.gate.close()


async def test_a_caller_with_the_right_is_let_in(rig: Rig) -> None:
    assert await rig.call() == ""


async def test_a_caller_without_the_right_is_told_which_to_grant(rig: Rig) -> None:
    with pytest.raises(AccessRefused) as refused:
        await rig.gate.check(EXPLAIN_METHOD, [("authorization", f"Bearer {TOKEN}")])
    assert (refused.value.code, refused.value.reason) == (code_pb2.PERMISSION_DENIED, "NOT_ALLOWED")
    assert refused.value.metadata == {"verb": "create", "subresource": "explain"}
    assert "jane may not create servingfleets/explain of fleet llm/demo" in refused.value.message


async def test_a_call_without_a_token_is_refused_without_asking(rig: Rig) -> None:
    assert await rig.call(token="") == "NO_CREDENTIAL"
    assert not rig.reviews.asked


async def test_a_token_that_nobody_knows_is_refused(rig: Rig) -> None:
    assert await rig.call(token="made up") == "BAD_CREDENTIAL"


async def test_a_method_that_nobody_thought_of_is_refused(rig: Rig) -> None:
    assert await rig.call(method="/servingfleet.v1.Router/New") == "UNKNOWN_METHOD"
    assert await rig.call(method="/grpc.health.v1.Health/Check", token="") == ""


async def test_clients_need_no_token_where_the_fleet_asks_for_none() -> None:
    rig = Rig(replace(ACCESS, client_tokens=False))
    assert await rig.call(token="") == ""
    assert await rig.call(token="", method=EXPLAIN_METHOD) == "NO_CREDENTIAL"
    assert await rig.call(token="", method="/servingfleet.v1.Fleet/GetReuse") == "NO_CREDENTIAL"


async def test_refusals_are_counted_by_reason(rig: Rig) -> None:
    await rig.call(token="")
    await rig.call(token="made up")
    await rig.call(token="made up")
    assert rig.gate.refusals == {"NO_CREDENTIAL": 1, "BAD_CREDENTIAL": 2}
    assert rig.gate.reviews == {("token", "no"): 1}


async def test_a_verdict_is_kept_for_a_minute_and_not_longer(rig: Rig) -> None:
    await rig.call()
    rig.reviews.callers.clear()
    rig.clock.now += 59.0
    assert await rig.call() == ""
    await rig.settled()
    assert await rig.call() == "BAD_CREDENTIAL"


async def test_a_right_withdrawn_is_noticed_within_a_minute(rig: Rig) -> None:
    await rig.call()
    rig.reviews.rights.clear()
    rig.clock.now += 60.0
    assert await rig.call() == "NOT_ALLOWED"


async def test_a_right_granted_is_noticed_soon(rig: Rig) -> None:
    assert await rig.call(method=EXPLAIN_METHOD) == "NOT_ALLOWED"
    rig.reviews.rights["jane"].add(EXPLAIN)
    assert await rig.call(method=EXPLAIN_METHOD) == "NOT_ALLOWED"
    rig.clock.now += 10.0
    assert await rig.call(method=EXPLAIN_METHOD) == ""


async def test_a_verdict_does_not_outlive_its_token(rig: Rig) -> None:
    token = jwt(exp=1_020)
    rig.reviews.callers[token] = Caller("jane")
    assert await rig.call(token) == ""
    del rig.reviews.callers[token]
    rig.clock.now += 20.0
    assert await rig.call(token) == "BAD_CREDENTIAL"


async def test_many_calls_with_one_token_ask_once(rig: Rig) -> None:
    rig.reviews.answering.clear()
    calls = [asyncio.create_task(rig.call()) for _ in range(50)]
    await asyncio.sleep(0)
    rig.reviews.answering.set()
    assert await asyncio.gather(*calls) == [""] * 50
    assert set(rig.reviews.asked.values()) == {1}


async def test_a_caller_that_gives_up_does_not_take_the_answer_from_others(rig: Rig) -> None:
    rig.reviews.answering.clear()
    first, second = (asyncio.create_task(rig.call()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    rig.reviews.answering.set()
    assert await second == ""


async def test_a_steady_caller_never_waits_for_the_api_server(rig: Rig) -> None:
    await rig.call()
    rig.clock.now += 31.0
    rig.reviews.answering.clear()
    async with asyncio.timeout(5):
        assert await rig.call() == ""
    rig.reviews.answering.set()
    await rig.settled()
    rig.clock.now += 40.0
    before = rig.reviews.asked[TOKEN]
    assert await rig.call() == ""
    assert before == 2


async def test_known_callers_are_let_in_while_the_api_server_is_away(rig: Rig) -> None:
    await rig.call()
    rig.reviews.away = True
    rig.clock.now += 359.0
    assert await rig.call() == ""
    rig.clock.now += 1.0
    assert await rig.call() == "REVIEW_UNAVAILABLE"


async def test_unknown_callers_are_told_to_come_again_while_it_is_away(rig: Rig) -> None:
    rig.reviews.away = True
    with pytest.raises(AccessRefused) as refused:
        await rig.gate.check(ROUTE_METHOD, [("authorization", f"Bearer {TOKEN}")])
    assert (refused.value.code, refused.value.reason) == (
        code_pb2.UNAVAILABLE,
        "REVIEW_UNAVAILABLE",
    )
    assert refused.value.retry_s
    rig.reviews.away = False
    assert await rig.call() == ""


async def test_nobody_who_is_known_waits_for_an_api_server_that_is_away(rig: Rig) -> None:
    await rig.call()
    rig.reviews.away = True
    rig.clock.now += 61.0
    assert await rig.call() == ""
    rig.reviews.answering.clear()
    rig.clock.now += 100.0
    async with asyncio.timeout(5):
        assert await rig.call() == ""
    rig.reviews.answering.set()
    await rig.settled()


async def test_an_api_server_that_is_away_is_not_asked_at_every_call(rig: Rig) -> None:
    await rig.call()
    rig.reviews.away = True
    rig.clock.now += 61.0
    for _ in range(100):
        assert await rig.call() == ""
        await rig.settled()
    assert rig.reviews.asked[TOKEN] == 2
    rig.clock.now += ACCESS.retry_s
    await rig.call()
    await rig.settled()
    assert rig.reviews.asked[TOKEN] == 3


async def test_when_it_is_back_it_is_believed_again(rig: Rig) -> None:
    await rig.call()
    rig.reviews.away = True
    rig.clock.now += 61.0
    await rig.call()
    rig.reviews.away = False
    rig.reviews.callers.clear()
    rig.clock.now += ACCESS.retry_s
    await rig.call()
    await rig.settled()
    assert await rig.call() == "BAD_CREDENTIAL"


async def test_its_absence_is_logged_once_and_never_with_a_token(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    rig.reviews.away = True
    await rig.call()
    await rig.call()
    rig.reviews.away = False
    await rig.call()
    events = [record.getMessage() for record in caplog.records if "gate" in record.name]
    assert events == ["api server away", "api server back"]
    assert not any(TOKEN in str(vars(record)) for record in caplog.records)


async def test_too_many_reviews_at_once_turn_unknown_callers_away() -> None:
    rig = Rig(replace(ACCESS, max_reviews=2))
    await rig.call()
    rig.reviews.answering.clear()
    waiting = [asyncio.create_task(rig.call(token=f"made up {number}")) for number in range(2)]
    await asyncio.sleep(0)
    assert await rig.call(token="one more") == "REVIEW_UNAVAILABLE"
    assert await rig.call() == ""
    rig.reviews.answering.set()
    assert await asyncio.gather(*waiting) == ["BAD_CREDENTIAL"] * 2


async def test_a_defect_is_no_refusal(rig: Rig) -> None:
    rig.reviews.defect = True
    with pytest.raises(ZeroDivisionError):
        await rig.gate.check(ROUTE_METHOD, [("authorization", f"Bearer {TOKEN}")])


async def test_closing_ends_what_is_asked(rig: Rig) -> None:
    rig.reviews.answering.clear()
    call = asyncio.create_task(rig.call())
    await asyncio.sleep(0)
    await rig.gate.close()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert rig.reviews.closed


async def test_a_relay_proves_its_pod(rig: Rig) -> None:
    rig.reviews.callers["pod token"] = pod("uid-1")
    assert (await rig.gate.relay("pod token")).pod_uid == "uid-1"


async def test_a_clients_token_opens_no_relays_stream_and_a_relays_no_clients_call(
    rig: Rig,
) -> None:
    audience = rig.gate.settings.audience
    for token, made_for in (("client's", audience), ("relay's", f"{audience}/relay")):
        rig.reviews.callers[token] = pod("uid-1")
        rig.reviews.audiences[token] = {made_for}
    assert (await rig.gate.relay("relay's")).pod_uid == "uid-1"
    with pytest.raises(AccessRefused, match=r"for the audience servingfleet\.dev/llm/demo/relay"):
        await rig.gate.relay("client's")
    assert await rig.call("relay's") == "BAD_CREDENTIAL"


@pytest.mark.parametrize(
    ("caller", "reason"),
    [(Caller("jane"), "NOT_A_POD"), (pod("uid-1", namespace="other"), "OTHER_NAMESPACE")],
)
async def test_who_is_no_pod_of_the_fleets_is_no_relay(
    rig: Rig, caller: Caller, reason: str
) -> None:
    rig.reviews.callers["a token"] = caller
    with pytest.raises(AccessRefused) as refused:
        await rig.gate.relay("a token")
    assert refused.value.reason == reason
    assert rig.gate.refusals == {reason: 1}
