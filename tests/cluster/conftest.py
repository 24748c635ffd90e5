"""Fixtures of the tests that need a Kubernetes API server: skipped unless SERVINGFLEET_CLUSTER is set.

- `cluster` (session): a control plane, which is enough for objects, admission, RBAC, controllers. Own it is started in
  6 s on free ports, so several test runs may go on at once. See `Cluster`: `.kubeconfig`, `.api`
  (`kubernetes.client.ApiClient`), `.mode`, `.kubectl(*args)`, `.helm(*args)`, `.apply(*objects)`, `.get(*args)`, and
  `.stop_api_server()`, `.start_api_server()`, `.freeze_api_server()`, `.thaw_api_server()`, which skip the test where
  the cluster is not our own.
- `namespace` (function): the name of a new namespace in `cluster`, deleted afterwards.
- `nodes` (session): a cluster in which pods run. `nodes_namespace` (function): as `namespace`.
- `operators` (function): the chart installed in `cluster`, and `.start()` for its replicas, which are processes of this
  machine. `operator` (function): one of them, leading.
- `crd` (session): the definition of fleets, in `cluster`. `release` (function): the chart installed, of which nothing runs.
- `images` (session): the project's images by process, loaded into `nodes`. `system` (session): the operator, running there.
- `until(probe, "what is expected")` of `tests.cluster.cluster` awaits conditions.

SERVINGFLEET_CLUSTER_NAME=NAME keeps an own cluster of that name between runs; `python -m tests.cluster down` ends it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest

from . import sources
from .building import Say
from .cluster import IMAGES, Cluster, temporary_namespace
from .images import images as assembled
from .operators import Operators, Replica, installed
from .place import Mode
from .releases import CRD, Release, a_release, bring_crd
from .sources import SWITCH, NoCluster
from .systems import System, running_system

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Last, so that a mistake that a control plane shows is known before pods are started.
    items.sort(key=lambda item: "nodes" in _fixtures(item))
    if os.environ.get(SWITCH, "") in ("", "0"):
        skip = pytest.mark.skip(
            reason=f"needs a Kubernetes cluster: set {SWITCH}=1 (make test-cluster)"
        )
        for item in items:
            if item.path.is_relative_to(HERE) and {"cluster", "nodes"} & _fixtures(item):
                item.add_marker(skip)


def _fixtures(item: pytest.Item) -> set[str]:
    return set(item.fixturenames) if isinstance(item, pytest.Function) else set()


@pytest.fixture(scope="session")
def say(pytestconfig: pytest.Config) -> Say:
    """Prints a line on the terminal at once."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    reporter = pytestconfig.pluginmanager.getplugin("terminalreporter")

    def print_line(line: str) -> None:
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            reporter.write_line(f"\n{line}")

    return print_line


@contextmanager
def _opened(mode: Mode, say: Say) -> Iterator[Cluster]:
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(sources.opened(sources.choose(os.environ), mode, say))
        except NoCluster as error:
            # Whoever asks for one of them by name, as continuous integration does, wants no tests left out.
            if os.environ[SWITCH] in sources.WISHES:
                raise
            pytest.skip(str(error))
        yield opened


@pytest.fixture(scope="session")
def cluster(say: Say) -> Iterator[Cluster]:
    """A control plane; its pods may or may not run."""
    with _opened("cp", say) as opened:
        yield opened


@pytest.fixture(scope="session")
def nodes(say: Say, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster in which pods run."""
    if sources.choose(os.environ).kind != "own":
        # There is one such cluster, for all.
        yield request.getfixturevalue("cluster")
        return
    with _opened("node", say) as opened:
        yield opened


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of `cluster` for one test."""
    with temporary_namespace(cluster, f"test-{secrets.token_hex(4)}") as name:
        yield name


@pytest.fixture
def nodes_namespace(nodes: Cluster) -> Iterator[str]:
    """A namespace of `nodes` for one test."""
    with temporary_namespace(nodes, f"test-{secrets.token_hex(4)}") as name:
        yield name


@pytest.fixture(scope="session")
def images(nodes: Cluster, say: Say) -> dict[str, str]:
    """The names of the project's images, which `nodes` can run: by process, and the emulated engine's."""
    pattern = os.environ.get(IMAGES)
    if pattern:
        return {process: pattern.format(process) for process in assembled.ENTRYPOINTS}
    nodes.load(assembled.archive(say))
    return {process: assembled.name(process) for process in assembled.ENTRYPOINTS}


@pytest.fixture(scope="session")
def system(nodes: Cluster, images: dict[str, str]) -> Iterator[System]:
    """The operator, installed in `nodes` with the chart, as its users would."""
    with running_system(nodes, images) as running:
        yield running


@pytest.fixture(scope="session")
def installed_chart(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operators]:
    """The chart with its own values, of which nothing runs."""
    with installed(cluster, tmp_path_factory.mktemp("operators")) as operators:
        yield operators


@pytest.fixture
def operators(installed_chart: Operators) -> Iterator[Operators]:
    """The installed chart; replicas that the test starts end with it."""
    yield installed_chart
    installed_chart.clear()


@pytest.fixture
def operator(operators: Operators) -> Replica:
    """A replica that leads."""
    return operators.start_leading()


@pytest.fixture(scope="session")
def crd(cluster: Cluster) -> None:
    """The definition of fleets, as it stands in the tree."""
    bring_crd(cluster, CRD.read_text())


@pytest.fixture
def release(cluster: Cluster, namespace: str, crd: None) -> Iterator[Release]:
    """A release of the chart with its own values, of which nothing runs."""
    with a_release(cluster, namespace) as installed:
        yield installed
