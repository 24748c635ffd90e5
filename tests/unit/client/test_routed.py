"""What is reported of a request, and when."""

from __future__ import annotations

import asyncio
import logging

import pytest

from servingfleet_client import Routed, RouteResponse, Target
from servingfleet_client.errors import Facts, Unavailable
from servingfleet_client.requests import Stage
from servingfleet_client.routed import MAX_WAITING, Deliveries, Failures
from servingfleet_protos.v1.routing_pb2 import Fallback, ReportRequest

DECISION = RouteResponse(
    decision_id="d",
    target=Target(replica="a", rank=1),
    endpoint="a:1",
    headers={"rank": "1"},
    body={"dp_rank": "1"},
    fallbacks=[
        Fallback(
            target=Target(replica="b"),
            endpoint="b:1",
            headers={"rank": "0"},
            body={"dp_rank": "0"},
        )
    ],
)
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}


class Told:
    """Collects reports; time stands still unless it is moved."""

    def __init__(self, failures: Failures = Exception) -> None:
        self.now = 100.0
        self.reports: list[ReportRequest] = []
        self.routed = Routed(DECISION, "r", self.reports.append, lambda: self.now, failures)

    @property
    def stages(self) -> list[str]:
        return [Stage.Name(report.stage).removeprefix("STAGE_") for report in self.reports]


def test_a_request_is_reported_from_start_to_end() -> None:
    told = Told()
    with told.routed as routed:
        routed.started()
        told.now += 0.5
        routed.first_token()
        told.now += 1
        routed.first_token()
        routed.finished(USAGE)
    assert told.stages == ["STARTED", "FIRST_TOKEN", "FINISHED"]
    assert [report.decision_id for report in told.reports] == ["d"] * 3
    assert [report.ttft_s for report in told.reports[1:]] == [0.5, 0.5]
    last = told.reports[-1]
    assert (last.prompt_tokens, last.cached_tokens, last.output_tokens) == (3, 1, 2)
    assert not any(report.HasField("ran_on") for report in told.reports)


def test_an_answer_that_came_whole_tells_no_time_to_first_token() -> None:
    told = Told()
    told.routed.finished(USAGE)
    assert not told.reports[0].HasField("ttft_s")


def test_a_usage_for_several_prompts_says_so() -> None:
    told = Told()
    told.routed.finished(USAGE, prompts=3)
    assert told.reports[0].prompts_in_usage == 3


def test_a_block_without_an_end_is_an_abort() -> None:
    told = Told()
    with told.routed:
        pass
    assert told.stages == ["ABORTED"]


@pytest.mark.parametrize(
    ("failures", "error", "stage"),
    [
        (Exception, OSError(), "FAILED"),
        (Exception, asyncio.CancelledError(), "ABORTED"),
        (Exception, KeyboardInterrupt(), "ABORTED"),
        (OSError, ConnectionError(), "FAILED"),
        (OSError, KeyError(), "ABORTED"),
        ((OSError, KeyError), KeyError(), "FAILED"),
    ],
)
def test_an_exception_ends_the_request_by_whose_it_is(
    failures: Failures, error: BaseException, stage: str
) -> None:
    told = Told(failures)
    with pytest.raises(type(error)), told.routed:
        raise error
    assert told.stages == [stage]


def test_the_first_end_counts() -> None:
    told = Told()
    told.routed.finished(USAGE)
    told.routed.aborted()
    told.routed.first_token()
    assert not told.routed.fall_back()
    with pytest.raises(OSError, match="user"), told.routed:
        raise OSError("the user's connection, while the last bytes were sent")
    assert told.stages == ["FINISHED"]


def test_a_fallback_is_where_it_ran_and_its_clock_starts_anew() -> None:
    told = Told()
    with told.routed as routed:
        assert (routed.endpoint, routed.headers) == ("a:1", {"rank": "1"})
        assert routed.body == {"dp_rank": 1}
        told.now += 5
        assert routed.fall_back()
        assert (routed.endpoint, routed.headers) == ("b:1", {"rank": "0"})
        assert routed.body == {"dp_rank": 0}
        told.now += 1
        routed.first_token()
        assert not routed.fall_back()
        routed.finished(USAGE)
    assert told.stages == ["STARTED", "FIRST_TOKEN", "FINISHED"]
    assert {report.ran_on.replica for report in told.reports} == {"b"}
    # In each: any of them may be the one that arrives.
    assert [[(t.replica, t.rank) for t in report.failed_on] for report in told.reports] == [
        [("a", 1)]
    ] * 3
    assert told.reports[-1].ttft_s == 1


def test_lost_reports_are_counted_each_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    deliveries = Deliveries()
    assert deliveries.room(MAX_WAITING - 1, closed=False)
    for _ in range(3):
        deliveries.failed(Unavailable("gone", Facts(reason="OWNER_SILENT")))
    assert not deliveries.room(MAX_WAITING, closed=False)
    assert not deliveries.room(0, closed=True)
    assert deliveries.lost == {"OWNER_SILENT": 3, "TOO_MANY": 1, "CLOSED": 1}
    assert [record.message for record in caplog.records] == ["reports are lost"]
    deliveries.taken()
    deliveries.taken()
    assert [record.message for record in caplog.records[1:]] == ["reports are taken again"]
