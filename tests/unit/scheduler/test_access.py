from __future__ import annotations

import base64
import json
import math

import pytest
from google.rpc import code_pb2

from servingfleet_protos.v1 import fleet_pb2, routing_pb2, stream_pb2
from servingfleet_scheduler.access import (
    LET_THROUGH,
    MAX_TOKEN_BYTES,
    POD_UID,
    RIGHTS,
    Caller,
    Claims,
    Keeping,
    Verdicts,
    bearer,
    check_relay,
    check_token,
    claims,
    why_not,
)
from servingfleet_scheduler.errors import AccessRefused

ACCOUNT = "system:serviceaccount:llm:engine"
POD = Caller(ACCOUNT, extra={POD_UID: ("uid-1",)})


def jwt(**said: object) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(said).encode()).decode().rstrip("=")
    return f"head.{payload}.signature"


def test_every_method_has_its_right_or_is_let_through() -> None:
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in (stream_pb2, routing_pb2, fleet_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods == set(RIGHTS) | {each for each in LET_THROUGH if "servingfleet" in each}


def test_explain_is_another_right_than_route() -> None:
    assert len({RIGHTS[f"/servingfleet.v1.Router/{name}"] for name in ("Route", "Explain")}) == 2


@pytest.mark.parametrize(
    ("metadata", "token"),
    [
        ([("authorization", "Bearer abc")], "abc"),
        ([("authorization", "bearer abc ")], "abc"),
        ([("x", "y"), ("authorization", "Bearer abc")], "abc"),
        ([("authorization", "Basic abc")], ""),
        ([("authorization", "abc")], ""),
        ([("authorization", b"Bearer abc")], ""),
        ([], ""),
    ],
)
def test_the_token_is_what_stands_after_bearer(
    metadata: list[tuple[str, str | bytes]], token: str
) -> None:
    assert bearer(metadata) == token


@pytest.mark.parametrize(
    ("token", "reason"), [("", "NO_CREDENTIAL"), ("x" * (MAX_TOKEN_BYTES + 1), "BAD_CREDENTIAL")]
)
def test_nobody_is_asked_about_what_can_be_no_token(token: str, reason: str) -> None:
    with pytest.raises(AccessRefused) as refused:
        check_token(token)
    assert (refused.value.code, refused.value.reason) == (code_pb2.UNAUTHENTICATED, reason)


@pytest.mark.parametrize(
    ("username", "namespace"),
    [
        (ACCOUNT, "llm"),
        ("system:serviceaccount:llm", ""),
        ("evil:serviceaccount:llm:engine", ""),
        ("jane", ""),
        ("", ""),
    ],
)
def test_a_namespace_is_that_of_a_service_account(username: str, namespace: str) -> None:
    assert Caller(username).namespace == namespace


@pytest.mark.parametrize(
    ("caller", "reason"),
    [
        (Caller(ACCOUNT), "NOT_A_POD"),
        (Caller("jane"), "NOT_A_POD"),
        (Caller("system:serviceaccount:other:engine", extra=POD.extra), "OTHER_NAMESPACE"),
        (Caller("jane", extra=POD.extra), "OTHER_NAMESPACE"),
    ],
)
def test_a_relay_is_a_pod_of_the_fleets_namespace(caller: Caller, reason: str) -> None:
    check_relay(POD, "llm")
    with pytest.raises(AccessRefused) as refused:
        check_relay(caller, "llm")
    assert (refused.value.code, refused.value.reason) == (code_pb2.PERMISSION_DENIED, reason)


def test_a_jwt_says_when_it_ends_and_whom_it_is_for() -> None:
    assert claims(jwt(exp=5, aud=["a", "b"])) == Claims(5.0, ("a", "b"))
    assert claims(jwt(aud="a")) == Claims(math.inf, ("a",))


@pytest.mark.parametrize(
    "token",
    ["opaque", "a.b.c", "a.!!.c", "a.W10.c", jwt(exp="soon"), jwt(exp=2**60), "..é"],
)
def test_any_other_token_says_nothing(token: str) -> None:
    assert claims(token) == Claims()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (Claims(90.0, ("fleet",)), "expired 10 s ago"),
        (Claims(110.0, ("https://kubernetes",)), "https://kubernetes; expected the audience fleet"),
        (Claims(110.0, ("fleet",)), "does not accept"),
        (Claims(), "does not accept"),
    ],
)
def test_a_refused_token_is_told_why_as_far_as_it_shows(said: Claims, words: str) -> None:
    assert words in why_not(said, "fleet", now=100.0)


def verdicts(most: int = 10) -> Verdicts[str]:
    return Verdicts(Keeping(yes_s=60, refresh_s=30, no_s=10, grace_s=300), most)


def test_a_yes_is_fresh_for_a_minute_and_usable_for_the_grace() -> None:
    kept = verdicts()
    kept.put(b"a", "yes", now=100.0)
    verdict = kept.get(b"a", 159.0)
    assert verdict is not None
    assert (verdict.refresh_at, verdict.fresh_until, verdict.usable_until) == (130, 160, 460)
    assert kept.get(b"a", 459.0) is not None
    assert kept.get(b"a", 460.0) is None


def test_a_no_has_no_grace() -> None:
    kept = verdicts()
    kept.put(b"a", None, now=100.0)
    assert kept.get(b"a", 109.0) is not None
    assert kept.get(b"a", 110.0) is None


def test_no_verdict_outlives_its_token() -> None:
    kept = verdicts()
    kept.put(b"a", "yes", now=100.0, expires=120.0)
    assert kept.get(b"a", 119.0) is not None
    assert kept.get(b"a", 120.0) is None


def test_the_last_answer_replaces_the_one_before() -> None:
    kept = verdicts()
    kept.put(b"a", "yes", now=100.0)
    kept.put(b"a", None, now=101.0)
    verdict = kept.get(b"a", 102.0)
    assert verdict is not None
    assert verdict.value is None
    assert len(kept) == 1


def test_invented_tokens_push_out_one_another_and_not_the_good() -> None:
    kept = verdicts(most=3)
    kept.put(b"good", "yes", now=100.0)
    for number in range(50):
        kept.put(b"bad %d" % number, None, now=100.0)
    assert kept.get(b"good", 101.0) is not None
    assert len(kept) == 4


def test_the_least_recently_asked_for_is_forgotten_first() -> None:
    kept = verdicts(most=2)
    kept.put(b"a", "yes", now=100.0)
    kept.put(b"b", "yes", now=100.0)
    assert kept.get(b"a", 101.0) is not None
    kept.put(b"c", "yes", now=102.0)
    assert kept.get(b"b", 103.0) is None
    assert kept.get(b"a", 103.0) is not None
