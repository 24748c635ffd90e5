"""The manifests that people copy do what their comments say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from servingfleet_operator import engines, selectors
from servingfleet_operator.spec import Engine, Fleet, parse

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
WORKLOADS = ("Deployment", "StatefulSet")


def objects(example: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(example.read_text()))


def fleet(example: Path) -> Fleet:
    [found] = [each for each in objects(example) if each["kind"] == "ServingFleet"]
    found["metadata"] |= {"namespace": "chat", "uid": "u-1"}
    return parse(found)


def pods(example: Path) -> list[dict[str, Any]]:
    """One pod of each workload."""
    return [each["spec"]["template"] for each in objects(example) if each["kind"] in WORKLOADS]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_pool_of_an_example_selects_a_pod_of_it(example: Path) -> None:
    for pool in fleet(example).pools:
        wanted = selectors.of_pool(pool.selector)
        assert any(
            all(each.holds(pod["metadata"]["labels"]) for each in wanted) for pod in pods(example)
        )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_engine_of_an_example_is_read_from_its_flags_and_nothing_is_missing(
    example: Path,
) -> None:
    described = fleet(example)
    [pool] = described.pools
    [pod] = pods(example)
    facts = engines.read(pod, pool)
    assert engines.findings(facts, described) == ()
    assert facts.kind != Engine.AUTO
    assert facts.http_port == pool.ports.http
    assert facts.ranks == pool.ranks
    assert facts.exposed == (), "events can be read from outside the pod"
