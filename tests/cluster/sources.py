"""Which cluster the tests use, and why.

In this order: one that the user points at, `kind` where Docker works and can pull its node image, one of our own from
the Go modules. `SERVINGFLEET_CLUSTER` may name one of `given`, `kind` and `own`; any other true value tries them in turn.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import building, own, place
from .api import connected
from .building import Say
from .cluster import KIND_CLUSTER, Cluster
from .place import Mode

SWITCH = "SERVINGFLEET_CLUSTER"
WISHES = ("given", "kind", "own")
OURS, THEIRS = "SERVINGFLEET_KUBECONFIG", "KUBECONFIG"
NAME = "SERVINGFLEET_CLUSTER_NAME"
KIND_NODE = f"kindest/node:{building.version('kubernetes')}"
PULL_PATIENCE_S = 300.0

Runs = Callable[[list[str], float], str]
"""Runs a command within seconds. Returns "" where it succeeds, else why it did not."""


class NoCluster(RuntimeError):
    """There is none to be had: the text says what is missing."""


@dataclass(frozen=True)
class Source:
    """Where the cluster comes from. `why`: for people, with what was preferred and why it is not used."""

    kind: Literal["given", "kind", "own"]
    why: str
    kubeconfig: Path | None = None


def choose(environment: Mapping[str, str], runs: Runs | None = None) -> Source:
    """Decides, without making anything. Raises NoCluster for a wish that can't be met."""
    wish = environment.get(SWITCH, "")
    for name in (OURS, THEIRS):
        path = environment.get(name, "")
        if path and wish not in ("kind", "own"):
            file = Path(path.split(os.pathsep)[0]).expanduser()
            if not file.exists():
                raise NoCluster(f"{name} names {file}, which does not exist")
            return Source("given", f"{name} is set", file)
    if wish == "given":
        raise NoCluster(f"{SWITCH}=given, but neither {OURS} nor {THEIRS} is set")
    if wish == "own":
        return Source("own", f"{SWITCH}=own")
    unusable = kind_unusable(runs or _run)
    if not unusable:
        return Source("kind", f"no kubeconfig is given; kind can run {KIND_NODE}")
    if wish == "kind":
        raise NoCluster(f"{SWITCH}=kind, but {unusable}")
    return Source("own", f"no kubeconfig is given; no kind: {unusable}")


def kind_unusable(runs: Runs) -> str:
    """Why kind can't be used here. Empty: it can."""
    for tool in ("kind", "docker"):
        if shutil.which(tool) is None:
            return f"'{tool}' is not on the PATH"
    if reason := runs(["docker", "info"], 20.0):
        return f"Docker does not answer ({reason})"
    if runs(["docker", "image", "inspect", KIND_NODE], 20.0) and (
        reason := runs(["docker", "pull", "--quiet", KIND_NODE], PULL_PATIENCE_S)
    ):
        return f"Docker can't pull {KIND_NODE} ({reason})"
    return ""


@contextlib.contextmanager
def opened(source: Source, mode: Mode, say: Say) -> Iterator[Cluster]:
    """The cluster for the length of the block. Raises NoCluster, BuildFailed, DaemonFailed."""
    say(f"cluster: {source.kind}, because {source.why}")
    match source.kind:
        case "given":
            assert source.kubeconfig is not None
            with _outside(source.kubeconfig, "given", say) as cluster:
                yield cluster
        case "kind":
            with _kind(say) as cluster:
                yield cluster
        case "own":
            with _own(mode, say) as cluster:
                yield cluster


@contextlib.contextmanager
def _own(mode: Mode, say: Say) -> Iterator[Cluster]:
    if lacking := own.missing(mode):
        raise NoCluster(f"a cluster of our own ({mode}) needs more: {lacking}")
    own.sweep(say)
    name = os.environ.get(NAME, "")
    with contextlib.ExitStack() as stack:
        if name:
            where = place.named(mode, name)
            stack.enter_context(place.held(where))
        else:
            where = stack.enter_context(place.private(mode))
            stack.callback(own.destroy, where)
        started = own.start(where, say)
        api = stack.enter_context(connected(where.kubeconfig))
        yield Cluster(where.kubeconfig, api, mode, mode == "node", started.binaries, started)


@contextlib.contextmanager
def _kind(say: Say) -> Iterator[Cluster]:
    folder = building.home() / "kind"
    folder.mkdir(parents=True, exist_ok=True)
    kubeconfig = folder / "kubeconfig"
    create = ["kind", "create", "cluster", "--name", KIND_CLUSTER, "--image", KIND_NODE]
    delete = ["kind", "delete", "cluster", "--name", KIND_CLUSTER, "--kubeconfig", str(kubeconfig)]
    _run(delete, 120.0)  # what a killed run has left
    if reason := _run([*create, "--kubeconfig", str(kubeconfig), "--wait", "180s"], 600.0):
        raise NoCluster(f"kind could not make its cluster: {reason}")
    try:
        with _outside(kubeconfig, "kind", say) as cluster:
            yield cluster
    finally:
        _run(delete, 120.0)


@contextlib.contextmanager
def _outside(kubeconfig: Path, mode: str, say: Say) -> Iterator[Cluster]:
    found = {tool: shutil.which(tool) for tool in building.TOOLS}
    tools = {tool: Path(path) for tool, path in found.items() if path is not None}
    tools |= building.build([tool for tool in building.TOOLS if tool not in tools], say)
    with connected(kubeconfig) as api:
        yield Cluster(kubeconfig, api, mode, nodes=True, tools=tools)


def _run(command: list[str], patience_s: float) -> str:
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=patience_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = ran.stderr.strip().splitlines() or [f"status {ran.returncode}"]
    return lines[-1] if ran.returncode else ""
