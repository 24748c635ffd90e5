"""Certificates under a clock that runs for years, and Secrets that were damaged, lost or half written."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from hypothesis import given, settings
from hypothesis import strategies as st

from servingfleet_operator import pki
from servingfleet_operator.pki import LEAF_LIFE, OVERLAP, Plan, plan

START = datetime(2026, 11, 29, 12, tzinfo=UTC)
NAMES = ("demo-scheduler.serving.svc", "demo-relays.serving.svc")
HOUR, DAY = timedelta(hours=1), timedelta(days=1)

Secret = Mapping[str, bytes]


def planned(
    now: datetime, authority: Secret | None = None, leaf: Secret | None = None, *names: str
) -> Plan:
    return plan(authority, leaf, names or NAMES, "serving/demo", now)


def accepts(bundle: bytes, leaf: bytes, now: datetime, name: str = NAMES[0]) -> bool:
    """As a strict verifier of the web's rules sees it."""
    store = Store(x509.load_pem_x509_certificates(bundle))
    verifier = PolicyBuilder().store(store).time(now).build_server_verifier(x509.DNSName(name))
    try:
        verifier.verify(x509.load_pem_x509_certificate(leaf), [])
    except VerificationError:
        return False
    return True


def accepted(result: Plan, now: datetime) -> bool:
    made = result.certificates
    return accepts(made.ca_bundle, made.cert, now)


def authorities(result: Plan) -> int:
    return result.leaf["ca.crt"].count(b"BEGIN CERTIFICATE")


def test_the_first_plan_serves_at_once_and_every_name_is_covered() -> None:
    first = planned(START)
    made = first.certificates
    assert all(accepts(made.ca_bundle, made.cert, START, name) for name in NAMES)
    assert not accepts(made.ca_bundle, made.cert, START, "other.serving.svc")
    assert not accepts(made.ca_bundle, made.cert, START - 2 * HOUR)
    assert not accepts(made.ca_bundle, made.cert, START + LEAF_LIFE + HOUR)


def test_nothing_changes_before_it_is_due() -> None:
    first = planned(START)
    second = planned(START + HOUR, first.authority, first.leaf)
    third = planned(second.due - timedelta(seconds=1), second.authority, second.leaf)
    assert third == second
    assert second.due == START - HOUR + (LEAF_LIFE + HOUR) * 2 / 3


def test_the_key_of_the_authority_is_nowhere_but_in_its_own_secret() -> None:
    first = planned(START)
    assert b"PRIVATE" not in first.leaf["ca.crt"] + first.leaf["tls.crt"]
    assert first.authority["signer.key"] not in first.leaf.values()
    assert not set(first.authority) & set(first.leaf)


def test_a_leaf_is_replaced_at_two_thirds_of_its_life_by_the_same_authority() -> None:
    first = planned(START)
    later = planned(START + 21 * DAY, first.authority, first.leaf)
    assert later.leaf["tls.crt"] != first.leaf["tls.crt"]
    assert later.leaf["ca.crt"] == first.leaf["ca.crt"]
    assert accepts(first.leaf["ca.crt"], later.leaf["tls.crt"], START + 21 * DAY)


def test_a_new_name_is_served_at_once() -> None:
    first = planned(START)
    later = planned(START + HOUR, first.authority, first.leaf, *NAMES, "more.serving.svc")
    made = later.certificates
    assert accepts(made.ca_bundle, made.cert, START + HOUR, "more.serving.svc")


def test_an_authority_is_published_before_it_signs_and_leaves_only_long_after() -> None:
    now, step = START, planned(START)
    old = step.leaf["ca.crt"]
    phases: list[str] = []
    while not phases or phases[-1] != "new":
        now = step.due
        step = planned(now, step.authority, step.leaf)
        bundle, leaf = step.leaf["ca.crt"], step.leaf["tls.crt"]
        trusts_old, trusts_both = old in bundle, authorities(step) == 2
        signed_by_old = accepts(old, leaf, now)
        phase = {
            (True, False, True): "old",
            (True, True, True): "both, old signs",
            (True, True, False): "both, new signs",
            (False, False, False): "new",
        }[trusts_old, trusts_both, signed_by_old]
        if not phases or phases[-1] != phase:
            phases.append(phase)
    assert phases == ["old", "both, old signs", "both, new signs", "new"]


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), longest_hours=st.integers(1, 200))
def test_every_bundle_of_the_last_day_accepts_every_leaf_of_the_last_day(
    seed: int, longest_hours: int
) -> None:
    """Over years: whatever the operator is late by, and whichever of its writes fail."""
    choose = random.Random(seed)
    now = START
    authority: Secret | None = None
    leaf: Secret | None = None
    shown: list[tuple[datetime, bytes, bytes]] = []
    rotations = set()
    while now < START + 900 * DAY:
        made = planned(now, authority, leaf)
        # A crash between the two writes, a refusal of either: all happen, and are soon tried again.
        failed = choose.random() < 0.2 and leaf is not None
        if not failed or choose.random() < 0.5:
            authority = made.authority
        if not failed:
            leaf = made.leaf
        if leaf is not None:
            shown.append((now, leaf["ca.crt"], leaf["tls.crt"]))
            rotations.add(leaf["ca.crt"])
        # What was current at any moment of the last day may still be in use.
        current = [each for each in shown if each[0] > now - OVERLAP]
        before = [each for each in shown if each[0] <= now - OVERLAP][-1:]
        shown = before + current
        for bundle in {each[1] for each in shown}:
            for cert in {each[2] for each in shown}:
                assert accepts(bundle, cert, now)
        due = made.due if not failed and choose.random() < 0.5 else now
        now = max(due, now) + HOUR * choose.random() * (1 if failed else longest_hours)
    assert len(rotations) >= 5


@pytest.mark.parametrize("damage", [b"", b"no certificate", None])
@pytest.mark.parametrize("key", ["tls.crt", "tls.key"])
def test_a_damaged_leaf_is_replaced_by_one_that_the_same_bundle_accepts(
    key: str, damage: bytes | None
) -> None:
    first = planned(START)
    broken = {name: value for name, value in first.leaf.items() if name != key}
    if damage is not None:
        broken[key] = damage
    mended = planned(START + HOUR, first.authority, broken)
    assert accepts(first.leaf["ca.crt"], mended.leaf["tls.crt"], START + HOUR)


def test_a_key_of_another_certificate_is_not_served() -> None:
    first, other = planned(START), planned(START)
    mixed = {**first.leaf, "tls.key": other.leaf["tls.key"]}
    mended = planned(START + HOUR, first.authority, mixed)
    assert mended.leaf["tls.key"] not in (first.leaf["tls.key"], other.leaf["tls.key"])


def test_somebody_else_s_certificates_are_replaced_and_never_trusted() -> None:
    first, foreign = planned(START), planned(START)
    mended = planned(START + HOUR, first.authority, foreign.leaf)
    assert mended.leaf["ca.crt"] == first.leaf["ca.crt"]
    assert accepted(mended, START + HOUR)


def test_a_lost_authority_is_followed_without_an_interruption() -> None:
    now, step = START, planned(START)
    step = planned(now + HOUR, step.authority, step.leaf)
    old = step.leaf
    for damage in (None, {**step.authority, "signer.key": b"gone"}):
        now = START + HOUR
        step = planned(now, damage, old)
        assert step.leaf["tls.crt"] == old["tls.crt"]
        while authorities(step) > 1:
            # Whoever holds the bundle of the moment before accepts what is shown now.
            before = step.leaf["ca.crt"]
            now = step.due
            step = planned(now, step.authority, step.leaf)
            assert accepts(before, step.leaf["tls.crt"], now)
        assert now - START < 3 * OVERLAP
        assert not accepts(old["ca.crt"], step.leaf["tls.crt"], now)


def test_after_years_of_absence_everything_is_made_anew() -> None:
    first = planned(START)
    later = planned(START + 800 * DAY, first.authority, first.leaf)
    assert accepted(later, START + 800 * DAY)
    assert authorities(later) == 1


def test_an_authority_that_is_about_to_expire_still_serves_while_its_follower_is_published() -> (
    None
):
    first = planned(START)
    now = START + 365 * DAY - HOUR
    late = planned(now, first.authority, first.leaf)
    assert authorities(late) == 2
    assert accepted(late, now)
    now += 2 * HOUR
    later = planned(now, late.authority, late.leaf)
    assert accepted(later, now)


@settings(max_examples=50, deadline=None)
@given(
    authority=st.dictionaries(
        st.sampled_from(["signer.crt", "signer.key", "next.crt", "retired.crt", "published"]),
        st.one_of(
            st.binary(max_size=40), st.sampled_from([b"[]", b'{"a": 1}', b'{"a": "2026-01-01"}'])
        ),
    ),
    leaf=st.dictionaries(st.sampled_from(["ca.crt", "tls.crt", "tls.key"]), st.binary(max_size=40)),
)
def test_whatever_the_secrets_hold_the_plan_serves(
    authority: dict[str, bytes], leaf: dict[str, bytes]
) -> None:
    assert accepted(planned(START, authority, leaf), START)


def test_a_clock_that_was_ahead_delays_nothing_for_ever() -> None:
    ahead = planned(START + 300 * DAY)
    ahead = planned(START + 300 * DAY + HOUR, ahead.authority, ahead.leaf)
    # Its certificates are not valid yet: they are replaced.
    now = START
    step = planned(now, ahead.authority, ahead.leaf)
    assert accepted(step, now)
    step = planned(now + HOUR, step.authority, step.leaf)
    assert accepted(step, now + HOUR)


def test_the_overlap_is_far_longer_than_the_kubelet_s_delay() -> None:
    assert timedelta(minutes=10) < OVERLAP < pki.LEAF_LIFE / 3
