"""The definition is brought up to date, never back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from servingfleet_operator import crd
from servingfleet_operator.cluster import Cluster
from servingfleet_operator.errors import Refused

from .api import FakeCluster

CRDS = Path(__file__).parents[3] / "crds"


def definition(version: str | None) -> dict[str, Any]:
    annotations = {} if version is None else {crd.VERSION_ANNOTATION: version}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": crd.NAME, "annotations": annotations},
        "spec": {"of": version},
    }


async def brought(present: str | bool | None, shipped: str) -> FakeCluster:
    api = FakeCluster()
    if present is not False:
        api.put(definition(cast("str | None", present)))
    await crd.bring_up_to_date(cast("Cluster", api), definition(shipped))
    return api


@pytest.mark.parametrize(
    ("present", "shipped", "written"),
    [
        (False, "1", True),
        (None, "1", True),
        ("1", "2", True),
        ("2", "2", False),
        ("3", "2", False),
        ("9", "10", True),
    ],
)
async def test_only_a_newer_definition_is_written(
    present: str | bool | None, shipped: str, written: bool
) -> None:
    assert bool((await brought(present, shipped)).writes()) == written


@pytest.mark.parametrize("verb", ["get", "apply"])
async def test_without_the_right_to_read_or_write_it_a_person_is_told_what_to_do(
    caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    api = FakeCluster()
    api.refuse(verb=verb, kind="CustomResourceDefinition", error=Refused("forbidden"))
    with caplog.at_level(logging.WARNING):
        await crd.bring_up_to_date(cast("Cluster", api), definition("1"))
    assert "kubectl apply" in caplog.records[0].__dict__["remedy"]


def test_the_definition_that_is_shipped_bears_a_version() -> None:
    assert crd.version(crd.shipped(CRDS)) >= 1


def test_a_folder_without_the_definition_ships_none(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({"metadata": {"name": "other"}}))
    assert crd.shipped(tmp_path) is None
