"""A cluster of our own from start to end."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import building, control_plane, node, place
from .building import Say
from .daemons import Daemons
from .place import InUse, Mode, Place


@dataclass(frozen=True)
class Own:
    """A cluster whose processes we may stop and freeze."""

    place: Place
    daemons: Daemons
    binaries: Mapping[str, Path]


def missing(mode: Mode) -> str:
    """What this machine lacks, for people. Empty: nothing."""
    if shutil.which("go") is None and not _built(mode):
        return "Go 1.24 or newer is not on the PATH"
    return node.missing() if mode == "node" else ""


def start(where: Place, say: Say) -> Own:
    """Builds and starts what is not there yet; what runs is left as it is. Raises BuildFailed, DaemonFailed."""
    binaries = building.build(
        building.NODE if where.mode == "node" else building.CONTROL_PLANE, say
    )
    own = Own(where, Daemons(where.folder), binaries)
    began = time.monotonic()
    if where.mode == "node":
        node.open_network(where)
    control_plane.start(where, own.daemons, binaries)
    if where.mode == "node":
        node.start(where, own.daemons, binaries)
    for name in own.daemons.names():
        own.daemons.check(name)
    say(f"cluster: {where.name} ready after {time.monotonic() - began:.1f} s, {where.kubeconfig}")
    return own


def destroy(where: Place) -> None:
    """Ends its processes, in the reverse order of their start, and removes all but its logs."""
    daemons = Daemons(where.folder)
    if where.mode == "node":
        node.stop(where, daemons)
    for name in reversed(daemons.names()):
        if daemons.running(name):
            daemons.kill(name)  # its data go too, so it has nothing to finish
    if where.mode == "node":
        node.close_network(where)
    place.remove(where)


def sweep(say: Say) -> None:
    """Destroys what killed test runs have left: private clusters that nobody holds."""
    with place.table():
        for where in place.known():
            if where.private:
                with contextlib.suppress(InUse), place.held(where):
                    say(f"cluster: removing {where.name}, whose process has ended")
                    destroy(where)


def _built(mode: Mode) -> bool:
    names = building.NODE if mode == "node" else building.CONTROL_PLANE
    return all(os.access(building.home() / "bin" / name, os.X_OK) for name in names)
