"""What tests hold in their hands: a cluster, whoever made it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from . import control_plane, node
from .control_plane import API_SERVER
from .own import Own

COMMAND_PATIENCE_S = 180.0
POLL_S = 0.2
KIND_CLUSTER = "servingfleet-test"
OURS = "servingfleet.dev/test=true"
"""The label of namespaces that tests have made."""
IMAGES = "SERVINGFLEET_IMAGES"
"""Images that a given cluster can pull: registry.example.com/servingfleet/{}:0.1.0, as `docker build --target` made them."""

Answer = TypeVar("Answer")
Object = dict[str, Any]


class CommandFailed(RuntimeError):
    """kubectl or helm refused: the text holds what it said."""


@dataclass
class Cluster:
    """A Kubernetes cluster. `nodes`: whether pods run; without, objects and controllers are all there is."""

    kubeconfig: Path
    api: client.ApiClient
    mode: str
    """'cp' or 'node' for one of our own, 'kind', or 'given'."""
    nodes: bool
    tools: Mapping[str, Path]
    """kubectl and helm."""
    own: Own | None = None
    """Its processes; None where it is not ours."""

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """What kubectl prints. Raises CommandFailed."""
        return self._run("kubectl", arguments, stdin)

    def helm(self, *arguments: str, stdin: str | None = None) -> str:
        """What helm prints. Raises CommandFailed."""
        return self._run("helm", arguments, stdin)

    def apply(self, *objects: Object) -> None:
        """Server-side apply, as a user would. Raises CommandFailed."""
        manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("apply", "--server-side", "--field-manager=test", "-f", "-", stdin=manifest)

    def get(self, *arguments: str) -> Object:
        """`kubectl get ... -o json`: one object, or a List. Raises CommandFailed."""
        found = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        assert isinstance(found, dict)
        return found

    def load(self, archive: Path) -> None:
        """Gives the images of an OCI archive to the cluster's nodes; skips the test where that can't be."""
        if self.own is not None:
            node.load(self.own.place, archive)
        elif self.mode == "kind":
            subprocess.run(
                ["kind", "load", "image-archive", str(archive), "--name", KIND_CLUSTER],
                check=True,
                capture_output=True,
            )
        else:
            pytest.skip(
                "nothing can be loaded into a given cluster: push the Dockerfile's targets, and set"
                f" {IMAGES}=registry.example.com/servingfleet/{{}}:0.1.0"
            )

    # Faults. Tests that use them are skipped on a cluster that is not ours.

    def stop_api_server(self) -> None:
        """Ends it without notice; etcd keeps what it wrote."""
        self.machinery().daemons.kill(API_SERVER)

    def start_api_server(self) -> None:
        """Starts it again, and waits until it serves."""
        own = self.machinery()
        own.daemons.restart(API_SERVER)
        control_plane.await_ready(own.place, own.daemons)

    def freeze_api_server(self) -> None:
        """Connections stay open, and nobody answers."""
        self.machinery().daemons.freeze(API_SERVER)

    def thaw_api_server(self) -> None:
        self.machinery().daemons.thaw(API_SERVER)

    def machinery(self) -> Own:
        """The processes of our own cluster; skips the test where it is not ours."""
        if self.own is None:
            pytest.skip(
                f"interferes with the control plane, and this cluster ({self.mode}) is not of our own making"
            )
        return self.own

    def _run(self, tool: str, arguments: Sequence[str], stdin: str | None) -> str:
        command = [str(self.tools[tool]), f"--kubeconfig={self.kubeconfig}", *arguments]
        ran = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_PATIENCE_S,
            check=False,
        )
        if ran.returncode:
            raise CommandFailed(
                f"{tool} {' '.join(arguments)} ended with status {ran.returncode}:\n"
                f"{ran.stderr.strip() or ran.stdout.strip()}"
            )
        return ran.stdout


def until(probe: Callable[[], Answer | None], expected: str, patience_s: float = 60.0) -> Answer:
    """Asks until the answer is true, and returns it. `expected` completes "waited in vain for ...".

    What the API server refuses while it is away counts as no answer, and is told if time runs out.
    """
    deadline = time.monotonic() + patience_s
    last: object = None
    while True:
        try:
            answer = probe()
            if answer:
                return answer
            last = answer
        except (CommandFailed, ApiException, HTTPError, AssertionError) as error:
            last = error
        if time.monotonic() > deadline:
            raise AssertionError(
                f"waited in vain for {expected}, {patience_s:.0f} s; last seen: {last}"
            )
        time.sleep(POLL_S)


@contextmanager
def temporary_namespace(cluster: Cluster, name: str) -> Iterator[str]:
    """A namespace for the length of the block; its removal is not waited for. Raises CommandFailed if it is not ours."""
    # One of that name that a test before, or a killed run, has left: this waits until it is gone.
    ours = ("--field-selector", f"metadata.name={name}", "--selector", OURS)
    cluster.kubectl("delete", "namespaces", *ours)
    key, _, value = OURS.partition("=")
    metadata = {"name": name, "labels": {key: value}}
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(manifest))
    try:
        yield name
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")
