from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servingfleet_operator.conditions import CONDITIONS
from servingfleet_operator.engines.facts import Finding
from servingfleet_operator.observed import Observed, Pod, Relay, SchedulerReport, Trouble
from servingfleet_operator.status import FIGURES_EVERY_S, MOST_REPLICAS, refused, status, write_in
from servingfleet_protos.v1 import common_pb2, fleet_pb2

from .observing import deployment, observed, pod, report, stream, sums
from .pods import fleet
from .schema import STATUS, problems

PROPERTY = settings(max_examples=40, deadline=None)
NOW = datetime(2026, 11, 29, 17, 30, tzinfo=UTC)

_findings = st.sampled_from(
    [(), (Finding("EventsOff", "x" * 3000),), (Finding("NoReplay", "no replay", severe=False),)]
)
_text = st.sampled_from(["", "gap: expected 41, got 44", "y" * 5000])


@st.composite
def _pods(draw: st.DrawFn) -> list[Pod]:
    return [
        pod(
            number,
            ready=draw(st.booleans()),
            serving=draw(st.booleans()),
            relay=draw(st.sampled_from(Relay)),
            relay_reason=draw(_text),
            findings=draw(_findings),
            exposed=draw(_text),
            also=draw(st.sampled_from([(), ("pool b",)])),
        )
        for number in range(draw(st.sampled_from([0, 1, 3, 63, 64, 65, 90])))
    ]


@st.composite
def _reports(draw: st.DrawFn, pods: list[Pod]) -> list[SchedulerReport] | None:
    if draw(st.booleans()):
        return draw(st.sampled_from([None, []]))
    states = st.sampled_from(common_pb2.StreamState.values())
    return [
        report(
            [stream(each, (draw(states), draw(_text)), blocks=7) for each in pods[:5]],
            name=f"demo-scheduler-{number}",
            total=sums(draw(st.integers(0, 60)), decisions=draw(st.integers(0, 100)), joined=0),
            set_aside={"late": draw(st.integers(0, 100))},
        )
        for number in range(draw(st.integers(1, 2)))
    ]


@st.composite
def everything(draw: st.DrawFn) -> Observed:
    pods = draw(_pods())
    return observed(
        deployment=draw(st.sampled_from([None, deployment(0), deployment(2), deployment(1)])),
        pods=pods,
        reports=draw(_reports(pods)),
        unanswered=draw(st.sampled_from([(), ("demo-scheduler-b: deadline exceeded",)])),
        troubles=draw(st.sampled_from([(), (Trouble("ForeignObject", "z" * 2000),)])),
    )


def condition(of: dict[str, Any], kind: str) -> dict[str, Any]:
    (found,) = (each for each in of["conditions"] if each["type"] == kind)
    return dict(found)


@PROPERTY
@given(everything())
def test_whatever_is_observed_the_api_server_takes_the_status(seen: Observed) -> None:
    made = status({}, seen, NOW)
    assert list(problems(made, STATUS)) == []
    assert [each["type"] for each in made["conditions"]] == list(CONDITIONS)
    assert len(made["replicas"]) + made.get("replicasOmitted", 0) == len(seen.pods)
    assert len(made["replicas"]) <= MOST_REPLICAS


@PROPERTY
@given(everything(), st.timedeltas(timedelta(0), timedelta(days=400)))
def test_what_has_not_changed_is_not_written_again(seen: Observed, later: timedelta) -> None:
    first = status({}, seen, NOW)
    second = status(first, seen, NOW + later)
    assert write_in(first, second, NOW + later) is None
    assert {**second, "observedAt": first["observedAt"]} == first


@PROPERTY
@given(everything(), everything())
def test_a_transition_is_dated_only_when_the_status_changes(
    before: Observed, after: Observed
) -> None:
    later = NOW + timedelta(hours=1)
    first = status({}, before, NOW)
    second = status(first, after, later)
    for kind in CONDITIONS:
        old, new = condition(first, kind), condition(second, kind)
        moved = old["status"] != new["status"]
        assert new["lastTransitionTime"] == (
            "2026-11-29T18:30:00Z" if moved else "2026-11-29T17:30:00Z"
        )


@PROPERTY
@given(everything())
def test_the_order_in_which_things_were_seen_does_not_matter(seen: Observed) -> None:
    turned = Observed(
        fleet=seen.fleet,
        deployment=seen.deployment,
        pods=seen.pods[::-1],
        reports=None if seen.reports is None else seen.reports[::-1],
        unanswered=seen.unanswered,
        troubles=seen.troubles,
    )
    assert status({}, turned, NOW) == status({}, seen, NOW)


def test_a_changed_condition_is_written_at_once() -> None:
    first = status({}, observed(), NOW)
    later = NOW + timedelta(seconds=1)
    worse = status(first, observed(pods=[pod(relay=Relay.NOT_INJECTED)]), later)
    assert write_in(first, worse, later) == 0


def test_figures_wait_for_their_turn() -> None:
    first = status({}, observed(), NOW)
    more = observed(reports=[report([stream(pod(), blocks=100)], total=sums(150))])
    later = NOW + timedelta(seconds=4)
    second = status(first, more, later)
    assert write_in(first, second, later) == FIGURES_EVERY_S - 4
    assert write_in(first, second, NOW + timedelta(seconds=FIGURES_EVERY_S)) == 0
    # A clock that was set back does not hold them up.
    assert write_in(first, second, NOW - timedelta(hours=1)) == 0


def test_another_message_for_the_same_reason_is_no_hurry() -> None:
    def lost(sequence: int) -> Observed:
        state = (common_pb2.STREAM_STATE_UNPROVEN, f"gap: expected {sequence}")
        return observed(reports=[report([stream(pod(), state)], total=sums(100))])

    first = status({}, lost(41), NOW)
    assert write_in(first, status(first, lost(42), NOW), NOW) == FIGURES_EVERY_S


def test_a_new_generation_is_acknowledged_at_once() -> None:
    """`kubectl wait` believes a condition only of the present generation."""
    first = status({}, observed(), NOW)
    newer = observed(fleet=msgspec.structs.replace(fleet(), generation=2))
    second = status(first, newer, NOW)
    assert second["observedGeneration"] == 2
    assert all(each["observedGeneration"] == 2 for each in second["conditions"])
    assert write_in(first, second, NOW) == 0


@pytest.mark.parametrize(
    "previous",
    [
        {},
        {"conditions": None},
        {"conditions": [{"type": "Ready"}]},
        {"observedAt": 5},
        {"observedAt": "x"},
    ],
)
def test_a_status_that_somebody_else_wrote_is_no_obstacle(previous: dict[str, Any]) -> None:
    made = status(previous, observed(), NOW)
    assert list(problems(made, STATUS)) == []
    assert write_in(previous, made, NOW) == 0


def test_the_status_of_a_fleet_is_as_people_read_it() -> None:
    pods = [pod(number, node=f"gpu-{number}") for number in range(3)]
    lost = (common_pb2.STREAM_STATE_UNPROVEN, "gap: expected 1882, got 1910")
    made = status(
        {},
        observed(
            pods=pods,
            reports=[
                report(
                    [
                        stream(pods[0], blocks=48_213),
                        stream(pods[1], blocks=1_024),
                        stream(pods[2], lost),
                    ],
                    total=sums(100, decisions=110),
                )
            ],
        ),
        NOW,
    )
    del made["conditions"]
    assert made == {
        "observedAt": "2026-11-29T17:30:00Z",
        "observedGeneration": 1,
        "replicas": [
            {
                "name": "vllm-2",
                "node": "gpu-2",
                "pool": "main",
                "state": "Unproven",
                "stateReason": "gap: expected 1882, got 1910",
                "storedBlocks": 0,
            },
            {
                "name": "vllm-0",
                "node": "gpu-0",
                "pool": "main",
                "state": "Live",
                "storedBlocks": 48_213,
            },
            {
                "name": "vllm-1",
                "node": "gpu-1",
                "pool": "main",
                "state": "Live",
                "storedBlocks": 1_024,
            },
        ],
        "reuse": {
            "agreedTokens": 54_050,
            "decisions": 110,
            "erroneousCredit": "0.37%",
            "erroneousCreditInterval": "0.15% - 0.59% (95%)",
            "erroneousCreditPerPrompt": "0.20%",
            "erroneousCreditPerPromptInterval": "0.08% - 0.32% (95%)",
            "erroneousTokens": 200,
            "indexCoverage": "98.4%",
            "indexCoverageInterval": "98.3% - 98.5% (95%)",
            "joinRate": "90.9%",
            "joinRateInterval": "84.1% - 95.0% (95%)",
            "pairs": 100,
            "predictedTokens": 54_250,
            "promptTokens": 100_000,
            "reusedFraction": "54.9%",
            "reusedFractionInterval": "54.4% - 55.5% (95%)",
            "reusedTokens": 54_950,
            "window": "1h",
        },
        "scheduler": {"endpoint": "demo-scheduler.serving.svc:7070", "ready": "2/2"},
        "summary": {
            "coverage": "98.4% ±0.11",
            "erroneous": "0.37% ±0.22",
            "indexBlocks": 49_237,
            "live": "2/3",
            "reused": "54.9% ±0.57",
        },
    }


def test_without_an_answer_no_figure_is_left_standing() -> None:
    first = status({}, observed(), NOW)
    second = status(first, observed(reports=[]), NOW)
    assert "reuse" in first
    assert "reuse" not in second
    assert second["summary"]["reused"] == "<none>"


def test_the_live_ones_are_counted_among_all_that_serve() -> None:
    replicas = fleet_pb2.ListReplicasResponse(
        replicas=[stream("uid-0"), stream("uid-1", common_pb2.STREAM_STATE_HISTORY_LOST)]
    ).replicas
    made = status(
        {},
        observed(pods=[pod(0), pod(1), pod(2), pod(3, serving=False)], reports=[report(replicas)]),
        NOW,
    )
    assert made["summary"]["live"] == "2/3"


def test_a_spec_that_cant_be_read_leaves_the_rest_of_the_status_as_it_was() -> None:
    first = status({}, observed(), NOW)
    later = NOW + timedelta(minutes=1)
    made = refused(first, Trouble("BadSpec", "spec.pools[0].ranks: Expected `int`"), 2, later)
    assert condition(made, "Reconciled") == {
        "type": "Reconciled",
        "status": "False",
        "reason": "BadSpec",
        "message": "spec.pools[0].ranks: Expected `int`.",
        "lastTransitionTime": "2026-11-29T17:31:00Z",
        "observedGeneration": 2,
    }
    assert condition(made, "Ready") == condition(first, "Ready")
    assert made["reuse"] == first["reuse"]
    assert list(problems(made, STATUS)) == []
    assert write_in(first, made, later) == 0
    assert (
        write_in(
            made,
            refused(made, Trouble("BadSpec", "spec.pools[0].ranks: Expected `int`"), 2, later),
            later,
        )
        is None
    )
