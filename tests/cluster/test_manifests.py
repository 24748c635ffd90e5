"""What people copy, from examples, documentation and the chart's notes: the API server takes it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

from tests.cluster.cluster import Cluster, Object
from tests.cluster.releases import FLEETS, ROOT, Release

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_accepted(cluster: Cluster, namespace: str, crd: None, example: Path) -> None:
    cluster.kubectl(
        *("create", "--dry-run=server", "--validate=strict"),
        *("-n", namespace, "-f", str(example)),
    )


def test_the_client_example_is_accepted(cluster: Cluster, namespace: str, crd: None) -> None:
    # The Role that it binds is the operator's work.
    cluster.kubectl(
        *("create", "role", "chat-client", "--verb=create", "--resource-name=chat"),
        *(f"--resource={FLEETS}/route", "-n", namespace),
    )
    cluster.kubectl(
        *("create", "--dry-run=server", "--validate=strict"),
        *("-n", namespace, "-k", str(ROOT / "examples" / "client")),
    )


def fleets_in(text: str) -> list[Object]:
    """The ServingFleets that stand in a text, indented or not."""
    found = []
    blocks = text.split("apiVersion: servingfleet.dev/v1alpha1")
    for before, after in itertools.pairwise(blocks):
        indent = len(before) - len(before.rstrip(" "))
        lines = []
        for line in after.splitlines()[1:]:
            if line.strip() and not line.startswith(" " * indent):
                break
            if line.strip() in ("EOF", "---", "```"):
                break
            lines.append(line[indent:])
        found.append(yaml.safe_load("apiVersion: servingfleet.dev/v1alpha1\n" + "\n".join(lines)))
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/kubernetes.md"])
def test_fleets_in_the_documentation_are_accepted(
    cluster: Cluster, namespace: str, crd: None, page: str
) -> None:
    found = fleets_in((ROOT / page).read_text())
    assert found, f"{page} shows no fleet"
    for each in found:
        cluster.kubectl(
            *("create", "--dry-run=server", "--validate=strict", "-n", namespace, "-f", "-"),
            stdin=yaml.safe_dump(each),
        )


def test_the_notes_show_a_fleet_that_is_accepted(release: Release) -> None:
    notes = release.cluster.helm("get", "notes", release.name, "--namespace", release.namespace)
    assert f"deployment/{release.fullname}" in notes
    [shown] = fleets_in(notes)
    shown["spec"]["model"]["name"] = "m"
    release.cluster.kubectl(
        *("create", "--dry-run=server", "--validate=strict", "-n", release.namespace, "-f", "-"),
        stdin=yaml.safe_dump(shown),
    )
