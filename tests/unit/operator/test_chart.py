"""What the chart and the operator must agree on, as far as files can tell; tests/cluster installs it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from servingfleet_operator import injection
from servingfleet_operator.__main__ import main

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "servingfleet"


def chart() -> dict[str, Any]:
    found = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert isinstance(found, dict)
    return found


def paths(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Every value by its path; maps that hold nothing are values."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from paths(value, f"{before}{key}.")
        else:
            yield f"{before}{key}"


def described(
    schema: Mapping[str, Any], root: Mapping[str, Any], before: str = ""
) -> Iterator[str]:
    """Every value that a schema describes, likewise."""
    for key, value in schema["properties"].items():
        if "$ref" in value:
            value = root["definitions"][value["$ref"].rpartition("/")[2]]
        if "properties" in value:
            yield from described(value, root, f"{before}{key}.")
        else:
            yield f"{before}{key}"


def test_every_value_has_its_place_in_the_schema_and_the_reverse() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(paths(values)) | {"global", "resources"} == {
        *described(schema, schema),
        *(path for path in paths(values) if path.startswith("resources.")),
    }


def test_the_chart_passes_options_that_the_operator_knows() -> None:
    template = (CHART / "templates" / "deployment.yaml").read_text()
    passed = set(re.findall(r"^ +- (--[a-z-]+)=", template, re.MULTILINE))
    known = {option for parameter in main.params for option in parameter.opts}
    # Addresses are all of the pod's.
    assert passed == known - {"--webhook-host", "--http-host", "--version"}


def test_the_chart_is_of_the_packages_release() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart()["version"] == chart()["appVersion"] == project["version"]


def test_the_operator_refuses_just_the_kubernetes_that_the_chart_refuses() -> None:
    [minor] = [int(part) for part in chart()["kubeVersion"].split(".")[1:2]]
    assert (1, minor) == injection.OLDEST_KUBERNETES


def test_the_charts_definition_is_the_one_that_the_operator_is_tested_against() -> None:
    assert (CHART / "crds" / "servingfleet.yaml").resolve() == ROOT / "crds" / "servingfleet.yaml"
