"""The whole of it on a cluster, from nothing to figures: what `make cluster-demo` shows."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import click

from . import sources
from .cluster import IMAGES, Cluster, Object, temporary_namespace, until
from .fleets import CHANGE_S, Fleet
from .images import images as assembled
from .systems import System, running_system

REQUESTS = 240
MEMORY = """
import glob, os, re
others = [file for file in glob.glob("/proc/[0-9]*/status") if str(os.getpid()) not in file]
found = [re.search(r"VmRSS:\\s+(\\d+)", open(file).read()) for file in others]
print(sum(int(each[1]) for each in found))
"""


def run() -> None:
    """Prints what it does, the times that it took, and the fleet's description."""
    with sources.opened(sources.choose(os.environ), "node", step) as cluster:
        pattern = os.environ.get(IMAGES)
        if pattern:
            images = {process: pattern.format(process) for process in assembled.ENTRYPOINTS}
        else:
            cluster.load(assembled.archive(step))
            images = {process: assembled.name(process) for process in assembled.ENTRYPOINTS}
        with timed("helm install"), contextlib.ExitStack() as stack:
            system = stack.enter_context(running_system(cluster, images))
            running = stack.pop_all()
        with running, temporary_namespace(cluster, "chat") as namespace:
            _show(Fleet(cluster, namespace, images), system)


def _show(fleet: Fleet, system: System) -> None:
    cluster = fleet.cluster
    with timed("kubectl apply of the ServingFleet, to Ready"):
        fleet.create()
        fleet.await_condition("Ready", "True")
    with timed("two engines, to streams from both"):
        fleet.create_engines()
        fleet.allow_clients()
        fleet.await_live(2)
    with timed(f"{REQUESTS} requests, from four clients"):
        counts = fleet.play(f"--requests={REQUESTS}")
    step(f"the clients saw: {counts['finished']} answers, {counts['reusedTokens']} tokens reused")
    with timed("their figures in the status"):
        until(
            lambda: fleet.status().get("reuse", {}).get("pairs") == counts["finished"],
            "the requests in the status",
            CHANGE_S,
        )
    for pod, container in (
        (fleet.pods()[0], "servingfleet-relay"),
        (fleet.schedulers()[0], "scheduler"),
        (system.pods()[0], "operator"),
    ):
        step(f"memory of {container}: {_memory_mib(cluster, pod, container):.0f} MiB")
    for command in (
        ("get", "pods", "--all-namespaces"),
        ("get", "servingfleet", "--namespace", fleet.namespace, "--output", "wide"),
        ("describe", "servingfleet", fleet.name, "--namespace", fleet.namespace),
    ):
        step(f"$ kubectl {' '.join(command)}")
        click.echo(cluster.kubectl(*command))


def _memory_mib(cluster: Cluster, pod: Object, container: str) -> float:
    where = ("--namespace", pod["metadata"]["namespace"], "--container", container)
    command = ("python", "-c", MEMORY)
    return int(cluster.kubectl("exec", pod["metadata"]["name"], *where, "--", *command)) / 1024


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Says what, and how long it took."""
    began = time.monotonic()
    yield
    step(f"{what}: {time.monotonic() - began:.1f} s")


def step(line: str) -> None:
    click.secho(f"== {line}", bold=True)
