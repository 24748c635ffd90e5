from __future__ import annotations

from typing import Any

import pytest

from servingfleet_operator.conditions import BAD_WHEN_TRUE, CONDITIONS, Verdict, View
from servingfleet_operator.engines.facts import Finding
from servingfleet_operator.observed import Observed, Relay, Trouble
from servingfleet_protos.v1 import common_pb2

from .observing import deployment, observed, pod, report, stream, sums
from .pods import fleet


def said(kind: str, of: Observed | None = None, **changes: Any) -> Verdict:
    return CONDITIONS[kind](View.of(of or observed(**changes)))


def test_where_all_is_well_every_condition_says_so() -> None:
    for kind in CONDITIONS:
        assert said(kind).status == ("False" if kind in BAD_WHEN_TRUE else "True"), kind


def test_before_anything_is_there_no_condition_blames_the_engines() -> None:
    empty = Observed(fleet=fleet())
    statuses = {kind: said(kind, empty).status for kind in CONDITIONS}
    assert [kind for kind, status in statuses.items() if status == "False"] == [
        "Ready",
        "SchedulerAvailable",
    ]


# The scheduler


def test_a_scheduler_of_which_all_pods_are_new_and_ready_is_available() -> None:
    assert said("SchedulerAvailable") == Verdict(
        "True", "Available", "Deployment demo-scheduler is available."
    )


def test_ready_means_that_the_scheduler_answers_whatever_else_is_wrong() -> None:
    bad = observed(
        pods=[pod(relay=Relay.NOT_INJECTED, findings=[Finding("EventsOff", "no events")])],
        reports=[report()],
        troubles=[Trouble("ForeignObject", "a clash")],
    )
    assert said("Ready", bad) == Verdict(
        "True",
        "SchedulerAnswers",
        "The scheduler answers at demo-scheduler.serving.svc:7070.",
    )


def test_one_scheduler_that_answers_is_enough() -> None:
    verdict = said("Ready", unanswered=["demo-scheduler-b: deadline exceeded"])
    assert verdict.status == "True"


def test_a_scheduler_that_does_not_answer_says_who_was_asked_and_why_not() -> None:
    verdict = said("Ready", reports=[], unanswered=["demo-scheduler-b: deadline exceeded"])
    assert (verdict.status, verdict.reason) == ("False", "SchedulerNotAnswering")
    assert "demo-scheduler-b: deadline exceeded" in verdict.message
    assert "port 7070" in verdict.message


def test_schedulers_that_were_not_asked_yet_are_not_called_silent() -> None:
    assert said("Ready", reports=None).status == "Unknown"


def waiting(reason: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "demo-scheduler-x"},
        "status": {"containerStatuses": [{"state": {"waiting": {"reason": reason}}}]},
    }


def test_an_image_that_cant_be_pulled_is_named_with_what_to_do() -> None:
    changes: dict[str, Any] = {
        "deployment": deployment(ready=0),
        "scheduler_pods": [waiting("ImagePullBackOff")],
        "reports": [],
    }
    for kind in ("Ready", "SchedulerAvailable"):
        verdict = said(kind, **changes)
        assert verdict.status == "False"
        assert "pod demo-scheduler-x waits in ImagePullBackOff" in verdict.message
        assert "imagePullSecrets" in verdict.message
    assert said("SchedulerAvailable", **changes).reason == "ImagePullBackOff"


def test_a_pod_that_is_being_made_is_no_trouble() -> None:
    verdict = said(
        "SchedulerAvailable",
        deployment=deployment(ready=1),
        scheduler_pods=[waiting("ContainerCreating")],
    )
    assert verdict == Verdict(
        "False", "Starting", "Deployment demo-scheduler has 1 of 2 pods ready."
    )


def test_a_rollout_that_is_stuck_is_told_while_the_earlier_pods_serve() -> None:
    verdict = said(
        "SchedulerAvailable",
        deployment=deployment(updatedReplicas=1, replicas=3),
        scheduler_pods=[waiting("CrashLoopBackOff")],
    )
    assert (verdict.status, verdict.reason) == ("True", "CrashLoopBackOff")
    assert "kubectl logs --previous" in verdict.message


def test_a_spec_that_the_deployment_has_not_seen_yet_is_rolling_out() -> None:
    assert said("SchedulerAvailable", deployment=deployment(observedGeneration=3)) == Verdict(
        "True",
        "RollingOut",
        "Deployment demo-scheduler is available, and rolls out a new revision.",
    )


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ({"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}, "PodsRefused"),
        ({"type": "Progressing", "status": "False", "message": "timed out"}, "RolloutStuck"),
    ],
)
def test_what_the_deployment_says_of_itself_is_passed_on(
    condition: dict[str, str], reason: str
) -> None:
    verdict = said("SchedulerAvailable", deployment=deployment(ready=0, conditions=[condition]))
    assert verdict.reason == reason
    assert condition["message"] in verdict.message


def test_a_pod_without_a_node_is_named() -> None:
    lost = {
        "metadata": {"name": "demo-scheduler-x"},
        "status": {"conditions": [{"type": "PodScheduled", "status": "False"}]},
    }
    verdict = said("SchedulerAvailable", deployment=deployment(ready=0), scheduler_pods=[lost])
    assert verdict.reason == "Unschedulable"
    assert "kubectl describe pod demo-scheduler-x" in verdict.message


def test_every_trouble_of_a_reconcile_is_told_the_worst_first() -> None:
    verdict = said(
        "Reconciled", troubles=[Trouble("ForeignObject", "a clash"), Trouble("Refused", "no right")]
    )
    assert verdict == Verdict("False", "ForeignObject", "a clash; no right.")


# Engine pods


@pytest.mark.parametrize("kind", ["RelaysInjected", "EnginesConfigured", "EventsExposed"])
def test_without_pods_the_selectors_are_told(kind: str) -> None:
    assert said(kind, pods=[]) == Verdict(
        "Unknown", "NoEnginePods", "No pod is selected by the pools: main (app=vllm)."
    )


def test_pods_without_relay_are_counted_and_the_first_is_named() -> None:
    pods = [
        pod(2),
        pod(1, relay=Relay.NOT_INJECTED, relay_reason="it predates the fleet: start it again"),
        pod(0, relay=Relay.NOT_INJECTED, relay_reason="it missed the webhook: start it again"),
    ]
    assert said("RelaysInjected", pods=pods) == Verdict(
        "False",
        "NotInjected",
        "2 of 3 engine pods, the first vllm-0: it missed the webhook: start it again.",
    )


def test_a_relay_of_another_spec_is_told_but_less_urgent_than_none() -> None:
    outdated = pod(0, relay=Relay.OUTDATED, relay_reason="its relay was told other ports")
    assert said("RelaysInjected", pods=[outdated]).reason == "Outdated"
    missing = pod(1, relay=Relay.NOT_INJECTED, relay_reason="it predates the fleet")
    assert said("RelaysInjected", pods=[outdated, missing]).reason == "NotInjected"


def test_pods_that_opted_out_are_as_they_should_be() -> None:
    verdict = said("RelaysInjected", pods=[pod(), pod(1, relay=Relay.OPTED_OUT)])
    assert verdict.status == "True"
    assert "servingfleet.dev/inject=false" in verdict.message


def test_further_pods_of_an_engine_need_no_relay() -> None:
    follower = pod(1, serving=False, relay=Relay.NOT_INJECTABLE, relay_reason="answers no requests")
    assert said("RelaysInjected", pods=[pod(), follower]).status == "True"


OFF = Finding("EventsOff", "container engine publishes no events: add --kv-events-config '{}'")
NO_REPLAY = Finding("NoReplay", "has no replay_endpoint: add it", severe=False)


def test_the_flag_that_an_engine_lacks_is_named() -> None:
    blind = [pod(number, findings=[NO_REPLAY, OFF]) for number in (3, 1)]
    assert said("EnginesConfigured", pods=blind, reports=[report()]) == Verdict(
        "False",
        "EventsOff",
        "vllm-1: container engine publishes no events: add --kv-events-config '{}'. Likewise 1 more.",
    )


def test_what_could_only_be_better_does_not_fail_the_engines() -> None:
    verdict = said("EnginesConfigured", pods=[pod(findings=[NO_REPLAY])])
    assert verdict == Verdict("True", "NoReplay", "vllm-0: has no replay_endpoint: add it.")


def test_an_engine_whose_stream_is_live_needs_no_flag() -> None:
    engine = pod(findings=[OFF])
    verdict = said("EnginesConfigured", pods=[engine], reports=[report([stream(engine)])])
    assert verdict.status == "True"


@pytest.mark.parametrize(
    ("state", "reason", "remedy"),
    [
        (common_pb2.STREAM_STATE_QUARANTINED, "StreamQuarantined", "until the engine restarts"),
        (
            common_pb2.STREAM_STATE_UNPROVEN,
            "StreamUnproven",
            "kubectl logs vllm-0 -c servingfleet-relay",
        ),
        (
            common_pb2.STREAM_STATE_UNSPECIFIED,
            "StreamMissing",
            "kubectl logs vllm-0 -c servingfleet-relay",
        ),
    ],
)
def test_a_broken_stream_names_its_pod_what_was_seen_and_what_to_do(
    state: common_pb2.StreamState.ValueType, reason: str, remedy: str
) -> None:
    pods = [pod(0), pod(1)]
    broken = [stream(each, (state, "expected 41, got 44")) for each in pods]
    verdict = said("StreamsConformant", pods=pods, reports=[report(broken)])
    assert (verdict.status, verdict.reason) == ("False", reason)
    assert verdict.message.startswith("vllm-0: expected 41, got 44: ")
    assert remedy in verdict.message
    assert verdict.message.endswith("Likewise 1 more.")


@pytest.mark.parametrize(
    "state", [common_pb2.STREAM_STATE_HISTORY_LOST, common_pb2.STREAM_STATE_RESYNCING]
)
def test_a_stream_that_mends_itself_is_conformant(state: common_pb2.StreamState.ValueType) -> None:
    verdict = said("StreamsConformant", reports=[report([stream(pod(), (state, "gap"))])])
    assert verdict.status == "True"


def test_a_stream_is_expected_only_where_there_is_a_relay() -> None:
    bare = pod(relay=Relay.OPTED_OUT)
    assert said("StreamsConformant", pods=[bare], reports=[report()]).reason == "NoRelays"
    assert said("StreamsConformant", reports=[]).reason == "SchedulerNotAnswering"


def test_an_engine_that_starts_breaks_no_promise() -> None:
    starting = pod(1, ready=False)
    verdict = said("StreamsConformant", pods=[pod(), starting], reports=[report([stream(pod())])])
    assert verdict.status == "True"


def test_events_that_can_be_read_are_told_until_they_cant() -> None:
    exposed = pod(exposed="port 5557 is open to other pods: close it")
    assert said("EventsExposed", pods=[exposed]) == Verdict(
        "True", "PortsOpen", "vllm-0: port 5557 is open to other pods: close it."
    )
    assert said("EventsExposed").status == "False"


def test_a_pod_that_is_selected_twice_is_named_with_its_selectors() -> None:
    verdict = said("PoolsDisjoint", pods=[pod(also=["pool b", "fleet other"])])
    assert (verdict.status, verdict.reason) == ("False", "PoolsOverlap")
    assert verdict.message.startswith(
        "vllm-0: counts in pool main and is also selected by pool b, fleet other: "
    )


@pytest.mark.parametrize(
    ("access", "status", "reason"),
    [
        ({}, "True", "TLS"),
        ({"clients": "TLSOnly"}, "True", "TLSOnly"),
        ({"transport": "PlainText", "clients": "None"}, "False", "PlainText"),
    ],
)
def test_plain_text_is_warned_of(access: dict[str, str], status: str, reason: str) -> None:
    verdict = said("TransportSecured", fleet=fleet(access=access))
    assert (verdict.status, verdict.reason) == (status, reason)


# The measurement


def test_clients_that_report_nothing_are_told_to() -> None:
    verdict = said("MeasurementJoined", reports=[report(total=sums(0, decisions=100))])
    assert (verdict.status, verdict.reason) == ("False", "NoOutcomes")
    assert verdict.message == (
        "Only 0% of the decisions were joined with an outcome, 50.0% are expected: "
        "clients must call Report with the decision_id when a request has ended."
    )


@pytest.mark.parametrize(
    ("set_aside", "reason", "remedy"),
    [
        ({"prompt_mismatch": 90, "aborted": 4}, "PromptMismatch", "spec.model.tokenizer"),
        ({"missing_counts": 60, "late": 2}, "CountsMissing", "--enable-cache-report"),
        ({"aborted": 10}, "NoOutcomes", "must call Report"),
        ({"of_a_later_release": 99}, "NoOutcomes", "must call Report"),
    ],
)
def test_the_commonest_reason_decides_what_to_do(
    set_aside: dict[str, int], reason: str, remedy: str
) -> None:
    total = sums(5, decisions=100)
    verdict = said("MeasurementJoined", reports=[report(total=total, set_aside=set_aside)])
    assert (verdict.status, verdict.reason) == ("False", reason)
    assert remedy in verdict.message


def test_outcomes_that_no_fleet_knows_count_as_well() -> None:
    total = sums(0, decisions=100)
    verdict = said(
        "MeasurementJoined", reports=[report(total=total, unknown={"unknown_decision": 80})]
    )
    assert verdict.reason == "DecisionsUnknown"


@pytest.mark.parametrize(
    ("pairs", "decisions", "reason"),
    [(0, 0, "NoRequests"), (0, 5, "TooFewPairs"), (10, 12, "TooFewPairs"), (19, 25, "TooFewPairs")],
)
def test_of_few_requests_nothing_is_said(pairs: int, decisions: int, reason: str) -> None:
    verdict = said("MeasurementJoined", reports=[report(total=sums(pairs, decisions=decisions))])
    assert (verdict.status, verdict.reason) == ("Unknown", reason)


def test_requests_that_still_run_do_not_fail_the_measurement() -> None:
    assert (
        said("MeasurementJoined", reports=[report(total=sums(60, decisions=100))]).status == "True"
    )


def test_schedulers_of_two_releases_are_told_apart() -> None:
    old = report(total=sums(30))
    old.reuse.reports[0].sums.ClearField("products")
    verdict = said("MeasurementJoined", reports=[old])
    assert (verdict.status, verdict.reason) == ("Unknown", "SchedulersDiffer")
    # Everything else is still told.
    assert said("Ready", reports=[old]).status == "True"


def test_no_message_ends_in_the_middle_of_a_sentence() -> None:
    for case in (observed(), Observed(fleet=fleet()), observed(pods=[], reports=[])):
        for kind in CONDITIONS:
            message = said(kind, case).message
            assert message.endswith("."), (kind, message)
            assert ".." not in message, (kind, message)
