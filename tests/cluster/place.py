"""One cluster of our own: its folder, its ports, and who may use it.

A *named* cluster is kept until somebody takes it down. A *private* one belongs to the process that made it, ends with it,
and is cleared away by the next cluster command if that process was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from . import building

Mode = Literal["cp", "node"]

NODE = "lab"
"""Name of the only node."""
NODE_ADDRESS = "10.250.0.1"
"""Inside the cluster's network namespace, as are pods and Services."""
POD_RANGE = "10.250.0.0/24"
SERVICE_RANGE = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"


@dataclass(frozen=True)
class Ports:
    """On loopback; in node mode that of the namespace, but for `api`, which is on both."""

    api: int
    etcd: int
    etcd_peer: int
    controllers: int
    scheduler: int


@dataclass(frozen=True)
class Place:
    """Where one cluster lies. `lock` is held by whoever uses it, `owner` by whoever will remove it."""

    folder: Path
    mode: Mode
    private: bool
    ports: Ports

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def kubeconfig(self) -> Path:
        """Of its administrator; serves inside and outside of the namespace."""
        return self.folder / "admin.kubeconfig"

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.ports.api}"

    @property
    def netns(self) -> str:
        """Name of the network namespace of node mode."""
        return f"servingfleet-{self.name}"

    @property
    def runtime(self) -> Path:
        """Sockets and mounts: short paths, gone after a reboot."""
        return Path("/run/servingfleet") / self.name


class InUse(RuntimeError):
    """Another process uses the cluster."""


def named(mode: Mode, name: str) -> Place:
    """The kept cluster of that name, which need not exist yet."""
    folder = building.home() / "run" / f"{mode}-{name}"
    file = folder / "place.json"
    with table():
        if file.exists():
            return _read(folder)
        return _make(folder, mode, private=False)


@contextlib.contextmanager
def private(mode: Mode) -> Iterator[Place]:
    """A new cluster for this process alone, held from its first moment."""
    with contextlib.ExitStack() as stack:
        with table():
            made = _make(building.home() / "run" / f"{mode}-p{os.getpid()}", mode, private=True)
            stack.enter_context(held(made))
        yield made


def known() -> list[Place]:
    """All clusters that left a trace."""
    found = []
    for file in sorted((building.home() / "run").glob("*/place.json")):
        with contextlib.suppress(FileNotFoundError):  # removed in this moment
            found.append(_read(file.parent))
    return found


@contextlib.contextmanager
def held(place: Place) -> Iterator[None]:
    """Keeps other processes off the cluster. Raises InUse."""
    with (place.folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUse(
                f"cluster {place.name} is used by another process; wait for it, or name another:"
                " SERVINGFLEET_CLUSTER_NAME"
            ) from None
        yield


def remove(place: Place) -> None:
    """Forgets the cluster, but keeps its logs: they are wanted when a test has failed."""
    logs = place.folder / "logs"
    if logs.exists():
        kept = building.home() / "logs" / place.mode
        shutil.rmtree(kept, ignore_errors=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        logs.rename(kept)
    shutil.rmtree(place.folder)


def _make(folder: Path, mode: Mode, private: bool) -> Place:
    folder.mkdir(parents=True)
    place = Place(folder, mode, private, Ports(*_free_ports(5)))
    state = {"mode": mode, "private": private, "ports": asdict(place.ports)}
    (folder / "place.json").write_text(json.dumps(state))
    return place


def _read(folder: Path) -> Place:
    state = json.loads((folder / "place.json").read_text())
    return Place(folder, state["mode"], state["private"], Ports(**state["ports"]))


@contextlib.contextmanager
def table() -> Iterator[None]:
    """One process at a time makes clusters, or clears away those that nobody holds."""
    (building.home() / "run").mkdir(parents=True, exist_ok=True)
    with (building.home() / "run.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _free_ports(count: int) -> list[int]:
    """Below the range from which the kernel gives outgoing connections theirs, so that they stay free."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            if port not in ports:
                ports.append(port)
    return ports
