from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.utils import parse_quantity
from msgspec import inspect

from servingfleet_operator.quantities import Duration, Quantity
from servingfleet_operator.spec import BadSpec, Clients, Engine, Policy, Spec, Transport, parse
from servingfleet_relay.adapters.registry import ADAPTERS
from servingfleet_scheduler.policy import POLICIES

from .schema import SPEC, shape, shape_of

RESOURCE: dict[str, Any] = {
    "metadata": {"name": "demo", "namespace": "serving", "uid": "u", "generation": 3},
    "spec": {
        "model": {"name": "org/model"},
        "pools": [{"name": "a", "selector": {"matchLabels": {"app": "vllm"}}}],
    },
}


def changed(**pool: Any) -> dict[str, Any]:
    return {
        **RESOURCE,
        "spec": {**RESOURCE["spec"], "pools": [{**RESOURCE["spec"]["pools"][0], **pool}]},
    }


LONG_KEY = f"{254 * 'x'}/app"


def test_the_typed_spec_and_the_definition_say_the_same() -> None:
    """Fields, types, bounds, words and defaults, in both directions."""
    assert shape_of(inspect.type_info(Spec)) == shape(SPEC)


def test_a_fleet_is_its_spec_and_its_identity() -> None:
    fleet = parse(RESOURCE)
    assert (fleet.name, fleet.namespace, fleet.uid, fleet.generation) == ("demo", "serving", "u", 3)
    assert fleet.pools[0].engine == Engine.AUTO
    assert fleet.pools[0].ports.events == 5557
    assert fleet.scheduler.window.seconds == 3600
    assert fleet.relay.resources.memory.number == 256 * 1024**2
    assert fleet.secured
    assert fleet.access.clients == Clients.TOKEN
    assert fleet.pool("a") is fleet.pools[0]
    assert fleet.pool("b") is None


def test_plain_text_is_not_secured() -> None:
    spec = {**RESOURCE["spec"], "access": {"transport": "PlainText", "clients": "None"}}
    fleet = parse({**RESOURCE, "spec": spec})
    assert fleet.access.transport == Transport.PLAIN_TEXT
    assert not fleet.secured


def test_a_field_of_a_later_definition_is_no_error() -> None:
    assert parse(changed(colour="blue")) == parse(RESOURCE)


@pytest.mark.parametrize(
    ("pool", "path", "problem"),
    [
        ({"ranks": "two"}, "spec.pools[0].ranks", "Expected `int`, got `str`"),
        ({"ranks": 0}, "spec.pools[0].ranks", "Expected `int` >= 1"),
        ({"engine": "Triton"}, "spec.pools[0].engine", "Invalid enum value 'Triton'"),
        (
            {"speed": {"bytesPerToken": "much"}},
            "spec.pools[0].speed.bytesPerToken",
            "'much' is no quantity; expected a number such as 500m or 2Gi",
        ),
        (
            {"tiers": [{"tier": "host", "bandwidth": "1G", "latency": "soon"}]},
            "spec.pools[0].tiers[0].latency",
            "'soon' is no duration; expected one such as 90s or 1h30m",
        ),
        *(
            (
                {"selector": selector},
                "spec.pools[0].selector",
                f"{key[:80]!r} is no label's name; expected one such as app or example.com/app",
            )
            for key, selector in (
                *(
                    (key, {"matchLabels": {key: "vllm"}})
                    for key in ("my app", "a..b/app", "a.-b/app", "/app", LONG_KEY, "app\n")
                ),
                (
                    LONG_KEY,
                    {
                        "matchLabels": {"app": "vllm"},
                        "matchExpressions": [{"key": LONG_KEY, "operator": "Exists"}],
                    },
                ),
            )
        ),
        (
            {"tiers": [{"tier": "host", "bandwidth": True}]},
            "spec.pools[0].tiers[0].bandwidth",
            "expected a quantity, got True",
        ),
    ],
)
def test_what_cant_be_read_is_refused_with_its_place(
    pool: dict[str, Any], path: str, problem: str
) -> None:
    with pytest.raises(BadSpec) as refused:
        parse(changed(**pool))
    assert (refused.value.path, refused.value.problem) == (path, problem)
    assert str(refused.value) == f"{path}: {problem}"


def test_a_spec_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadSpec, match="required field `model`"):
        parse({"metadata": RESOURCE["metadata"]})


def test_the_policies_are_those_that_the_scheduler_has() -> None:
    assert {str(policy) for policy in Policy} == set(POLICIES)


def test_the_kinds_of_layer_groups_are_those_that_a_relay_reads() -> None:
    (full, window) = re.findall(
        r"\(([a-z_|]+)\)",
        SPEC["properties"]["pools"]["items"]["properties"]["layerGroups"]["items"]["pattern"],
    )
    profiles = [adapter.profile for adapter in ADAPTERS.values()]
    windows = {kind for profile in profiles for kind in profile.window_kinds}
    others = {
        kind
        for profile in profiles
        for kind in (*profile.attention_kinds, *profile.recurrent_kinds)
        if kind is not None
    }
    assert set(window.split("|")) == windows
    assert set(full.split("|")) == others


@settings(deadline=None)
@given(
    st.from_regex(
        r"([0-9]{1,9}(\.[0-9]{0,3})?|\.[0-9]{1,3})([KMGTPE]i|[numkMGTPE])?", fullmatch=True
    )
)
def test_a_quantity_is_what_kubernetes_says_it_is(text: str) -> None:
    assert Quantity(text).number == parse_quantity(text)  # type: ignore[no-untyped-call]
    assert Quantity(text) == text


@pytest.mark.parametrize(
    ("text", "number"), [("1e3", 1000), ("1E+3", 1000), ("5e-1", Decimal("0.5"))]
)
def test_a_quantity_may_have_an_exponent(text: str, number: Decimal) -> None:
    assert Quantity(text).number == number


@pytest.mark.parametrize("text", ["", "-1", "1 Gi", "1gi", "Gi", "1e", "\uff11"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no quantity"):
        Quantity(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1h30m", 5400), ("1.5s", 1.5), ("3ms", 0.003), ("0s", 0)]
)
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert Duration(text).seconds == seconds


@pytest.mark.parametrize("text", ["", "5", "-5s", "1d", "s", "1h 30m"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no duration"):
        Duration(text)
