"""The definition of ServingFleet as a document: that it teaches, and that what is made of it agrees with it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from servingfleet_operator import names, sidecar
from servingfleet_operator.conditions import BAD_WHEN_TRUE, CONDITIONS
from servingfleet_operator.replicas import State
from servingfleet_operator.status import MOST_REPLICAS

from .schema import DEFINITION, ROOT, SPEC, STATUS, VERSION, fields

REPOSITORY = Path(__file__).parents[3]


def test_the_names_are_those_that_the_operator_uses() -> None:
    wanted = DEFINITION["spec"]
    assert DEFINITION["metadata"]["name"] == f"{names.PLURAL}.{names.GROUP}"
    assert (wanted["group"], VERSION["name"]) == (names.GROUP, names.VERSION)
    assert (wanted["names"]["kind"], wanted["names"]["plural"]) == (names.KIND, names.PLURAL)


@pytest.mark.parametrize(("path", "field"), [*fields(ROOT)])
def test_every_field_says_what_it_means_and_its_default(path: str, field: dict[str, Any]) -> None:
    if path == ".metadata":
        return  # the API server's own
    description = field.get("description", "")
    assert description.endswith("."), path
    default = field.get("default", {})
    if default != {}:
        said = str(default).lower() if isinstance(default, bool) else default
        assert description.endswith(f" By default {said}."), path


def test_strings_and_lists_are_bounded_so_that_rules_and_status_stay_cheap() -> None:
    for path, field in fields(ROOT):
        if path in (".apiVersion", ".kind", ".metadata"):
            continue
        for node in (field, field.get("items", {}), field.get("additionalProperties", {})):
            if node.get("type") == "string" and node.get("format") is None:
                assert "maxLength" in node or "enum" in node, path
            if node.get("type") == "array":
                assert "maxItems" in node, path
                assert "x-kubernetes-list-type" in node, path


def test_conditions_are_a_map_and_replicas_one_value() -> None:
    conditions, replicas = STATUS["properties"]["conditions"], STATUS["properties"]["replicas"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
    assert conditions["maxItems"] >= len(CONDITIONS)
    # A keyed list would have one manager's fields noted for each item.
    assert replicas["x-kubernetes-list-type"] == "atomic"
    assert replicas["maxItems"] == MOST_REPLICAS


def test_every_state_of_a_replica_is_explained() -> None:
    description = STATUS["properties"]["replicas"]["items"]["properties"]["state"]["description"]
    assert [state for state in State if state not in description] == []


def test_the_condition_of_bad_polarity_is_named() -> None:
    description = STATUS["properties"]["conditions"]["description"]
    assert all(kind in description for kind in BAD_WHEN_TRUE)


def test_the_least_memory_of_a_relay_lets_its_worker_be_limited_below_it() -> None:
    resources = SPEC["properties"]["relay"]["properties"]["resources"]["properties"]
    [rule] = resources["memory"]["x-kubernetes-validations"]
    [least] = re.findall(r"'(\d+)Mi'", rule["rule"])
    assert int(least) >= sidecar.LEAST_WORKER_MIB + sidecar.SUPERVISOR_MIB


def test_the_definition_is_small_enough_for_a_plain_kubectl_apply() -> None:
    # It keeps all that was applied in an annotation of at most 262144 bytes.
    assert (REPOSITORY / "crds" / "servingfleet.yaml").stat().st_size < 100_000


def test_the_reference_is_what_the_schema_says() -> None:
    reference = runpy.run_path(str(REPOSITORY / "crds" / "reference.py"))
    assert (REPOSITORY / "docs" / "crd.md").read_text() == reference["page"](DEFINITION)


def test_the_summary_of_the_columns_is_in_the_status() -> None:
    known = {f".status{path}" for path, _ in fields(STATUS)} | {
        f".spec{path}" for path, _ in fields(SPEC)
    }
    for column in VERSION["additionalPrinterColumns"]:
        path = column["jsonPath"]
        if "[?" not in path and not path.startswith(".metadata"):
            assert path in known
